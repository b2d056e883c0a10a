"""Reports of ``workers.engines``: a table of how each engine computes a model (``comparison``), and
whether this machine's devices compute correctly (``device_check``)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from pipeline.preflight.ask import run
from pipeline.preflight.model_folder import read_model_config
from protocol.errors import ConfigError

NEAR_LOGPROBS = 1e-3
"""Largest difference of a log-prob, or relative difference of a value, that float32's rounding
explains."""
NEAR_GRADIENT = 1e-2
"""Largest difference of a gradient that rounding explains, as a share of its norm."""


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """One way of computing a model, compared with transformers' own."""

    name: str
    how: str = ""
    logprobs: float | None = None
    """Largest difference of a log-prob from transformers' own; for a critic, of a value."""
    gradient: float | None = None
    """Norm of the gradients' difference, as a share of the norm of transformers' own."""
    tokens_per_s: float | None = None
    note: str = ""
    refusal: str = ""
    """Why the model cannot be computed this way; empty if it can."""

    @property
    def is_right(self) -> bool:
        """Whether it computes the model, with no more than rounding differences."""
        near = (self.logprobs or 0.0) <= NEAR_LOGPROBS and (self.gradient or 0.0) <= NEAR_GRADIENT
        return near and not self.refusal


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    architecture: str
    device: str
    num_weights: int
    learner_bytes: int
    """fp32 weights, gradients and AdamW's moments, without activations."""
    cache_bytes: float | None
    """KV cache or state of the local engine per token of context; None if it refused the model."""
    parts: list[PartReport]

    @property
    def is_right(self) -> bool:
        return all(part.is_right for part in self.parts)


def report_model(path: Path, device: str, *, timeout_s: float) -> ModelReport:
    """Compare the engines on a folder's model, in a subprocess. Raises DataError if the folder
    holds no complete model, ConfigError with the reason if it cannot be loaded."""
    read_model_config(path)
    try:
        answer = run("workers.engines.comparison", str(path), device, timeout_s=timeout_s)
    except TimeoutError as error:
        raise ConfigError(
            f"{path}: {error}; give it more time with --timeout, or a machine with more processors"
        ) from None
    if answer.refusal is not None:
        raise ConfigError(answer.refusal)
    return msgspec.json.decode(answer.notes.splitlines()[-1], type=ModelReport)


def rows_of(report: ModelReport) -> list[list[str]]:
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
    lines = [f"the learner needs {size} (fp32 weights, gradients, AdamW), plus activations"]
    if report.cache_bytes is not None:
        lines.append(f"the local engine keeps {report.cache_bytes:,.0f} bytes per token of context")
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
"""Largest deviation from float64 that float32's rounding explains, as a share of the result's
norm."""


class CheckedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The result of several forward and backward passes of a small model on one device."""

    device: str
    num_passes: int
    num_unlike: int
    """Passes that differ from the first in at least one bit."""
    error: float
    """Largest deviation of a pass from float64, as a share of the result's norm."""
    limit: float = LIMIT

    @property
    def is_sound(self) -> bool:
        """Whether the passes are equal and correct."""
        return self.num_unlike == 0 and self.error <= self.limit


def check_devices(timeout_s: float) -> list[CheckedDevice]:
    """Check each device that torch sees, in a subprocess. Raises ConfigError if that fails or takes
    too long."""
    try:
        answer = run("workers.engines.device_check", timeout_s=timeout_s)
    except TimeoutError as error:
        raise ConfigError(f"{error}; give it more time with --timeout") from None
    if answer.refusal is not None:
        raise ConfigError(answer.refusal)
    return msgspec.json.decode(answer.notes.splitlines()[-1], type=list[CheckedDevice])
