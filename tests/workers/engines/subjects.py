"""Training backends under test: each made from a model and settings, in this process alone or with
ranks that follow it.

Where the launcher started this process (``tests.workers.engines.ranked``), the ranked backends are
made on all ranks, and the other ranks follow. Several backends may live at once, so the number of a
backend precedes each of its commands."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from pipeline.config.learning import DeepSpeedSection
from pipeline.schedule.timetable import Orders, Step
from pipeline.training.live_states import StateLoan
from protocol.errors import ConfigError
from tests.workers.engines.tiny import ARCHITECTURES, exact_norms
from workers.engines.model.head import HEAD_BYTES
from workers.engines.model.loading import load_value_model, value_head
from workers.engines.model.optimizer import OptimizerSettings, freeze
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.ranks.backend import RankedTraining, RankedValue
from workers.engines.training.ranks.build import Ranks, make_training, make_value
from workers.engines.training.ranks.fsdp2 import Fsdp2Shards
from workers.engines.training.ranks.group import Group, join
from workers.engines.training.ranks.launch import is_rank
from workers.engines.training.ranks.messages import Command, Lead, Lend, decode
from workers.engines.training.ranks.stages.backend import StagePlan
from workers.engines.training.seam import TrainingBackend
from workers.engines.training.torch import TorchTraining
from workers.engines.value.regression import ValueSettings
from workers.engines.value.seam import ValueEngine
from workers.engines.value.torch import TorchValue

if TYPE_CHECKING:
    from workers.engines.training.lora import LoraSettings

TIMEOUT_S = 60.0
_MAKE, _FORGET, _END, _DISAGREE, _COMPARE, _LATE = -1, -2, -3, -4, -5, -6


@dataclass(frozen=True)
class Settings:
    """The settings of a backend under test."""

    learning_rate: float = 1e-3
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    eps: float = 1e-8
    temperature: float = 1.0
    micro_batch_tokens: int = 128
    gradient_checkpointing: bool | int = False
    autocast: torch.dtype | None = None
    head_bytes: int = HEAD_BYTES
    optimizer_name: str = "adamw-fused"
    freeze: Sequence[str] = ()
    lora_rank: int = 0
    """With alpha twice as large; 0: no adapter."""

    @property
    def lora(self) -> LoraSettings | None:
        if not self.lora_rank:
            return None
        from workers.engines.training.lora import LoraSettings

        return LoraSettings(self.lora_rank, 2.0 * self.lora_rank)

    @property
    def forward(self) -> ForwardSettings:
        return ForwardSettings(self.temperature, self.micro_batch_tokens, self.autocast, self.head_bytes)

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(
            self.learning_rate,
            self.warmup_steps,
            self.weight_decay,
            eps=self.eps,
            max_grad_norm=self.max_grad_norm,
            name=self.optimizer_name,
        )


SMOOTH_EPS = 1e-6
"""With it AdamW does not blow the last bits of a vanishing gradient up to a step."""
VALUE = ValueSettings(micro_batch_tokens=64)
VALUE_OPTIMIZER = OptimizerSettings(1e-3, warmup_steps=3, weight_decay=0.1, eps=SMOOTH_EPS)

Make = Callable[[PreTrainedModel, Settings], TrainingBackend]


@dataclass(frozen=True)
class Subject:
    """A kind of backend."""

    name: str
    make: Make
    exact: torch.dtype = torch.float64
    """The finest type that it computes in."""

    def within(self, fine: float, coarse: float) -> float:
        """Choose a tolerance: ``fine`` for float64, ``coarse`` for float32."""
        return fine if self.exact == torch.float64 else coarse


def make_torch(model: PreTrainedModel, settings: Settings) -> TrainingBackend:
    freeze(model, settings.freeze)
    return TorchTraining(
        model,
        settings.forward,
        settings.optimizer,
        gradient_checkpointing=settings.gradient_checkpointing,
        lora=settings.lora,
    )


def _ranked(stage: int) -> Make:
    def make(model: PreTrainedModel, settings: Settings) -> TrainingBackend:
        return _build(model, settings, stage, Ranks(group(), _announce(model, settings, stage)))

    return make


def make_torch_value(folder: Path) -> ValueEngine:
    return TorchValue(value_model(folder), VALUE, VALUE_OPTIMIZER)


def make_ranked_value(subject: Subject, folder: Path) -> ValueEngine:
    """Make a value engine on the model in ``folder``, on all ranks."""
    stage = _TENSOR if subject is TENSOR else RANKED.index(subject)
    ranks = _divided(Ranks(group(), _lead({"value": str(folder), "stage": stage})), stage)
    return make_value(value_model(folder), VALUE, VALUE_OPTIMIZER, ranks, zero=_zero(stage))


def value_model(folder: Path) -> PreTrainedModel:
    """The value model that starts in ``folder``, with a random head."""
    model = load_value_model(folder, torch.float32, torch.device("cpu"))
    torch.manual_seed(3)
    torch.nn.init.normal_(value_head(model).weight, std=0.3)
    return model


TORCH = Subject("torch", make_torch)
FSDP2 = Subject("fsdp2", _ranked(0))
ZERO = [Subject(f"deepspeed-zero{stage}", _ranked(stage), torch.float32) for stage in (1, 2, 3)]
_STAGES = -1
PIPELINE = Subject("pipeline", _ranked(_STAGES))

_TENSOR = -2
TENSOR = Subject("fsdp2-tensor2", _ranked(_TENSOR))
SPLIT = [TENSOR] if is_rank() else []

RANKED = [FSDP2, *ZERO]
"""What shares a model of any kind: policies, critics, adapters."""
TRAINED_IN_SHARES = [*RANKED, PIPELINE, *SPLIT]
CONTRACT = [*([PIPELINE] if is_rank() else [TORCH]), *SPLIT, FSDP2, ZERO[1]]
"""On one rank and on two, each of the kinds; all stages of ZeRO are held against plain torch
besides."""


@cache
def group() -> Group:
    """The ranks of this process's session."""
    return join("cpu", timeout_s=TIMEOUT_S)


