"""Promises of the decoder, mailboxes, ``peek`` and ``score`` under hostile bytes, for ``ops.checks.fuzz`` and the
tests.

Reading raises no error but a WireError. A message that was read can be written and read again. A mailbox, a
responder and a requester continue after hostile messages, and deliver the good message that follows. The output
of ``peek`` and ``score`` is short, and moves no cursor. ``score`` judges each line or reports its error. A
target takes any bytes and raises if a promise is broken."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import zmq
from rich.console import Console
from xxhash import xxh3_64_intdigest

from pipeline.cli.peek import show
from pipeline.cli.score.command import show_report
from pipeline.cli.score.offline import score_file
from pipeline.config.training import RewardSection
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure
from pipeline.weights.store import WeightsStore
from pipeline.weights.tensorfile import TensorSpec, publication
from protocol.arrays import Buffer
from protocol.codec import decode, encode, from_blob, to_blob
from protocol.endpoints import ipc_endpoint
from protocol.errors import DeadlineExceeded, HeadraceError, UnknownMessage, WireError
from protocol.ids import ChunkId, TrajectoryId
from protocol.messages import Message, WeightsPart, WeightsRequest
from protocol.peek import peek, render
from protocol.printable import printable
from protocol.trajectory import (
    FinishReason,
    Guidance,
    GuidanceScore,
    Prompt,
    ReferenceScore,
    RewardScore,
    Segment,
    TrajectoryChunk,
    ValueScore,
)
from protocol.zeromq import ZmqTransport

MAX_BYTES = 1 << 20
_MESSAGES = ("chunk", "weights_request", "weights_part")
_SCORES = ("reward", "reference", "value", "guidance")
_TAGS = (*_MESSAGES, *_SCORES)
_TYPES = {
    "chunk": TrajectoryChunk,
    "reward": RewardScore,
    "reference": ReferenceScore,
    "value": ValueScore,
    "guidance": GuidanceScore,
}
_WAIT_S = 20.0


def forged(tag: str, body: bytes, *, sequence: int = 0) -> list[bytes]:
    """Return frames with a right checksum over any body, so that fuzzing gets past it."""
    head = {"version": 1, "type": tag, "sender": "mallory#1", "checksum": xxh3_64_intdigest(body), "sent_s": 0.0}
    return [msgspec.msgpack.encode(head | {"sequence": sequence}), body]


def samples() -> dict[str, bytes]:
    """Return the body of one message and score of each type."""
    chunk = TrajectoryChunk(
        id=ChunkId(TrajectoryId("t", 12, 3), 0),
        prompt=Prompt(
            prompt_id="train:17",
            tokens=np.array([5, 9], np.int32),
            text="2+3=",
            answer="5",
            verifier="arithmetic",
            extra={"level": [1, {"a": None}], "b": b"x"},
        ),
        context_tokens=np.array([1], np.int32),
        tokens=np.array([7, 8], np.int32),
        behavior_logprobs=np.array([-0.5, -1.0], np.float32),
        segments=(Segment(3, 1), Segment(4, 1)),
        finish_reason=FinishReason.STOP,
        response_text="5",
        worker="generator-0#3",
    )
    messages: tuple[Message, ...] = (
        chunk,
        WeightsRequest(version=4, offset=0, max_bytes=1 << 10),
        WeightsPart(version=4, offset=0, total_bytes=3, data=np.array([1, 2, 3], np.uint8)),
    )
    bodies = {
        tag: bytes(encode(m, sender="", sequence=0, sent_s=0.0)[1]) for tag, m in zip(_MESSAGES, messages, strict=True)
    }
    scores = (
        RewardScore(
            reward=1.0, accuracy=1.0, parts={"correct": 1.0}, guidance=Guidance(gold_text="5", judge_text="7 is wrong")
        ),
        ReferenceScore(logprobs=np.array([-0.5], np.float32)),
        ValueScore(values=np.array([0.5], np.float32), value_version=2),
        GuidanceScore(
            standard_logprobs=np.array([-0.5], np.float32),
            judge_logprobs=np.array([-1.0], np.float32),
            guide_version="8c",
        ),
    )
    blobs = {tag: to_blob(score) for tag, score in zip(_SCORES, scores, strict=True)}
    return bodies | {tag: bytes(msgspec.msgpack.decode(blob, type=_Body).body) for tag, blob in blobs.items()}


class _Body(msgspec.Struct):
    body: msgspec.Raw


_TEXTS = {
    "number": "so 17 + 25 = 42\n\n42",
    "answer": "Answer: $\\frac{1}{2}$\n\n\\frac12",
    "boxed": "the result is \\boxed{x^2 + 1}\n\nx^2+1",
    "mathematics": "$\\left\\{1, \\sqrt{2}\\right\\}$ or $x \\in (0, \\infty)$\n\n$\\{1, \\sqrt 2\\}$",
}
_LINES = (
    b'{"response": "Answer: 4", "answer": 4, "verifier": "dapo_math", "num_tokens": 7, "finish_reason": "length"}\n'
    b'{"response": "4", "answer": "four", "prompt": "2+2=", "verifier": "arithmetic"}\n{"respo'
)


def good_inputs(target: str) -> dict[str, bytes]:
    """Return the first inputs of a target's corpus, by name."""
    if target == "score":
        judged = {
            f"{name}-{kind}": bytes([kind]) + text.encode() for name, text in _TEXTS.items() for kind in (4, 5, 6)
        }
        return judged | {"lines": b"\x00" + _LINES, "lines-own": b"\x01" + _LINES}
    bodies = enumerate(samples().items())
    if target == "mailbox":
        return {tag: bytes([0x90 | n % 3]) + len(body).to_bytes(2, "big") + body for n, (tag, body) in bodies}
    return {tag: bytes([n | 0x40 * (n % 2)]) + body for n, (tag, body) in bodies}


