"""No charts in the reports of every Python process that finds this module on its path.

It is as without the extra ``charts``. matplotlib costs a processor second at the end of a run."""

import sys

sys.modules["matplotlib"] = None  # pyright: ignore[reportArgumentType]