class NumberedLead(Lead):
    """Sends the number of its backend before each command."""

    def __init__(self, number: int) -> None:
        super().__init__(group(), timeout_s=1e6)
        self._number = number

    def _tell(self, command: Command) -> None:
        _say(self._number)
        super()._tell(command)


_made: list[int] = []
_linear = functional.linear


def forget_followers() -> None:
    """Let the other ranks drop the backends of a test that is over."""
    _restore_linear()
    if _made:
        _made.clear()
        _say(_FORGET)


def _restore_linear() -> None:
    """Undo ZeRO-3's lasting change of this process.

    Its linear hands out the gradients of weight and bias in another order. ZeRO-1 and 2 add up what ranks have in the
    order in which it comes, so with it on one rank alone, which no worker's process has, they add unlike parameters."""
    functional.linear = _linear


def end_followers() -> None:
    """Let the other ranks end."""
    _say(_END)


def disagree() -> None:
    """Compare digests that are other ones on each rank."""
    _say(_DISAGREE)
    group().agree(bytes([group().rank]) * 32, "configuration")


def compare_ranks(backend: RankedTraining) -> None:
    """Raise ConfigError unless every rank has the same trained weights, bit for bit."""
    _say(_COMPARE)
    _compare(backend)


def _compare(backend: RankedTraining) -> None:
    """Compare the trained weights of the newest backend with those of the other ranks."""
    shards, names = backend._model.shards, sorted(backend._model._trained)
    if isinstance(shards, Fsdp2Shards):
        whole = [cast("Any", shards._parameters[name]).full_tensor() for name in names]
    else:
        whole = [cast("torch.Tensor", shards.weight(name)).contiguous() for name in names]
    weights = [each.detach().numpy().tobytes() for each in whole]
    group().agree(hashlib.sha256(b"".join(weights)).digest(), "weights")


def copy_late() -> None:
    """Let the other ranks begin the copy of what they lend next only once they wait for it."""
    _say(_LATE)


class LateCopy:
    """The next copy of this process, which a change of the state must wait for."""

    def __init__(self) -> None:
        self._may_begin = threading.Event()
        self._copy, self._wait = StateLoan.copy, StateLoan.wait

    def begin(self) -> None:
        """Hold the next copy back."""

        def copy(loan: StateLoan) -> None:
            assert self._may_begin.wait(TIMEOUT_S)
            self._copy(loan)

        def wait(loan: StateLoan) -> None:
            self._may_begin.set()
            self._wait(loan)

        cast("Any", StateLoan).copy = copy
        cast("Any", StateLoan).wait = wait

    def end(self) -> None:
        """Let it begin now in any case."""
        self._may_begin.set()
        cast("Any", StateLoan).copy = self._copy
        cast("Any", StateLoan).wait = self._wait


