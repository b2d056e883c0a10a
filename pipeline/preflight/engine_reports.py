"""Reports of ``workers.engines``: how each engine computes a model (``comparison``), as a table, and
whether this machine's devices compute right (``device_check``)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from pipeline.preflight.ask import run
from pipeline.preflight.model_folder import read_model_config
from protocol.errors import ConfigError

NEAR_LOGPROBS = 1e-3
"""Largest difference of a log-prob, or of a value as a share, that float32's rounding explains."""
NEAR_GRADIENT = 1e-2
"""The same of a gradient, as a share of its length."""


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """One way of computing a model, next to transformers' own."""

    name: str
    how: str = ""
    logprobs: float | None = None
    """Largest difference of a log-prob from transformers' own; of a critic, of a value."""
    gradient: float | None = None
    """Length of the difference of the gradients, as a share of transformers' own."""
    tokens_per_s: float | None = None
    note: str = ""
    refusal: str = ""
    """Why the model cannot be computed so; empty where it can."""

    @property
    def is_right(self) -> bool:
        """Whether it computes the model, and what differs is rounding."""
        near = (self.logprobs or 0.0) <= NEAR_LOGPROBS and (self.gradient or 0.0) <= NEAR_GRADIENT
        return near and not self.refusal


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """All ways of computing a model."""

    path: str
    architecture: str
    device: str
    num_weights: int
    learner_bytes: int
    """fp32 weights, gradients and AdamW's moments, without activations."""
    cache_bytes: float | None
    """KV cache or state of the local engine, a token of context; None when it was refused."""
    parts: list[PartReport]

    @property
    def is_right(self) -> bool:
        """Whether every engine computes the model."""
        return all(part.is_right for part in self.parts)


def report_model(path: Path, device: str, *, timeout_s: float) -> ModelReport:
    """Compare the engines on a folder's model, in a subprocess. Raises DataError for a
    folder that holds no whole model, ConfigError with the reason for one that cannot be loaded."""
    read_model_config(path)
    try:
        answer = run("workers.engines.comparison", str(path), device, timeout_s=timeout_s)
    except TimeoutError as error:
        raise ConfigError(f"{path}: {error}; give it longer by --timeout, or a machine with more processors") from None
    if answer.refusal is not None:
        raise ConfigError(answer.refusal)
    return msgspec.json.decode(answer.notes.splitlines()[-1], type=ModelReport)


def rows_of(report: ModelReport) -> list[list[str]]:
    """Return the table's rows, the first its head."""
    rows = [["", "how", "log-probs", "gradient", "tokens/s", ""]]
    for part in report.parts:
        verdict = "refused" if part.refusal else "right" if part.is_right else "DIFFERS"
        speed = "" if part.tokens_per_s is None else f"{part.tokens_per_s:,.0f}"
        numbers = ["" if value is None else f"{value:.0e}" for value in (part.logprobs, part.gradient)]
        rows.append([part.name, part.how, *numbers, speed, "the truth" if part.name == "transformers" else verdict])
    return rows


def remarks_of(report: ModelReport) -> list[str]:
    """Return what is not in the table: sizes, reasons, and what the model can be used for."""
    needed = report.learner_bytes / 1e6
    size = f"{needed / 1e3:,.1f} GB" if needed > 1e3 else f"{needed:,.1f} MB"
    lines = [f"the learner needs {size} and activations (fp32 weights, gradients, AdamW)"]
    if report.cache_bytes is not None:
        lines.append(f"the local engine keeps {report.cache_bytes:,.0f} bytes a token of context")
    for part in report.parts:
        lines += [f"{part.name}: {text}" for text in (part.note, part.refusal) if text]
    wrong = {part.name for part in report.parts if not part.is_right}
    if "learner" in wrong:
        lines.append("not usable: choose another model (Qwen2, Qwen3 and Llama do)")
    else:
        lines.append(
            "usable without a critic (grpo, dapo, ...)" if "critic" in wrong else "usable with every algorithm"
        )
        if "local engine" in wrong:
            lines.append("set generation.engine = 'vllm': the local engine cannot serve it")
    return lines


LIMIT: Final = 1e-4
"""Largest distance from float64 that float32's rounding explains, as a share of the result's
length."""


class CheckedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device: several passes of a small model, forward and backward."""

    device: str
    num_passes: int
    num_unlike: int
    """Passes that differ from the first in a bit."""
    error: float
    """Largest distance of a pass from the same in float64, as a share of the result's length."""
    limit: float = LIMIT

    @property
    def is_sound(self) -> bool:
        """Whether the passes are the same, and right."""
        return self.num_unlike == 0 and self.error <= self.limit


def check_devices(timeout_s: float) -> list[CheckedDevice]:
    """Check each device that torch sees, in a subprocess. Raises ConfigError when that
    ends, or takes too long."""
    try:
        answer = run("workers.engines.device_check", timeout_s=timeout_s)
    except TimeoutError as error:
        raise ConfigError(f"{error}; give it longer by --timeout") from None
    if answer.refusal is not None:
        raise ConfigError(answer.refusal)
    return msgspec.json.decode(answer.notes.splitlines()[-1], type=list[CheckedDevice])
