"""The rules of the Trace Event Format, as far as a file can break them, and its reader."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "M": {"name", "pid", "tid", "args"},
}
_METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
_METADATA["thread_sort_index"] = "sort_index"


class TraceFile:
    """A file's events by their kind; made only of one that keeps the rules."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(path.read_text())
        assert whole["displayTimeUnit"] in ("ms", "ns")
        self.events: list[Event] = whole["traceEvents"]
        for event in self.events:
            _check_fields(event)
        self.slices = [event for event in self.events if event["ph"] == "X"]
        self.processes = self._named("process_name")
        self.tracks = self._named("thread_name")
        assert {event["pid"] for event in self.events} <= {pid for pid, _ in self.processes}
        assert {(event["pid"], event["tid"]) for event in self.slices} <= set(self.tracks)
        self._check_nesting()
        self.arrows = self._arrows()

    def of(self, process: str, track: str = "") -> list[Event]:
        """Return the slices of a process, or of one of its tracks, in the order of time."""
        found = [
            event
            for event in self.slices
            if self.processes[event["pid"], 0] == process
            and (not track or self.tracks[event["pid"], event["tid"]] == track)
        ]
        return sorted(found, key=lambda event: (event["ts"], -event["dur"]))

    def ends(self, name: str) -> list[tuple[Event, Event]]:
        """Return the slices at both ends of each arrow of a name."""
        return [(begin, end) for arrow, begin, end in self.arrows if arrow == name]

    def _named(self, kind: str) -> dict[tuple[int, int], str]:
        found = [event for event in self.events if event["ph"] == "M" and event["name"] == kind]
        names = {(event["pid"], event["tid"]): event["args"]["name"] for event in found}
        assert len(names) == len(found), "each is named once"
        return names

    def _check_nesting(self) -> None:
        tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self.slices:
            tracks[event["pid"], event["tid"]].append(event)
        for events in tracks.values():
            around: list[int] = []
            for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
                begin, end = event["ts"], event["ts"] + event["dur"]
                while around and around[-1] <= begin:
                    around.pop()
                assert not around or end <= around[-1], f"{event} overlaps another slice of its track"
                around.append(end)

    def _arrows(self) -> list[tuple[str, Event, Event]]:
        begins = {event["id"]: event for event in self.events if event["ph"] == "s"}
        ends = {event["id"]: event for event in self.events if event["ph"] == "f"}
        assert begins.keys() == ends.keys()
        assert len(begins) + len(ends) == sum(event["ph"] in "sf" for event in self.events)
        found = []
        for number, begin in begins.items():
            end = ends[number]
            assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
            assert begin["ts"] <= end["ts"] and end["bp"] == "e"
            found.append((begin["name"], self._around(begin), self._around(end)))
        return found

    def _around(self, flow: Event) -> Event:
        inside = [
            event
            for event in self.slices
            if (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
            and event["ts"] < flow["ts"] < event["ts"] + event["dur"]
        ]
        assert inside, f"{flow} is in no slice"
        return max(inside, key=lambda event: event["dur"])


def _check_fields(event: Event) -> None:
    kind = event["ph"]
    assert event.keys() - {"ph"} == _NEEDED[kind], event
    for name in ("pid", "tid", "ts", "dur", "id"):
        assert name not in event or (type(event[name]) is int and event[name] >= 0), event
    assert all(isinstance(event[name], str) and event[name] for name in ("name", "cat") if name in event), event
    if kind == "X":
        assert event["dur"] > 0
    if kind == "M":
        assert _METADATA[event["name"]] in event["args"]
