"""Refused messages of one sender blame its link; those of many senders the receiver."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.fleet.signs import Signs
from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import LinkReport
from tests.pipeline.fleet.live_fleet import BREAKS_S, LiveFleet


def refusing(fleet: LiveFleet, receiver: str, senders: tuple[str, ...], each_s: int) -> None:
    def change(since: int, beat: Worker) -> Worker:
        def refused(link: LinkReport) -> LinkReport:
            return msgspec.structs.replace(link, refused=each_s * since if link.name.split(">")[0] in senders else 0)

        assert beat.vitals is not None
        vitals = msgspec.structs.replace(beat.vitals, refused=each_s * len(senders) * since)
        return msgspec.structs.replace(beat, links=tuple(map(refused, beat.links)), vitals=vitals)

    fleet.change(receiver, change)


@pytest.mark.parametrize(
    ("senders", "component"),
    [(("generator-1",), "generator-1>reward-0"), (("generator-0", "generator-1", "generator-2"), "reward-0")],
)
def test_the_link_is_named_when_nearly_all_refusals_came_by_it(senders: tuple[str, ...], component: str) -> None:
    fleet = LiveFleet()
    refusing(fleet, "reward-0", senders, 1)
    found = fleet.suspected(BREAKS_S + 25)
    assert [(one.component, one.kind) for one in found] == [(component, "refused")]


def test_old_refusals_fade_and_a_restarted_count_adds_none() -> None:
    refusals = Signs()
    fleet = LiveFleet()
    (beat,) = (each for each in fleet.at(1) if each.who.worker == "reward-0")

    def at(count: int) -> list[Worker]:
        return [msgspec.structs.replace(beat, links=(LinkReport(name="generator-0>reward-0", refused=count),))]

    refusals.observe(1.0, 1.0, at(100))
    assert refusals.refused_link("reward-0") == "", "refusals from before are not recent"
    refusals.observe(2.0, 2.0, at(105))
    assert refusals.refused_link("reward-0") == "generator-0>reward-0"
    refusals.observe(3.0, 3.0, at(2))
    refusals.observe(60.0, 60.0, at(2))
    assert refusals.refused_link("reward-0") == ""
    assert refusals.refused_link("reward-1") == ""
