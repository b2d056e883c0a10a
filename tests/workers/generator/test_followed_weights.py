"""Claims about the weights of a standby's engine: each newer version, verified, and none that is
not served."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ops.emulated.generation import EmulatedEngine
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.weights import TENSOR, make_tensor, publish_tensors
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.store import WeightsStore
from protocol.errors import WeightsDamaged
from workers.generator.followed_weights import FollowedWeights

NUM_WEIGHTS = 5000


class Engine(EmulatedEngine):
    """An emulated engine that keeps a copy of the tensors that it was given."""

    def __init__(self) -> None:
        super().__init__(
            num_slots=4,
            lengths=LengthLaw("constant", median_tokens=6.0, tail=1.0),
            tokens=TokenLaw.of(32, {1}),
            vocabulary=32,
            num_weights=NUM_WEIGHTS,
        )
        self.served: dict[int, np.ndarray] = {}
        self.misses: list[str] = []

    def load_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        super().load_weights(tensors, policy_version)
        self.served[policy_version] = tensors[TENSOR].copy()

    def unserved(self, tensors: Mapping[str, Any]) -> list[str]:
        return self.misses


class Rig:
    """A learner's published files, and a standby's engine that follows them."""

    def __init__(self, folder: Path) -> None:
        self.store = WeightsStore(folder / "weights", keep=1, max_part_bytes=1 << 20)
        self.engine = Engine()
        self.weights = FollowedWeights(self.engine)

    def publish(self, version: int) -> WeightsAnnouncement:
        published = publish_tensors([(TENSOR, make_tensor(f"{version:016x}", NUM_WEIGHTS))])
        return self.store.announcement(self.store.publish(version, published), endpoint="")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.weights.close()
    made.store.close()


def is_held(fd: int) -> bool:
    """Return whether some reader keeps the file from being filled again."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(other)
    return False


def test_each_newer_version_is_served_as_it_was_published_and_an_older_one_is_left(rig: Rig) -> None:
    first = rig.publish(1)
    assert rig.weights.follow(first) and rig.weights.policy_version == 1
    second = rig.publish(2)
    assert rig.weights.follow(second) and rig.weights.follow(second) and rig.weights.follow(first)
    assert list(rig.engine.served) == [1, 2]
    for version, tensor in rig.engine.served.items():
        np.testing.assert_array_equal(tensor, make_tensor(f"{version:016x}", NUM_WEIGHTS))
    assert rig.weights.serving is not None and rig.weights.serving[0] == second


def test_the_former_version_s_file_goes_back_to_its_writer_the_present_one_s_not(rig: Rig) -> None:
    held = []
    for version in (1, 2):
        rig.weights.follow(rig.publish(version))
        assert rig.weights.serving is not None
        held.append(rig.weights.serving[1].fd)
    # the writer itself holds what is published: version 2
    rig.store.close()
    assert [is_held(fd) for fd in held] == [False, True]


def test_damaged_bytes_are_refused_by_name_and_never_reach_the_engine(rig: Rig) -> None:
    announced = rig.publish(1)
    path = Path(announced.path)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsDamaged, match=r"v00000001.safetensors is not version 1 as it was published"):
        rig.weights.follow(announced)
    assert rig.engine.policy_version == -1 and not rig.engine.served and rig.weights.serving is None


def test_a_file_of_another_length_is_refused(rig: Rig) -> None:
    announced = rig.publish(1)
    with pytest.raises(WeightsDamaged):
        rig.weights.follow(msgspec.structs.replace(announced, num_bytes=announced.num_bytes + 1))
    assert not rig.engine.served


def test_a_file_that_was_filled_again_is_mapped_anew_before_it_is_blamed(rig: Rig) -> None:
    rig.weights.follow(rig.publish(1))
    assert rig.weights.serving is not None
    # an engine may write into its own pages of the file
    first = rig.weights.serving[1]
    first.data[-4:] ^= 1
    for version in (2, 3):
        rig.weights.follow(rig.publish(version))
    assert os.fstat(rig.weights.serving[1].fd).st_ino == os.fstat(first.fd).st_ino, "version 3 is in the first's file"
    np.testing.assert_array_equal(rig.engine.served[3], make_tensor(f"{3:016x}", NUM_WEIGHTS))


def test_an_engine_that_does_not_serve_what_it_was_given_is_of_no_use(rig: Rig) -> None:
    rig.engine.misses = [TENSOR]
    with pytest.raises(WeightsDamaged, match="was given version 1 but does not serve it: 1 tensors differ"):
        rig.weights.follow(rig.publish(1))
    assert rig.weights.serving is None


def test_adapters_and_files_that_are_not_here_are_left_to_the_generator(rig: Rig) -> None:
    announced = rig.publish(1)
    gone = msgspec.structs.replace(announced, path=f"{announced.path}.gone")
    adapter = msgspec.structs.replace(announced, base=announced)
    assert not rig.weights.follow(gone) and not rig.weights.follow(adapter)
    assert rig.weights.policy_version == -1 and not rig.engine.served
