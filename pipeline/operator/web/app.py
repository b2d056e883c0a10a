"""The web page's addresses and their answers.

    GET  /                                the page; /static/ has its scripts and styles
    GET  /api/session                     what may be asked and done, given the right token
    GET  /api/runs                        the runs that are served
    GET  /api/runs/RUN/events             server-sent events: a snapshot of the run, about once a second
    GET  /api/runs/RUN/history            curves: updates, evaluations, value steps
    GET  /api/runs/RUN/record             what a run leaves for people: summary, use of time, evaluations, settings
    GET  /api/runs/RUN/samples            ?last=UPDATES&before=UPDATE
    GET  /api/runs/RUN/logs               ?worker=NAME&level=LEVEL&last=LINES
    GET  /api/runs/RUN/trajectory         ?name=TRAJECTORY: its life
    GET  /api/runs/RUN/audit              the ledger's balance, if cheap to count; audit-now: in any
                                          case; drops, versions, groups, why: as the commands
    POST /api/runs/RUN/scale              {"role": ROLE, "count": NUMBER or null for auto}
    POST /api/runs/RUN/pause              {"reason": TEXT}; resume: {}
    POST /api/runs/RUN/drain              {"worker": NAME}

A refused request is answered with ``{"error": SENTENCE}``. Changes use the functions of the commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from pipeline.ledger.types import Pause
from pipeline.observability.page import STATIC
from pipeline.observability.page.figures import HistoryFigures, encoded, log_figures, names_in_words, sample_figures
from pipeline.observability.record_tables import record_figures
from pipeline.observability.report_data import read_records
from pipeline.operator import steering
from pipeline.operator.attached import Attached
from pipeline.operator.runs import KeptFiles, run_folders
from pipeline.operator.web.guard import Guard, RequestRules
from pipeline.operator.web.reader import EventStream, Question, RunReader
from pipeline.operator.web.views import VIEWS, life, painter, served_runs, trouble_picture
from pipeline.runtime.registry.contract import Fleet
from pipeline.supervisor.run_folder import supervisor_pid
from protocol.errors import ConfigError, DeadlineExceeded, HeadraceError, LedgerError
from protocol.ids import ELASTIC_ROLES, Role

_MAX_COUNT: Final = 100_000


async def scale(at: Attached, values: Mapping[str, Any]) -> Fleet:
    """Set a role's number of workers. ``values``: ``role``, and ``count`` (null: generators by demand).
    Raises ConfigError."""
    role, count = values.get("role"), values.get("count")
    if role not in ELASTIC_ROLES:
        raise ConfigError(f"role {role!r}: expected one of {', '.join(ELASTIC_ROLES)}")
    is_number = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= _MAX_COUNT
    if not is_number and not (count is None and role == Role.GENERATOR):
        raise ConfigError(f"count {count!r}: expected a whole number from 1, or null for generators by demand")
    _check_running(at)
    return await steering.change_fleet(at, {Role(role): count})


async def pause(at: Attached, values: Mapping[str, Any]) -> Pause:
    """Stop admitting new groups. ``values``: ``reason``. Raises ConfigError."""
    _check_running(at)
    return await steering.pause(at, str(values.get("reason", "")))


async def resume(at: Attached, _: Mapping[str, Any]) -> dict[str, bool]:
    """Admit new groups again. Raises ConfigError."""
    _check_running(at)
    return {"was_paused": await steering.resume(at) is not None}


async def drain(at: Attached, values: Mapping[str, Any]) -> Fleet:
    """Have a worker finish and leave. ``values``: ``worker``. Raises ConfigError."""
    _check_running(at)
    return await steering.drain(at, str(values.get("worker", "")))


def _check_running(at: Attached) -> None:
    """Raise ConfigError for a run without a supervisor, or a copy, where a change would be lost."""
    if supervisor_pid(at.run_dir) is None:
        raise ConfigError(f"{at.run_dir.name} is not running; continue it with `headrace up --resume {at.run_dir}`")
    if at.is_copy:
        raise ConfigError(
            f"{at.run_dir.name} has just been restarted, and the page still reads a copy of it; try again in a "
            f"few seconds"
        )


ACTIONS: Final[Mapping[str, Callable[[Attached, Mapping[str, Any]], Awaitable[object]]]] = {
    "scale": scale,
    "pause": pause,
    "resume": resume,
    "drain": drain,
}
"""By address."""


_MAX_BODY_BYTES: Final = 16 << 10
_MOST_DIGITS: Final = 20
_MAX_STREAMS: Final = 64
_RUNS_KEPT_S: Final = 5.0
Handler = Callable[[Request], Awaitable[Response]]


class ServedRuns:
    """The runs of one folder and their readers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[str, RunReader] = {}
        self._history = HistoryFigures()
        self._history_lock = asyncio.Lock()
        self._recording = asyncio.Lock()
        self._listed: tuple[float, bytes] | None = None
        self._kept = KeptFiles()
        self._listing = asyncio.Lock()
        self.num_streams = 0

    async def listed(self) -> bytes:
        """Return a row for each run, as JSON that is at most a few seconds old."""
        async with self._listing:
            now_s = asyncio.get_running_loop().time()
            if self._listed is None or now_s - self._listed[0] > _RUNS_KEPT_S:
                rows = await asyncio.to_thread(served_runs, self._folder, self._kept)
                self._listed = now_s, encoded({"folder": self._folder, "runs": rows})
            return self._listed[1]

    def reader(self, name: str) -> RunReader:
        """Return a run's reader. Raises HTTPException 404 for an unknown run."""
        run_dir = self.run_dir(name)
        found = self._readers.get(name)
        if found is None or found.run_dir != run_dir:
            found = self._readers[name] = RunReader(run_dir, painter, trouble_picture)
        return found

    def run_dir(self, name: str) -> Path:
        """Return a run's folder. Raises HTTPException 404 for an unknown run."""
        there = {path.name: path for path in run_folders(self._folder)}
        if name not in there:
            raise HTTPException(404, f"no run {name!r} in {self._folder}; it has: {names_in_words(there)}")
        return there[name]

    async def history(self, name: str) -> bytes:
        run_dir = self.run_dir(name)
        async with self._history_lock:
            return await asyncio.to_thread(lambda: encoded(self._history.read(run_dir)))

    async def record(self, name: str) -> bytes:
        run_dir = self.run_dir(name)
        # One at a time: it parses the whole history, 10 s for 100,000 updates.
        async with self._recording:
            return await asyncio.to_thread(lambda: encoded(record_figures(run_dir, read_records(run_dir))))

    def end_streams(self) -> None:
        """End the event streams of all pages, so that the server can exit."""
        for reader in self._readers.values():
            reader.feed.close()

    async def close(self) -> None:
        for reader in self._readers.values():
            await asyncio.to_thread(reader.close)