# -- the decoder -----------------------------------------------------------------------------------


def read_anything(data: bytes) -> None:
    """Read bytes in every possible way. Raises if a promise is broken."""
    kind, rest = (data[0], data[1:]) if data else (0, b"")
    tag = _TAGS[kind % len(_TAGS)]
    blob = msgspec.msgpack.encode(
        {"version": 1, "type": tag, "checksum": xxh3_64_intdigest(rest), "body": msgspec.Raw(rest or b"\xc0")}
    )
    _read_frames(forged(tag, rest))
    _read_frames([rest, rest])
    for bytes_, type_ in ((blob, _TYPES.get(tag, TrajectoryChunk)), (rest, TrajectoryChunk)):
        with contextlib.suppress(WireError):
            read = from_blob(bytes_, type_)
            again = from_blob(to_blob(read), type_)
            assert to_blob(again) == to_blob(read), "a blob changes when it is written and read again"


def _read_frames(frames: Sequence[bytes]) -> None:
    with contextlib.suppress(WireError):
        message, envelope = decode(frames, max_bytes=MAX_BYTES)
        again = encode(message, sender=envelope.sender, sequence=envelope.sequence, sent_s=envelope.sent_s)
        assert decode(again, max_bytes=MAX_BYTES)[1].checksum == envelope.checksum or _is_rewritten(frames, again)


def _is_rewritten(frames: Sequence[bytes], again: Sequence[Buffer]) -> bool:
    """Whether only the encoding of the same values differs: unknown fields, longer forms, another order."""
    one, other = decode(frames, max_bytes=MAX_BYTES)[0], decode(again, max_bytes=MAX_BYTES)[0]
    write = lambda message: [bytes(frame) for frame in encode(message, sender="", sequence=0, sent_s=0.0)[1:]]  # noqa: E731
    return write(one) == write(other)


# -- peek and score --------------------------------------------------------------------------------

_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal would obey or could not show; ``protocol.printable`` has the reason for each."""
_MAX_SHOWN_CHARS = 2_000_000


def show_anything(data: bytes) -> None:
    """Peek at bytes as a blob, as a body and as frames. Raises if the output is long, not JSON, or acts on a
    terminal."""
    kind, rest = (data[0], data[1:]) if data else (0, b"")
    tag = _TAGS[kind % len(_TAGS)]
    cut = len(rest) // 2
    for frames in ([rest], forged(tag, rest), [rest[:cut], rest[cut:]], [b"\x82\xa4body" + rest]):
        shown = render(frames)
        json.loads(shown)
        _check_shown(shown)
        # a hundred times slower
        if kind & 0x40:
            page = io.StringIO()
            show(peek(frames), Console(file=page, width=120))
            _check_shown(page.getvalue())


def _check_shown(text: str) -> None:
    assert len(text) <= _MAX_SHOWN_CHARS, f"{len(text)} characters are shown"
    found = _ACTS.search(text)
    assert found is None, f"{found[0]!r} is shown as it is" if found else ""


class Scoring:
    """``headrace score`` on hostile files, and each verifier on hostile responses and answers."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-fuzz-"))
        self._runner = asyncio.Runner()
        self._pool = VerifierPool(RewardSection(timeout_s=1.0, processes=1))
        self._runner.run(self._pool.start(["math"]))

    def feed(self, data: bytes) -> None:
        """Score a file or a response. Raises unless that ends with a report, a verdict or a failure."""
        kind, rest = (data[0] % 8, data[1:]) if data else (0, b"")
        if kind < 4:
            self._score_file(rest, None if kind % 2 else "arithmetic")
        else:
            self._judge(rest, ("arithmetic", "dapo_math", "math", "dapo_math")[kind - 4])

    def close(self) -> None:
        self._runner.run(self._pool.aclose())
        self._runner.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _score_file(self, lines: bytes, verifier: str | None) -> None:
        path = self._folder / "responses.jsonl"
        path.write_bytes(lines + b'\n{"response": "2 + 2 = 4", "answer": "4", "verifier": "dapo_math", "level": 1}\n')
        page = io.StringIO()
        try:
            report = score_file(path, verifier, config=RewardSection(timeout_s=1.0), by="level")
        except HeadraceError as error:
            page.write(printable(str(error)))
        else:
            json.dumps(asdict(report))
            show_report(report, Console(file=page, width=120, highlight=False, markup=False))
        _check_shown(page.getvalue())

    def _judge(self, data: bytes, verifier: str) -> None:
        text, _, answer = data.decode(errors="replace").partition("\n\n")
        response = Response(response_text=text, answer=answer, verifier=verifier)
        (outcome,) = self._runner.run(self._pool.score([response]))
        assert isinstance(outcome, Verdict | VerifierFailure)
        if isinstance(outcome, Verdict):
            assert 0.0 <= outcome.accuracy <= 1.0


