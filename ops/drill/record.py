"""The events of a drill, read afterwards from files that the run cannot take back.

The files are read once nothing runs in the run's folder any more. The events of the ledger's file come first,
in order, then those of checkpoints, journals, history and logs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ops.drill.append_only import read_transactions
from ops.drill.events import Blamed, Checkpointed, Crashed, Event, NotStored, Repaired, Sampled, ServerLogged, Updated
from ops.drill.fleet import RUN, DrillFleet
from ops.drill.game import Game
from ops.drill.ledger_history import LedgerHistory
from ops.drill.verifier import verdict
from ops.emulated.build import length_law, token_law
from ops.emulated.journal import read_journal
from ops.emulated.settings import emulation_of
from pipeline.config.load import read_resolved
from pipeline.config.schema import RunConfig
from pipeline.data.end_tokens import end_tokens, model_ends
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.environments.contract import Step
from pipeline.environments.conversation import ChatFormat
from pipeline.fleet.incidents.records import incident_records
from pipeline.fleet.repair.levels import RepairLevel, StepOutcome
from pipeline.fleet.repair.records import read_repairs, read_steps
from pipeline.training.checkpoints import read_checkpoint
from protocol.errors import DataError
from protocol.ids import ChunkId
from protocol.trajectory import FinishReason, TrajectoryChunk, Turn

_CRASH = "worker_failed"
_TRACEBACK = re.compile("^Traceback", re.MULTILINE)
"""At the start of a line: a warning contains those of a user's verifier."""
_EMULATED = "ops.emulated.build:generation"
_ERROR_CHARS = 600
_ACTING = frozenset(
    {
        RepairLevel.RESTART,
        RepairLevel.REPLACE,
        RepairLevel.EVICT,
        RepairLevel.ROLE_RESTART,
        RepairLevel.ROLLBACK,
        RepairLevel.WHOLE_RUN,
    }
)
_SERVER_LINE = re.compile(r"(\d+):M ")
"""The server itself logs as M: its children are C, replicas S, Sentinels X (https://valkey.io/topics/debugging)."""


def read_events(fleet: DrillFleet) -> Iterator[Event]:
    """Yield the events in the files of a run."""
    config = read_resolved(fleet.run_dir)
    truth = _truth(fleet.run_dir) if config.generation.engine == _EMULATED else (lambda _: None)
    fault = _fault_of(config) if config.has_environment else (lambda *_: "")
    history = LedgerHistory(RUN, truth, lambda chunk: verdict(chunk.response_text or ""), fault)
    yield from history.read(read_transactions(fleet.run_dir / "ledger"))
    yield from _checkpoints(fleet.run_dir / "checkpoints")
    for row in fleet.updates():
        yield Updated(row.update, row.policy_version, row.staleness_max)
    for path in sorted(fleet.journals.glob("*.journal")):
        for trajectory, begin, end in read_journal(path):
            yield Sampled(int(path.stem), str(trajectory), begin, end)
    yield from crashes(fleet.run_dir / "logs")
    yield from refused_windows(fleet.run_dir / "logs")
    yield from repairs(fleet.run_dir)
    yield from blames(fleet.run_dir)
    yield from servers(fleet.run_dir / "ledger" / "server.log")


def _truth(run_dir: Path) -> Callable[[TrajectoryChunk], bool]:
    """Return the judge of an emulated run, in which every token of every response is known beforehand."""
    config = read_resolved(run_dir)
    tokenizer = load_text_tokenizer(config.model.path)
    words = token_law(config, tokenizer)
    lengths, seed = length_law(emulation_of(config)), config.run.seed

    def is_true(chunk: TrajectoryChunk) -> bool:
        response = np.concatenate([chunk.context_tokens, chunk.tokens])
        length = 0
        for begin, end in _turns(chunk):
            length = lengths.end_after(seed, chunk.trajectory, begin)
            if not np.array_equal(response[begin:end], words.tokens(seed, chunk.trajectory, begin, end, length=length)):
                return False
        is_over = chunk.is_opening or response.size in (length, config.generation.max_response_tokens)
        return (chunk.finish_reason.is_final or chunk.finish_reason is FinishReason.TURN) == is_over

    return is_true


def _turns(chunk: TrajectoryChunk) -> list[tuple[int, int]]:
    """Return where the model's turns begin and end, in the chunk's context and tokens."""
    spans = chunk.given_spans
    begins = [0, *(span.start + span.num_tokens for span in spans)]
    ends = [*(span.start for span in spans), chunk.context_tokens.size + chunk.tokens.size]
    return list(zip(begins, ends, strict=True))


