"""A wall clock that a drill can move, in every Python process that finds this module on its path.

*Consumes* the file that HEADRACE_DRILL_CLOCK names: one float64, seconds to add. *Produces* a
``time.time`` that adds them. *Waits for* nothing. The machine's own clock, the ledger server's and
monotonic time stay as they are.
"""

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