# -- the mailboxes ---------------------------------------------------------------------------------


def messages_in(data: bytes) -> list[list[bytes]]:
    """Cut bytes into up to four messages of up to four frames; some get an envelope with a right checksum."""
    found: list[list[bytes]] = []
    at = 0
    while at < len(data) and len(found) < 4:
        kind, at = data[at], at + 1
        num_frames = kind >> 4 & 3
        frames: list[bytes] = []
        for _ in range(max(1, num_frames)):
            length = int.from_bytes(data[at : at + 2], "big")
            frames.append(data[at + 2 : at + 2 + length])
            at += 2 + length
        found.append(forged(_MESSAGES[kind % 3], frames[0], sequence=kind) if kind & 0x80 else frames)
    return found


class Mailboxes:
    """A mailbox, a responder and a requester on real sockets, with a hostile peer at each."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-fuzz-"))
        self._runner = asyncio.Runner()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._transport = ZmqTransport("victim#1", high_water_mark=16, max_message_bytes=MAX_BYTES, keys=None)
        self._mailbox = self._transport.mailbox(ipc_endpoint(self._folder, "mailbox"))
        self._responder = self._transport.responder(ipc_endpoint(self._folder, "responder"))
        self._push = self._socket(zmq.PUSH)
        self._push.connect(self._mailbox.endpoint)
        self._dealer = self._socket(zmq.DEALER)
        self._dealer.connect(self._responder.endpoint)
        answering = ipc_endpoint(self._folder, "requester")
        self._router = self._socket(zmq.ROUTER)
        self._router.bind(answering)
        self._requester = self._transport.requester(answering)
        self._store = WeightsStore(self._folder / "weights", keep=1, max_part_bytes=MAX_BYTES // 2)
        zeros = np.zeros(16, np.uint8)
        self._store.publish(4, publication([TensorSpec("w", "U8", zeros.shape)], iter([zeros])))
        self._good = samples()
        self._sequence = 1 << 20

    def feed(self, data: bytes) -> None:
        """Send hostile messages to each, then a good one, which must be delivered. Raises if it is not."""
        self._runner.run(self._feed(messages_in(data)))

    def close(self) -> None:
        self._transport.close()
        self._context.destroy(linger=0)
        self._runner.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, int(1000 * _WAIT_S))
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * _WAIT_S))
        return socket

    def _request(self) -> list[bytes]:
        return forged("weights_request", self._good["weights_request"], sequence=self._sequence)

    async def _feed(self, messages: list[list[bytes]]) -> None:
        self._sequence += 1
        await self._feed_mailboxes(messages)
        await self._feed_responder(messages)
        await self._feed_requester(messages)

    async def _feed_mailboxes(self, messages: list[list[bytes]]) -> None:
        for frames in (*messages, self._request()):
            self._push.send_multipart(frames)
        while True:
            delivery = await self._mailbox.receive(timeout_s=_WAIT_S)
            assert delivery is not None, "the good message after the hostile ones did not come"
            if (delivery.sender, delivery.sequence) == ("mallory#1", self._sequence):
                break
        msgspec.json.encode([link.num_gaps for link in self._mailbox.stats()])

    async def _feed_responder(self, messages: list[list[bytes]]) -> None:
        for frames in (*messages, self._request()):
            self._dealer.send_multipart(frames)
        while True:
            request = await self._responder.next_request(timeout_s=_WAIT_S)
            assert request is not None, "the request did not come"
            try:
                self._responder.reply(request, self._store.answer(request.message))
            except UnknownMessage:
                # not a request; the learner logs it
                continue
            _, envelope = decode(self._dealer.recv_multipart(), max_bytes=MAX_BYTES)
            if envelope.sequence == self._sequence:
                return

    async def _feed_requester(self, messages: list[list[bytes]]) -> None:
        async def answer() -> None:
            route, *frames = await asyncio.to_thread(self._router.recv_multipart)
            _, envelope = decode(frames, max_bytes=MAX_BYTES)
            good = forged("weights_part", self._good["weights_part"], sequence=envelope.sequence)
            for hostile in (*messages, good):
                self._router.send_multipart([route, *hostile])

        async with asyncio.timeout(_WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(answer())
            with contextlib.suppress(WireError, DeadlineExceeded):
                await self._requester.request(WeightsRequest(version=4, offset=0, max_bytes=8), timeout_s=_WAIT_S)
