"""No token leaves under a version whose weights vLLM did not take as they were published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pipeline.weights.digest import digest_buffer
from protocol.errors import ParityFailed
from protocol.trajectory import FinishReason, Segment
from tests.vllm.cores import POSITIONS, CorePool
from tests.workers.engines.adapters import make_adapter, merged
from tests.workers.engines.generation_contract import continued, drain, request
from tests.workers.engines.model.test_adapter import bytes_of
from tests.workers.engines.model_contract import check_logprobs, published
from tests.workers.engines.tiny import VOCABULARY, plain_logprobs, tiny_model
from workers.engines.generation.vllm import worker
from workers.engines.generation.vllm.engine import VllmEngine
from workers.engines.model.adapter import publish_adapter, publish_base, publish_merged
from workers.engines.model.loading import model_state
from workers.engines.model.weights_file import ParityProbe, PublishedWeights, read_weights, write_weights
from workers.engines.training.publishing import probe_tokens


def probed(model: PreTrainedModel, path: Path) -> PublishedWeights:
    """Publish a model as the learner does: with its own log-probs of the probe."""
    tokens = probe_tokens(VOCABULARY, POSITIONS)
    with torch.no_grad():
        logprobs = plain_logprobs(model, tokens, tokens.size - 1, 1.0).numpy()
    write_weights(path, published(model).items(), dtype="float32", probe=ParityProbe(tokens, logprobs))
    return read_weights(path)


def engine_for(cores: CorePool, model: PreTrainedModel, **options: Any) -> VllmEngine:
    """Make an engine of four slots; nothing but a limit ends a response."""
    settings: dict[str, Any] = {"num_slots": 4, "vocabulary": VOCABULARY, "positions": POSITIONS}
    return VllmEngine(cores.take(model), model_state(model.config), **(settings | options))


@pytest.mark.parametrize("tied", [True, False])
def test_every_update_is_held_against_the_learners_own_log_probs(cores: CorePool, tmp_path: Path, tied: bool) -> None:
    models = [tiny_model(seed=n, hidden_size=128, tie_word_embeddings=tied).eval() for n in (1, 2, 3)]
    engine = engine_for(cores, models[0])
    for version, model in enumerate(models):
        engine.load_weights(probed(model, tmp_path / f"{version}"), version)
        assert engine.policy_version == version
        engine.submit(request(version))
        check_logprobs(model, request(version), drain(engine)[request(version).trajectory])


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_merged_served_and_compared_to_the_learner_like_whole_weights(
    cores: CorePool, tmp_path: Path, tied: bool
) -> None:
    model = tiny_model(seed=1, hidden_size=128, tie_word_embeddings=tied).eval()
    engine = engine_for(cores, model)
    base = bytes_of(publish_base(make_adapter(model), dtype="float32"))
    for version in range(2):
        adapter = make_adapter(model, seed=version)
        learner = tiny_model(seed=1, hidden_size=128, tie_word_embeddings=tied).eval()
        learner.load_state_dict(merged(adapter), strict=False)
        probe = probed(learner, tmp_path / "whole").probe
        arrived = bytes_of(publish_adapter(adapter, digest_buffer(base), probe=probe))
        file = tmp_path / f"{version}"
        file.write_bytes(bytes_of(publish_merged(arrived, base, digest_buffer(base), dtype="float32")).tobytes())
        weights = read_weights(file)
        assert weights.probe is not None
        # ParityFailed if vLLM did not compute the same as the learner
        engine.load_weights(weights, version)
        engine.submit(request(version))
        check_logprobs(learner, request(version), drain(engine)[request(version).trajectory])


def test_a_stale_output_layer_is_found_and_the_engine_is_quarantined(
    cores: CorePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (tiny_model(seed=n, hidden_size=128).eval() for n in (1, 2))
    engine = engine_for(cores, old)
    engine.load_weights(probed(old, tmp_path / "0"), 0)
    engine.submit(request(0, window=30))
    assert engine.advance(3) == []
    # vLLM does this by itself: a tied output layer keeps its packed copy of the old embedding
    monkeypatch.setattr(worker, "repack_tied_head", lambda model: None)
    with pytest.raises(ParityFailed, match=r"version 1 .* differ from the learner's"):
        engine.load_weights(probed(new, tmp_path / "1"), 1)
    assert engine.policy_version == 0
    for _ in range(2):
        with pytest.raises(ParityFailed):
            engine.advance(1)
    with pytest.raises(ParityFailed):
        engine.load_weights(probed(new, tmp_path / "2"), 2)


def test_live_windows_go_on_while_a_probe_is_scored_and_lose_nothing(cores: CorePool, tmp_path: Path) -> None:
    old, new = (tiny_model(seed=n).eval() for n in (1, 2))
    engine = engine_for(cores, old)
    engine.load_weights(probed(old, tmp_path / "0"), 0)
    requests = [request(n, window=6 if n else 7) for n in range(4)]
    for each in requests:
        engine.submit(each)
    assert engine.advance(5) == []
    engine.load_weights(probed(new, tmp_path / "1"), 1)
    windows = drain(engine)
    assert {w.segments for w in windows.values()} == {(Segment(0, 5), Segment(1, 1)), (Segment(0, 5), Segment(1, 2))}


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_by_wait_and_abort_no_window_spans_two_versions(cores: CorePool, tmp_path: Path, pause: str) -> None:
    old, new = (tiny_model(seed=n).eval() for n in (1, 2))
    engine = engine_for(cores, old, pause=pause, kv_policy="recompute")
    engine.load_weights(probed(old, tmp_path / "0"), 0)
    requests = {request(n).trajectory: request(n, window=9) for n in range(6)}
    for each in requests.values():
        engine.submit(each)
    assert engine.advance(4) == []
    engine.load_weights(probed(new, tmp_path / "1"), 1)
    windows = drain(engine)
    # two were waiting for a slot
    assert len(windows) == 6
    for name, window in windows.items():
        ((version, num_tokens),) = [(s.policy_version, s.num_tokens) for s in window.segments]
        assert window.finish_reason is FinishReason.WINDOW
        assert num_tokens == (4 if pause == "abort" and version == 0 else 9)
        check_logprobs((old, new)[version], requests[name], window)
    assert sorted(w.segments[0].policy_version for w in windows.values()) == [0, 0, 0, 0, 1, 1]
    again = continued(requests[request(0).trajectory], windows[request(0).trajectory])
    engine.submit(again)
    check_logprobs(new, again, drain(engine)[again.trajectory])


def test_a_dead_engine_is_told_from_a_bad_request(cores: CorePool, monkeypatch: pytest.MonkeyPatch) -> None:
    from protocol.errors import EngineDied

    model = tiny_model(seed=1).eval()
    core = cores.take(model)
    engine = VllmEngine(core, model_state(model.config), num_slots=2, vocabulary=VOCABULARY, positions=POSITIONS)
    engine.load_weights(published(model), 0)
    engine.submit(request(0))

    def fail() -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(core._engine, "step", fail)
    for _ in range(2):
        with pytest.raises(EngineDied, match="fell off the bus"):
            engine.advance(1)


def test_probe_tokens_are_the_same_in_every_process() -> None:
    assert probe_tokens(64, 512)[:4].tolist() == np.random.default_rng(0).integers(0, 64, size=48)[:4].tolist()
    assert probe_tokens(64, 10).size == 10
