"""A fleet written by hand: every worker finishes a piece a second, until a test changes that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeline.fleet.flow.rows import FlowIncident, LinkRow, StateRow
from pipeline.fleet.flow.watcher import FlowWatch

SHAPE = {"generator": 4, "reward": 3, "learner": 1}
BREAKS_S = 60


def names(role: str) -> list[str]:
    return [role] if SHAPE[role] == 1 else [f"{role}-{index}" for index in range(SHAPE[role])]


WORKERS = {name: role for role in SHAPE for name in names(role)}
LINKS = [
    *((sender, receiver) for sender in names("generator") for receiver in names("reward")),
    *((sender, "learner") for sender in names("reward")),
    *(("learner", receiver) for receiver in names("generator")),
]

Change = Callable[[int, StateRow], StateRow | None]
LinkChange = Callable[[int, LinkRow], LinkRow | None]


class MadeFleet:
    """Rows by second. Changes apply from ``BREAKS_S`` on; None leaves the row out."""

    def __init__(self) -> None:
        self.changes: dict[str, Change] = {}
        self.link_changes: dict[tuple[str, str], LinkChange] = {}

    def states(self, second: int) -> list[StateRow]:
        rows = list[StateRow]()
        for name, role in WORKERS.items():
            row: StateRow | None = StateRow(
                second, name, role, "compute", done=second, in_flight=1, oldest_age_s=0.5, input_depth=0,
                output_depth=0, errors=0, policy_version=second // 5 if role != "reward" else -1,
            )  # fmt: skip
            if second >= BREAKS_S and name in self.changes and row is not None:
                row = self.changes[name](second, row)
            if row is not None:
                rows.append(row)
        return rows

    def links(self, second: int) -> list[LinkRow]:
        rows = list[LinkRow]()
        for sender, receiver in LINKS:
            row: LinkRow | None = LinkRow(second, sender, receiver, second, second, second, second, 0.0, second)
            if second >= BREAKS_S and (sender, receiver) in self.link_changes and row is not None:
                row = self.link_changes[sender, receiver](second, row)
            if row is not None:
                rows.append(row)
        return rows

    def incidents(
        self, until_s: int = 110, *, watch: FlowWatch | None = None, states: bool = True, links: bool = True
    ) -> list[FlowIncident]:
        watch = watch or FlowWatch()
        found = list[FlowIncident]()
        for second in range(until_s):
            found += watch.tick(
                second + 0.5, self.states(second) if states else [], self.links(second) if links else []
            )
        return found

    # -- what tests do to it --------------------------------------------------------------------

    def hang(self, name: str, word: str = "compute", **others: float) -> None:
        """The worker reports the word and finishes nothing more; its messages stand."""
        self.changes[name] = lambda _, row: replace(row, waiting_for=word, done=BREAKS_S - 1, **others)
        self.stand(name)

    def stand(self, name: str) -> None:
        for sender, receiver in LINKS:
            if sender == name:
                self.link_changes[sender, receiver] = lambda _, row: replace(
                    row, produced=BREAKS_S - 1, sent=BREAKS_S - 1, received=BREAKS_S - 1, done=BREAKS_S - 1,
                    acknowledged=BREAKS_S - 1,
                )  # fmt: skip
            elif receiver == name:
                self.link_changes[sender, receiver] = lambda second, row: replace(
                    row, sent=min(second, BREAKS_S + 1), received=min(second, BREAKS_S + 1), done=BREAKS_S - 1,
                    acknowledged=BREAKS_S - 1,
                )  # fmt: skip

    def wait(self, name: str, word: str, **others: float) -> None:
        """The worker waits for others from now on."""
        self.changes[name] = lambda _, row: replace(row, waiting_for=word, done=BREAKS_S - 1, in_flight=0, **others)

    def kill(self, name: str) -> None:
        self.changes[name] = lambda *_: None
        self.stand(name)


def blamed(incidents: Sequence[FlowIncident]) -> list[tuple[str, str]]:
    """Return the first cause of each incident, with its kind."""
    return [(incident.causes[0].component, str(incident.causes[0].kind)) for incident in incidents]
