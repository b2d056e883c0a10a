"""The page that shows runs: live, from the dashboard's server, or as one file, the report.

``static`` has its markup, scripts and styles, ``figures`` what it shows of a run's files, and ``document``
puts both into one file that loads nothing."""

from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).with_name("static")
