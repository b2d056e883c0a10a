# pyright: reportMissingImports=false
"""A LoRA adapter on a frozen policy, by peft: the adapter alone is trained and published.

Generators merge the adapter and the frozen weights below it (``workers.engines.model.adapter``). A
checkpoint holds, beside ``model/`` with the merged weights:

    adapter/adapter_config.json          as peft writes it
    adapter/adapter_model.safetensors    likewise; its metadata hold the digest of the weights below the adapter

A restart takes the weights below from the run's start model and the adapter from the checkpoint. It
never takes the merged weights, which are rounded. So training goes on bit for bit.

There is no dropout: a ratio of probabilities must be 1 while the weights are the same. Source: Hu
et al. 2021, https://arxiv.org/abs/2106.09685. A layer computes ``W x + (alpha / rank) B A x`` with
B = 0 at first.

This module is imported only where an adapter is configured: peft brings accelerate, and takes a
second to import."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
from workers.engines.model.adapter import Adapter
from workers.engines.model.checkpoint_files import (
    make_skeleton,
    model_writer,
    read_model,
    storage_errors,
    weight_owners,
)
from workers.engines.model.fingerprint import digest_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FOLDER = "adapter"

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_ADAPTER = "default"
_BASE = "base"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The adapter's shape."""

    rank: int
    alpha: float
    """The adapter's part is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of linear layers; all but the output head when empty."""
    seed: int = 0
    """Of A's first values."""


class AdaptedModel:
    """A frozen model with an adapter: what ``trained_weights.WholeModel`` is without one."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, tokenizer_from: Path | None) -> None:
        """Freeze ``model`` and put an adapter into it. Raises ConfigError for a wrong target."""
        self._owners = list(dict.fromkeys(weight_owners(model).values()))
        self._skeleton = make_skeleton(model)
        self._tokenizer_from = tokenizer_from
        self._base = xxh3_128_hexdigest(b"".join(digest_tensors(self._weights_of(model)).values()))
        self._config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  # a factor, whatever its annotation says
            target_modules=list(settings.target_modules) or "all-linear",
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        head = model.get_output_embeddings()
        self._peft = _inject(model, self._config, settings)
        # as peft writes it: a reader of the folder does not train
        self._config.inference_mode = True
        self._model = model.eval()
        self._layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)
        }
        for target in settings.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name in self._layers):
                raise ConfigError(
                    f"learner.lora.target_modules names {target}, but the model has no such layer; correct it, or leave it out "
                    "for all linear layers of the blocks"
                )
        for name, layer in self._layers.items():
            if not isinstance(layer, Linear) or layer.get_base_layer() is head:
                raise ConfigError(
                    f"learner.lora.target_modules names {name}, which is not a linear layer inside the model's blocks; name "
                    "such layers only (q_proj, down_proj, ...), or leave target_modules out for all of them"
                )
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the merged weights, made one at a time, and the live frozen ones."""
        return self._weights_of(self._model)

    def adapter(self) -> Adapter:
        """Return the live adapter, and the frozen weights below it."""
        layers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, layer in self._layers.items():
            a, b = (part[_ADAPTER].weight.detach().to("cpu") for part in (layer.lora_A, layer.lora_B))
            # of a layer whose weight lies transposed
            layers[name] = (b.T, a.T) if layer.fan_in_fan_out else (a, b)
        scaling: float = next(iter(self._layers.values())).scaling[_ADAPTER]
        return Adapter(layers, scaling, below=lambda: self._weights_of(self._model, merged=False))

    def snapshot(self) -> Callable[[Path], None]:
        """Copy adapter and merged weights; return the writer of ``model/`` and ``adapter/``."""
        # merged weights are new tensors, and the others never change
        write_model = model_writer(self._skeleton, dict(self.tensors()), self._tokenizer_from)
        adapter = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._adapter().items()}

        def write(folder: Path) -> None:
            write_model(folder)
            self._config.save_pretrained(folder / ADAPTER_FOLDER)
            path = folder / ADAPTER_FOLDER / _WEIGHTS_FILE
            with storage_errors(path):
                # one entry: of several the order is random
                save_file(adapter, path, metadata={_BASE: self._base})

        return write

    def read(self, folder: Path) -> Callable[[], None]:
        """Read ``adapter/``, and see that ``model/`` is whole."""
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
                f"{path} was trained on other weights than those of this run's start model; set model.path to the model that "
                "the run began with"
            )
        expected = self._adapter()
        if {name: tensor.shape for name, tensor in found.items()} != {name: t.shape for name, t in expected.items()}:
            raise DataError(
                f"{path} has an adapter of other layers or another rank than learner.lora; resume with the target_modules and "
                "rank that it was made with"
            )

        def put() -> None:
            with torch.no_grad():
                for name, tensor in expected.items():
                    tensor.copy_(found[name])

        return put

    def _adapter(self) -> dict[str, torch.Tensor]:
        """Return the adapter's live tensors by the names of peft's format."""
        return get_peft_model_state_dict(self._peft, adapter_name=_ADAPTER, save_embedding_layers=False)

    def _weights_of(self, model: PreTrainedModel, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights by the names from before the adapter, with or without its part."""
        state = model.state_dict(keep_vars=True)
        for name in self._owners:
            if name in state:
                yield name, state[name].detach().to("cpu")
                continue
            path, _, kind = name.rpartition(".")
            layer = self._layers[path]
            tensor = getattr(layer.get_base_layer(), kind).detach()
            if kind == "weight" and merged:
                with torch.no_grad():
                    tensor = tensor + layer.get_delta_weight(_ADAPTER)
            yield name, tensor.to("cpu")

    def _check_shape(self, path: Path) -> None:
        """Refuse an adapter of another scale. Raises DataError."""
        try:
            config: dict[str, Any] = json.loads(path.read_bytes())
            found = (config["r"], config["lora_alpha"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error
        if found != (self._config.r, self._config.lora_alpha):
            raise DataError(
                f"{path} has rank {found[0]} and alpha {found[1]}, learner.lora has {self._config.r} and "
                f"{self._config.lora_alpha}; resume with those that the checkpoint was made with"
            )


def _inject(model: PreTrainedModel, config: LoraConfig, settings: LoraSettings) -> torch.nn.Module:
    """Let peft put in its layers, drawn from the seed; the process's streams stay as they are."""
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
