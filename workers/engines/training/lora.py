# pyright: reportMissingImports=false
"""LoRA training with peft: only an adapter on a frozen policy is trained and published.

Generators merge the adapter into the frozen weights (``workers.engines.model.adapter``). Beside
``model/`` with the merged weights, a checkpoint holds:

    adapter/adapter_config.json          as peft writes it
    adapter/adapter_model.safetensors    likewise; its metadata hold the digest of the frozen weights

With low-precision computation, frozen linear layers are kept in that type alone, not in fp32 with a
copy for every micro-batch: they never change, and the layer computes with the same numbers. On a CPU a
file that has that type is mapped, not copied.

A restart takes the frozen weights from the run's start model and the adapter from the checkpoint,
never the merged weights, which are rounded. So training resumes bit for bit.

A layer computes ``W x + (alpha / rank) B A x`` with B = 0 at first. There is no dropout: the
probability ratio must be 1 while the weights are unchanged. Source: Hu et al. 2021,
https://arxiv.org/abs/2106.09685.

Import this module only where an adapter is configured: peft pulls in accelerate and takes a second
to import."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear, LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128_hexdigest

from protocol.errors import ConfigError, DataError
from workers.engines.model.adapter import Adapter, merge
from workers.engines.model.checkpoint_files import (
    make_skeleton,
    model_writer,
    read_model,
    storage_errors,
    weight_owners,
)
from workers.engines.model.weights_file import digest_tensors
from workers.engines.training.trained_weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FOLDER = "adapter"

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_ADAPTER = "default"
_BASE = "base"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int
    alpha: float
    """The adapter's output is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of linear layers; if empty, all but the output head."""
    seed: int = 0
    """For the initial values of A."""


