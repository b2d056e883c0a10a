"""The judge bench compares two runs that differ in their judge alone."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from ops.bench import judge
from ops.bench.judge import FLEET, JudgedRun, judge_server, with_judge
from ops.bench.overlap.scenarios import CONFIG
from pipeline.config.load import load_config

ROOT = Path(__file__).parents[3]


def test_both_runs_are_configurations_and_differ_in_the_judge_alone() -> None:
    alone = load_config([ROOT / CONFIG], [*FLEET])
    judged = load_config([ROOT / CONFIG], [*FLEET, *with_judge("http://127.0.0.1:8000/v1")])
    assert judged.data.verifier == "endpoint/judge"
    assert judged.reward.endpoints["judge"].max_in_flight == 64
    assert judged.model_copy(update={"reward": alone.reward, "data": alone.data}) == alone


async def test_the_judge_takes_its_latency_and_replies_with_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "LATENCY_S", 0.2)
    with judge_server() as url:
        async with httpx2.AsyncClient(timeout=10.0) as client:
            reply = await client.post(f"{url}/chat/completions", content=b"{}")
    assert reply.elapsed.total_seconds() >= 0.2
    assert "Score: 5" in reply.text


@pytest.mark.parametrize(("rate", "code"), [(960.0, 0), (940.0, 1)])
def test_the_bar_is_of_the_median_of_pairs(
    rate: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(work: Path, url: str | None, *, seed: int, num_updates: int) -> JudgedRun:
        of = 1000.0 * (seed + 1)
        return JudgedRun(seed, of if url is None else of * rate / 1000.0, 28.0, 2, 1.0, 2.0, 0.0)

    monkeypatch.setattr(judge, "measure", measured)
    path = tmp_path / "judge.json"
    assert judge.main(["--rounds", "3", "--json", str(path)]) == code
    assert json.loads(path.read_text())["ratio"]["median"] == pytest.approx(rate / 1000.0)
