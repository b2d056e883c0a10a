"""The full-screen view of ``headrace top``, a Textual app.

It shows one snapshot a second from a feed, never reading two at once, and turns keys into changes of
the run. The feed keeps answering after the run has ended, so only the user closes the view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.widgets import Static

from pipeline.operator.overview import RunOverview
from pipeline.operator.top.feed import Feed, InspectionView, drop_page, version_page
from pipeline.operator.top.format import (
    INCIDENT_COLUMNS,
    INCIDENT_WIDTHS,
    QUEUE_COLUMNS,
    ROLE_COLUMNS,
    WORKER_COLUMNS,
    TableRow,
    fitted,
    head_lines,
    incident_rows,
    queue_rows,
    role_rows,
    worker_rows,
)
from pipeline.operator.top.screens import (
    CTRL_C_DRAINS,
    CTRL_C_LEAVES,
    HELP,
    LiveTable,
    LogScreen,
    QuestionScreen,
    TextScreen,
    TrajectoriesScreen,
)
from protocol.errors import HeadraceError
from protocol.ids import Role
from protocol.printable import printable_line

REFRESH_S = 1.0
_VIEWS = ("run", "workers", "versions", "drops", "incidents")
_KEYS = "? help  1-5 view  +/- scale  d drain  p pause  l log  t trajectories  q quit"
_WIDE = 130
_TALL = 36

_CSS = """
Screen { layout: vertical; overflow: hidden; }
Static { height: auto; }
LiveTable { height: 1fr; }
#views { height: 1; }
#body { height: 1fr; layout: horizontal; }
#parts { layout: horizontal; height: 1fr; width: 1fr; }
#roles { width: 34; }
#queues { width: 1fr; }
#workers, #pages { display: none; }
#workers { width: 1fr; height: 1fr; }
#pages { height: 1fr; }
#incidents { height: 4; }
#said { height: auto; max-height: 4; }
#keys { height: 1; }
.title { height: auto; }
Screen.show-workers #parts, Screen.show-workers #incidents { display: none; }
Screen.show-workers #workers { display: block; }
Screen.show-versions #body, Screen.show-versions #incidents { display: none; }
Screen.show-versions #pages { display: block; }
Screen.show-drops #body, Screen.show-drops #incidents { display: none; }
Screen.show-drops #pages { display: block; }
Screen.show-incidents #body { display: none; }
Screen.show-incidents #incidents { height: 1fr; }
Screen.-tall #incidents { height: 12; }
Screen.-tall.show-incidents #incidents { height: 1fr; }
Screen.-wide.show-run #workers { display: block; }
Screen.-wide.show-run #parts { layout: vertical; width: 62; }
Screen.-wide.show-run #roles { width: 100%; height: 9; }
QuestionScreen { align: center middle; }
#question { width: 70; max-width: 100%; height: auto; border: ascii $foreground; padding: 1 2; background: $background; }
RichLog { height: 1fr; background: transparent; }
Input, Input:focus { height: 1; border: none; padding: 0; text-style: reverse; }
"""


class TopApp(App[int]):
    CSS = _CSS
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (_WIDE, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-low"), (_TALL, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number + 1), f"view('{name}')", name) for number, name in enumerate(_VIEWS)),
        Binding("plus,equals_sign", "scale(1)", "one more"),
        Binding("minus", "scale(-1)", "one fewer"),
        Binding("d", "drain", "drain"),
        Binding("p", "pause", "pause"),
        Binding("r", "resume", "resume"),
        Binding("l", "log", "log"),
        Binding("t", "trajectories", "trajectories"),
        Binding("question_mark,h,f1", "help", "help"),
        Binding("q", "leave", "quit"),
        Binding("ctrl+c", "interrupt", "quit", priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        *,
        refresh_s: float = REFRESH_S,
        on_interrupt: Callable[[], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        """``on_interrupt`` is called for Ctrl-C instead of leaving; ``on_start`` once the app owns the
        terminal."""
        super().__init__()
        self.animation_level = "none"
        self.feed = feed
        self.picture: RunOverview | None = None
        self._refresh_s = refresh_s
        self._on_interrupt, self._on_start = on_interrupt, on_start
        self._view = "run"
        self._num_lines = 0
        self._is_acting = False
        self._inspected: InspectionView | None = None

    # -- the screen --------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static(Text("reading the run"), id="head")
        yield Static(id="views")
        with Container(id="body"):
            with Container(id="parts"):
                yield LiveTable(ROLE_COLUMNS, (9, 5, 12), name="roles", shares=(2,))
                yield LiveTable(QUEUE_COLUMNS, (12, 9, 5, 5, 6), name="queues", shares=(0, 1))
            yield LiveTable(WORKER_COLUMNS, (16, 4, 5, 22, 14), name="workers", shares=(3, 4))
        with VerticalScroll(id="pages"):
            yield Static(id="page")
        yield LiveTable(INCIDENT_COLUMNS, INCIDENT_WIDTHS, name="incidents", shares=(2,))
        yield Static(id="said")
        yield Static(Text(_KEYS, style="reverse", no_wrap=True, overflow="ellipsis"), id="keys")

    def on_mount(self) -> None:
        self.action_view("run")
        if self._on_start is not None:
            self.call_after_refresh(self._on_start)
        self.run_worker(self._follow(), name="follow")

    async def _follow(self) -> None:
        while True:
            began_s = time.monotonic()
            picture = await self.feed.read()
            if self._view in ("versions", "drops"):
                self._inspected = await self.feed.inspect()
            self.show(picture)
            await asyncio.sleep(max(0.1 * self._refresh_s, self._refresh_s - (time.monotonic() - began_s)))

    def show(self, picture: RunOverview) -> None:
        """Show a snapshot. Hidden tables are not updated."""
        self.picture = picture
        screen = self.screen_stack[0]
        lines = fitted(head_lines(picture), self.size.width, num_wrapped=2)
        head = Text("\n").join(Text(line, style=style) for line, style in lines)
        # A new layout costs as much as everything else.
        screen.query_one("#head", Static).update(head, layout=len(lines) != self._num_lines)
        self._num_lines = len(lines)
        for name, rows in (
            ("roles", role_rows),
            ("workers", worker_rows),
            ("incidents", lambda run: incident_rows(run, self.size.width)),
        ):
            self._fill(name, lambda rows=rows: rows(picture))
        self._fill("queues", lambda: queue_rows(picture.queues))
        if self._view in ("versions", "drops"):
            page = version_page if self._view == "versions" else drop_page
            parts = [Text(part) if isinstance(part, str) else part for part in page(picture, self._inspected)]
            screen.query_one("#page", Static).update(Group(*parts))

    def _fill(self, name: str, rows: Callable[[], list[TableRow]]) -> None:
        table = self.screen_stack[0].query_one(f"#{name}", LiveTable)
        if table.display and all(parent.display for parent in table.ancestors if hasattr(parent, "display")):
            table.show(rows())

    def say(self, sentence: str) -> None:
        """Show a sentence above the keys, until the next one."""
        self.screen_stack[0].query_one("#said", Static).update(Text(printable_line(sentence), style="bold"))

    # -- keys --------------------------------------------------------------------------------------

    def action_view(self, name: str) -> None:
        self._view = name
        screen = self.screen_stack[0]
        for other in _VIEWS:
            screen.set_class(other == name, f"show-{other}")
        tabs = "  ".join(
            f"[{number} {view}]" if view == name else f" {number} {view} " for number, view in enumerate(_VIEWS, 1)
        )
        screen.query_one("#views", Static).update(Text(tabs, no_wrap=True))
        first = {"run": "roles", "workers": "workers", "incidents": "incidents"}.get(name, "pages")
        screen.query_one(f"#{first}").focus()
        if self.picture is not None:
            self.show(self.picture)

    def action_scale(self, change: int) -> None:
        """Add or remove a worker of the role under the cursor."""
        role = self._chosen_role()
        if role is None:
            self.say("choose a role or a worker with the arrows first (views 1 and 2)")
        elif change > 0:
            self._act(lambda: self.feed.scale(role, 1))
        else:
            question = f"One {role} worker fewer? It finishes or gives back its work; nothing is lost."
            self._ask(question, lambda: self.feed.scale(role, -1))

    def action_drain(self) -> None:
        worker = self._chosen_worker()
        if worker is None:
            self.say("choose a worker first: 2 shows the workers")
        else:
            question = f"Drain {worker}? It finishes or gives back its work and leaves; its role has one worker fewer."
            self._ask(question, lambda: self.feed.drain(worker))

    def action_pause(self) -> None:
        question = "Pause the run? No new group is admitted until r resumes; work in flight is finished."
        self._ask(question, self.feed.pause)

    def action_resume(self) -> None:
        self._act(self.feed.resume)

    def action_log(self) -> None:
        worker = self._chosen_worker()
        if worker is None:
            self.say("choose a worker first: 2 shows the workers")
        else:
            self.push_screen(LogScreen(worker, self.feed.log(worker)))

    def action_trajectories(self) -> None:
        self.push_screen(TrajectoriesScreen(self.feed.recent, self.feed.trajectory))

    def action_help(self) -> None:
        ctrl_c = CTRL_C_LEAVES if self._on_interrupt is None else CTRL_C_DRAINS
        self.push_screen(TextScreen("headrace top", HELP.format(ctrl_c=ctrl_c).splitlines()))

    def action_leave(self) -> None:
        self.exit(0)

    def action_interrupt(self) -> None:
        if self._on_interrupt is None:
            self.exit(0)
        else:
            self._on_interrupt()

    def on_live_table_taken(self, event: LiveTable.Taken) -> None:
        """Enter: go from a role to its workers, from a worker to its log."""
        if event.table.id == "roles":
            role = self._chosen_role()
            self.action_view("workers")
            workers = [row.worker for row in self.picture.workers if row.role == role] if self.picture else []
            if workers:
                self.query_one("#workers", LiveTable).choose(workers[0])
        elif event.table.id in ("workers", "incidents"):
            self.action_log()

    def _chosen_worker(self) -> str | None:
        focused = self.focused
        if isinstance(focused, LiveTable) and focused.id == "workers":
            return focused.chosen
        if isinstance(focused, LiveTable) and focused.id == "incidents" and self.picture is not None:
            chosen = focused.chosen or ""
            found = (one.worker for one in self.picture.incidents if chosen.startswith(f"{one.at_s} {one.worker} "))
            return next(found, None)
        return None

    def _chosen_role(self) -> Role | None:
        focused = self.focused
        if self.picture is None or not isinstance(focused, LiveTable):
            return None
        if focused.id == "roles":
            return next((row.role for row in self.picture.roles if row.role == focused.chosen), None)
        if focused.id == "workers":
            return next((row.role for row in self.picture.workers if row.worker == focused.chosen), None)
        return None

    def _ask(self, question: str, act: Callable[[], Awaitable[str]]) -> None:
        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self._act(act)
            else:
                self.say("nothing was changed")

        self.push_screen(QuestionScreen(question), answered)

    def _act(self, act: Callable[[], Awaitable[str]]) -> None:
        if self._is_acting:
            self.say("the last change is still being made")
            return
        self._is_acting = True
        self.say("...")
        self.run_worker(self._acting(act), name="act")

    async def _acting(self, act: Callable[[], Awaitable[str]]) -> None:
        try:
            self.say(await act())
        except (HeadraceError, OSError, TimeoutError) as error:
            self.say(str(error) or "the ledger did not answer in time")
        finally:
            self._is_acting = False
