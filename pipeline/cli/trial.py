"""``headrace try``: what the start model answers, and how it is judged, before a run costs
anything."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, echo_json, json_option, set_option
from pipeline.process.exit_codes import ExitCode
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from pipeline.preflight.trial import Trial, TriedPrompt, TriedResponse

_MOST_CHARS = 1_200
"""Most characters shown of a text. Longer ones lose their middle; --json has all of it."""
_COLOURS = {"right": "green", "wrong": "red", "no verdict": "yellow"}

_EPILOG = """\b
Examples:
  headrace try run.toml
  headrace try run.toml --num 2 --samples 1
  headrace try run.toml --set data.verifier=math_strict --json

Exit code 0; 11 when a response has no verdict.
"""


@click.command("try", epilog=_EPILOG)
@click.argument("files", nargs=-1, required=True, type=PATH)
@click.option(
    "--num", "num_prompts", type=click.IntRange(1, 1024), default=8, show_default=True, help="Number of prompts."
)
@click.option(
    "--samples",
    "num_samples",
    type=click.IntRange(1, 1024),
    help="Responses per prompt. Default: algorithm.group_size, at most 4.",
)
@click.option("--timeout", "timeout_s", default=1800.0, show_default=True, help="Seconds to wait at most.")
@set_option
@json_option
def try_(
    files: tuple[Path, ...],
    num_prompts: int,
    num_samples: int | None,
    timeout_s: float,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Sample a run's first prompts with its start model, and judge the responses. No run is started.

    Shows each prompt as the model reads it, each response, and its verdict with the reason; then
    accuracy and pass@k, and what would keep a run from learning."""
    import msgspec

    from pipeline.config.load import load_config
    from pipeline.data.hub import pin_models
    from pipeline.preflight.trial import try_model
    from pipeline.process.progress_bar import progress

    config = pin_models(load_config(files, overrides, os.environ))
    samples = num_samples or min(4, config.algorithm.group_size)
    with progress(f"sampling {num_prompts} prompts, {samples} responses each"):
        trial = try_model(config, num_prompts=num_prompts, num_samples=samples, timeout_s=timeout_s)
    if as_json:
        found = {"pass_at_1": trial.pass_at(1), f"pass_at_{samples}": trial.pass_at(samples)}
        echo_json({**msgspec.to_builtins(trial), **found, "remarks": list(trial.remarks())})
    else:
        for line in render(trial, samples):
            click.echo(line)
    return ExitCode.NOT_ALL_JUDGED if trial.num_unjudged else ExitCode.OK


def render(trial: Trial, samples: int) -> list[str]:
    lines: list[str] = []
    for number, prompt in enumerate(trial.prompts, start=1):
        lines += [*_prompt(prompt, f"prompt {number} of {len(trial.prompts)}"), ""]
    estimates = {f"pass@{k}": trial.pass_at(k) for k in dict.fromkeys((1, samples))}
    shown = [f"{name} {of.value:.1%} ({of.low:.1%} to {of.high:.1%})" for name, of in estimates.items() if of]
    if trial.accuracy is not None:
        shown.insert(0, f"accuracy {trial.accuracy.value:.1%}")
    size = f"{len(trial.prompts)} prompts, {len(trial.responses)} responses at temperature {trial.temperature:g}"
    signal = f"{trial.num_with_signal} of {len(trial.prompts)} prompts have right and wrong responses"
    lines.append("; ".join([", ".join(shown) or "no verdicts", size, *([signal] if samples > 1 else [])]))
    lines += [click.style("note: ", fg="yellow", bold=True) + printable(remark) for remark in trial.remarks()]
    return lines


def _prompt(prompt: TriedPrompt, number: str) -> list[str]:
    facts = (
        f"{printable_line(prompt.prompt_id)}, {prompt.num_tokens} tokens, judged by {printable_line(prompt.verifier)}"
    )
    head = click.style(number, bold=True) + f"  {facts}"
    lines = [head, *_text(prompt.text, "  > ")]
    if prompt.answer:
        lines += _text(prompt.answer, "  answer: ")
    for response in prompt.responses:
        lines += _response(response)
    return lines


def _response(response: TriedResponse) -> list[str]:
    words = [f"{response.num_tokens} tokens", "cut at the limit" if response.is_cut else "ended by itself"]
    if response.reward is not None:
        parts = ", ".join(f"{name} {value + 0.0:+.2f}" for name, value in response.parts.items())
        words.insert(0, f"reward {response.reward:+.2f}" + (f" ({parts})" if len(response.parts) > 1 else ""))
    if response.masked:
        words.append("masked as over-long")
    if response.reason:
        words.append(response.reason)
    verdict = click.style(response.verdict, fg=_COLOURS.get(response.verdict, "cyan"), bold=True)
    return [f"  {verdict}  {printable_line('; '.join(words))}", *_text(response.text, "    | ")]


def _text(text: str, margin: str) -> list[str]:
    if len(text) > _MOST_CHARS:
        head = _MOST_CHARS // 3
        cut = len(text) - _MOST_CHARS
        text = f"{text[:head]}\n[... {cut:,} characters ...]\n{text[len(text) - (_MOST_CHARS - head) :]}"
    lines = printable(text).splitlines() or [""]
    return textwrap.indent("\n".join(lines), margin, lambda _: True).split("\n")