def build_app(runs: ServedRuns, rules: RequestRules) -> ASGIApp:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await runs.close()

    async def index(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def session(_: Request) -> Response:
        return JSONResponse({"abilities": [*VIEWS, "trajectory", *ACTIONS], "elastic": ELASTIC_ROLES})

    async def listed(_: Request) -> Response:
        return _json(await runs.listed())

    async def events(request: Request) -> Response:
        if runs.num_streams >= _MAX_STREAMS:
            raise HTTPException(503, f"{_MAX_STREAMS} pages are open; close some")
        reader = runs.reader(request.path_params["run"])
        # Starlette calls the returned object as an ASGI application.
        return _CountedStream(runs, EventStream(reader))

    async def history(request: Request) -> Response:
        return _json(await runs.history(request.path_params["run"]))

    async def record(request: Request) -> Response:
        return _json(await runs.record(request.path_params["run"]))

    async def samples(request: Request) -> Response:
        run_dir, last = runs.run_dir(request.path_params["run"]), _number(request, "last", 4, most=50)
        before = _number(request, "before", 0) or None
        return _json(encoded(await asyncio.to_thread(sample_figures, run_dir, last=last, before=before)))

    async def logs(request: Request) -> Response:
        run_dir, last = runs.run_dir(request.path_params["run"]), _number(request, "last", 200, most=500)
        worker, level = request.query_params.get("worker"), request.query_params.get("level", "info")
        found = await asyncio.to_thread(log_figures, run_dir, worker=worker or None, level=level, last=last)
        return _json(encoded(found))

    async def trajectory(request: Request) -> Response:
        reader, name = runs.reader(request.path_params["run"]), request.query_params.get("name", "")
        return _json(encoded(await reader.ask(lambda at: life(at, name))))

    def view(name: str, question: Question) -> Handler:
        async def answer(request: Request) -> Response:
            return _json(await runs.reader(request.path_params["run"]).view(name, question))

        return answer

    def change(act: Callable[[Attached, Mapping[str, Any]], Awaitable[object]]) -> Handler:
        async def answer(request: Request) -> Response:
            values = await _values(request)
            reader = runs.reader(request.path_params["run"])
            done = await reader.ask(lambda at: act(at, values))
            reader.forget()
            return _json(encoded(done))

        return answer

    routes = [
        Route("/", index),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/session", session),
        Route("/api/runs", listed),
        Route("/api/runs/{run}/events", events),
        Route("/api/runs/{run}/history", history),
        Route("/api/runs/{run}/record", record),
        Route("/api/runs/{run}/samples", samples),
        Route("/api/runs/{run}/logs", logs),
        Route("/api/runs/{run}/trajectory", trajectory),
        *(Route(f"/api/runs/{{run}}/{name}", view(name, question)) for name, question in VIEWS.items()),
        *(Route(f"/api/runs/{{run}}/{name}", change(act), methods=["POST"]) for name, act in ACTIONS.items()),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _refused, HeadraceError: _failed},
        lifespan=lifespan,
    )
    return Guard(app, rules)


class _CountedStream(Response):
    """An event stream that is counted while open."""

    def __init__(self, runs: ServedRuns, stream: EventStream) -> None:
        super().__init__()
        self._runs, self._stream = runs, stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._runs.num_streams += 1
        try:
            await self._stream(scope, receive, send)
        finally:
            self._runs.num_streams -= 1


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def _failed(_: Request, error: Exception) -> Response:
    status = 503 if isinstance(error, LedgerError | DeadlineExceeded) else 400
    return JSONResponse({"error": str(error)}, status)


async def _values(request: Request) -> Mapping[str, Any]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"the request has more than {_MAX_BODY_BYTES:,} bytes")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the request is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise HTTPException(400, f"expected a JSON object, got a {type(values).__name__}")
    return values


def _number(request: Request, name: str, default: int, *, most: int = 1 << 31) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigError(f"{name}={text!r}: expected a whole number from 0 to {most}")
    return min(int(text), most)
