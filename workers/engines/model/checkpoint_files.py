"""The files of a training checkpoint: a Hugging Face model, and the optimiser beside it. No pickle.

    model/                    config, safetensors weights, tokenizer: what ``from_pretrained`` reads
    optimizer.safetensors     <state>/<parameter name> for every parameter that was ever stepped, and rng/<device>
    training.json             number of steps taken, and which optimiser and schedule took them

A snapshot is a copy in memory, which another thread may write while training continues. A load
reads and checks everything before it changes anything."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline.process import work
from protocol.errors import DataError
from workers.engines.model.layers import count_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_FOLDER = "model"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINING_FILE = "training.json"

OptimizerState: TypeAlias = tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""State by parameter name and kind, and random generator states by device."""

STEP = "step"
"""AdamW's step count: a scalar, stored with every parameter that it steps."""
TRAINING_FORMAT = 1
_RNG = "rng"
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "*.model", "*.tiktoken",
)  # fmt: skip


class TrainingState(msgspec.Struct, frozen=True, omit_defaults=True):
    format: int
    num_steps: int
    """Optimiser steps applied; the position in the learning-rate schedule."""
    optimizer: str = "adamw"
    """Name of the optimiser; fused and unfused AdamW share one."""
    schedule: str = "constant"


def snapshot_writer(*writers: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for writer in writers:
            writer(folder)

    return write


def snapshot_model(model: PreTrainedModel, tokenizer_from: Path | None) -> Callable[[Path], None]:
    state = model.state_dict(keep_vars=True)
    return model_writer(
        model,
        {name: copy_to_host(state[name]) for name in dict.fromkeys(weight_owners(model).values())},
        tokenizer_from,
    )


def model_writer(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], tokenizer_from: Path | None
) -> Callable[[Path], None]:
    """Return a function that writes a model in Hugging Face format, with the tokenizer's files.

    ``weights``, on the host, has a tensor for each owner of :func:`weight_owners`; the model's own
    tensors may be on ``meta`` and are not read. The function may run on any thread and raises
    OSError."""
    # tied weights remain one tensor
    named = {name: weights[owner] for name, owner in weight_owners(model).items()}

    def write(folder: Path) -> None:
        count_files()
        with storage_errors(folder / MODEL_FOLDER):
            model.save_pretrained(folder / MODEL_FOLDER, state_dict=named)
        for path in sorted(tokenizer_from.iterdir()) if tokenizer_from is not None else ():
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _TOKENIZER_FILES):
                shutil.copyfile(path, folder / MODEL_FOLDER / path.name)
        work.step()

    return write


