"""The memory of the observer at 200 workers, over two hours of its looks at the fleet.

    python -m ops.bench.observer_memory --json ops/results/observer-memory.json
    python -m ops.bench.observer_memory --links all --minutes 20

This process makes the heartbeats of a fleet that is well, and looks at them as the observer does.
It has the watch, the flow, the incidents, and files of all tables. The clock is driven, so two
hours pass as fast as the looks do. *History* is what the process holds beyond its imports and its
first minute: it grows until every past is full, and no further. The bar is 200 MB for the whole
process.

*Consumes* nothing. *Produces* a table, JSON, and exit code 1 when the bar does not hold. *Waits
for* nothing. Linux only."""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.bench.table import provenance, show, write_json
from ops.ending import exit_code
from pipeline.flow.host_records import MESSAGES, WAITS
from pipeline.flow.recorded import LINKS
from pipeline.incidents.book import IncidentBook
from pipeline.process.work import ServiceSums, WorkReport
from pipeline.runtime.registry.contract import MAX_NAMED_LINKS, Heartbeat, LinkReport, WaitingFor, link_name
from pipeline.runtime.registry.vitals import Vitals
from pipeline.watch.segments import SegmentWriter
from pipeline.weights import TURNS
from protocol.ids import Incarnation, Role
from workers.observer.suspicions import FleetSuspicions

BAR_MB = 200.0
_SEGMENT_MB = 256
"""Limit of the folder of files, as ``observer.keep_mb`` has it."""
_TURN_S = 60
"""A scorer names the links of other generators every minute, so that thousands have a past."""
_VERSION_S = 30
_MESSAGES = 2
"""A second, of each generator."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory of this process at one moment, MB."""

    minute: float
    rss_mb: float
    anonymous_mb: float
    """Without the pages of libraries, which other processes on the host share."""
    links: int
    """Links whose counters the look has."""
    ms_a_look: float


