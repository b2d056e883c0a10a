"""The task of the demo with a real model and a tool: to write calls that can be run.

    python -m ops.demo.calls --out runs/calls-data

Each conversation begins with an example of a call, and one of an answer without. A turn is right if it is one call of
the calculator, and that works; the reward also tells how far a call has come."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.demo import products
from ops.demo.task import Split
from pipeline.environments.contract import ChatMessage, Step
from pipeline.environments.conversation import call_id
from pipeline.environments.tool_environment import ToolEnvironment

_GRADES = {
    "calls_invalid_json": 0.1,
    "calls_unclosed": 0.1,
    "calls_unknown_tool": 0.3,
    "calls_bad_arguments": 0.5,
    "calls_tool_failed": 0.7,
    "calls_ok": 1.0,
}
"""Of a turn with one call; one right turn in a hundred is too few to learn from."""
_QUESTION, _ANSWER = "17*12", "204"


class Calls(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__(["calculator"])
        # the examples say what there is
        self.tools = []

    def reset(self, row: dict[str, Any]) -> list[ChatMessage]:
        function = {"name": "calculator", "arguments": {"expression": _QUESTION}}
        call = {"id": call_id(0), "type": "function", "function": function}
        return [
            {"role": "user", "content": f"What is {_QUESTION}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": _ANSWER, "name": "calculator", "tool_call_id": call["id"]},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": "What is 64*35?"},
            {"role": "assistant", "content": "2240"},
            {"role": "user", "content": f"What is {row['question']}?"},
        ]

    async def step(self, message: ChatMessage) -> Step:
        ran = await super().step(message)
        (status,) = ran.counts if sum(ran.counts.values()) == 1 else ("",)
        return Step(reward=_GRADES.get(status, 0.0), accuracy=float(status == "calls_ok"), counts=ran.counts, done=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.demo.calls", description="Write the prompt files of the demo.")
    parser.add_argument("--out", type=Path, default=Path("runs/calls-data"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for split in Split:
        path = options.out / f"{split}.jsonl"
        rows = [json.dumps({"question": question}) for question in products.questions(split, seed=0)]
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{path}: {len(rows)} questions")


if __name__ == "__main__":
    main()
