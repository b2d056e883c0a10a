"""Claims about devices: words in, devices out; and a measured core."""

from __future__ import annotations

import pytest

from pipeline.plan.devices import calibrate, known_devices, price_eur, read_devices
from protocol.errors import ConfigError


def test_devices_are_read_with_their_numbers() -> None:
    found = read_devices("4xH100, 8xl4")
    assert [(number, device.name) for number, device in found] == [(4, "H100"), (8, "L4")]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("8xV900", r"names 'V900', which is not known; known are A100, H100, H200, B200, L4"),
        ("H100", r"has 'H100'; expected a number and a device, such as 8xH200"),
        ("0xH100", r"has '0xH100'; expected a number"),
        ("2xH100,3xH100", r"names H100 twice"),
    ],
)
def test_wrong_devices_are_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_devices(words)


def test_prices_are_in_euros_and_missing_for_devices_without_one() -> None:
    known = known_devices()
    one, eight = price_eur([(1, known["H100"])]), price_eur([(8, known["H100"])])
    assert one is not None and eight == pytest.approx(8 * one) and 2.0 < one < 4.0
    assert price_eur([(1, known["H100"]), (1, known["CPU"])]) is None


def test_a_core_of_this_machine_multiplies_and_copies() -> None:
    core = calibrate(0.2)
    assert core.is_cpu and 1e9 < core.flops < 1e13 and 1e8 < core.bandwidth < 1e12
