"""The task of the demo with a real model and a tool: to write calls that can be run.

    python -m ops.demo.calls --out runs/calls-data

Each conversation begins with two examples. A turn is right if it is one call of the calculator, and that works."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.demo import products
from ops.demo.task import Split, write_lines
from pipeline.environments.contract import ChatMessage, Step
from pipeline.environments.conversation import call_id
from pipeline.environments.tool_environment import ToolEnvironment

_EXAMPLES = (("17*12", "204"), ("64*35", "2240"))


class Calls(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__(["calculator"])
        # the examples say what there is
        self.tools = []

    def reset(self, row: dict[str, Any]) -> list[ChatMessage]:
        messages: list[ChatMessage] = []
        for question, answer in _EXAMPLES:
            function = {"name": "calculator", "arguments": {"expression": question}}
            call = {"id": call_id(0), "type": "function", "function": function}
            messages += [
                {"role": "user", "content": f"What is {question}?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": answer, "name": "calculator", "tool_call_id": call["id"]},
                {"role": "assistant", "content": answer},
            ]
        return [*messages, {"role": "user", "content": f"What is {row['question']}?"}]

    async def step(self, message: ChatMessage) -> Step:
        ran = await super().step(message)
        is_right = float(ran.counts == {"calls_ok": 1})
        return Step(reward=is_right, accuracy=is_right, counts=ran.counts, done=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.demo.calls", description="Write the prompt files of the demo.")
    parser.add_argument("--out", type=Path, default=Path("runs/calls-data"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    for split in Split:
        path = options.out / f"{split}.jsonl"
        rows = [{"question": question} for question in products.questions(split, seed=0)]
        write_lines(path, rows)
        print(f"{path}: {len(rows)} questions")


if __name__ == "__main__":
    main()
