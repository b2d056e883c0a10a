"""Claims about the Prometheus endpoint: each counter a metric, by Prometheus's conventions."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ops.docs.whole_fleet import whole_collector
from pipeline.ledger.types import Pause, QueueStat
from pipeline.observability.effective_time import EffectiveTime, UpSpan, effective_time
from pipeline.observability.metrics import HeartbeatCollector, MetricsServer
from pipeline.runtime.registry.contract import LinkReport, WaitingFor
from protocol.errors import ConfigError
from tests.manual_clock import ManualClock
from tests.pipeline.fleet.test_status import NOW, beat
from tests.pipeline.observability.test_live_view import TOTALS

NAME = re.compile(r"headrace(_[a-z]+)+")
NO_UNITS = {"s", "ms", "mb", "kb", "gb", "percent", "pct", "minutes", "milliseconds", "kilobytes", "megabytes", "num"}
"""Words for which Prometheus has base units or other forms."""
UNITS = {"seconds", "bytes", "ratio"}
"""Base units stand last, before ``total``."""


def page(collector: HeartbeatCollector) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


@pytest.fixture(scope="module")
def whole_page() -> str:
    return page(whole_collector())


@pytest.fixture(scope="module")
def families(whole_page: str) -> list[Metric]:
    return list(text_string_to_metric_families(whole_page))


def test_the_effective_time_is_there_by_its_three_measures(whole_page: str) -> None:
    for by, share in (("steps", 1.0), ("last_hour", 1.0), ("device", 0.5)):
        assert f'headrace_effective_time_ratio{{by="{by}",run="run"}} {share}' in whole_page


def test_the_time_under_repair_is_there_by_its_parts(whole_page: str) -> None:
    for part in ("detect", "localise", "replace", "reload", "repeat"):
        assert f'headrace_repair_seconds{{part="{part}",run="run"}} 2.0' in whole_page


def test_without_a_new_effective_time_the_last_one_stays() -> None:
    collector = HeartbeatCollector(ManualClock(), "run")
    assert "effective_time" not in page(collector)
    collector.update([], [], None, EffectiveTime(0.75, 0.5, 0.5, 10.0, 4000.0))
    collector.update([], [])
    found = [line for line in page(collector).splitlines() if line.startswith("headrace_effective_time_ratio")]
    assert len(found) == 2 and any(line.endswith(" 0.75") for line in found)


def test_a_run_of_less_than_an_hour_has_no_share_of_its_last_hour() -> None:
    collector = HeartbeatCollector(ManualClock(), "run")
    collector.update([], [], None, effective_time([10.0 * n for n in range(1, 9)], [UpSpan(0.0, 90.0)]))
    found = [line for line in page(collector).splitlines() if line.startswith("headrace_effective_time_ratio")]
    assert len(found) == 1 and 'by="steps"' in found[0]


def test_names_follow_prometheus_conventions(families: list[Metric]) -> None:
    for family in families:
        words = family.name.split("_")
        assert NAME.fullmatch(family.name), family.name
        assert not NO_UNITS & set(words), f"{family.name}: base units, in full"
        assert family.type in ("counter", "gauge")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
        units = UNITS & set(words)
        assert not units or words[-1] in units, f"{family.name}: its unit stands last"
        assert not {"counter", "gauge", "metric"} & set(words), f"{family.name}: its type is no part of its name"


def test_each_metric_has_a_help_text_and_one_set_of_labels(families: list[Metric]) -> None:
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation.endswith("."), family.name
        labels = {frozenset(sample.labels) for sample in family.samples}
        assert len(labels) == 1, f"{family.name} has {labels}"
        (only,) = labels
        assert family.name == "headrace_build_info" or "run" in only, f"{family.name}: several runs share a Prometheus"
        assert not {"name", "event", "type", "counter"} & only, f"{family.name}: sums over it would mean nothing"


def test_promtool_finds_nothing_wrong(whole_page: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; the tests above hold its rules")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=whole_page, capture_output=True, text=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_scrape_has_the_whole_fleet() -> None:
    clock = ManualClock(start_s=NOW)
    links = (LinkReport(name="generator-0>reward-0", sent=12),)
    counters = {
        "chunks": 8.0,
        "judge:requests": 3.0,
        "logprob_gap:generator-1": 0.25,
        "reward_length": -0.5,
        "of_a_later_version": 1.0,
    }
    with MetricsServer(0, clock, run="demo", info={"algorithm": "dapo"}) as server:
        server.update(
            [
                beat("generator-0", WaitingFor.ROOM, links=links, counters=counters, policy_version=4),
                beat("reward-0", WaitingFor.INPUT, silent_s=60.0),
            ],
            [QueueStat("reward", 12, None, 0.5, "reward")],
            replace(TOTALS, num_groups_dropped={"no_signal": 3}),
        )
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5.0).read().decode()
    worker = 'role="generator",run="demo",worker="generator-0"'
    for line in (
        f"headrace_up{{{worker}}} 1.0",
        'headrace_up{role="reward",run="demo",worker="reward-0"} 0.0',
        f"headrace_worker_policy_version{{{worker}}} 4.0",
        f'headrace_worker_waiting{{for="room",{worker}}} 1.0',
        f"headrace_written_chunks_total{{{worker}}} 8.0",
        f'headrace_endpoint_requests_total{{endpoint="judge",{worker}}} 3.0',
        f'headrace_logprob_gap_nats{{generator="generator-1",{worker}}} 0.25',
        f'headrace_train_reward_part{{part="length",{worker}}} -0.5',
        'headrace_link_sent_messages_total{link="generator-0>reward-0",run="demo"} 12.0',
        'headrace_queue_depth{queue="reward",run="demo"} 12.0',
        'headrace_queue_oldest_age_seconds{queue="reward",run="demo"} 0.5',
        'headrace_ledger_dropped_groups_total{reason="no_signal",run="demo"} 3.0',
        'headrace_run_info{algorithm="dapo",run="demo"} 1.0',
        'headrace_learner_input_wait_ratio{run="demo"} 0.0',
    ):
        assert line in text
    assert "headrace_build_info{version=" in text
    assert "later_version" not in text, "a counter without a name of its own is left out"


async def test_a_pause_is_a_metric_and_its_waits_are_not_the_learners() -> None:
    clock = ManualClock(start_s=NOW)
    collector = HeartbeatCollector(clock, "demo")
    totals = {False: TOTALS, True: replace(TOTALS, paused=Pause(NOW, "person@host"))}

    def shown() -> dict[str, float]:
        return {sample.name: sample.value for metric in collector.collect() for sample in metric.samples}

    async def look(at: WaitingFor, *, is_paused: bool) -> float:
        for _ in range(300):
            await clock.advance(1.0)
            collector.update([beat("learner-0", at)], [], totals[is_paused])
        found = shown()
        assert found["headrace_ledger_is_paused"] == float(is_paused)
        return found["headrace_learner_input_wait_ratio"]

    assert await look(WaitingFor.INPUT, is_paused=False) > 0.9
    assert await look(WaitingFor.INPUT, is_paused=True) == 0.0, "it adds no generators by an older figure"
    assert await look(WaitingFor.COMPUTE, is_paused=False) < 0.1
    await look(WaitingFor.INPUT, is_paused=True)
    collector.update([beat("learner-0", WaitingFor.COMPUTE)], [], TOTALS)
    assert shown()["headrace_learner_input_wait_ratio"] < 0.1, "waits in a pause are not the learner's"


def test_a_port_in_use_is_a_sentence() -> None:
    with MetricsServer(0, ManualClock()) as first, pytest.raises(ConfigError, match=f"metrics_port is {first.port}"):
        MetricsServer(first.port, ManualClock())
