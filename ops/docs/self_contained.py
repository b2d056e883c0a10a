"""Finds what built pages would load from elsewhere: scripts, styles, fonts, pictures, frames."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

_LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
"""By element: the attribute whose address a browser loads without a click."""
_STYLE = re.compile(r"@import\s+(?:url\()?['\"]?([^'\")\s;]+)|url\(\s*['\"]?([^'\")]+)")
_ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_SCRIPT_LOADS = re.compile(r"(?:fetch|importScripts|import|\.src\s*=)\s*\(?\s*['\"]((?:https?:)?//[^'\"]+)")


class _Loads(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what an element loads."""
        held = dict(attrs)
        name = "href" if tag == "link" and "canonical" not in (held.get("rel") or "") else _LOADS.get(tag)
        if name is not None and held.get(name):
            self.found.append(held[name] or "")


def loaded_from_elsewhere(folder: Path) -> list[str]:
    """Return each address that a page, style or script of the folder loads from another host."""
    wrong: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".html", ".css", ".js"):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            page = _Loads()
            page.feed(text)
            found = page.found
        else:
            pattern = _STYLE if path.suffix == ".css" else _SCRIPT_LOADS
            found = ["".join(part or "" for part in groups.groups()) for groups in pattern.finditer(text)]
        wrong += [f"{path.relative_to(folder)} loads {address}" for address in found if _ELSEWHERE.match(address)]
    return wrong
