"""Links and anchors of Markdown pages: found, checked and rewritten without a Markdown tool."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_LINK = re.compile(r"(?P<before>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()(?P<target>[^()\s]+)(?P<after>\))")
_SPAN = re.compile(r"(`+)(?:(?!`).|(?!\1)`)*?\1(?!`)", re.DOTALL)
_HEADING = re.compile(r" {0,3}#{1,6}\s+(?P<title>.*?)\s*#*\s*$")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a page, as it is written there."""

    line: int
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


def links(text: str) -> list[Link]:
    """Return every link of a page outside of code."""
    found: list[Link] = []

    def keep(line: int, target: str) -> str:
        found.append(Link(line, target))
        return target

    _mapped(text, keep)
    return found


def relinked(text: str, target_of: Callable[[str], str]) -> str:
    """Return a page with each link's target replaced by ``target_of`` of it."""
    return _mapped(text, lambda _, target: target_of(target))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub and MyST make them."""
    seen = Counter[str]()
    found = set[str]()
    for _, line, is_code in _lines(text):
        heading = None if is_code else _HEADING.match(line)
        if heading is None:
            continue
        name = slug(heading["title"])
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def slug(title: str) -> str:
    """Return a heading's anchor: its text in lower case, without punctuation, hyphens for
    spaces."""
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


def title_of(text: str) -> str | None:
    """Return the first heading's text; None for a page without one."""
    titles = (_HEADING.match(line) for _, line, is_code in _lines(text) if not is_code)
    return next((heading["title"] for heading in titles if heading), None)


def resolved(page: str, path: str) -> str:
    """Return the place of a link's path, relative to the root that ``page`` is relative to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def relative(page: str, place: str) -> str:
    """Return the link from a page to a place; both are relative to one root."""
    return posixpath.relpath(place, posixpath.dirname(page) or ".")


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield each line with its number, and whether it is code or the edge of code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if fence:
            yield number, line, True
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif mark:
            fence = mark[1]
            yield number, line, True
        else:
            yield number, line, False


def _mapped(text: str, change: Callable[[int, str], str]) -> str:
    """Return the text with every link's target changed. Links do not cross a blank line."""
    done: list[str] = []
    paragraph: list[str] = []
    first = 1

    def flush() -> None:
        if paragraph:
            done.append(_changed("\n".join(paragraph), first, change))
            paragraph.clear()

    for number, line, is_code in _lines(text):
        if is_code or not line.strip():
            flush()
            done.append(line)
            continue
        if not paragraph:
            first = number
        paragraph.append(line)
    flush()
    return "\n".join(done) + "\n"


def _changed(paragraph: str, first: int, change: Callable[[int, str], str]) -> str:
    spans = [(span.start(), span.end()) for span in _SPAN.finditer(paragraph)]

    def of(link: re.Match[str]) -> str:
        # a link's text may hold code; its target may not
        if any(start <= link.start("target") < end for start, end in spans):
            return link[0]
        line = first + paragraph.count("\n", 0, link.start())
        return f"{link['before']}{change(line, link['target'])}{link['after']}"

    return _LINK.sub(of, paragraph)
