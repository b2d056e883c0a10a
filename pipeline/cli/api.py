"""``import headrace``: runs from Python, for notebooks and tests.

These functions call the same code as the commands. An error is an exception of ``protocol.errors``,
with the message that the command prints.

*Consumes* a configuration or a run's folder. *Produces* a run, in a separate process that outlives
this one. *Waits for* the start (``Run.start``) and the end (``Run.wait``, ``Run.stop``), each with
a deadline. *Unblocked by* the run's supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pipeline.config import RESOLVED_NAME
from pipeline.files import write_private
from protocol import headrace
from protocol.errors import ConfigError, DeadlineExceeded, HeadraceError, LedgerError, LedgerUnavailable

if TYPE_CHECKING:
    from pipeline.cli.score.distribution import ScoreReport
    from pipeline.ledger.types import Pause
    from pipeline.observability.samples import ResponseSample
    from pipeline.operator.attached import Attached
    from pipeline.operator.status_report import StatusReport

OUTPUT_NAME = "up.out"
"""File in the run's ``logs`` with the output of its ``headrace up``."""
_POLL_S = 0.05
_LAST_CHARS = 4000

_T = TypeVar("_T")


class Run:
    """A run, known by its folder. Each call reads the run again.

    Attributes:
        folder: the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @classmethod
    def open(cls, folder: str | Path | None = None) -> Run:
        """Return the run in ``folder``, by default the newest under ./runs. Raises ConfigError if
        there is none."""
        from pipeline.operator.attached import find_run

        return cls(find_run(None if folder is None else Path(folder)).absolute())

    @classmethod
    def start(
        cls,
        config: str | Path | Iterable[str | Path] | Mapping[str, Any],
        *,
        fleet: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        timeout_s: float = 900.0,
    ) -> Run:
        """Start a run as ``headrace up`` does, and return it once its workers start.

        Args:
            config: a run file, several (later wins), or the settings by section and name.
            fleet: a fleet file.
            settings: as ``--set``, by key: ``{"learner.learning_rate": 1e-5}``.
            timeout_s: seconds for the checks and the ledger's start.

        Raises:
            ConfigError: a setting, a file or the data is wrong, or the folder has a run.
            LedgerUnavailable: the ledger's server does not answer.
            DeadlineExceeded: not started in time; the started process was ended."""
        with tempfile.TemporaryDirectory(prefix="headrace-start-") as private:
            return _start(_files(config, fleet, Path(private)), _overrides(settings or {}), timeout_s)

    def status(self) -> StatusReport:
        """Return state, workers, totals and waits, like ``headrace status --json``."""
        from pipeline.operator.attached import look_at
        from pipeline.operator.status_report import read_status

        async def read() -> StatusReport:
            async with look_at(self.folder) as at:
                return await read_status(at)

        return _apart(lambda: asyncio.run(read()))

    def history(self, kind: Literal["update", "refused", "evaluation", "value"] = "update") -> dict[str, list[Any]]:
        """Return the rows of one kind as columns of equal length, oldest first. Names and units are
        those of ``history.jsonl``; an objective's metric is a column ``metrics.NAME``. Damaged
        lines are skipped, and a warning says how many."""
        from pipeline.files.records import skipped_words
        from pipeline.observability.history import HISTORY_NAME, VALUE_HISTORY_NAME, columns, run_history

        path = self.folder / (VALUE_HISTORY_NAME if kind == "value" else HISTORY_NAME)
        rows, num_skipped = run_history(path).read()
        if num_skipped:
            warnings.warn(skipped_words(num_skipped, str(path)), stacklevel=2)
        return columns(rows, kind)

    def samples(self, *, last: int = 1, update: int | None = None) -> list[ResponseSample]:
        """Return samples of the ``last`` newest updates, like ``headrace samples``; with
        ``update``, of that update or the nearest earlier one with samples."""
        from pipeline.cli.samples import newest_samples

        return newest_samples(self.folder, last=last, update=update)

    def scale(self, **counts: int | str) -> dict[str, int]:
        """Change the number of workers of some roles: ``scale(generator=4)``, or
        ``generator="auto"`` to follow demand. Return the wanted number of workers of each role.
        Raises ConfigError as ``headrace scale``."""
        from pipeline.cli.control import parse_count
        from pipeline.operator import steering

        wanted = dict(parse_count(f"{role}={count}") for role, count in counts.items())
        fleet = _apart(lambda: asyncio.run(self._steer(lambda at: steering.change_fleet(at, wanted))))
        return {str(role): count for role, count in fleet.counts.items()}

    def drain(self, worker: str, *, replace: bool = False) -> dict[str, int]:
        """Let one worker finish its work and leave, like ``headrace fleet drain``. Return the
        wanted number of workers of each role. Raises ConfigError."""
        from pipeline.operator import steering

        fleet = _apart(lambda: asyncio.run(self._steer(lambda at: steering.drain(at, worker, replace))))
        return {str(role): count for role, count in fleet.counts.items()}

    def pause(self, reason: str = "") -> Pause:
        """Admit no new groups until ``resume``, like ``headrace run pause``; return the pause."""
        from pipeline.operator import steering

        return _apart(lambda: asyncio.run(self._steer(lambda at: steering.pause(at, reason))))

    def resume(self) -> Pause | None:
        """Admit new groups again; return the pause that ended, or None if there was none."""
        from pipeline.operator import steering

        return _apart(lambda: asyncio.run(self._steer(steering.resume)))

    async def _steer(self, steer: Callable[[Attached], Awaitable[_T]]) -> _T:
        from pipeline.operator.attached import attach

        async with attach(self.folder) as at:
            return await steer(at)

    def stop(self, *, now: bool = False, timeout_s: float | None = None) -> bool:
        """Drain the run and end it, like ``headrace down``; return whether it was running. With
        ``now`` unfinished work stays in the ledger. Raises DeadlineExceeded."""
        from pipeline.operator.ending import end_run

        return _apart(lambda: end_run(self.folder, now=now, timeout_s=timeout_s, report=lambda _: None))

    def wait(self, timeout_s: float) -> StatusReport:
        """Wait for the run's end and return its last status. Raises DeadlineExceeded if the run is
        still going on."""
        from pipeline.supervisor.run_folder import supervisor_pid

        deadline = time.monotonic() + timeout_s
        while supervisor_pid(self.folder) is not None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self.folder} has not ended within {timeout_s:g} s; it is still running")
            time.sleep(_POLL_S)
        return self.status()

    def export(self, out: str | Path, *, version: int | None = None) -> Path:
        """Write a checkpoint's model, by default the newest, with a model card to the new folder
        ``out``, and return it. Raises ConfigError or DataError as ``headrace run export``."""
        from pipeline.cli.export import export_model

        return export_model(self.folder, Path(out), version=version)


def score(
    file: str | Path,
    verifier: str | None = None,
    *,
    path: Iterable[str | Path] = (),
    by: str | None = None,
    timeout_s: float | None = None,
    processes: int | None = None,
    out: str | Path | None = None,
) -> ScoreReport:
    """Score a file of responses with a verifier. The options are those of ``headrace score``.

    Raises DataError for the file, ConfigError for the verifier."""
    from pipeline.cli.score.offline import score_file, scoring_settings

    config = scoring_settings([Path(folder) for folder in path], timeout_s=timeout_s, processes=processes)
    verdicts = None if out is None else Path(out)
    return _apart(lambda: score_file(Path(file), verifier, config=config, by=by, out=verdicts))


def _start(files: list[Path], overrides: list[str], timeout_s: float) -> Run:
    from pipeline.config.load import load_config, resolve_paths
    from pipeline.supervisor.run_folder import check_no_run, supervisor_pid

    config = resolve_paths(load_config(files, overrides, os.environ))
    check_no_run(config)
    folder = config.run_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "logs").mkdir(mode=0o700, exist_ok=True)
        output = os.open(folder / "logs" / OUTPUT_NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}; choose another place with run.dir") from error
    words = ["up", *map(str, files), *(word for text in overrides for word in ("--set", text)), "--plain"]
    with os.fdopen(output, "r+b", buffering=0) as file:
        # A separate session: an interrupted notebook cell does not stop the run.
        child = subprocess.Popen(
            headrace.command("pipeline.cli", *words),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        # The child outlives this object; the thread reaps it whenever it ends.
        threading.Thread(target=child.wait, name="headrace-up", daemon=True).start()
        deadline = time.monotonic() + timeout_s
        while not (supervisor_pid(folder) and _has_begun(folder)):
            if child.poll() is not None:
                break
            if time.monotonic() > deadline:
                # One signal is enough, since its workers have not begun: there is nothing to drain.
                child.terminate()
                where = f"its output is in {folder / 'logs' / OUTPUT_NAME}"
                raise DeadlineExceeded(f"{folder} did not start within {timeout_s:g} s; {where}")
            time.sleep(_POLL_S)
        if (folder / RESOLVED_NAME).is_file():
            return Run(folder)
        printed = os.pread(output, _LAST_CHARS, max(0, os.fstat(output).st_size - _LAST_CHARS))
    _forget(folder)
    raise _refusal(child.returncode, printed.decode(errors="replace"))


def _has_begun(folder: Path) -> bool:
    """Return whether a run has its configuration, its ledger and its fleet."""
    from pipeline.runtime.registry.contract import RunState

    if not (folder / RESOLVED_NAME).is_file():
        return False
    try:
        return Run(folder).status().state is not RunState.STARTING
    except LedgerError:
        return False


def _forget(folder: Path) -> None:
    """Remove what a refused start has left, but no other files in the folder."""
    with contextlib.suppress(OSError):
        (folder / "logs" / OUTPUT_NAME).unlink()
        (folder / "logs").rmdir()
        folder.rmdir()


def _refusal(exit_code: int, printed: str) -> HeadraceError:
    from pipeline.process.exit_codes import ExitCode

    reason = re.split(r"^headrace: ", printed, flags=re.MULTILINE)[-1].strip()
    kinds: dict[int, type[HeadraceError]] = {
        ExitCode.CONFIG: ConfigError,
        ExitCode.LEDGER_UNAVAILABLE: LedgerUnavailable,
    }
    return kinds.get(exit_code, HeadraceError)(reason or f"headrace up ended with exit code {exit_code}")


def _files(
    config: str | Path | Iterable[str | Path] | Mapping[str, Any], fleet: str | Path | None, private: Path
) -> list[Path]:
    if isinstance(config, Mapping):
        import tomli_w

        path = private / "settings.toml"
        write_private(path, tomli_w.dumps(_plain(config)).encode())
        files = [path]
    elif isinstance(config, str | Path):
        files = [Path(config)]
    else:
        files = [Path(file) for file in config]
    return [*files, *([] if fleet is None else [Path(fleet)])]


def _plain(value: Any) -> Any:
    """Return settings as plain TOML values: paths as text, absent values left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    from pipeline.config.describe import in_toml

    return [f"{key}={in_toml(value)}" for key, value in _plain(settings).items()]


def _apart(work: Callable[[], _T]) -> _T:
    """Run blocking work that starts its own event loop. If this thread already has one, as in a
    notebook, run it in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