@dataclass(frozen=True, slots=True)
class MadeFleet:
    """A fleet that is well: generators send to all scorers in turn."""

    num_workers: int
    all_links: bool
    """Name every link in each heartbeat; else as many as a real one does."""

    @property
    def scorers(self) -> int:
        """A quarter of the fleet, but for the learner."""
        return self.num_workers // 4 - 1

    @property
    def generators(self) -> int:
        """All others."""
        return self.num_workers - self.scorers - 1

    def beats(self, second: int) -> list[Heartbeat]:
        """Return the heartbeats of a moment."""
        generators = [f"generator-{at}" for at in range(self.generators)]
        scorers = [f"{Role.REWARD if at % 2 else Role.REFERENCE}-{at // 2}" for at in range(self.scorers)]
        sent: dict[str, list[LinkReport]] = {name: [] for name in generators}
        found = [_beat("learner", Role.LEARNER, "update", second, ())]
        for at, name in enumerate(scorers):
            links = list[LinkReport]()
            for sender in self._senders(generators, at, second):
                link = link_name(sender, name)
                links.append(LinkReport(name=link, received=second, done=second))
                sent[sender].append(LinkReport(name=link, sent=second))
            role = Role(name.partition("-")[0])
            found.append(_beat(name, role, "judging" if role is Role.REWARD else "scoring", second, tuple(links)))
        found += [_beat(name, Role.GENERATOR, "sampling", second, tuple(links)) for name, links in sent.items()]
        return found

    def _senders(self, generators: list[str], at: int, second: int) -> Iterator[str]:
        """Yield the generators whose links a scorer names: others every minute, in turn."""
        number = len(generators) if self.all_links else MAX_NAMED_LINKS
        first = (at + second // _TURN_S) * MAX_NAMED_LINKS % len(generators)
        return islice(cycle(generators), first, first + number)

    def records(self, second: int) -> dict[str, NDArray[np.void]]:
        """Return the rows of the host's flow records of a second."""
        names = np.array([f"generator-{at}" for at in range(self.generators)], object)
        messages = np.zeros(_MESSAGES * len(names), MESSAGES)
        messages["time_s"], messages["worker"] = second, np.tile(names, _MESSAGES)
        messages["link"], messages["outcome"] = messages["worker"] + ">reward-0", "done"
        messages["key"] = np.arange(len(messages)) + second * len(messages)
        waits = np.zeros(len(names), WAITS)
        waits["begin_s"], waits["end_s"], waits["worker"], waits["wait"] = second - 1, second, names, "compute"
        return {"messages": messages, "waits": waits}


def main() -> int:
    """Drive the looks, and print what they hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=120.0, help="of the driven clock")
    parser.add_argument("--links", choices=("named", "all"), default="named", help="that each heartbeat reports")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    fleet = MadeFleet(options.workers, options.links == "all")
    with tempfile.TemporaryDirectory(prefix="headrace-observer-") as folder:
        readings, num_incidents = drive(fleet, Path(folder), round(60 * options.minutes))
    peak_mb, first = peak_rss_mb(), readings[0]
    verdict = "under" if peak_mb < BAR_MB else "OVER"
    show(
        f"Memory of an observer of {options.workers} workers: peak {peak_mb:.0f} MB, {verdict} {BAR_MB:g} MB",
        ["minute", "resident, MB", "of it its own, MB", "history, MB", "links", "ms a look"],
        [
            (f"{one.minute:g}", f"{one.rss_mb:.0f}", f"{one.anonymous_mb:.0f}", f"{one.rss_mb - first.rss_mb:.0f}",
             one.links, f"{one.ms_a_look:.0f}")
            for one in readings
        ],
    )  # fmt: skip
    if options.json:
        figures = {
            **provenance("observer_memory", None, workers=options.workers, links=options.links),
            "command": f"python -m ops.bench.observer_memory --minutes {options.minutes:g} --links {options.links}",
            "bar_mb": BAR_MB, "peak_mb": peak_mb, "incidents": num_incidents,
            "readings": [asdict(one) for one in readings],
        }  # fmt: skip
        write_json(options.json, figures)
    return 0 if peak_mb < BAR_MB else 1


def drive(fleet: MadeFleet, folder: Path, seconds: int) -> tuple[list[Reading], int]:
    """Look at a fleet once a driven second; return readings, the first after a minute, and the
    number of incidents."""
    finder, book = FleetSuspicions(), IncidentBook()
    segments = SegmentWriter(folder, keep_bytes=_SEGMENT_MB << 20)
    readings, num_incidents, began_s, looked = list[Reading](), 0, time.process_time(), 0
    every = max(60, seconds // 12)
    for second in range(1, seconds + 1):
        at_s = 1.7e9 + second
        frame, suspicions = finder.look(float(second), at_s, fleet.beats(second), second // _VERSION_S)
        segments.add(at_s, frame, finder.tables | fleet.records(second))
        num_incidents += len(book.look(at_s, suspicions))
        looked += 1
        if segments.is_due():
            segments.take()()
        if second == 60 or second % every == 0:
            ms = 1000.0 * (time.process_time() - began_s) / looked
            rss_mb, anonymous_mb = resident_mb()
            readings.append(Reading(second / 60.0, rss_mb, anonymous_mb, len(finder.tables[LINKS]), ms))
            began_s, looked = time.process_time(), 0
            print(f"\r{second // 60} of {seconds // 60} minutes, {rss_mb:.0f} MB", end="", file=sys.stderr, flush=True)
    segments.take()()
    gc.collect()
    print(file=sys.stderr)
    return readings, num_incidents


def resident_mb() -> tuple[float, float]:
    """Return this process's resident memory, and the part that is no file's."""
    cells = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return _mb(cells["VmRSS"]), _mb(cells["RssAnon"])


def peak_rss_mb() -> float:
    """Return the largest resident memory that this process has had."""
    cells = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return _mb(cells["VmHWM"])


def _mb(cell: str) -> float:
    return int(cell.split()[0]) / 1024.0


def _beat(name: str, role: Role, kind: str, second: int, links: tuple[LinkReport, ...]) -> Heartbeat:
    counters = {TURNS: 2.0 * second} if role is Role.GENERATOR else {}
    vitals = Vitals(
        service={kind: ServiceSums(4 * second, 0.8 * second, 400.0 * second)}, cpu=0.8, input_depth=0, output_depth=0,
        oldest_age_s=0.4, num_fds=40, disk_free_bytes=1 << 40, disk_free_share=0.5, ledger_rtt_ms=0.4,
    )  # fmt: skip
    return Heartbeat(
        who=Incarnation(role, name, 1), pid=1, host="host", at_s=1.7e9 + second, started_s=1.7e9, progress=4 * second,
        progress_at_s=1.7e9 + second, waiting_for=WaitingFor.COMPUTE, rss_bytes=1 << 28, counters=counters,
        policy_version=-1 if role not in (Role.GENERATOR, Role.LEARNER) else second // _VERSION_S, links=links,
        turns=20 * second, turned_at_s=1.7e9 + second, held=4, work=WorkReport(steps=30 * second), silent_s=0.3,
        vitals=vitals,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(exit_code(main))