class AdapterForm:
    """A frozen model with an adapter; implements :class:`trained_weights.WeightsForm`."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, tokenizer_from: Path | None) -> None:
        """Freeze ``model`` and inject an adapter. Raises ConfigError for an unsuitable target."""
        self._skeleton = make_skeleton(model)
        self._dtype = model.dtype
        self._tokenizer_from = tokenizer_from
        owners = list(dict.fromkeys(weight_owners(model).values()))
        state = model.state_dict(keep_vars=True)
        self._digests = digest_tensors((name, state[name]) for name in owners)
        self._base = xxh3_128_hexdigest(b"".join(self._digests.values()))
        self._config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  # a factor, whatever its annotation says
            target_modules=list(settings.target_modules) or "all-linear",
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        head = model.get_output_embeddings()
        adapted = _inject(model, self._config, settings)
        # like peft's own files: whoever reads the folder does not train
        self._config.inference_mode = True
        model.eval()
        layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
        _check_layers(layers, settings, head)
        self._scaling: float = next(iter(layers.values())).scaling[_ADAPTER]
        self._parts = {name: _part_names(name) for name in layers}
        self._is_transposed = {name: bool(layer.fan_in_fan_out) for name, layer in layers.items()}
        state = model.state_dict(keep_vars=True)
        inside = {f"{layer}.{kind}": f"{layer}.base_layer.{kind}" for layer in layers for kind in ("weight", "bias")}
        self._inner = {name: name if name in state else inside[name] for name in owners}
        """Name before the adapter was injected -> name in the adapted model."""
        self.adapter_names = [name for parts in self._parts.values() for name in parts]
        self.names = [*self._inner.values(), *self.adapter_names]
        self.shapes = {name: state[name].shape for name in self.names}
        written = get_peft_model_state_dict(adapted, adapter_name=_ADAPTER, save_embedding_layers=False)
        assert set(written) == set(map(_written_name, self.adapter_names)), "peft's names of an adapter's tensors"

    def published(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the frozen weights and, computed one at a time, the merged ones."""
        for name, inner in self._inner.items():
            tensor = weights[inner].detach()
            layer = name.removesuffix(".weight")
            if layer in self._parts and layer != name:
                tensor = merge(tensor, *self._low_rank(layer, weights), self._scaling)
            yield name, self._on_host(tensor)

    def adapter(self, parts: Weights, below: Callable[[], Weights]) -> Adapter:
        def frozen() -> Iterator[tuple[str, torch.Tensor]]:
            weights = below()
            # in the type they are kept in: a publication holds all of them at once
            return ((name, weights[inner].detach().to("cpu")) for name, inner in self._inner.items())

        layers = {layer: self._low_rank(layer, parts) for layer in self._parts}
        on_host = {layer: (a.to("cpu"), b.to("cpu")) for layer, (a, b) in layers.items()}
        return Adapter(on_host, self._scaling, below=frozen, digests_below=self._digests)

    def writer(self, weights: Weights) -> Callable[[Path], None]:
        """Merge ``weights`` now; return a function that writes ``model/`` and ``adapter/``."""
        write_model = model_writer(self._skeleton, dict(self.published(weights)), self._tokenizer_from)
        adapter = {_written_name(name): weights[name].detach().to("cpu").contiguous() for name in self.adapter_names}

        def write(folder: Path) -> None:
            write_model(folder)
            self._config.save_pretrained(folder / ADAPTER_FOLDER)
            path = folder / ADAPTER_FOLDER / _WEIGHTS_FILE
            with storage_errors(path):
                # a single entry, as safetensors writes several in random order
                save_file(adapter, path, metadata={_BASE: self._base})

        return write

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        read_model(self._skeleton, folder)
        self._check_shape(folder / ADAPTER_FOLDER / _CONFIG_FILE)
        path = folder / ADAPTER_FOLDER / _WEIGHTS_FILE
        try:
            with safe_open(path, framework="pt") as file:
                base = (file.metadata() or {}).get(_BASE)
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error
        if base != self._base:
            raise DataError(
                f"{path} was trained on other weights than this run's start model; set model.path to the model that the run "
                "started from"
            )
        expected = {_written_name(name): self.shapes[name] for name in self.adapter_names}
        if {name: tensor.shape for name, tensor in found.items()} != expected:
            raise DataError(
                f"{path} has an adapter with other layers or another rank than learner.lora; resume with the target_modules "
                "and rank that it was trained with"
            )
        return {name: found[_written_name(name)] for name in self.adapter_names}

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the start model was loaded, whatever type it is kept in."""
        return tensor.to("cpu", self._dtype if tensor.is_floating_point() else tensor.dtype)

    def _low_rank(self, layer: str, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [rank, columns] and B [rows, rank] for a weight of [rows, columns]."""
        a, b = (weights[name].detach() for name in self._parts[layer])
        # transposed for layers that store their weight transposed
        return (b.T.contiguous(), a.T.contiguous()) if self._is_transposed[layer] else (a, b)

    def _check_shape(self, path: Path) -> None:
        try:
            config: dict[str, Any] = json.loads(path.read_bytes())
            found = (config["r"], config["lora_alpha"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error
        if found != (self._config.r, self._config.lora_alpha):
            raise DataError(
                f"{path} has rank {found[0]} and alpha {found[1]}, but learner.lora has {self._config.r} and "
                f"{self._config.lora_alpha}; resume with the values that the checkpoint was made with"
            )


def keep_frozen_as(model: PreTrainedModel, dtype: torch.dtype, folder: Path | None) -> None:
    """Keep frozen linear layers in ``dtype``, in which autocast computes them.

    On a CPU, those that the model's ``folder`` has in that type are mapped from its files: the host's processes
    then share one copy, as the reference maps them too. Norms and embeddings, also one that is the head too, are
    read in the type they have."""
    read = {id(parameter) for parameter in (model.get_input_embeddings() or model).parameters()}
    files = sorted(folder.glob("*.safetensors")) if folder is not None and model.device.type == "cpu" else []
    mapped: dict[str, torch.Tensor] = {}
    for file in files:
        # one that is not the model's may be anything
        with suppress(SafetensorError, OSError):
            mapped |= load_file(file)
    for prefix, layer in model.named_modules():
        if type(layer) is torch.nn.Linear:
            for kind, parameter in layer.named_parameters():
                if not parameter.requires_grad and id(parameter) not in read:
                    kept = parameter.data.to(dtype)
                    there = mapped.get(f"{prefix.removesuffix('.base_layer')}.{kind}")
                    is_same = there is not None and there.dtype == dtype and torch.equal(there, kept)
                    parameter.data = there if there is not None and is_same else kept


def _part_names(layer: str) -> tuple[str, str]:
    return f"{layer}.lora_A.{_ADAPTER}.weight", f"{layer}.lora_B.{_ADAPTER}.weight"


def _written_name(name: str) -> str:
    return f"base_model.model.{name.removesuffix(f'.{_ADAPTER}.weight')}.weight"


def _check_layers(layers: dict[str, Any], settings: LoraSettings, head: torch.nn.Module | None) -> None:
    """Raise ConfigError for targets that are not linear layers inside the blocks."""
    for target in settings.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            raise ConfigError(
                f"learner.lora.target_modules names {target}, but the model has no such layer; correct it, or leave it out "
                "for all linear layers of the blocks"
            )
    for name, layer in layers.items():
        if not isinstance(layer, Linear) or layer.get_base_layer() is head:
            raise ConfigError(
                f"learner.lora.target_modules names {name}, which is not a linear layer inside the model's blocks; name "
                "such layers only (q_proj, down_proj, ...), or leave target_modules out for all of them"
            )


def _inject(model: PreTrainedModel, config: LoraConfig, settings: LoraSettings) -> torch.nn.Module:
    """Insert peft's layers, initialised from the seed without touching the process's random
    streams."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(settings.seed)
        try:
            return get_peft_model(model, config, adapter_name=_ADAPTER, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigError(
                f"learner.lora does not fit the model: {error}; correct target_modules, or leave it out for all linear layers "
                "of the blocks"
            ) from error
