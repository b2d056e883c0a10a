"""``headrace init``: writes the first run file and fleet file for a model and data.

On a terminal it asks for whatever the options leave open. The written files are then checked as by
``headrace config check``."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from pipeline.cli.common import echo_json, json_option
from protocol.errors import ConfigError, DataError
from protocol.printable import printable

if TYPE_CHECKING:
    from pipeline.config.data_sets import ColumnsSection
    from pipeline.data.tokenizer import TextTokenizer
    from pipeline.preflight.draft import DataForm, Surroundings
    from pipeline.preflight.findings import CheckFinding

_EPILOG = """\b
Examples:
  headrace init                                    # prompts for what it needs
  headrace init mine --model models/mine --data data/train.jsonl
  headrace init mine --model hf://Qwen/Qwen2.5-0.5B --data train.parquet \\
      --eval test.parquet --algorithm grpo --hardware gpu

Exit code 0; 2 when the written files do not pass `headrace config check`.
"""
_T = TypeVar("_T")
_RUN, _FLEET = "run.toml", "fleet.toml"
_MODEL: Final = "hf://Qwen/Qwen2.5-0.5B"
_LARGEST_CONTEXT: Final = 32768
"""Assumed context of a model that states none, in tokens."""


@click.command(epilog=_EPILOG)
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model", metavar="PATH|hf://NAME", help="Folder of a Hugging Face causal LM, or its name on the hub.")
@click.option("--data", "train", metavar="FILE", help="Prompts: JSONL or Parquet, a glob, or a data set on the hub.")
@click.option("--eval", "evaluation", metavar="FILE", help="Held-out prompts, in the same format.")
@click.option("--algorithm", help="dapo, grpo, ppo ... or package.module:Class of your own.  [default: dapo]")
@click.option("--hardware", help="laptop, gpu, gpus or hosts.  [default: this machine]")
@click.option("--question", help="Column of the prompt, if it is not recognised.")
@click.option("--answer", help="Column of the answer, if it is not recognised.")
@click.option(
    "--verifier",
    help="math (the last box, #### or answer), math_strict (hedges are wrong), arithmetic, dapo_math, or "
    "package.module:function.  [default: chosen from the answers]",
)
@click.option(
    "--path",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with your verifier's module, as reward.path; may be repeated.",
)
@click.option("--force", is_flag=True, help="Overwrite run.toml and fleet.toml.")
@json_option
def init(folder: Path, **given: Any) -> int:
    """Write DIR/run.toml and DIR/fleet.toml for your model and data.

    Columns, lengths, batch sizes and the ledger's memory come from the model, the data and this
    machine. Every setting has a comment with its meaning, unit and default."""
    from pipeline.config.data_sets import ColumnsSection
    from pipeline.data.hub import pinned_model
    from pipeline.data.tokenizer import load_text_tokenizer
    from pipeline.preflight.draft import HARDWARE, Choices, draft
    from pipeline.preflight.findings import Gravity, worst
    from pipeline.preflight.model_folder import read_model_config
    from pipeline.process.exit_codes import ExitCode
    from pipeline.rewards.registry import resolve
    from pipeline.runtime.log import log_to_stderr

    log_to_stderr()
    _check_folder(folder, force=given["force"])
    asks = sys.stdin.isatty() and sys.stdout.isatty() and not given["as_json"]
    if not asks and (missing := [f"--{name}" for name, key in _NEEDED.items() if given[key] is None]):
        raise click.UsageError(f"{' and '.join(missing)} must be given, since there is no terminal to ask on")

    def model_of(name: str) -> tuple[str, Path, dict[str, Any], TextTokenizer]:
        place = pinned_model(Path(name))
        return _rooted(name), place, read_model_config(place), load_text_tokenizer(place)

    model, place, config, tokenizer = _answer(
        given["model"], asks, "Model (folder, or hf://OWNER/NAME)", _MODEL, model_of
    )
    if given["verifier"] is not None:
        resolve(given["verifier"])
    columns = ColumnsSection(question=given["question"], answer=given["answer"])
    train, form, columns = _answer(
        given["train"], asks, "Training prompts (JSONL or Parquet)", None,
        lambda name: _data(name, columns, tokenizer, given["verifier"], asks=asks),
    )  # fmt: skip
    held_out = given["evaluation"]
    if held_out is None and asks:
        held_out = click.prompt("Held-out prompts (empty: none)", default="", show_default=False) or None
    evaluation = None if held_out is None else _data(held_out, columns, tokenizer, form.verifier, asks=False)[0]
    algorithm = _answer(given["algorithm"], asks, "Algorithm (dapo, grpo, ppo ...)", "dapo", _algorithm)
    around = _surroundings(place, config)
    hardware = _answer(given["hardware"], asks, f"Hardware ({', '.join(HARDWARE)})", _seen(around), _hardware)
    choices = Choices(
        name=_name_of(folder), model=model, train=train, evaluation=evaluation, algorithm=algorithm, hardware=hardware,
        columns=columns, folders=tuple(_rooted(str(folder)) for folder in given["folders"]),
    )  # fmt: skip
    written = draft(choices, form, around)
    files = _write(folder, {_RUN: written.run, _FLEET: written.fleet})
    if sys.stderr.isatty():
        click.echo("checking the files as `headrace config check` does", err=True)
    found = _checked(files, around)
    steps = _next_steps(files, hardware, choices.name)
    gravest = worst(found)
    if given["as_json"]:
        troubles = [one for one in found if one.level != Gravity.OK or one.check in _SHOWN]
        echo_json({"files": files, "next": steps, "ok": gravest != Gravity.ERROR, "findings": troubles})
    else:
        click.echo("\n".join(_told(files, form, found, steps)))
    return ExitCode.CONFIG if gravest == Gravity.ERROR else ExitCode.OK


_SHOWN: Final = ("prompts",)
"""Checks whose findings are shown even if they are ok."""
_NEEDED: Final = {"model": "model", "data": "train"}


def _answer(given: str | None, asks: bool, prompt: str, default: str | None, read: Callable[[str], _T]) -> _T:
    """Return what ``read`` makes of the option, of an answer on the terminal (asked again until it
    is valid), or of the default. Raises ConfigError or DataError for a wrong option."""
    if given is not None or not asks:
        value = given if given is not None else default
        assert value is not None, "options without a default are needed"
        return read(value)
    while True:
        try:
            return read(click.prompt(prompt, default=default))
        except (ConfigError, DataError) as error:
            click.echo(click.style(_wrapped(str(error)), fg="yellow"))


def _data(
    name: str, columns: ColumnsSection, tokenizer: TextTokenizer, verifier: str | None, *, asks: bool
) -> tuple[str, DataForm, ColumnsSection]:
    """Return the data's path, form and columns. On a terminal, ask for columns that are not
    recognised. Raises DataError."""
    from pipeline.config.data_sets import ColumnsSection
    from pipeline.preflight.draft import column_names, read_form

    entry = name if "://" in name else Path(name)
    try:
        return _rooted(name), read_form([entry], columns, tokenizer, verifier), columns
    except DataError:
        there = column_names([entry]) if asks else []
        if not there:
            raise
    click.echo(f"The columns are {printable(', '.join(there))}.")
    choice = click.Choice(there)
    mapped = ColumnsSection(
        question=click.prompt("Column of the prompt", type=choice, show_choices=False),
        answer=click.prompt("Column of the answer", type=choice, show_choices=False),
    )
    return _rooted(name), read_form([entry], mapped, tokenizer, verifier), mapped


def _algorithm(name: str) -> str:
    from pipeline.config.catalogue import declare

    declare(name)
    return name


def _hardware(name: str) -> str:
    from pipeline.preflight.draft import HARDWARE

    if name not in HARDWARE:
        kinds = "; ".join(f"{kind}: {words}" for kind, words in HARDWARE.items())
        raise ConfigError(f"hardware is {name!r}; expected one of these ({kinds}): choose one")
    return name


def _surroundings(place: Path, config: dict[str, Any]) -> Surroundings:
    from pipeline.preflight.draft import Surroundings
    from pipeline.preflight.host import TorchBuild, probe_torch
    from pipeline.preflight.memory_needs import count_weights, is_cpu, shape_of
    from pipeline.preflight.model_folder import longest_context
    from pipeline.preflight.vllm import installed_builds
    from pipeline.runtime.machine import this_machine

    # only torch can count GPUs, and importing it takes seconds
    torch = "" if is_cpu("auto") else probe_torch()
    gpus = torch.gpus if isinstance(torch, TorchBuild) else ()
    limit, _ = longest_context(config)
    num_weights = count_weights(place)
    return Surroundings(
        num_weights=num_weights,
        context=min(limit or _LARGEST_CONTEXT, _LARGEST_CONTEXT),
        num_cores=this_machine().num_cores,
        num_gpus=len(gpus),
        has_vllm="vllm" in installed_builds(),
        shape=shape_of(config, num_weights),
        gpu_bytes=gpus[0].memory_bytes if gpus else 0,
    )


def _seen(around: Surroundings) -> str:
    return ("laptop", "gpu", "gpus")[min(2, around.num_gpus)]


def _check_folder(folder: Path, *, force: bool) -> None:
    there = [str(folder / name) for name in (_RUN, _FLEET) if (folder / name).exists()]
    if there and not force:
        raise ConfigError(f"{' and '.join(there)} exist; give another folder, or --force to overwrite them")
    above = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: {above} cannot be written; choose a folder that you may write to")


def _name_of(folder: Path) -> str:
    """Return a name for the run, after its folder, that no run under ./runs has."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).lstrip("._-")[:40] or "run"
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if not Path("runs", one).exists())


