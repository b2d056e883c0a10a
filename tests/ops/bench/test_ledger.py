"""The ledger bench moves every chunk by every way, and reports the seconds of each. It sets no
limit to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.ledger import path
from ops.bench.ledger.__main__ import PATH, PATH_KL, SET_GET, STREAM, ZMQ, judge, judge_by_cpu, main
from ops.bench.ledger.race import Gate, Part, race
from protocol.errors import DataError


@pytest.mark.long
def test_every_contender_moves_every_chunk(tmp_path: Path) -> None:
    file = tmp_path / "ledger.json"
    main(["--tokens", "256", "--chunks", str(2 * path.BATCH), "--rounds", "1", "--json", str(file)])
    told = json.loads(file.read_text())
    assert {"command", "machine", "versions", "settings"} <= told.keys()
    [result] = told["results"]
    assert {PATH, PATH_KL, ZMQ, SET_GET, STREAM} <= result["seconds"].keys()
    assert all(len(taken) == 1 and taken[0] > 0 for taken in result["seconds"].values())
    assert result["chunk_bytes"] > 8 * 256, "tokens and log-probs of four bytes each"


def test_the_bars_compare_with_the_slower_of_two_and_only_from_1024_tokens() -> None:
    seconds = {PATH: [2.0], ZMQ: [0.1], SET_GET: [1.0], STREAM: [3.0]}
    ratios = judge({"num_tokens": 1024, "seconds": seconds})
    assert {what: ratio.median for what, ratio in ratios.items()} == {
        "of the slower of (a) and (b)": 0.5,
        "of (c)": 1.5,
    }
    assert judge({"num_tokens": 256, "seconds": seconds}).keys() == {"of (c)"}


@pytest.mark.integration
def test_a_part_that_fails_ends_the_race() -> None:
    with pytest.raises(DataError, match="did not end well"):
        race([Part(_fail)])


def _fail(gate: Gate) -> None:
    gate.begin()
    raise SystemExit(3)


def test_processor_time_is_of_clients_and_server_together() -> None:
    ratios = judge_by_cpu(
        {
            "num_tokens": 256,
            "client_cpu_us": {PATH: [200.0], ZMQ: [10.0], SET_GET: [100.0], STREAM: [100.0]},
            "server_cpu_us": {PATH: [100.0], ZMQ: [0.0], SET_GET: [20.0], STREAM: [50.0]},
        }
    )
    assert {what: ratio.median for what, ratio in ratios.items()} == {"of (c)": 0.5}
