"""Whether this machine's devices compute right: what ``workers.engines.device_check`` reports."""

from __future__ import annotations

from typing import Final

import msgspec

from pipeline.preflight.ask import run
from protocol.errors import ConfigError

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
    """Check each device that torch sees, in a process of its own. Raises ConfigError when that
    ends, or takes too long."""
    try:
        answer = run("workers.engines.device_check", timeout_s=timeout_s)
    except TimeoutError as error:
        raise ConfigError(f"{error}; give it longer by --timeout") from None
    if answer.refusal is not None:
        raise ConfigError(answer.refusal)
    return msgspec.json.decode(answer.notes.splitlines()[-1], type=list[CheckedDevice])