def _rooted(name: str) -> str:
    """Make a path absolute; a name on the hub or a URL stays as it is."""
    return name if "://" in name else str(Path(name).expanduser().absolute())


def _write(folder: Path, texts: dict[str, str]) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}; choose a folder that you may write to"
        ) from None
    return [folder / name for name in texts]


def _checked(files: Sequence[Path], around: Surroundings) -> list[CheckFinding]:
    from pipeline.config.load import load_config
    from pipeline.data.hub import pin_models
    from pipeline.preflight.cards import judge_cards
    from pipeline.preflight.checks import diagnose
    from pipeline.preflight.host import Gpu

    config = pin_models(load_config(files))
    gpu = Gpu(name="this machine's", memory_bytes=around.gpu_bytes, free_bytes=around.gpu_bytes)
    shape = around.shape
    cards = judge_cards(config, (shape, shape), [gpu] * around.num_gpus) if shape and around.num_gpus else []
    return diagnose(config) + cards


def _next_steps(files: Sequence[Path], hardware: str, name: str) -> list[str]:
    run, fleet = (shlex.quote(str(file)) for file in files)
    steps = [f"headrace doctor {run} {fleet}", f"headrace up {run} --fleet {fleet}"]
    if hardware == "hosts" and "REDIS_URL" not in os.environ:
        steps[1:1] = [
            "export REDIS_URL=rediss://...  # a server that all hosts reach: ops/docs/how-to/ledger-server.md"
        ]
    if hardware == "hosts":
        steps += [
            f"headrace fleet tokens create --role generator --out generator.token runs/{name}",
            "headrace fleet join $REDIS_URL --token generator.token  # on each other host",
        ]
    return steps


def _told(files: Sequence[Path], form: DataForm, found: Sequence[CheckFinding], steps: Sequence[str]) -> list[str]:
    answer = f", the answer in {form.answer!r}" if form.answer else ""
    usable = f"{form.num_usable:,} of {form.num_read:,} lines read are usable"
    data = f"data: the prompt is in {form.question!r}{answer}, verifier {form.verifier}; {usable}"
    lines = [_wrapped(data), _wrapped(f"wrote {files[0]} and {files[1]}")]
    for one in found:
        if one.check in _SHOWN:
            lines.append(_wrapped(one.words))
            continue
        style = "red" if one.level == "error" else "yellow"
        lines += [click.style(_wrapped(f"{one.level}: {one.words}"), fg=style)] if one.level != "ok" else []
    return [*lines, "next:", *(f"  {step}" for step in steps)]


def _wrapped(text: str) -> str:
    """Wrap a text to the terminal's width; in a pipe it stays as it is."""
    text = printable(text)
    if not sys.stdout.isatty():
        return text
    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
