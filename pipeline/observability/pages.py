"""Pages of runs: templates in this folder, with all text escaped and made printable on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def render_page(template: str, **values: Any) -> str:
    """Return a page of a template; an absent value is an error."""
    # Deferred: only a finished run needs it.
    import jinja2

    from protocol.printable import printable

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.filters["printable"] = printable
    return environment.get_template(template).render(values)


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: a reader never sees half a page."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
