"""The page and its data as one file that works from disk: no server, nothing loaded from elsewhere.

The file holds the answers that the dashboard's server would give, by address, so the page's scripts are
the same. The scripts' modules become functions, because a module inside a file cannot import another. The
policy of content (CSP) names the digests of the one script and the one style: nothing else runs, and no
address can be reached."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from pipeline.observability.page import STATIC
from pipeline.observability.page.figures import encoded

_IMPORT = re.compile(r'^import \{([^}]+)\} from "\./(\w+)\.js";$', re.MULTILINE)
_UNQUOTED = "~!*'()"
"""What ``encodeURIComponent`` leaves as it is, besides letters, digits, ``-``, ``_`` and ``.``."""
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|class|function) (\w+))", re.MULTILINE)


def run_address(name: str, what: str) -> str:
    """Return the address of an answer about a run, as the page's scripts write it."""
    return f"runs/{quote(name, safe=_UNQUOTED)}/{what}"


def document(title: str, answers: Mapping[str, object]) -> str:
    """Return the page as one file.

    Args:
        title: The title until a run is shown.
        answers: What the page asks for, by address without ``/api/``."""
    style = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in ("page.css", "panels.css"))
    icon = base64.b64encode((STATIC / "favicon.svg").read_bytes()).decode()
    style = style.replace("favicon.svg", f"data:image/svg+xml;base64,{icon}")
    script = _script("main", {})
    allowed = f"script-src {_digest(script)}; style-src {_digest(style)}; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    # Within a script element, only "<" could end it.
    data = encoded(answers).decode().replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<div id="page">
<noscript>This page needs JavaScript, all of it in this file. The figures are in report.json beside it.</noscript>
</div>
<script type="application/json" id="answers">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _script(name: str, done: dict[str, str]) -> str:
    """Return a module and all that it imports, as functions that run in order."""
    text = (STATIC / f"{name}.js").read_text(encoding="utf-8")
    for imported in _IMPORT.findall(text):
        if imported[1] not in done:
            _script(imported[1], done)
    exports = ", ".join(_EXPORT.findall(text))
    body = _EXPORT.sub("", _IMPORT.sub(r"const {\1} = \2;", text))
    done[name] = f"const {name} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();"
    return "\n".join(done.values())


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that a reader never sees half a page."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
