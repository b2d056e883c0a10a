"""Compares the learner, the local engine and the critic with plain transformers, on one model.

The command line names a folder and a device. Standard output ends with a line of JSON
(``pipeline.preflight.engine_reports.ModelReport``). The exit code is 0, or 2 with the reason on
standard error when the model cannot be loaded. Everything is computed in float32 on a few short
sequences of random tokens, so the speeds compare implementations, not machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from pipeline.preflight.engine_reports import ModelReport, PartReport
from pipeline.preflight.memory_needs import count_weights, room_here
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.machine import this_machine
from protocol.errors import ConfigError, HeadraceError
from protocol.ids import TrajectoryId
from workers.engines.generation.local.engine import LocalEngine
from workers.engines.generation.local.lone import LoneForward
from workers.engines.generation.seam import SampledWindow, SamplingParams, WindowRequest
from workers.engines.model.checkpoint_files import weight_owners
from workers.engines.model.loading import load_model, load_value_model, resolve_device, value_head
from workers.engines.model.packed import PackedTokens, hidden_packed, packing_of, prepare_packed, score_packed
from workers.engines.model.trial import attend_eagerly, backbone, trial

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTHS = (40, 9, 33, 21, 5, 28)
_SLOTS, _WINDOW = 4, 24
_LONG_S = 5.0
"""A pass that takes longer is not repeated to measure its speed."""


class _Comparison:
    def __init__(self, model: PreTrainedModel, *, with_gradient: bool) -> None:
        rng = np.random.default_rng(0)
        vocabulary = int(model.config.get_text_config().vocab_size)
        self._model, self._with_gradient = model, with_gradient
        self.sequences = [rng.integers(0, vocabulary, size=length).astype(np.int32) for length in _LENGTHS]
        self.batch = PackedTokens.of(self.sequences, [length - 1 for length in _LENGTHS], model.device)
        attend_eagerly(model)
        self.truth, self._gradient, self.speed = self._pass(self._plain)

    def learner(self) -> PartReport:
        packing = packing_of(prepare_packed(self._model))
        reason = packing.unpacked_because
        found, gradient, speed = self._pass(lambda: score_packed(self._model, self.batch).logprobs)
        return PartReport(
            name="learner",
            how="padded batches" if reason else "packed rows",
            logprobs=float((found - self.truth).abs().max()),
            gradient=apart(gradient, self._gradient) if gradient and self._gradient else None,
            tokens_per_s=speed,
            note=f"sequences are padded: {reason}" if reason else "",
        )

    def _plain(self) -> torch.Tensor:
        return torch.cat([logprobs_of(self._model, tokens, tokens.size - 1) for tokens in self.sequences])

    def _pass(self, score: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor | None], float]:
        """Return log-probs [M], gradients by parameter, and tokens per second."""
        seconds = 0.0
        found = gradient = None
        for _ in range(2):
            self._model.zero_grad(set_to_none=True)
            began = time.perf_counter()
            with torch.set_grad_enabled(self._with_gradient):
                found = score()
                if self._with_gradient:
                    found.mean().backward()
            gradient = [parameter.grad for parameter in self._model.parameters()] if self._with_gradient else []
            if found.is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            if seconds > _LONG_S:
                break
        assert found is not None and gradient is not None, "there was a pass"
        self._model.zero_grad(set_to_none=True)
        return found.detach(), gradient, sum(_LENGTHS) / seconds


def logprobs_of(model: PreTrainedModel, tokens: np.ndarray, num_scored: int) -> torch.Tensor:
    """Return log-probs [num_scored] of a sequence's last tokens, from a model's own forward pass."""
    row = torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)
    logits = model(input_ids=row, use_cache=False)[0][0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])[-num_scored:, 0]


def apart(found: Sequence[torch.Tensor | None], truth: Sequence[torch.Tensor | None]) -> float:
    """Return the relative difference of two gradients, by norm; a missing gradient counts as 0."""
    pairs = [(one, other) for one, other in zip(found, truth, strict=True) if one is not None or other is not None]
    error = sum(float(_less(one, other).norm() ** 2) for one, other in pairs)
    return (error / max(1e-60, sum(float(other.norm() ** 2) for _, other in pairs if other is not None))) ** 0.5


def _less(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    if one is not None and other is not None:
        return one - other
    found = one if one is not None else other
    assert found is not None, "one of them has a gradient"
    return found


def _engine(model: PreTrainedModel) -> tuple[PartReport, float]:
    """Sample from a model with the local engine; also return cache bytes per token of context."""
    owners = weight_owners(model)
    named = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    engine = LocalEngine(model, num_slots=_SLOTS)
    engine.load_weights({name: tensor for name, tensor in named.items() if owners[name] == name}, 0)
    prompts = [np.arange(2, 6 + 4 * number, dtype=np.int32) for number in range(_SLOTS)]
    for number, prompt in enumerate(prompts):
        nothing = np.empty(0, np.int32)
        request = WindowRequest(
            TrajectoryId("t", 0, number), prompt, nothing, _WINDOW, 2 * _WINDOW, SamplingParams(1.0), 0
        )
        engine.submit(request)
    began = time.perf_counter()
    windows: list[SampledWindow] = []
    cache = 0
    while engine.stats().num_live:
        windows += engine.advance(1)
        cache = max(cache, engine.cache_bytes)
    speed = _SLOTS * _WINDOW / (time.perf_counter() - began)
    is_lone = isinstance(engine.forward, LoneForward)
    attend_eagerly(model)
    worst = 0.0
    for window in windows:
        sequence = np.concatenate([prompts[window.trajectory.member], window.tokens])
        with torch.no_grad():
            truth = logprobs_of(model, sequence, window.tokens.size).cpu().numpy()
        worst = max(worst, float(np.abs(truth - window.behavior_logprobs).max()))
    note = "each row takes its own pass, which is slow; vLLM may serve it faster" if is_lone else ""
    how = "a row at a time" if is_lone else "slot cache"
    held = sum(prompt.size + _WINDOW for prompt in prompts)
    part = PartReport(name="local engine", how=how, logprobs=worst, tokens_per_s=speed, note=note)
    return part, cache / held


@torch.no_grad()
def _critic(path: Path, device: torch.device, comparison: _Comparison) -> PartReport:
    critic = load_value_model(path, torch.float32, device)
    torch.manual_seed(0)
    head = value_head(critic)
    torch.nn.init.normal_(head.weight, std=head.in_features**-0.5)
    attend_eagerly(critic)
    rows = [torch.from_numpy(tokens.astype(np.int64))[None].to(device) for tokens in comparison.sequences]
    # before each token but the first, as a packed row may have its sequences in another order
    truth = torch.cat([head(backbone(critic)(input_ids=row, use_cache=False)[0][0][:-1]) for row in rows])
    found = head(hidden_packed(prepare_packed(critic), comparison.batch).index_select(0, comparison.batch.positions))
    largest = float((found - truth).abs().max() / truth.abs().max())
    return PartReport(name="critic", how=f"values of {type(critic).__name__}", logprobs=largest)


def compare(path: Path, device_name: str) -> ModelReport:
    """Compare every engine on the model in ``path``. Raises DataError or ConfigError when it cannot
    be loaded, EngineError when its own forward pass fails."""
    device = resolve_device(device_name)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else room_here(this_machine()).free
    # the policy, and the critic after it
    needed = 2 * 4 * count_weights(path)
    if needed > free:
        raise ConfigError(
            f"{path} needs {needed / 1e9:.1f} GB to compare in float32, but {free / 1e9:.1f} GB are free; use a machine with "
            "more memory"
        )
    model = load_model(path, torch.float32, device)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    # the weights are loaded already; two sets of gradients will be added
    fits = 3 * 4 * num_weights <= free
    made: list[_Comparison] = []

    def start() -> torch.Tensor:
        with torch.enable_grad():
            made.append(_Comparison(model, with_gradient=fits))
        return made[0].truth

    trial(start)
    comparison = made[0]
    note = "" if fits else f"gradients were not compared: they need {12e-9 * num_weights:.1f} GB in all"
    truth = PartReport(name="transformers", how="each sequence alone", tokens_per_s=comparison.speed, note=note)
    parts = [truth, _or_refused("learner", comparison.learner)]
    cache: float | None = None

    def sampled() -> PartReport:
        nonlocal cache
        part, cache = _engine(model)
        return part

    parts.append(_or_refused("local engine", sampled))
    architecture = type(model).__name__
    del model
    parts.append(_or_refused("critic", lambda: _critic(path, device, comparison)))
    return ModelReport(
        path=str(path),
        architecture=architecture,
        device=str(device),
        num_weights=num_weights,
        learner_bytes=16 * num_weights,
        cache_bytes=cache,
        parts=parts,
    )


def _or_refused(name: str, compute: Callable[[], PartReport]) -> PartReport:
    try:
        return compute()
    except HeadraceError as error:
        return PartReport(name=name, refusal=str(error))


def main() -> ExitCode:
    try:
        report = compare(Path(sys.argv[1]), sys.argv[2])
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    return ExitCode.OK
