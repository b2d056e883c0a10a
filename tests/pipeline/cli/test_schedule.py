"""``headrace schedule``: numbers a person can check, JSON that is read back, a picture, and one sentence for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.cli import main
from pipeline.schedule.plan import read_plan
from protocol.errors import ConfigError

MINE: dict[str, Any] = {
    "devices": 2,
    "memory": 20,
    "blocks": [
        {"name": "f0", "span": 5, "memory": 8, "devices": [0]},
        {"name": "f1", "span": 6, "memory": 9, "devices": [1]},
        {"name": "b1", "span": 11, "memory": -9, "devices": [1]},
        {"name": "b0", "span": 10, "memory": -8, "devices": [0]},
    ],
    "chains": [["f0", "f1", "b1", "b0"]],
}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["schedule", *words])
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    return told.out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["schedule", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def written(folder: Path, **changes: Any) -> str:
    path = folder / "mine.json"
    path.write_text(json.dumps({**MINE, **changes}))
    return str(path)


def test_it_says_the_period_with_its_proof_and_compares_with_known_orders(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, "V", "--devices", "4", "--memory", "3", "--unroll", "3", "--against", "all")
    assert "period   5.333 (3 micro-batches every 16), optimal among all orders that repeat after at most 3" in told
    assert "work 4, recurrence 0, memory 6" in told
    rows = [line.split() for line in told.splitlines()]
    assert ["found", "5.333", "96", "33.3%", "3", "3", "2", "1"] in rows
    assert ["1F1B", "4", "76", "15.8%", "4", "3", "2", "1", "does", "not", "fit", "3"] in rows


def test_its_json_is_a_plan_that_gives_any_number_of_micro_batches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    words = ("M", "--devices", "4", "--memory", "6", "--micro-batches", "8", "--against", "all", "--json")
    path.write_text(run(capsys, *words))
    plan = read_plan(path)
    assert (plan.period.value, plan.period.proof, plan.found.makespan) == (6, "optimal", 60)
    assert [each.name for each in plan.baselines] == ["one at a time", "GPipe", "1F1B+"]
    assert plan.orders == plan.repetend.timetable(8).orders
    plan.repetend.timetable(21).check([6] * 4)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no plan"):
        read_plan(path)


def test_a_file_of_ones_own_has_its_memory_and_chains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = json.loads(run(capsys, written(tmp_path), "--json"))
    assert (found["period"]["value"], found["memory"], found["found"]["fits"]) == (17, [20, 20], True)
    found = json.loads(run(capsys, written(tmp_path), "--memory", "9", "--json"))
    assert (found["period"]["value"], found["found"]["peaks"]) == (32, [8, 9])


def test_the_picture_has_every_step_at_its_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "k.svg"
    run(capsys, "K", "--devices", "4", "--memory", "6", "--micro-batches", "4", "--svg", str(path))
    titles = [each.text or "" for each in ElementTree.parse(path).iter() if each.tag.endswith("title")]
    drawn = [title for title in titles if title.startswith("join.f, micro-batch 0:")]
    # on each device, of the found order and of 1F1B+ below it
    assert drawn == ["join.f, micro-batch 0: 2 to 3"] * 8
    assert len(titles) == 2 * 4 * 4 * 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("Y", "--devices", "4"), "no shape 'Y'"),
        (("V",), "--devices is missing"),
        ((), "expected a shape, a file or --iteration FILE"),
        (("V", "--devices", "4", "--micro-batches", "0"), "--micro-batches is 0; expected 1 or more"),
        (("K", "--devices", "4", "--memory", "1"), "block 'join.f' needs 2 of memory on device 0, 1 more"),
        (("V", "--devices", "4", "--svg", "/nowhere/v.svg"), "cannot be written"),
        (("--iteration", "/nowhere.json"), "cannot be read"),
        (("V", "--devices", "4", "--chunks", "2"), "--chunks is of an iteration"),
        (("--iteration", "/nowhere.json", "--memory", "4"), "without --memory"),
        (("--iteration", "/nowhere.json", "--unroll", "2"), "without options of a pipeline"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert says in refused(capsys, *words)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spam": 1}, "unknown field `spam`"),
        ({"blocks": [{"name": "f0", "spam": 1, "devices": [0]}]}, "unknown field `spam` - at `$.blocks[0]`"),
        ({"blocks": [{"name": "f0", "span": -1}]}, "block 'f0' has span -1; expected 1 or more"),
        ({"blocks": [{"name": "f0", "span": "1"}]}, "Expected `int`, got `str`"),
        ({"chains": [["f0", "f1", "f0"]]}, "blocks wait for one another in a circle: "),
        ({"chains": [["f0", "g"]]}, "a dependency names block 'g'; expected one of f0, f1, b1, b0"),
        ({"memory": [20]}, "memory is (20,); expected a limit of 0 or more, or 2 of them"),
        (
            {"memory": 8},
            "block 'f1' needs 9 of memory on device 1, 1 more than the limit of 8; the least limit that works is 9",
        ),
    ],
)
def test_a_wrong_file_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    assert says in refused(capsys, written(tmp_path, **changes))
