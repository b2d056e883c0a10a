"""Claims about the parts that a standby makes, and about their trials: numbers that are not finite
keep a standby from becoming a worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ops.emulated import OVERRIDES
from ops.emulated.generation import EmulatedEngine
from ops.emulated.law import LengthLaw, TokenLaw
from pipeline.config.schema import RunConfig
from pipeline.process.work import Meter, listening
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.store import WeightsStore
from pipeline.weights.tensorfile import TensorSpec, publication
from protocol.errors import EngineError
from protocol.ids import Role
from tests.pipeline.op_config import MODEL, op_config
from workers.generator.followed_weights import FollowedWeights
from workers.preparation import check_finite, prepare, try_generation


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """The demo's model with one weight that is no number."""
    folder = tmp_path / "spoilt"
    shutil.copytree(MODEL, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor.copy() for name, tensor in load_file(file).items()}
    name = next(name for name in tensors if "norm" in name)
    tensors[name].reshape(-1)[0] = np.nan
    file.chmod(0o600)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_each_role_s_parts_are_made_and_each_is_a_piece_of_work(tmp_path: Path) -> None:
    config = op_config(tmp_path, "reference.always=true", *OVERRIDES)
    meter = Meter()
    with listening(meter):
        made = prepare(config, [Role.GENERATOR, Role.REWARD, Role.REFERENCE])
        assert set(made) == {"prompts", "generation", "reference"}
        assert meter.report().steps == 3
        assert set(prepare(config, [Role.LEARNER])) == {"prompts", "training"}


def test_a_reference_whose_numbers_are_not_finite_is_refused(tmp_path: Path, spoilt: Path) -> None:
    sound = op_config(tmp_path, "reference.always=true")
    assert set(prepare(sound, [Role.REFERENCE])) == {"reference"}
    config = op_config(tmp_path, "reference.always=true", f"model.reference_path={spoilt}")
    with pytest.raises(EngineError, match="the reference computes numbers that are not finite"):
        prepare(config, [Role.REFERENCE])


def test_a_value_model_whose_numbers_are_not_finite_is_refused(tmp_path: Path, spoilt: Path) -> None:
    critic = ["algorithm.name=vapo", "algorithm.dynamic_sampling=false"]
    assert set(prepare(op_config(tmp_path, *critic), [Role.VALUE])) == {"value"}
    with pytest.raises(EngineError, match="the value model computes numbers that are not finite"):
        prepare(op_config(tmp_path, *critic, f"value.path={spoilt}"), [Role.VALUE])


def published(folder: Path, model: Path) -> tuple[WeightsStore, WeightsAnnouncement]:
    """Publish a model's weights as version 1."""
    (file,) = model.glob("*.safetensors")
    named = {name: np.asarray(tensor, np.float32) for name, tensor in load_file(file).items()}
    specs = [TensorSpec(name, "F32", tensor.shape) for name, tensor in named.items()]
    store = WeightsStore(folder / "weights", keep=1, max_part_bytes=1 << 20)
    laid_out = publication(specs, (tensor.reshape(-1).view(np.uint8) for tensor in named.values()))
    return store, store.announcement(store.publish(1, laid_out), endpoint="")


def test_a_generator_is_tried_with_the_weights_that_it_follows(tmp_path: Path, spoilt: Path) -> None:
    config = op_config(tmp_path)
    for model, is_sound in ((MODEL, True), (spoilt, False)):
        engine = prepare(config, [Role.GENERATOR])["generation"]
        store, announced = published(tmp_path, model)
        weights = FollowedWeights(engine)
        assert weights.follow(announced)
        if is_sound:
            try_generation(engine, config)
            assert engine.stats().num_live == 0, "the trial leaves nothing behind"
        else:
            with pytest.raises(EngineError, match="not finite"):
                try_generation(engine, config)
        weights.close()
        store.close()


class Mute(EmulatedEngine):
    """An engine that takes requests and samples nothing."""

    def __init__(self, config: RunConfig) -> None:
        law = TokenLaw.of(32, {1})
        super().__init__(num_slots=config.generation.num_slots, lengths=LengthLaw("constant", 6.0, 1.0), tokens=law,
                         vocabulary=32)  # fmt: skip
        self.num_turns = 0

    def advance(self, max_steps: int) -> list:
        self.num_turns += 1
        return []


def test_an_engine_that_samples_nothing_fails_its_trial(tmp_path: Path) -> None:
    config = op_config(tmp_path)
    engine = Mute(config)
    with pytest.raises(EngineError, match="sampled nothing in 100 steps"):
        try_generation(engine, config)
    assert engine.num_turns == 100


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_enough(bad: float) -> None:
    check_finite("the engine", np.array([-1.0, 0.0]))
    with pytest.raises(EngineError, match="the engine computes numbers that are not finite"):
        check_finite("the engine", np.array([-1.0, bad]))
