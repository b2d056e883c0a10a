"""Drafts a user's first run file: from a few choices to settings that ``config check`` accepts.

``draft`` is pure: the facts about model, data and machine are given to it. Sizes follow from the
hardware, lengths from model and data, the ledger's memory from both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.config.catalogue import declare
from pipeline.config.data_sets import ColumnsSection
from pipeline.config.describe import commented
from pipeline.config.load import parse_config
from pipeline.config.rewards import JUDGMENTS
from pipeline.data.columns import ColumnMap, recognised
from pipeline.data.files import BadRow, read_rows
from pipeline.data.lines import PromptLine, parse_line
from pipeline.data.places import local_file, named_files
from pipeline.data.prompt_form import PromptForm
from pipeline.data.tokenizer import TextTokenizer
from pipeline.preflight.device_memory import vllm_share
from pipeline.preflight.ledger_size import ledger_load
from pipeline.preflight.memory_needs import Shape
from pipeline.rewards.arithmetic import last_number
from protocol.errors import DataError

_LOOKED_AT: Final = 1000
"""Lines of the first file that are read."""
_MOST_LISTED: Final = 12


@dataclass(frozen=True, slots=True)
class DataForm:
    question: str
    answer: str
    """Column of the answer. Empty if the answer ends a conversation, or if the verifier needs
    none."""
    num_read: int
    num_usable: int
    longest_tokens: int
    """Length of the longest of these prompts."""
    verifier: str
    """The verifier that the lines name, or that fits their answers."""


def read_form(
    entries: Sequence[Path | str], columns: ColumnsSection, tokenizer: TextTokenizer, verifier: str | None = None
) -> DataForm:
    """Return the form of the first file. Raises DataError if it cannot be read, or if none of its
    first lines has a prompt and an answer; the error lists its columns."""
    path = local_file(named_files(entries)[0])
    reader, form, read, usable, longest = ColumnMap(columns), PromptForm(tokenizer), 0, 0, 0
    problem, named = "it has no lines", ""
    found: tuple[str | None, str | None] | None = None
    seen: dict[str, None] = {}
    answers: list[str] = []
    asks_for_sum = True
    for row in itertools.islice(read_rows(path), _LOOKED_AT):
        read += 1
        if isinstance(row, BadRow):
            problem = f"line {row.line}: {row.problem.value}, {row.detail}"
            continue
        seen |= dict.fromkeys(row.columns)
        line = parse_line(reader.own(row.columns), verifier or "")
        if not isinstance(line, PromptLine):
            problem = f"line {row.line}: {line.detail}"
            continue
        try:
            longest = max(longest, len(form.render(line.prompt).tokens))
        except DataError as error:
            problem = f"line {row.line}: {error}"
            continue
        found = found or recognised(row.columns, columns)
        usable += 1
        answers.append(line.answer)
        named = named or line.verifier or ""
        asks_for_sum &= isinstance(line.prompt, str) and line.prompt.rstrip().endswith("=")
    if found is None:
        there = list(seen)[:_MOST_LISTED]
        its = f"its columns are {', '.join(there)}" if there else "it has no columns"
        raise DataError(
            f"{path}: none of the first {read} lines has a prompt and an answer ({problem}); {its}: name them with --question "
            "and --answer (data.columns)"
        )
    is_sum = asks_for_sum and all(last_number(answer) is not None for answer in answers)
    fits = verifier or named or ("arithmetic" if is_sum else "math")
    return DataForm(
        found[0] or "", found[1] or "", num_read=read, num_usable=usable, longest_tokens=longest, verifier=fits
    )


def column_names(entries: Sequence[Path | str]) -> list[str]:
    """Return the columns of the first line that can be read. Raises DataError."""
    path = local_file(named_files(entries)[0])
    rows = itertools.islice(read_rows(path), _LOOKED_AT)
    return next((list(row.columns) for row in rows if not isinstance(row, BadRow)), [])


HARDWARE: Final[Mapping[str, str]] = {
    "laptop": "one machine, on its CPU",
    "gpu": "one machine with one GPU",
    "gpus": "one machine with several GPUs",
    "hosts": "generators join from other hosts",
}
_MB: Final = 2**20
_LEAST_RESPONSE: Final = 32
_GUIDED_PARTS: Final = 4
"""With guidance a response gets one of this many parts of the context after the prompt, since the
model also reads it after a template and a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    name: str
    model: str
    train: str
    evaluation: str | None
    algorithm: str
    hardware: str
    columns: ColumnsSection
    folders: tuple[str, ...] = ()
    """Folders with modules of the user's verifiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    num_weights: int
    """0 if it is unknown."""
    context: int
    """Most tokens of prompt and response together."""
    num_cores: int
    num_gpus: int
    has_vllm: bool
    """Whether vLLM's build for GPUs is installed."""
    shape: Shape | None = None
    gpu_bytes: int = 0
    """Memory of the first GPU; 0 without one."""


