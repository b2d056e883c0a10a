"""Changes that a drill makes in every Python process of its fleet: a process loads this module if it is on its
path.

HEADRACE_DRILL_CLOCK names a file with one float64, the seconds that ``time.time`` adds. The machine's own
clock, the ledger server's and monotonic time stay as they are. HEADRACE_DRILL_ORDERS names a folder of orders
to single workers (``ops.drill.orders``)."""

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

if "HEADRACE_DRILL_ORDERS" in os.environ:
    from ops.drill.orders import obey

    obey()
