"""vLLM's async engine, in processes of its own: the engine that serves GPUs, run here on a CPU. It
decodes without waiting for its caller, so claims are about the content of windows, never about its
progress."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from protocol.errors import EngineDied
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason
from tests.vllm.cores import BLOCK, POSITIONS
from tests.vllm.test_parity import probed
from tests.workers.engines.distributions import check_window
from tests.workers.engines.generation_contract import continued, drain, request
from tests.workers.engines.model_contract import KINDS, check_logprobs, end_of, forward, mixed_forward
from tests.workers.engines.tiny import VOCABULARY, tiny_model, tiny_tokenizer
from workers.engines.generation.seam import SampledWindow
from workers.engines.generation.vllm.arguments import engine_arguments
from workers.engines.generation.vllm.background import BackgroundCore
from workers.engines.generation.vllm.engine import VllmEngine
from workers.engines.model.loading import model_state


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundCore]:
    """One core for the module: its three processes take ten seconds to start."""
    before = held_by_vllm()
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    extra = {"block_size": BLOCK, "num_gpu_blocks_override": 400}
    made = BackgroundCore(
        engine_arguments(path, num_slots=8, positions=POSITIONS, dtype="float32", on_cpu=True, extra=extra)
    )
    yield made
    made.close()
    deadline_s = time.monotonic() + 30.0
    while not held_by_vllm() <= before:
        assert time.monotonic() < deadline_s, "its shared memory stays"
        time.sleep(0.1)


@pytest.fixture
def old() -> PreTrainedModel:
    return tiny_model(seed=1).eval()


@pytest.fixture
def new() -> PreTrainedModel:
    return tiny_model(seed=2).eval()


def held_by_vllm() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


def engine_on(core: BackgroundCore, *, kv_policy: str = "keep", pause: str = "keep") -> VllmEngine:
    settings = {"kv_policy": kv_policy, "pause": pause}
    state = model_state(tiny_model().config)
    sizes = {"num_slots": 8, "vocabulary": VOCABULARY, "positions": POSITIONS}
    return VllmEngine(core, state, tokenizer=tiny_tokenizer(), **sizes, **settings)  # type: ignore[arg-type]


def begin(engine: VllmEngine) -> list[SampledWindow]:
    """Advance until a token is sampled, with no time limit; return the windows that have ended by
    then."""
    before = engine.stats().num_decode_steps
    windows: list[SampledWindow] = []
    while engine.stats().num_decode_steps == before:
        windows += engine.advance(1)
    return windows


def test_it_serves_the_distribution_and_the_streams_that_the_local_engine_does(core, old, tmp_path: Path) -> None:
    from tests.workers.engines.model_contract import published
    from workers.engines.generation.local.engine import LocalEngine

    assert core.has_streams
    engine = engine_on(core)
    engine.load_weights(probed(old, tmp_path / "0"), 0)
    local = LocalEngine(tiny_model(), num_slots=8)
    local.load_weights(published(old), 0)
    requests = [request(n, window=20, sampling=KINDS[n % len(KINDS)]) for n in range(12)]
    for each in requests:
        engine.submit(each)
        local.submit(each)
    windows, truth = drain(engine), drain(local)
    for each in requests:
        np.testing.assert_array_equal(windows[each.trajectory].tokens, truth[each.trajectory].tokens)
        check_window(old, each, windows[each.trajectory])


@pytest.mark.parametrize(
    ("kv_policy", "reported", "staged"), [("keep", True, True), ("recompute", True, False), ("recompute", False, True)]
)
def test_a_swap_in_flight_makes_true_segments_and_true_logprobs(
    core, old, new, tmp_path: Path, kv_policy: str, reported: bool, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether vLLM reports the version of each token or the pauses are recorded, whether weights
    were staged or not."""
    monkeypatch.setattr(core, "_reports_versions", reported and core._reports_versions)
    # until the swap fell inside the windows
    for _ in range(5):
        engine = engine_on(core, kv_policy=kv_policy)
        engine.load_weights(probed(old, tmp_path / "0"), 0)
        requests = [request(n, window=300, limit=300) for n in range(4)]
        for each in requests:
            engine.submit(each)
        early = begin(engine)
        weights = probed(new, tmp_path / "1")
        if staged:
            engine.stage_weights(weights, 1)
            # a staged version needs no file
            (tmp_path / "1").unlink()
        engine.load_weights(weights, 1)
        windows = {w.trajectory: w for w in early} | drain(engine)
        split = [each for each in requests if len(windows[each.trajectory].segments) == 2]
        if split:
            break
    else:
        pytest.fail("no swap fell inside the windows")
    for each in split:
        window = windows[each.trajectory]
        at = window.segments[0].num_tokens
        assert [s.policy_version for s in window.segments] == [0, 1]
        if kv_policy == "recompute":
            truth = np.concatenate([forward(old, each, window)[:at], forward(new, each, window)[at:]])
        else:
            truth = mixed_forward(old, new, each, window, kept=each.prompt_tokens.size + at - 1)
        np.testing.assert_allclose(window.behavior_logprobs, truth, atol=1e-3)


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_vllm_decodes_on_past_a_stop_string_and_no_token_after_it_is_kept(
    core, old, tmp_path: Path, pause: str
) -> None:
    engine = engine_on(core, pause=pause)
    engine.load_weights(probed(old, tmp_path / "0"), 0)
    requests = [request(n, window=200, limit=200) for n in range(8)]
    for each in requests:
        engine.submit(each)
    free = {name: window.tokens for name, window in drain(engine).items()}
    stop = tiny_tokenizer().decode(free[requests[0].trajectory].tolist())[30:34]
    asked = {each.trajectory: replace(each, stop_strings=(stop,)) for each in requests}
    for each in asked.values():
        engine.submit(each)
    early = begin(engine)
    # a swap to the same weights, by which some are cut
    engine.load_weights(probed(old, tmp_path / "1"), 1)
    rows = [*early, *drain(engine).values()]
    windows = {window.trajectory: window for window in rows}
    assert len(windows) == len(rows)
    done: set[TrajectoryId] = set()
    while len(done) < len(asked):
        for name, window in windows.items():
            check_window(old, asked[name], window)
            assert window.tokens.size == sum(segment.num_tokens for segment in window.segments)
            asked[name] = continued(asked[name], window)
            if window.finish_reason.is_final:
                done.add(name)
                end = end_of(free[name], stop)
                np.testing.assert_array_equal(asked[name].response_tokens, free[name][:end])
                assert window.finish_reason is (FinishReason.LENGTH if end is None else FinishReason.STOP)
        for name, each in asked.items():
            if name not in done:
                engine.submit(each)
        windows = drain(engine)
    assert end_of(free[requests[0].trajectory], stop) is not None


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_by_wait_and_abort_no_window_spans_two_versions(core, old, new, tmp_path: Path, pause: str) -> None:
    engine = engine_on(core, pause=pause, kv_policy="recompute")
    engine.load_weights(probed(old, tmp_path / "0"), 0)
    requests = {request(n).trajectory: request(n, window=60, limit=100) for n in range(4)}
    for each in requests.values():
        engine.submit(each)
    early = begin(engine)
    engine.load_weights(probed(new, tmp_path / "1"), 1)
    windows = [*early, *drain(engine).values()]
    assert windows
    for window in windows:
        assert [s.policy_version for s in window.segments] == [0]
        check_logprobs(old, requests[window.trajectory], window)