@dataclass(frozen=True, slots=True)
class Draft:
    run: str
    fleet: str


@dataclass(frozen=True, slots=True)
class _Sizes:
    updates: int
    groups: int
    group_size: int
    minibatches: int
    response: int
    slots: int


_SIZES: Final = {
    "laptop": _Sizes(updates=50, groups=8, group_size=8, minibatches=2, response=512, slots=32),
    "gpu": _Sizes(updates=200, groups=32, group_size=8, minibatches=4, response=2048, slots=64),
    "gpus": _Sizes(updates=300, groups=32, group_size=16, minibatches=4, response=4096, slots=128),
    "hosts": _Sizes(updates=300, groups=32, group_size=16, minibatches=4, response=2048, slots=64),
}


def draft(choices: Choices, form: DataForm, around: Surroundings) -> Draft:
    """Return the run file and the fleet file. Raises DataError for prompts that leave no room for a
    response, ConfigError for an unknown algorithm."""
    sizes, declaration = _SIZES[choices.hardware], declare(choices.algorithm)
    generators = {"laptop": 2 if around.num_cores >= 4 else 1, "gpu": 1, "gpus": 1, "hosts": 0}[choices.hardware]
    values: dict[str, Any] = {"run.name": choices.name, "run.num_updates": sizes.updates}
    why: dict[str, str] = {}
    values |= {"model.path": choices.model, "data.train": [choices.train], "data.verifier": form.verifier}
    why["data.train"] = _of_data(choices, form)
    if choices.folders:
        values["reward.path"] = list(choices.folders)
    for name, column in choices.columns.model_dump(exclude_none=True).items():
        values[f"data.columns.{name}"] = column
    if choices.evaluation is not None:
        values |= {"data.evaluation": [choices.evaluation], "evaluation.every_updates": 10}
    values |= _lengths(form, around, sizes, why, is_guided=declaration.needs_guidance)
    batch = sizes.groups * sizes.group_size
    values |= {
        "algorithm.name": choices.algorithm,
        "algorithm.group_size": sizes.group_size,
        "algorithm.groups_per_update": sizes.groups,
        "algorithm.num_minibatches": sizes.minibatches,
        "staleness.eta": 2,
    }
    why["algorithm.num_minibatches"] = f"an update has {sizes.groups} * {sizes.group_size} = {batch} responses"
    credit = (values["staleness.eta"] + 1) * batch
    values["generation.num_slots"] = min(sizes.slots, credit // max(1, generators))
    if declaration.needs_reference:
        values["reference.always"] = True
    judgments = form.verifier.removesuffix("_strict")
    if declaration.needs_guidance and judgments in JUDGMENTS:
        values["guidance.judgments"] = judgments
        why["guidance.judgments"] = "the same as the verifier"
    if declaration.has_critic:
        values["value.batch_trajectories"] = batch
        why["value.batch_trajectories"] = "as many as an update has"
        if choices.hardware == "laptop":
            values["value.pretrain_steps"] = 10
    rate = learning_rate(around.num_weights)
    values |= {"learner.learning_rate": rate, "learner.warmup_updates": sizes.updates // 10}
    if around.num_weights:
        why["learner.learning_rate"] = (
            f"for AdamW on all {around.num_weights / 1e6:,.1f} million weights; a LoRA adapter tolerates "
            f"{learning_rate(around.num_weights, is_lora=True):g}"
        )
    values |= _devices(choices, around, why)
    if choices.hardware == "hosts":
        values |= {"wire.transport": "tcp", "wire.host": "0.0.0.0", "wire.ports": "5600-5700"}  # noqa: S104
        why["ledger.max_memory_mb"] = (
            "other hosts need a server of yours, in REDIS_URL or ledger.url; give it this much"
        )
    fleet = {"fleet.generator": generators, "fleet.reward": 1}
    values["ledger.max_memory_mb"] = 1 << 20
    config = parse_config(commented(values | fleet, {}, algorithm=choices.algorithm), "the draft")
    fleet["fleet.reference"] = int(config.has_reference)
    load = ledger_load(config)
    if choices.hardware == "gpu" and around.shape is not None and around.gpu_bytes:
        share = vllm_share(config, around.shape, around.gpu_bytes)
        if share is not None:
            values["generation.vllm.engine_args"] = {"gpu_memory_utilization": share}
            taken, total = share * around.gpu_bytes / 1e9, around.gpu_bytes / 1e9
            why["generation.vllm.engine_args"] = f"{taken:.1f} of the GPU's {total:.1f} GB; the learner has the rest"
    needed = max(load.batch_bytes, load.in_flight_bytes) / config.ledger.watermark / _MB
    values["ledger.max_memory_mb"] = max(256, 256 * math.ceil(needed / 256))
    run = commented(values, why, algorithm=choices.algorithm, head=_HEAD.format(hardware=HARDWARE[choices.hardware]))
    told = {"fleet.generator": "on other hosts: `headrace fleet join`"} if not generators else {}
    return Draft(run, commented(fleet, told, algorithm=choices.algorithm, head=_FLEET_HEAD))


_HEAD: Final = (
    "A run for {hardware}, written by `headrace init`. A setting that is not here has its default: `headrace config show "
    "FILE` lists them all, and `headrace config explain KEY` explains one."
)
_FLEET_HEAD: Final = "How many workers of each role. `headrace scale` changes it while the run goes on."


def _of_data(choices: Choices, form: DataForm) -> str:
    answer = f", the answer in {form.answer}" if form.answer else ""
    held_out = "" if choices.evaluation else " No held-out prompts were given; data.evaluation takes them."
    usable = f"{form.num_usable} of the first {form.num_read} lines are usable"
    return f"the prompt is in {form.question}{answer}; {usable}.{held_out}"


def _lengths(
    form: DataForm, around: Surroundings, sizes: _Sizes, why: dict[str, str], *, is_guided: bool
) -> dict[str, Any]:
    longest = min(form.longest_tokens, around.context * 3 // 4)
    prompt = min(max(16, 2 ** math.ceil(math.log2(max(1, longest * 1.25)))), max(longest, around.context // 2))
    # a guided pass reads the response after a template and a text
    response = min(sizes.response, (around.context - prompt) // (_GUIDED_PARTS if is_guided else 1))
    if response < _LEAST_RESPONSE:
        raise DataError(
            f"the model reads at most {around.context} tokens, and prompts take {prompt} of them; expected at least "
            f"{_LEAST_RESPONSE} for a response: choose another model, or shorter prompts"
        )
    why["data.max_prompt_tokens"] = f"the longest of the prompts that were read has {form.longest_tokens} tokens"
    if response < sizes.response:
        why["generation.max_response_tokens"] = f"the model reads at most {around.context} tokens, prompts included"
    # at least 16: T-PPO takes the last 8 tokens of a window out of the loss
    window = min(response, max(16, min(512, response // 4)))
    return {
        "data.max_prompt_tokens": prompt,
        "generation.max_response_tokens": response,
        "generation.window_tokens": window,
    }


def _devices(choices: Choices, around: Surroundings, why: dict[str, str]) -> dict[str, Any]:
    if choices.hardware == "laptop":
        return {}
    values: dict[str, Any] = {
        "model.dtype": "bfloat16",
        "generation.dtype": "bfloat16",
        "weights.dtype": "bfloat16",
    }
    use_vllm = around.has_vllm and around.num_gpus > 0
    if use_vllm:
        values["generation.engine"] = "vllm"
    if choices.hardware != "gpus":
        return values
    if around.num_gpus < 2:
        why["model.path"] = (
            "fewer than two GPUs were seen where this was written. With more, set generation.device to the last one, such as "
            "cuda:1, and learner.ranks to the number of the others"
        )
        return values
    last = around.num_gpus - 1
    if use_vllm:
        # vLLM uses GPUs from the first on
        values |= {"model.device": f"cuda:{last}", "generation.vllm.data_parallel_size": last}
    else:
        values["generation.device"] = f"cuda:{last}"
        if last > 1:
            values |= {"learner.backend": "fsdp2", "learner.ranks": last}
            why["learner.ranks"] = "the last GPU is the generator's"
    return values


# A first learning rate, by a model's size and its optimiser; not a tuned recipe.
#
# Larger models need smaller rates. For AdamW and all weights:
#
#     rate(n) = 1e-5 * (135e6 / n) ** 0.583,   within 1e-6 and 1e-4
#
# This power law goes through 1e-5 at 135 million weights, at which SmolLM2-135M learns, and 1e-6 at
# 7 billion, the papers' rate for 7 to 32 billion. Below 2.6 million weights the rate is 1e-4.
#
# Other optimisers and adapters multiply it. Muon's steps are scaled to the size of AdamW's: 1.
# Adafactor's rate is relative to a tensor's root mean square, usually 0.02: 50. A LoRA adapter
# tolerates about ten times the rate of all weights.

_ANCHOR, _ANCHOR_RATE, _POWER = 135e6, 1e-5, 0.583
_LEAST, _MOST = 1e-6, 1e-4
_FACTORS: Final = {"adafactor": 50.0}
_LORA: Final = 10.0


def learning_rate(num_weights: int, optimizer: str = "adamw-fused", *, is_lora: bool = False) -> float:
    """Return the rate, rounded to two digits. An unknown size, 0, gets the rate of large models."""
    rate = _ANCHOR_RATE * (_ANCHOR / num_weights) ** _POWER if num_weights > 0 else _LEAST
    bounded = min(max(rate, _LEAST), _MOST)
    return float(f"{bounded * _FACTORS.get(optimizer, 1.0) * (_LORA if is_lora else 1.0):.1e}")