def weight_owners(model: PreTrainedModel) -> dict[str, str]:
    """Map every name in a model's state dict to the first name of the same tensor, its owner."""
    owners: dict[int, str] = {}
    return {name: owners.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def make_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model on ``meta``, made before it is sharded or adapted."""
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    torch.nn.Module.to(skeleton, model.dtype)
    # a value model has none
    if hasattr(model, "generation_config"):
        skeleton.generation_config = model.generation_config
    for name, parameter in model.named_parameters():
        skeleton.get_parameter(name).requires_grad_(parameter.requires_grad)
    return skeleton


def snapshot_optimizer(
    states: Mapping[str, Mapping[str, torch.Tensor | int]], state: TrainingState
) -> Callable[[Path], None]:
    return optimizer_writer(
        {label: copy_to_host(value) for label, value in optimizer_tensors(states).items()},
        state,
    )


def optimizer_tensors(states: Mapping[str, Mapping[str, torch.Tensor | int]]) -> dict[str, torch.Tensor]:
    """Return live state as ``<state>/<parameter name>`` -> tensor; plain numbers become tensors."""
    return {f"{key}/{name}": torch.as_tensor(value) for name, kept in states.items() for key, value in kept.items()}


def rng_tensors() -> dict[str, torch.Tensor]:
    return {f"{_RNG}/{device}": state for device, state in rng_states().items()}


def optimizer_writer(states: Mapping[str, torch.Tensor], state: TrainingState) -> Callable[[Path], None]:
    """Return a function that writes optimiser, random generator states and step count.

    ``states`` is ``<state>/<parameter name>`` -> tensor on the host. The function may run on any
    thread and raises OSError."""
    tensors = {**states, **rng_tensors()}

    def write(folder: Path) -> None:
        with storage_errors(folder / OPTIMIZER_FILE):
            save_file(tensors, folder / OPTIMIZER_FILE)
        work.step()
        (folder / TRAINING_FILE).write_bytes(msgspec.json.encode(state))

    return write


def read_training_state(folder: Path) -> TrainingState:
    """Raises DataError naming the file."""
    path = folder / TRAINING_FILE
    try:
        return parse_training_state(path.read_bytes(), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error


def parse_training_state(text: bytes, path: Path) -> TrainingState:
    """Raises DataError naming ``path``."""
    try:
        state = msgspec.json.decode(text, type=TrainingState)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error
    if state.format != TRAINING_FORMAT:
        raise DataError(
            f"{path} has format {state.format}, expected {TRAINING_FORMAT}; resume with the release that wrote it"
        )
    return state


def read_model(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of ``folder/model``. Raises DataError naming the file."""
    count_files()
    path = folder / MODEL_FOLDER
    for file in (path / "config.json", *(sorted(path.glob("*.safetensors")) or [path / "model.safetensors"])):
        if not file.is_file():
            raise DataError(f"{file} is missing; resume from another checkpoint")
        if file.suffix == ".safetensors":
            _read_tensors(file)
    try:
        loaded, report = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            type(model).from_pretrained(
                path, dtype=model.dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
            ),
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{path} does not load: {error}; resume from another checkpoint") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := report.get(problem):
            raise DataError(
                f"{path} does not fit the model of this run: {problem.replace('_', ' ')} {sorted(map(str, names))[:4]}; "
                "resume with the model that the checkpoint was made from"
            )
    weights = loaded.state_dict()
    expected = model.state_dict()
    if foreign := sorted(weights.keys() - expected.keys()):
        raise DataError(
            f"{path} has weights that the model of this run lacks: {foreign[:4]}; "
            "resume with the model that the checkpoint was made from"
        )
    for name, tensor in expected.items():
        if name not in weights or weights[name].shape != tensor.shape:
            got = tuple(weights[name].shape) if name in weights else "nothing"
            raise DataError(
                f"{path} has {got} for {name}, expected shape {tuple(tensor.shape)}; "
                "resume with the model that the checkpoint was made from"
            )
    return weights


def put_model(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(weights[name])


def read_optimizer(shapes: Mapping[str, torch.Size], folder: Path) -> OptimizerState:
    """Read the optimiser and random generator states. Raises DataError naming the file."""
    path = folder / OPTIMIZER_FILE
    if not path.is_file():
        raise DataError(f"{path} is missing; resume from another checkpoint")
    return sort_optimizer(_read_tensors(path), shapes, path)


def sort_optimizer(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], path: Path) -> OptimizerState:
    """Group the tensors of ``path`` by parameter, and random generator states by device.

    Raises DataError for a tensor that fits no parameter of these ``shapes``."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    rng: dict[str, torch.Tensor] = {}
    for label, tensor in tensors.items():
        key, _, name = label.partition("/")
        if key == _RNG:
            rng[name] = tensor
        elif name not in shapes or not _fits(key, tensor, shapes[name]):
            raise DataError(
                f"{path} holds {label} of shape {tuple(tensor.shape)}, which fits no parameter; "
                "resume with the model that the checkpoint was made from"
            )
        else:
            states.setdefault(name, {})[key] = tensor
    return states, rng


def _fits(key: str, tensor: torch.Tensor, shape: torch.Size) -> bool:
    if tensor.ndim == 0:
        return True
    of_other_shape = {
        # Adafactor's factors
        "row_var": (*shape[:-1], 1),
        "col_var": (*shape[:-2], 1, *shape[-1:]),
        # 8-bit: a scale for each block of 256 numbers, and the code book of 256 values
        **dict.fromkeys(("absmax1", "absmax2"), (-(-shape.numel() // 256),)),
        **dict.fromkeys(("qmap1", "qmap2"), (256,)),
    }
    return tuple(tensor.shape) == of_other_shape.get(key, tuple(shape))


def restored_state(
    kept: Mapping[str, torch.Tensor], device: torch.device, *, fused: bool
) -> dict[str, torch.Tensor | int]:
    """Convert a parameter's state of :func:`read_optimizer` to the form its optimiser holds."""
    found: dict[str, torch.Tensor | int] = {}
    for key, value in kept.items():
        if value.ndim == 0 and not value.is_floating_point():
            # bitsandbytes counts steps with a number
            found[key] = int(value)
        elif value.ndim or fused:
            found[key] = value.to(device, copy=True)
        else:
            # torch keeps such a count on the CPU, unless the optimiser is fused
            found[key] = value.clone()
    return found


def restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the random generator states of the devices that exist here."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif (index := int(device.removeprefix("cuda:"))) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, index)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host that nothing else writes to."""
    copied = tensor.detach().to("cpu", copy=True).contiguous()
    work.step()
    return copied


def rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{index}": torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
    return states


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn safetensors' error for a failed write into the OSError behind it."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