def test_cut_windows_go_on_where_they_were(core, old, tmp_path: Path) -> None:
    engine = engine_on(core)
    engine.load_weights(probed(old, tmp_path / "0"), 0)
    asked = {request(n).trajectory: request(n, window=400, limit=400) for n in range(4)}
    for each in asked.values():
        engine.submit(each)
    windows = {w.trajectory: w for w in begin(engine)}
    windows |= {w.trajectory: w for w in engine.cut()}
    assert engine.stats().num_live == 0
    assert core.live == []
    for name, window in windows.items():
        check_logprobs(old, asked[name], window, atol=1e-3)
        if window.finish_reason is FinishReason.WINDOW:
            after = continued(asked[name], window)
            engine.submit(after)
            check_logprobs(old, after, drain(engine)[name], atol=1e-3)


def test_dead_processes_end_every_wait_with_an_engine_that_died(core, old, tmp_path: Path) -> None:
    """The last test of the module: nothing lives after it."""
    engine = engine_on(core)
    engine.load_weights(probed(old, tmp_path / "0"), 0)
    engine.submit(request(0, window=400, limit=400))
    children = multiprocessing.active_children()
    assert children
    for child in children:
        child.kill()
    with pytest.raises(EngineDied):
        for _ in range(10_000):
            engine.advance(1)
    with pytest.raises(EngineDied):
        engine.load_weights(probed(old, tmp_path / "1"), 1)
