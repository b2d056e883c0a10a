"""Links of Markdown pages, rewritten without a Markdown tool."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_LINK = re.compile(r"(?P<before>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()(?P<target>[^()\s]+)(?P<after>\))")
_SPAN = re.compile(r"(`+)(?:(?!`).|(?!\1)`)*?\1(?!`)", re.DOTALL)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a page, as it is written there."""

    target: str

    @property
    def path(self) -> str:
        """The target without its anchor."""
        return self.target.partition("#")[0]

    @property
    def anchor(self) -> str:
        """The heading that is meant; may be empty."""
        return self.target.partition("#")[2]

    @property
    def is_elsewhere(self) -> bool:
        """Whether it leads out of the repository."""
        return bool(_ELSEWHERE.match(self.target))


def resolved(page: str, path: str) -> str:
    """Return the place of a link's path, relative to the root that ``page`` is relative to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def relative(page: str, place: str) -> str:
    """Return the link from a page to a place; both are relative to one root."""
    return posixpath.relpath(place, posixpath.dirname(page) or ".")


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is code or the edge of code."""
    fence = ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence:
            yield line, True
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif mark:
            fence = mark[1]
            yield line, True
        else:
            yield line, False


def relinked(text: str, target_of: Callable[[str], str]) -> str:
    """Return a page with the target of each link outside of code replaced by ``target_of`` of it. Links
    do not cross a blank line."""
    done: list[str] = []
    paragraph: list[str] = []

    def flush() -> None:
        if paragraph:
            done.append(_changed("\n".join(paragraph), target_of))
            paragraph.clear()

    for line, is_code in _lines(text):
        if is_code or not line.strip():
            flush()
            done.append(line)
            continue
        paragraph.append(line)
    flush()
    return "\n".join(done) + "\n"


def _changed(paragraph: str, target_of: Callable[[str], str]) -> str:
    spans = [(span.start(), span.end()) for span in _SPAN.finditer(paragraph)]

    def of(link: re.Match[str]) -> str:
        # a link's text may hold code; its target may not
        if any(start <= link.start("target") < end for start, end in spans):
            return link[0]
        return f"{link['before']}{target_of(link['target'])}{link['after']}"

    return _LINK.sub(of, paragraph)
