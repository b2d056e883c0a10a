"""Verifiers as users might write them, good and bad. Run in sandbox processes by the tests beside
this file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.rewards.verifier import Response, Verdict, VerifierOutcome

not_a_function = 3


def equals(responses: Sequence[Response]) -> list[bool]:
    return [r.response_text == r.answer for r in responses]


def with_parts(responses: Sequence[Response]) -> list[VerifierOutcome]:
    return [Verdict(accuracy=0.5, parts={"format": float(r.extra["bonus"])}) for r in responses]


def raises(responses: Sequence[Response]) -> list[float]:
    raise KeyError(f"no rule for {responses[0].answer}")


def hangs_when_told(responses: Sequence[Response]) -> list[float]:
    while responses[0].response_text == "hang":
        time.sleep(1.0)
    return [1.0]


def spins_without_the_interpreter(responses: Sequence[Response]) -> list[float]:
    # of a text, or a type checker computes the power too: that takes minutes
    nine = int("9")
    return [float(len(str(nine**nine**nine)))]


def prints_a_lot(responses: Sequence[Response]) -> list[float]:
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * 2_000_000)
        stream.flush()
    os.write(1, b"\x00\x00\x00\x01garbage")
    return [1.0]


def scribbles_on_every_descriptor(responses: Sequence[Response]) -> list[float]:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 64)
    return [1.0]


def returns_numpy(responses: Sequence[Response]) -> list[Verdict]:
    import numpy as np

    return [Verdict(accuracy=np.float32(0.5), parts={"bonus": np.float64(0.25)})]  # pyright: ignore[reportArgumentType]


def returns_too_much(responses: Sequence[Response]) -> list[VerifierOutcome]:
    return [Verdict(accuracy=1.0, parts={"p" * 3_000_000: 0.0})]


def raises_with_a_huge_message(responses: Sequence[Response]) -> list[float]:
    raise ValueError("y" * 5_000_000)


def exits(responses: Sequence[Response]) -> list[float]:
    sys.exit(7)


def dies(responses: Sequence[Response]) -> list[float]:
    os._exit(7)


def grows(responses: Sequence[Response]) -> list[float]:
    return [float(len(bytearray(8 << 30)))]


def returns(responses: Sequence[Response]) -> object:
    return {
        "nothing": None,
        "text": "yes",
        "too few": [],
        "too large": [1.5],
        "not a number": [float("nan")],
        "not an outcome": [object()],
        "a reserved part": [Verdict(accuracy=1.0, parts={"correct": 1.0})],
        "an infinite part": [Verdict(accuracy=1.0, parts={"bonus": float("inf")})],
        "a broken text": [Verdict(accuracy=1.0, parts={"\ud800": 0.0})],
    }[responses[0].response_text]


def leaves_processes(responses: Sequence[Response]) -> list[float]:
    """Start as many processes as the answer counts, the first in a session of its own, write their
    process ids, and obey the response."""
    response = responses[0]
    started = [
        subprocess.Popen(["sleep", "300"], start_new_session=number == 0) for number in range(int(response.answer))
    ]
    Path(response.extra["tell"]).write_text(" ".join(str(process.pid) for process in started))
    while response.response_text == "hang":
        time.sleep(1.0)
    if response.response_text == "die":
        os._exit(7)
    return [1.0]


def has_limits(responses: Sequence[Response]) -> list[float]:
    too_large = too_many = False
    with Path(responses[0].extra["file"]).open("wb") as file:
        try:
            file.truncate((1 << 30) + 1)
        except OSError as error:
            too_large = error.errno == errno.EFBIG
    files: list[int] = []
    try:
        for _ in range(2000):
            files.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401  those before the failure are kept open
    except OSError as error:
        too_many = error.errno == errno.EMFILE
    return [float(too_large and too_many and resource.getrlimit(resource.RLIMIT_CORE) == (0, 0))]


def finds_no_password(responses: Sequence[Response]) -> list[float]:
    return [float("REDIS_URL" not in os.environ and not any(responses[0].answer in v for v in os.environ.values()))]


async def counts_its_batch(responses: Sequence[Response]) -> list[VerifierOutcome]:
    """Return verdicts with the batch's size; raise, hang or die where a response demands it."""
    for response in responses:
        if response.response_text == "raise":
            raise RuntimeError("one of the batch")
        if response.response_text == "hang":
            await asyncio.sleep(600.0)
        if response.response_text == "die":
            os._exit(7)
    return [Verdict(accuracy=1.0, parts={"together": float(len(responses))}) for _ in responses]


counts_its_batch.max_batch = 4  # type: ignore[attr-defined]


def two_parameters(response: str, answer: str) -> float:
    return 1.0


def trl_reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def dies_by_its_response(responses: Sequence[Response]) -> list[float]:
    """Die on "die", and once on "die once", whose file then exists."""
    response = responses[0]
    if response.response_text == "die":
        os._exit(7)
    if response.response_text == "die once" and not (once := Path(response.extra["once"])).exists():
        once.touch()
        os._exit(7)
    return [1.0]


def trl_penalty(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def returns_infinity(responses: Sequence[Response]) -> list[float]:
    return [float("inf") for _ in responses]


def accepts(responses: Sequence[Response]) -> list[float]:
    return [1.0 for _ in responses]


def ranks_its_group(responses: Sequence[Response]) -> list[float]:
    """Return 100 times the group's size, plus the rank by length; obey a response as above."""
    texts = [response.response_text for response in responses]
    if "raise" in texts:
        raise RuntimeError("one of the group")
    if "hang" in texts:
        time.sleep(600.0)
    if "die" in texts:
        os._exit(7)
    order = sorted(texts, key=len)
    return [100.0 * len(texts) + order.index(text) for text in texts]


def verl_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return 1.0


def spins_in_a_child(responses: Sequence[Response]) -> list[float]:
    subprocess.run([sys.executable, "-c", "while True: pass"], check=False)
    return [1.0]


def works_for_so_long(responses: Sequence[Response]) -> list[float]:
    """Use the seconds of processor time that the response says."""
    until_s = time.process_time() + float(responses[0].response_text)
    while time.process_time() < until_s:
        pass
    return [1.0]


def naps(responses: Sequence[Response]) -> list[float]:
    """Wait for longer than any grace that a limit of 0.01 s might have."""
    time.sleep(2.5)
    return [1.0]
