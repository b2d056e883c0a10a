"""A device that computes wrongly, always or now and then, is found by passes of a small model."""

from __future__ import annotations

import torch

from workers.engines.device_check import Result, check, one_pass


def flipped(given: Result, bit: int) -> Result:
    found = [one.clone() for one in one_pass(given)]
    found[3].view(torch.int32)[7, 9] ^= 1 << bit
    return found


def test_a_sound_device_has_the_same_passes_near_to_float64() -> None:
    found = check("cpu", num_passes=3)
    assert found.is_sound and found.num_unlike == 0 and 0.0 < found.error < 1e-5


def test_one_flipped_bit_in_one_pass_is_found() -> None:
    calls: list[int] = []

    def now_and_then(given: Result) -> Result:
        calls.append(1)
        return flipped(given, 0) if len(calls) == 3 else one_pass(given)

    found = check("cpu", passes=now_and_then, num_passes=4)
    assert found.num_unlike == 1 and not found.is_sound


def test_a_device_that_is_always_wrong_is_found_by_float64() -> None:
    found = check("cpu", passes=lambda given: flipped(given, 30), num_passes=3)
    assert found.num_unlike == 0 and not found.is_sound
    assert not check("cpu", passes=lambda given: [one * torch.nan for one in one_pass(given)], num_passes=2).is_sound
