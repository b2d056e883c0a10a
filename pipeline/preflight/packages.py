"""Optional packages that a run needs (DeepSpeed, bitsandbytes, peft), and their versions, without
importing them.

Only pyproject.toml declares the versions. In a source tree that file counts, since the metadata of
an editable install may be out of date. An installed Headrace has only the metadata."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pipeline.config.schema import RANKED_BACKENDS, RunConfig
from pipeline.preflight.model_folder import read_model_config, tensor_shapes
from pipeline.schedule.stages import StageOrders, stage_orders
from protocol.errors import ConfigError

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def declared(extra: str) -> SpecifierSet:
    """Return the versions of the one package that an extra of Headrace names."""
    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text("utf-8"))["project"]
        (requirement,) = map(Requirement, project["optional-dependencies"][extra])
    else:
        named = [each for each in map(Requirement, metadata.requires("headrace") or ()) if each.marker is not None]
        (requirement,) = (each for each in named if each.marker and each.marker.evaluate({"extra": extra}))
    return requirement.specifier


def wanted_by(distribution: str, package: str) -> SpecifierSet | None:
    """Return the versions of a package that an installed distribution requires; None if none."""
    try:
        required = [Requirement(each) for each in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        return None
    named = [each for each in required if each.name == package and (each.marker is None or each.marker.evaluate())]
    return named[0].specifier if named else None


def fits(version: str, versions: SpecifierSet) -> bool:
    """Return whether a version is among ``versions``. Local builds and release candidates count,
    too."""
    try:
        return versions.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def require(package: str, version: str | None, extra: str, need: str, instead: str, *, to_change: str = "") -> str:
    """Return ``version`` of a package, if it is one that the extra declares. Raises ConfigError
    otherwise.

    ``need`` says what needs the package, ``instead`` which setting avoids it, and ``to_change``
    what to do about another version (by default: install the extra)."""
    versions, install = declared(extra), f"pip install 'headrace[{extra}]'"
    if version is None:
        state = f"{need}, but {package} is not installed here"
    elif not fits(version, versions):
        state, install = f"{need}, and {package} {version} is installed", to_change or install
    else:
        return version
    raise ConfigError(f"{state}; Headrace works with {span(versions)}: {install}, or set {instead}")


def span(versions: SpecifierSet) -> str:
    """Return versions in words: ``0.20 up to, not including, 0.33``."""
    bounds = {each.operator: each.version for each in versions}
    return f"{bounds['>=']} up to, not including, {bounds['<']}"


# DeepSpeed's versions are limited because the learner depends, besides its documented API, on the place
# of ZeRO's flat shards, which another version may have moved.


def check_ranks(config: RunConfig, version: str | None = None) -> list[str]:
    """Check the backends of learner and value worker; return lines for the operator. ``version`` is
    DeepSpeed's, by default the installed one. Raises ConfigError if DeepSpeed is needed, but absent
    or of another version."""
    lines: list[str] = []
    sections = [("learner", config.learner), *([("value", config.value)] if config.has_critic else [])]
    for name, section in sections:
        if section.backend == "deepspeed":
            need, instead = f"{name}.backend is deepspeed", f"{name}.backend to fsdp2"
            given, change = version or installed("deepspeed"), "install one of those"
            found = require("DeepSpeed", given, "deepspeed", need, instead, to_change=change)
            lines.append(f"{name}: DeepSpeed {found}, ZeRO {section.deepspeed.stage}, {_ranks(section.ranks)}")
        elif section.backend == "pipeline":
            check_pipeline_torch(installed("torch") or "none")
            found = stage_orders_of(config)
            lines.append(f"{name}: {len(found.ranks)} stages on {_ranks(section.ranks)}, {found.words}")
        elif section.backend in RANKED_BACKENDS:
            split = f", layers split over {section.tensor_parallel}" if section.tensor_parallel > 1 else ""
            lines.append(f"{name}: FSDP2, {_ranks(section.ranks)}{split}")
        path = config.value.path if name == "value" else None
        check_heads(name, section.tensor_parallel, path or config.model.path)
    return lines


def check_heads(name: str, tensor_parallel: int, path: Path) -> None:
    """Raise ConfigError for heads that the ranks of a split layer cannot share evenly, and DataError."""
    model = read_model_config(path) if tensor_parallel > 1 else {}
    model = model.get("text_config") or model
    for what in ("num_attention_heads", "num_key_value_heads"):
        number = model.get(what)
        if isinstance(number, int) and number % tensor_parallel:
            raise ConfigError(
                f"{path} has {what} {number}, which {name}.tensor_parallel {tensor_parallel} does not divide; set it to a "
                f"divisor of {number}"
            )


_PIPELINE_TORCH: Final = SpecifierSet(">=2.13,<2.14")
"""Versions whose pipeline runtime, which is private, has been tried."""


def check_pipeline_torch(version: str) -> None:
    """Raise ConfigError for a torch whose pipeline runtime may be another one."""
    if not fits(version, _PIPELINE_TORCH):
        raise ConfigError(
            f"learner.backend is pipeline, which needs torch {span(_PIPELINE_TORCH)}, and torch {version} is "
            "installed; install that, or set learner.backend to fsdp2"
        )


def stage_orders_of(config: RunConfig, *, recomputes: bool | None = None) -> StageOrders:
    """Return where the stages of a run's learner are, and their orders.

    ``recomputes``: whether layers are recomputed; by default, if the settings say so. Raises ConfigError if the schedule
    does not fit, or the model has fewer layers than stages, and DataError."""
    learner, wanted = config.learner, config.model.gradient_checkpointing
    pipe, recomputes = learner.pipeline, wanted not in ("auto", False) if recomputes is None else recomputes
    found = stage_orders(pipe.schedule, learner.ranks, pipe.stages, memory=pipe.memory, recomputes=recomputes)
    model = read_model_config(config.model.path)
    layers = (model.get("text_config") or model).get("num_hidden_layers")
    if isinstance(layers, int) and layers < len(found.ranks):
        raise ConfigError(
            f"{config.model.path} has {layers} layers, but learner.pipeline has {len(found.ranks)} stages on {learner.ranks} "
            "ranks; expected at least one layer a stage: lower learner.ranks or learner.pipeline.stages"
        )
    return found


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


# bitsandbytes' versions are limited because checkpoints hold the 8-bit state by its names and shapes,
# which another version may have changed.


def check_optimizer(config: RunConfig, version: str | None = None) -> list[str]:
    """Check the optimiser's package; return lines for the operator. ``version`` is by default the
    installed one. Raises ConfigError if the package is absent or of another version."""
    learner = config.learner
    if learner.has_own_engine:
        return []
    found = learner.optimizer
    if learner.optimizer == "adamw-8bit":
        need, instead = "learner.optimizer is adamw-8bit", "learner.optimizer to adamw-fused"
        version = require("bitsandbytes", version or installed("bitsandbytes"), "bitsandbytes", need, instead)
        found = f"adamw-8bit by bitsandbytes {version}"
    if learner.optimizer == "adamw-fused" and learner.schedule == "constant":
        return []
    return [f"learner: {found}, schedule {learner.schedule}"]


# peft's versions are limited because merged weights are read through its layers, which another version
# may have changed.

_IN_BLOCK: Final = re.compile(r"(^|\.)\d+\.")
"""A block's number in the name of one of its tensors."""


