"""A wall clock that a drill can move, in every Python process that finds this module on its path.

HEADRACE_DRILL_CLOCK names a file with one float64, the seconds that ``time.time`` adds. The
machine's own clock, the ledger server's and monotonic time stay as they are."""

import mmap
import os
import struct
import time

_path = os.environ.get("HEADRACE_DRILL_CLOCK")
if _path is not None:
    with open(_path, "rb") as _file:  # noqa: PTH123 -- loaded in every process: nothing more than this is imported
        _offset = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _true_time = time.time

    def _moved_time() -> float:
        return _true_time() + struct.unpack("<d", _offset[:8])[0]

    time.time = _moved_time