def _fault_of(config: RunConfig) -> Callable[[TrajectoryChunk, Turn], str]:
    """Return what repeats the drill's environment on stored tokens."""
    tokenizer = load_text_tokenizer(config.model.path)
    stops = end_tokens(config.model.path, tokenizer, config.generation.stop_token_ids)
    chat = ChatFormat(tokenizer, model_ends(config.model.path, tokenizer), keep_thinking=False)

    def fault(chunk: TrajectoryChunk, turn: Turn) -> str:
        game, spans = Game(), chunk.given_spans
        opening = game.reset({"prompt_id": chunk.prompt.prompt_id})
        if chunk.is_opening:
            return "" if opening in turn.text else f"begins with {turn.text!r}"
        if not isinstance(chunk.asked, msgspec.UnsetType) and chunk.asked.sequence:
            # a sequence in place of another, which this chunk does not have
            return ""
        response = np.concatenate([chunk.context_tokens, chunk.tokens]).tolist()
        told = [tokenizer.decode(response[span.start : span.start + span.num_tokens]) for span in spans]
        step = Step()
        for (begin, end), text in zip(_turns(chunk), [*told, turn.text], strict=True):
            if turn.is_done and end == len(response) and (turn.is_truncated or response[-1] not in stops):
                return f"was truncated with accuracy {turn.accuracy}" if turn.accuracy else ""
            step = game.answer(chat.parse(response[begin:end]).message["content"])
            if not step.done and str(step.messages) not in text:
                return f"was answered {text!r}, expected {step.messages!r}"
        is_true = (turn.is_done, turn.accuracy) == (step.done, step.accuracy)
        return "" if is_true else f"ended as {turn.is_done}, {turn.accuracy}; expected {step.done}, {step.accuracy}"

    return fault


def _checkpoints(folder: Path) -> Iterator[Event]:
    for path in sorted(folder.glob("[0-9]*")):
        try:
            checkpoint = read_checkpoint(path)
        except DataError:
            # a resumed learner refuses it too
            continue
        state = checkpoint.state
        yield Checkpointed(path.name, checkpoint.version, int(state["num_updates"]), tuple(state["claims"]))


def crashes(logs: Path) -> Iterator[Crashed]:
    """Find workers that ended by an unexpected error."""
    for name, row in _logged(logs, _CRASH):
        yield Crashed(name, str(row.get("exception", row))[-_ERROR_CHARS:])
    for path in sorted(logs.glob("*.out")):
        text = path.read_text(errors="replace")
        if _TRACEBACK.search(text):
            yield Crashed(path.stem, text[-_ERROR_CHARS:])


def refused_windows(logs: Path) -> Iterator[NotStored]:
    """Find the windows of generators that the ledger refused."""
    for name, row in _logged(logs, "chunk_not_stored"):
        trajectory = str(ChunkId.parse(str(row["chunk"])).trajectory)
        begin = int(row["begin"])
        yield NotStored(f"{name}#{row['epoch']}", trajectory, begin, begin + int(row["num_tokens"]))


def _logged(logs: Path, event: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines about an event in the workers' logs, with each log's name."""
    for path in sorted(logs.glob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            if event not in line:
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row.get("event") == event:
                yield path.stem, row


def repairs(run_dir: Path) -> Iterator[Repaired]:
    """Find the repairs of workers, and the steps that acted on one."""
    for row in read_repairs(run_dir)[0]:
        yield Repaired(row.worker, row.cause)
    for step in read_steps(run_dir):
        if step.rung in _ACTING and step.outcome == StepOutcome.BEGUN:
            yield Repaired(step.worker, f"{step.rung}: {step.sentence}")


def blames(run_dir: Path) -> Iterator[Blamed]:
    """Find the components that incidents are about."""
    for record in incident_records(run_dir).read()[0]:
        if record.is_finding:
            yield Blamed(record.component, record.sentence, record.at_s)


def servers(log: Path) -> Iterator[Event]:
    """Find which server processes wrote into a server's log, in order."""
    last = 0
    for line in log.read_text(errors="replace").splitlines() if log.is_file() else ():
        if (match := _SERVER_LINE.match(line)) and int(match[1]) != last:
            last = int(match[1])
            yield ServerLogged(last)