def check_lora(config: RunConfig, version: str | None = None) -> list[str]:
    """Check what an adapter needs; return lines for the operator. ``version`` is peft's, by default
    the installed one. Raises ConfigError if peft is absent or of another version, or if a target is
    not a linear layer of the model's blocks."""
    lora = config.learner.lora
    if not lora.rank:
        return []
    need, instead = "learner.lora.rank is above 0", "learner.lora.rank to 0"
    version = require("peft", version or installed("peft"), "lora", need, instead)
    _check_targets(lora.target_modules, config.model.path)
    targets = ", ".join(lora.target_modules) or "all linear layers of the blocks"
    return [f"learner: LoRA by peft {version}, rank {lora.rank}, alpha {lora.alpha:g}, on {targets}"]


def _check_targets(targets: tuple[str, ...], model: Path) -> None:
    """Refuse targets that are not linear layers inside the model's blocks, and a model without any."""
    shapes = tensor_shapes(model)
    is_linear = {
        name.removesuffix(".weight"): len(shape) == 2 and _IN_BLOCK.search(name) is not None
        for name, shape in shapes.items()
        if name.endswith(".weight")
    }
    usable = sorted({layer.rpartition(".")[2] for layer, fits in is_linear.items() if fits})
    if not usable:
        raise ConfigError(
            f"learner.lora.rank is above 0, but {model} has no linear layer in a numbered block for an adapter; expected one "
            "such as model.layers.0.self_attn.q_proj.weight: set learner.lora.rank to 0"
        )
    instead = f"expected some of {', '.join(usable)}: correct it, or leave it out for all linear layers of the blocks"
    for target in targets:
        named = [fits for layer, fits in is_linear.items() if layer == target or layer.endswith(f".{target}")]
        if not named:
            raise ConfigError(f"learner.lora.target_modules names {target!r}, but {model} has no such layer; {instead}")
        if not all(named):
            raise ConfigError(
                f"learner.lora.target_modules names {target!r}, which in {model} is not only linear layers inside the blocks; "
                f"{instead}"
            )
