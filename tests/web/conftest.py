"""A real run, two with hostile text, the dashboard before them, and a browser.

``make test-web`` runs these tests: they need playwright and the system's chromium."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.observability.history import HISTORY_NAME, HistoryTail, UpdateRow
from tests.pipeline.operator.web.served import HOSTILE, served_run, write_files

if TYPE_CHECKING:
    from playwright.sync_api import Page  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BEGIN_S = 300.0
LARGE = ("algorithm.group_size=64", "algorithm.groups_per_update=64")
NUM_HELD = 2_500
"""Trajectories in the large run's ledger: more than the page counts without a request."""
HOSTILE_WORKER = "generator-<script>window.hacked = true</script>"
collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--pictures FOLDER``."""
    parser.addoption("--pictures", type=Path, default=None, help="Keep screenshots in this folder.")


def chromium() -> str:
    """Return the browser's path; end the tests with a sentence without one."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.exit("no chromium on PATH: `apt-get install chromium`, or CHROMIUM=PATH make test-web", returncode=2)
    return found


@dataclass
class Dashboard:
    """A dashboard that is served: where, and which runs."""

    url: str
    token: str
    folder: Path

    def headrace(self, *words: str) -> Any:
        """Return the JSON of a command on the real run."""
        command = [sys.executable, "-m", "pipeline.cli", *words, "--json"]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=120)
        return json.loads(done.stdout)

    @property
    def live(self) -> Path:
        """The real run's folder."""
        return self.folder / "live"


@pytest.fixture(scope="session")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """Start the demo's fleet, and the dashboard of its folder. It has a hostile run of files too,
    and a large one: a worker of a hostile name has leased its trajectories."""
    chromium()
    place = tmp_path_factory.mktemp("web")
    folder = place / "runs"
    folder.mkdir()
    python = [sys.executable, "-m"]
    subprocess.run([*python, "ops.demo.task", "--out", str(place / "data")], cwd=ROOT, check=True, timeout=120)
    data = [
        f"data.{name}=['{place / 'data' / file}']"
        for name, file in (("train", "train.jsonl"), ("evaluation", "heldout.jsonl"))
    ]
    settings = [*data, "run.name=live", f"run.dir={folder}", "run.num_updates=100000", "learner.schedule=constant"]
    words = [*python, "pipeline.cli", "up", "configs/demo.toml", "--fleet", "configs/fleets/demo.toml", "--plain"]
    words += [word for text in settings for word in ("--set", text)]
    with (place / "up").open("wb") as out:
        fleet = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out)
    server, stack = None, ExitStack()
    try:
        until(lambda: num_updates(folder / "live") >= 3 or fleet.poll() is not None, BEGIN_S)
        assert fleet.poll() is None, (place / "up").read_text()
        hostile_run(folder / "hostile", folder / "live")
        (place / "large").mkdir()
        large = served_run(
            place / "large", f"run.dir={folder}", "run.name=large", *LARGE, num_leased=NUM_HELD, worker=HOSTILE_WORKER
        )
        stack.enter_context(large)
        serve = [*python, "pipeline.cli", "run", "dashboard", str(folder), "--port", "0"]
        server = subprocess.Popen(
            serve, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        assert server.stdout is not None
        found = re.fullmatch(r"(http://\S+/)#token=(\S+)", server.stdout.readline().strip())
        assert found
        yield Dashboard(found[1], found[2], folder)
    finally:
        if server is not None:
            server.terminate()
            server.wait(20)
            assert server.stdout is not None
            server.stdout.close()
        stack.close()
        # Two signals: at once, without a drain.
        for _ in range(2):
            fleet.terminate()
            time.sleep(1.0)
        fleet.wait(60)


def hostile_run(folder: Path, like: Path) -> None:
    """Make a run of files alone, whose samples and logs are hostile."""
    (folder / "logs").mkdir(parents=True)
    shutil.copy(like / "config.toml", folder / "config.toml")
    write_files(folder)
    line = {"at": "2026-01-01T00:00:00Z", "worker": "generator-0", "level": "info", "event": HOSTILE, "text": HOSTILE}
    (folder / "logs" / "generator-0.jsonl").write_text(json.dumps(line) + "\n")


def num_updates(run_dir: Path) -> int:
    """Return the number of updates in a run's history."""
    return sum(isinstance(row, UpdateRow) for row in HistoryTail(run_dir / HISTORY_NAME).read())


def until(condition: Any, limit_s: float) -> None:
    """Wait for a condition. Raises AssertionError at the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.2)


@dataclass
class Browser:
    """Opens pages, and collects what they complain of."""

    playwright: Any
    folder: Path
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    _opened: list[Any] = field(default_factory=list)

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        """Open a page with a new user's folder."""
        context = self.playwright.chromium.launch_persistent_context(
            self.folder / str(len(self._opened)),
            executable_path=chromium(),
            args=list(FLAGS),
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        self._opened.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(url[:12]) else self.foreign.append(asked.url))
        page.goto(url)
        return page

    def close(self) -> None:
        """Close all pages."""
        for context in self._opened:
            context.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser whose pages complained of nothing and loaded nothing from elsewhere."""
    from playwright.sync_api import expect, sync_playwright  # pyright: ignore[reportMissingImports]

    # The first look at a run takes seconds where the fleet has all cores.
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        opened = Browser(playwright, tmp_path)
        yield opened
        opened.close()
        assert opened.complaints == []
        assert opened.foreign == []


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Page:
    """The page of the real run, with a picture."""
    page = browser.open(f"{dashboard.url}#token={dashboard.token}")
    page.wait_for_selector("main")
    show(page, "live", "overview")
    return page


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Keeps a screenshot by its name, where ``--pictures`` names a folder."""
    pictures: Path | None = request.config.getoption("--pictures")

    def kept(page: Page, name: str) -> None:
        if pictures is not None:
            page.screenshot(path=pictures / f"{name}.png", full_page=True)

    return kept


def show(page: Page, run: str, tab: str) -> None:
    """Go to a run's tab."""
    page.evaluate("hash => { location.hash = hash }", f"#/{run}/{tab}")
    page.wait_for_selector(f'.tabs a[aria-current="page"][href="#/{run}/{tab}"]')
