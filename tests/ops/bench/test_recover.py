"""Claims about ``python -m ops.bench.recover``: arrival times, records, and one real run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.recover import __main__ as bench
from ops.bench.recover.processes import onsets
from ops.bench.recover.trials import (
    RunRecord,
    Trial,
    bars,
    committed,
    compared,
    ended_unstruck,
    repaired,
    tables,
)
from ops.drill.fleet import ROOT
from pipeline.fleet.repair.records import RepairRow
from protocol.errors import ConfigError

BEGAN_S = 1_700_000_000.0
SEED = 5
"""Of one fault in six seconds, two seconds after their begin."""


def test_a_time_of_no_length_is_refused_before_a_fleet_starts() -> None:
    with pytest.raises(ConfigError, match="--mean is 0; expected a finite number above 0"):
        bench.main(["--mean", "0"])


@given(st.integers(0, 1000), st.floats(1.0, 100.0))
def test_arrivals_come_in_order_within_their_time_and_by_seed_alone(seed: int, mean_s: float) -> None:
    at_s = onsets(mean_s, seed, 20 * mean_s)
    assert list(at_s) == sorted(at_s) and all(0.0 < each < 20 * mean_s for each in at_s)
    assert at_s == onsets(mean_s, seed, 20 * mean_s)
    assert at_s[:1] != onsets(mean_s, seed + 1, 20 * mean_s)[:1]


# -- records ---------------------------------------------------------------------------------------


def trial(role: str = "learner", **values: float | str) -> Trial:
    return replace(Trial(role, "kill", role, 10.0, 0.0), **values)


def repair(worker: str = "learner", **values: float) -> RepairRow:
    row = RepairRow(BEGAN_S + 14.0, worker, worker, "killed", 0.6, 0.2, 1.0, 2.0)
    return msgspec.structs.replace(row, **values)


def test_the_times_of_a_repair_count_from_the_onset_and_not_from_the_last_progress() -> None:
    found = repaired(trial(), BEGAN_S, [repair()])
    assert found is not None
    assert (found.noticed_s, found.started_s, found.useful_s) == (0.8, 1.0, 4.0)
    slow = repaired(trial(), BEGAN_S, [repair(localise_s=0.5, replace_s=0.2)])
    assert slow is not None and slow.noticed_s == 0.3


def test_repairs_of_others_and_of_earlier_faults_are_not_this_ones() -> None:
    assert repaired(trial(), BEGAN_S, [repair("reward-0"), repair(at_s=BEGAN_S + 9.0)]) is None


def test_the_first_update_after_the_onset_counts_and_lower_numbers_are_repeated() -> None:
    seen = [(1, BEGAN_S + 8.0), (2, BEGAN_S + 9.0), (3, BEGAN_S + 9.9)]
    assert committed(trial(), BEGAN_S, seen) is None
    found = committed(trial(), BEGAN_S, [*seen, (3, BEGAN_S + 12.0), (4, BEGAN_S + 12.5)])
    assert found is not None and (found.committed_s, found.num_repeated) == (2.0, 1)
    whole = committed(trial(), BEGAN_S, [*seen, (4, BEGAN_S + 12.0)])
    assert whole is not None and whole.num_repeated == 0
    far = committed(trial(), BEGAN_S, [*seen, (1, BEGAN_S + 12.0)])
    assert far is not None and far.num_repeated == 3


def test_a_worker_is_unstruck_before_its_fault_and_after_its_repair() -> None:
    struck = trial("reward", target="reward-0", useful_s=3.0)
    ended = [(at_s, worker, "why") for worker in ("reward-0", "reward-1") for at_s in (9.0, 11.0, 14.0)]
    assert ended_unstruck(ended, [struck]) == ("reward-0: why", "reward-0: why", *3 * ("reward-1: why",))
    assert len(ended_unstruck(ended, [replace(struck, useful_s=None)])) == 4


def run(label: str = bench.BASE, role: str = "learner", **values: object) -> RunRecord:
    own = trial(role, noticed_s=0.2, started_s=0.5, useful_s=3.0)
    if role == "learner":
        own = replace(own, committed_s=4.0, num_repeated=1)
    found = RunRecord(label, role, 0, (), 0.5, 100.0, 190, (), True, (own,))
    return replace(found, **values)


def test_a_bar_holds_by_what_was_seen_and_a_repair_that_was_not_seen_breaks_it() -> None:
    assert all(bars([run(), run(role="generator")]).values())
    unseen = run(role="generator", trials=(trial("generator"),))
    late = run(trials=(trial(committed_s=10.5, num_repeated=0),))
    twice = run(trials=(trial(committed_s=4.0, num_repeated=2),))
    for broken in (unseen, late, twice, run(balances=False), run(healthy=("a: b", "c: d"))):
        assert list(bars([broken]).values()).count(False) == 1, broken


def test_the_tables_have_every_group_and_two_settings_are_compared_by_their_medians() -> None:
    warm = run("fleet.standby=1", trials=(trial(committed_s=0.5, num_repeated=0),))
    text = tables([run(), warm])
    assert "| as configured | learner | kill | 1 | 0.2 | 0.5 | 4.0 | 4.0 | 1.000 (0.207 to 1.000) | 1 |" in text
    assert "| fleet.standby=1 | learner | kill | 1 | not seen | not seen | 0.5 | 0.5 |" in text
    assert compared([run()]) == ""
    assert "| learner | kill | 4.0 | 0.5 | 8.0 |" in compared([run(), warm])
    never = run("fleet.standby=1", trials=(trial(),))
    assert "| learner | kill | 4.0 | not seen | - |" in compared([run(), never])


# -- a real run ------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_killed_learner_is_back_and_repeats_at_most_one_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "recover.json"
    assert len(onsets(5.0, SEED, 6.0)) == 1
    small = [
        "engines.settings.step_s=0.2",
        "engines.settings.decode_base_s=0.01",
        "fleet.generator=2",
        "fleet.reward=1",
        "fleet.reference=1",
        "observer.enabled=false",
    ]
    words = [word for setting in small for word in ("--set", setting)]
    bench.main(
        ["--role", "learner", "--fault", "kill", "--mean", "5", "--minutes", "0.1", "--warm", "8", "--seed", str(SEED),
         "--json", str(out), *words]
    )  # fmt: skip
    (found,) = json.loads(out.read_text())["runs"]
    (struck,) = found["trials"]
    assert struck["target"] == "learner" and struck["fault"] == "kill"
    assert 0.0 <= struck["noticed_s"] <= struck["started_s"] <= struck["committed_s"]
    assert struck["num_repeated"] <= 1
    assert found["balances"] and not found["healthy"]
    assert found["num_updates"] > 0
