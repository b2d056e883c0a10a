"""``headrace fleet place`` as it is, except that a join is the stand-in for one.

python place_stand_in.py FOLDER fleet place"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from pipeline.cli.join import serve
from tests.pipeline.supervisor.launchers import stand_in

if __name__ == "__main__":
    folder, *_ = sys.argv[1:]
    sys.exit(serve(sys.executable, str(stand_in.__file__), folder))
