"""Samples responses of the start model for offline learning, and writes held-out chains.

    python -m ops.demo.guided_responses --out runs/guided-data --responses 50

Writes ``responses.jsonl``, one response a line with verdict and judgment, as ``data.responses`` reads it, and
``heldout.jsonl``, prompts for ``data.evaluation``. The same arguments always give the same bytes. The model
samples one response to each question at temperature 1; three in four are wrong."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from ops.demo.guided import MODEL, Fault, first_fault_of, problems
from ops.demo.make_guided_model import SYMBOLS
from ops.demo.make_tiny_model import EOS, build_tokenizer, respond
from ops.demo.task import Problem, Split, write_lines
from pipeline.rewards.arithmetic import verify
from pipeline.rewards.verifier import Response, Verdict


@dataclass(frozen=True, slots=True)
class GuidedSample:
    """One response of the start model, with its verdict and judgment."""

    problem: Problem
    text: str
    """Without the end-of-sequence token."""
    is_cut: bool
    """Whether the response reached the length limit before its end."""
    is_right: bool
    judgment: str
    """The first error of a wrong response, in words; empty if the working has none."""

    @property
    def fault(self) -> Fault | None:
        """The first digit of the working that does not follow."""
        return first_fault_of(self.problem, self.text)

    @property
    def line(self) -> dict[str, object]:
        """One line of a response file."""
        columns: dict[str, object] = {
            "prompt": self.problem.prompt,
            "answer": self.problem.answer,
            "response": self.text,
            "verdict": self.is_right,
        }
        if self.judgment:
            columns["judgment"] = self.judgment
        return columns | ({"finish_reason": "length"} if self.is_cut else {})


def draw_samples(num: int, seed: int, model: Path = MODEL) -> list[GuidedSample]:
    """Sample one response to each of ``num`` training questions; a function of the arguments."""
    asked = list(problems(Split.TRAIN, num, seed))
    policy = Qwen3ForCausalLM.from_pretrained(model)
    dice = torch.Generator().manual_seed(seed)
    texts = respond(policy.eval(), build_tokenizer(SYMBOLS), [problem.prompt for problem in asked], dice)
    return [judged(problem, text) for problem, text in zip(asked, texts, strict=True)]


def judged(problem: Problem, text: str) -> GuidedSample:
    """Return a response with its verdict and judgment; ``text`` ends in EOS unless it was cut."""
    body = text.removesuffix(EOS)
    told = Response(prompt_text=problem.prompt, response_text=body, answer=problem.answer, verifier="arithmetic")
    [verdict] = verify([told])
    assert isinstance(verdict, Verdict), verdict
    is_right = verdict.accuracy == 1.0
    fault = None if is_right else first_fault_of(problem, body)
    return GuidedSample(problem, body, body == text, is_right, "" if fault is None else fault.judgment)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.demo.guided_responses",
        description="Sample responses of the guided start model, with verdicts and judgments.",
        epilog="example: python -m ops.demo.guided_responses --out runs/guided-data --responses 50 --seed 0",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/guided-data"), help="folder (default: %(default)s)")
    parser.add_argument("--responses", type=int, default=50, help="number of responses (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=512, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of questions and samples (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    samples = draw_samples(options.responses, options.seed)
    path = options.out / "responses.jsonl"
    write_lines(path, (sample.line for sample in samples))
    print(f"{path}: {len(samples)} responses, {sum(sample.is_right for sample in samples)} of them correct")
    path = options.out / "heldout.jsonl"
    asked = problems(Split.HELD_OUT, options.heldout, options.seed)
    write_lines(path, ({"prompt": one.prompt, "answer": one.answer, "verifier": "arithmetic"} for one in asked))
    print(f"{path}: {options.heldout} prompts")


if __name__ == "__main__":
    main()
