"""TensorBoard: event files in ``<run_dir>/tensorboard``, for ``tensorboard --logdir runs``.

Updates and evaluations are in the folder itself. The critic's steps and the fleet's seconds are in
the folders ``value`` and ``fleet``, since they count another thing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from pipeline.observability.sinks.event_file import EventFile
from pipeline.observability.sinks.points import Axis, Point
from pipeline.observability.sinks.seam import SinkFailed
from pipeline.observability.sinks.spec import SinkSpec

NAME: Final = "tensorboard"
_FOLDERS: Final = {Axis.UPDATE: ".", Axis.VALUE: "value", Axis.FLEET: "fleet"}


class TensorBoardSink:
    """Event files of one run."""

    id = ""

    def __init__(self, spec: SinkSpec) -> None:
        """Open no file yet."""
        self._spec = spec
        self._files: dict[Axis, EventFile] = {}

    def write(self, points: Sequence[Point]) -> None:
        """Write points; they are with the operating system on return. Raises SinkFailed."""
        try:
            for point in points:
                self._file(point.axis).scalars(point.at_s, point.step, point.values)
            for file in self._files.values():
                file.flush()
        except OSError as error:
            raise SinkFailed(f"{self._spec.run_dir / NAME} cannot be written: {error.strerror}") from error

    def restart(self, axis: Axis, step: int) -> None:
        """Void the points of an axis from ``step`` on. Raises SinkFailed."""
        try:
            self._file(axis).restart(time.time(), step)
        except OSError as error:
            raise SinkFailed(f"{self._spec.run_dir / NAME} cannot be written: {error.strerror}") from error

    def close(self, *, has_failed: bool) -> None:
        """Close the files. Raises SinkFailed."""
        files, self._files = self._files, {}
        failed = [error for file in files.values() if (error := file.close()) is not None]
        if failed:
            raise SinkFailed(f"{self._spec.run_dir / NAME} cannot be written: {failed[0].strerror}")

    def _file(self, axis: Axis) -> EventFile:
        if axis not in self._files:
            self._files[axis] = file = EventFile(self._spec.run_dir / NAME / _FOLDERS[axis])
            if axis is Axis.UPDATE:
                file.text(time.time(), "config", f"```toml\n{self._spec.settings_text}\n```")
        return self._files[axis]