def follow_tests() -> None:
    """Be one of the other ranks, until rank 0 ends."""
    backends: dict[int, RankedTraining | RankedValue] = {}
    late: LateCopy | None = None
    while (number := int(group().broadcast(torch.tensor([0])))) != _END:
        if number == _FORGET:
            _restore_linear()
            backends.clear()
        elif number == _DISAGREE:
            with pytest.raises(ConfigError, match="ranks 1 of 2"):
                group().agree(bytes([group().rank]) * 32, "configuration")
        elif number == _COMPARE:
            newest = backends[max(backends)]
            assert isinstance(newest, RankedTraining)
            _compare(newest)
        elif number == _LATE:
            late = LateCopy()
            late.begin()
        elif number == _MAKE:
            told = json.loads(group().broadcast_bytes(None).tobytes())
            # so short that any beat of a rank that follows would come during the tests
            ranks = Ranks(group(), Lead(group(), timeout_s=0.1))
            backends[told["number"]] = _obedient(told, ranks)
        else:
            command = decode(group().broadcast_bytes(None))
            backends[number].obey(command)
            if late is not None and not isinstance(command, Lend):
                late.end()
                late = None


def _obedient(told: dict[str, Any], ranks: Ranks) -> RankedTraining | RankedValue:
    """Make the backend that rank 0 makes at this moment."""
    if "value" in told:
        stage = told["stage"]
        model = value_model(Path(told["value"]))
        return make_value(model, VALUE, VALUE_OPTIMIZER, _divided(ranks, stage), zero=_zero(stage))
    config, kind = ARCHITECTURES[told["architecture"]]
    model = kind(config(**told["config"])).to(getattr(torch, told["dtype"]))
    if model.dtype == torch.float64:
        exact_norms(model)
    _share_weights(model)
    settings = Settings(**told["settings"])
    if settings.autocast is not None:
        settings = replace(settings, autocast=getattr(torch, str(settings.autocast)))
    return _build(model, settings, told["stage"], ranks)


def _announce(model: PreTrainedModel, settings: Settings, stage: int) -> Lead:
    """Have the other ranks make the same backend; return the lead of the ranks."""
    autocast = None if settings.autocast is None else str(settings.autocast).removeprefix("torch.")
    lead = _lead(
        {
            "architecture": model.config.model_type,
            "config": {key: value for key, value in model.config.to_dict().items() if key != "model_type"},
            "dtype": str(model.dtype).removeprefix("torch."),
            "settings": asdict(settings) | {"autocast": autocast},
            "stage": stage,
        }
    )
    _share_weights(model)
    return lead


def _lead(told: dict[str, Any]) -> Lead:
    """Order the other ranks to make a backend, if there are any; return the lead of the ranks."""
    if group().size == 1:
        return Lead(group(), timeout_s=1e6)
    number = len(_made)
    _made.append(number)
    _say(_MAKE)
    group().broadcast_bytes(json.dumps(told | {"number": number}, default=str).encode())
    return NumberedLead(number)


def _build(model: PreTrainedModel, settings: Settings, stage: int, ranks: Ranks) -> RankedTraining:
    freeze(model, settings.freeze)
    return make_training(
        model,
        settings.forward,
        settings.optimizer,
        _divided(ranks, stage),
        zero=_zero(stage),
        gradient_checkpointing=settings.gradient_checkpointing,
        lora=settings.lora,
        stages=two_stages() if stage == _STAGES else None,
    )


def _divided(ranks: Ranks, stage: int) -> Ranks:
    return replace(ranks, group=replace(ranks.group, tensor=2)) if stage == _TENSOR else ranks


def _zero(stage: int) -> DeepSpeedSection | None:
    return DeepSpeedSection.model_validate({"stage": stage}) if stage > 0 else None


def two_stages() -> StagePlan:
    """Two stages on one rank, or one on each of two."""
    return StagePlan([0, group().size - 1], 4, gpipe([0, group().size - 1]))


def gpipe(ranks: Sequence[int]) -> Callable[[int], Orders]:
    """Return GPipe's orders for stages on these ranks: all forward passes, then all backward passes."""
    stages = range(len(ranks))
    names = [*(f"f{stage}" for stage in stages), *(f"b{stage}" for stage in reversed(stages))]

    def orders(number: int) -> Orders:
        return [
            [Step(name, micro) for name in names if ranks[int(name[1:])] == rank for micro in range(number)]
            for rank in range(max(ranks) + 1)
        ]

    return orders


def _say(number: int) -> None:
    group().broadcast(torch.tensor([number]))


@torch.no_grad()
def _share_weights(model: PreTrainedModel) -> None:
    """Give the other ranks rank 0's weights."""
    for parameter in model.parameters():
        group().broadcast(parameter.data)
