"""Devices that a plan may use: a table with sources (``devices.toml``), and this machine's cores by measurement."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.runtime.machine import this_machine
from protocol.errors import ConfigError

CPU: Final = "CPU"
PER_HOST: Final = 8
"""Devices of one host, and so the most ranks of a learner."""
_TABLE: Final = Path(__file__).with_name("devices.toml")
_GROUP = re.compile(r"(\d+)x(.+)")
_MOST_DEVICES = 4096


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device; rates a second, in bytes or operations."""

    name: str
    flops: float
    """Of matrix products in bfloat16, dense; of a core in float32."""
    bandwidth: float
    memory_gb: float
    link: float
    network: float
    training_share: float
    """Of ``flops``, reached by training and prefill."""
    reading_share: float
    """Of ``bandwidth``, reached by decoding."""
    usd_per_hour: float | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    @property
    def num_bytes(self) -> int:
        return int(self.memory_gb * 1e9)


@cache
def known_devices() -> dict[str, Device]:
    return {name: msgspec.convert({"name": name, **each}, Device) for name, each in _tables().items()}


@cache
def _tables() -> dict[str, Any]:
    return {name: value for name, value in _read().items() if isinstance(value, dict)}


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def price_eur(devices: list[tuple[int, Device]]) -> float | None:
    """Return what devices cost an hour; None if no price is known for one of them."""
    if any(device.usd_per_hour is None for _, device in devices):
        return None
    return sum(number * (device.usd_per_hour or 0.0) for number, device in devices) / _read()["usd_per_eur"]


def read_devices(words: str) -> list[tuple[int, Device]]:
    """Return the devices of ``4xH100,8xL4``. Raises ConfigError for a word of another form and an unknown device."""
    known, found = known_devices(), list[tuple[int, Device]]()
    for word in words.split(","):
        match = _GROUP.fullmatch(word.strip())
        if match is None or not 0 < int(match[1]) <= _MOST_DEVICES:
            raise ConfigError(
                f"--devices has {word.strip()!r}; expected a number and a device, such as 8xH200 or 4xH100,8xL4"
            )
        device = {name.lower(): each for name, each in known.items()}.get(match[2].strip().lower())
        if device is None:
            raise ConfigError(f"--devices names {match[2]!r}, which is not known; known are {', '.join(known)}")
        if any(device.name == other.name for _, other in found):
            raise ConfigError(f"--devices names {device.name} twice; expected one number for each kind")
        found.append((int(match[1]), device))
    return found


def calibrate(seconds: float = 2.0) -> Device:
    """Measure one core of this machine: products of matrices in float32, and copies that leave its caches."""
    import numpy as np

    left, right = (np.random.default_rng(0).random((768, 768), dtype=np.float32) for _ in range(2))
    product, source = np.empty_like(left), np.ones(1 << 25, dtype=np.float32)
    target = np.empty_like(source)
    flops = 2 * 768**3 * _rate(lambda: np.matmul(left, right, out=product), seconds / 2)
    copied = 2 * source.nbytes * _rate(lambda: np.copyto(target, source), seconds / 2)
    machine = this_machine()
    known = known_devices()[CPU]
    return msgspec.structs.replace(
        known, flops=flops, bandwidth=copied, memory_gb=machine.memory_bytes / machine.num_cores / 1e9
    )


def _rate(call: Callable[[], object], seconds: float) -> float:
    """Return calls a second of processor time, the fastest of several: other work only slows them."""
    call()
    best, end_s = 0.0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.process_time()
        call()
        best = max(best, 1.0 / max(time.process_time() - began_s, 1e-9))
    return best
