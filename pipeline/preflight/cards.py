"""What a run plans on each GPU of the learner's host, in bytes, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from pipeline.config.schema import RunConfig
from pipeline.preflight.device_memory import (
    generator_parts,
    learning_needs,
    learning_plan,
    longest_sample,
    share_card,
    vllm_share,
    workers_by_card,
)
from pipeline.preflight.findings import CheckFinding, fine, refuse
from pipeline.preflight.host import Gpu
from pipeline.preflight.memory_needs import Shape, is_cpu
from protocol.ids import Role

_CHECK: Final = "gpu memory"
_SIZES: Final = ("gpu_memory_utilization", "kv_cache_memory_bytes")


def told_cards(config: RunConfig) -> str:
    """Return which GPU each worker of a run gets, in one line."""
    cards = workers_by_card(config)
    if not cards or is_cpu("auto"):
        why = "all devices are cpu" if not cards else "no GPU on this machine, so `auto` is the CPU"
        return f"devices: {why}; `headrace doctor FILE --card-gib 24` plans the memory of a GPU"
    named = "; ".join(f"GPU {card}: {', '.join(map(_many, here.items()))}" for card, here in cards.items())
    return f"devices: {named}; `headrace doctor` plans their memory"


def judge_cards(config: RunConfig, shapes: tuple[Shape, Shape | None], gpus: Sequence[Gpu]) -> list[CheckFinding]:
    """Return one finding for each GPU that the run uses, with the bytes of each part. A GPU that is
    missing or too small is refused, with the settings that make its workers fit."""
    found: list[CheckFinding] = []
    for card, here in workers_by_card(config).items():
        if card >= len(gpus):
            who = ", ".join(map(_many, here.items()))
            do = "lower its ranks, tensor_parallel_size or data_parallel_size, or set its device to another one"
            found.append(refuse("gpu", f"{who} would use GPU {card}", f"a number below {len(gpus)}", do))
            continue
        total = gpus[card].memory_bytes
        told, needed, fits = _planned(config, here, shapes, total)
        words = f"GPU {card} ({gpus[card].name}, {_gb(total)} GB): {told}"
        if fits:
            found.append(fine(_CHECK, f"{words}; {_gb(total - needed)} GB are left"))
            continue

        def fits_too(other: RunConfig, card: int = card, total: int = total) -> bool:
            here = workers_by_card(other).get(card)
            return here is None or _planned(other, here, shapes, total)[2]

        do = _changes(config, fits_too)
        most = f"at most {_gb(total)} GB, of which learning workers use nine tenths"
        found.append(refuse(_CHECK, f"{words}, {_gb(needed)} GB in all", most, do))
    return found


def _planned(
    config: RunConfig, here: Mapping[Role, int], shapes: tuple[Shape, Shape | None], total: int
) -> tuple[str, int, bool]:
    """Return the plan of one GPU in words, its bytes, and whether it fits."""
    sizes = share_card(config, here, shapes, total)
    needs = learning_needs(config, here, shapes)
    told: list[str] = []
    needed, fits, longest = 0, True, longest_sample(config)
    for role, number in here.items():
        size, parts, more = sizes.get(role, 0), {}, ""
        if (need := needs.get(role)) is not None:
            section = config.value if role is Role.VALUE else config.learner
            layers = (config.value if role is Role.VALUE else config.model).gradient_checkpointing
            plan = learning_plan(config, need, size, is_value=role is Role.VALUE)
            parts = dict(need.parts) | {"activations": plan.num_bytes - need.fixed}
            one = f" and samples of up to {longest:,}" if longest > plan.tokens else ""
            more = (
                f"; micro-batches of {plan.tokens:,} tokens ({section.micro_batch_tokens}){one}, {plan.recomputed} of "
                f"{need.layers} layers recomputed ({str(layers).lower()})"
            )
            size, fits = plan.num_bytes, fits and plan.fits
        elif role is Role.GENERATOR:
            parts = generator_parts(config, shapes[0])
            of_one = parts["KV cache"] // config.generation.num_slots
            parts["KV cache"] -= sum(parts.values()) - size
            fits &= parts["KV cache"] >= of_one
            if (share := vllm_share(config, shapes[0], total)) is not None:
                more = f"; gpu_memory_utilization {share:g}"
        listed = ", ".join(f"{name} {_gb(part)}" for name, part in parts.items() if abs(part) >= 50e6)
        each = " each" if number > 1 else ""
        told.append(f"{_many((role, number))} {_gb(size)} GB{each}" + (f" ({listed}{more})" if listed else ""))
        needed += number * size
    return ", ".join(told), needed, fits and needed <= total


def _changes(config: RunConfig, fits: Callable[[RunConfig], bool]) -> str:
    """Return the settings that make a plan fit: each alone, or those that do together."""
    steps = list(_steps(config))
    alone = [_said(step) for step in steps if fits(_changed(config, *step))]
    if alone:
        return f"set {' or '.join(alone)}"
    if fits(_with(config, steps)):
        for step in reversed(steps):
            # the cheap ones come first, and stay
            if fits(_with(config, fewer := [one for one in steps if one is not step])):
                steps = fewer
        return f"set {', '.join(map(_said, steps))} together"
    several = "several (learner.backend = fsdp2 with learner.ranks; another generation.device)"
    return f"no setting makes it fit: take a smaller model, a larger GPU, or {several}"


def _steps(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield changes that save memory, those that cost least first."""
    learner, generation = config.learner, config.generation
    if (given := generation.vllm.engine_args) and generation.engine == "vllm":
        yield "generation.vllm.engine_args", {name: one for name, one in given.items() if name not in _SIZES}
    if config.scores_with_vllm:
        yield "reference.backend", "torch"
    for section in ("model", "learner", "generation", *(["value"] if config.has_critic else [])):
        for name, cheap in (("gradient_checkpointing", "auto"), ("micro_batch_tokens", "auto"), ("dtype", "bfloat16")):
            if getattr(getattr(config, section), name, cheap) != cheap:
                yield f"{section}.{name}", cheap
    if generation.num_slots > 1:
        yield "generation.num_slots", generation.num_slots // 2
    if learner.optimizer in ("adamw", "adamw-fused") and not learner.lora.rank:
        yield "learner.optimizer", "adamw-8bit"
    yield "generation.max_response_tokens", max(1, generation.max_response_tokens // 2)
    if not learner.lora.rank:
        yield "learner.lora.rank", 16


def _with(config: RunConfig, steps: Sequence[tuple[str, Any]]) -> RunConfig:
    for step in steps:
        config = _changed(config, *step)
    return config


def _said(step: tuple[str, Any]) -> str:
    key, value = step
    return f"{key} without {' and '.join(_SIZES)}" if isinstance(value, dict) else f"{key} = {value}"


def _changed(config: Any, key: str, value: Any) -> Any:
    """Return a copy of a section with another value of a setting below it."""
    name, _, rest = key.partition(".")
    held = getattr(config, name)
    return config.model_copy(update={name: _changed(held, rest, value) if rest else value})


def _many(role_and_number: tuple[Role, int]) -> str:
    role, number = role_and_number
    return str(role) if number == 1 else f"{number} {role}s"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
