"""Settings of Sphinx. The pages load nothing from other servers: no font, script or style."""

from __future__ import annotations

from typing import Any

from ops.docs import nav
from ops.docs.site import SETTINGS, ending

project = "Headrace"
author = "Headrace contributors"
extensions = ["myst_parser"]
root_doc = nav.INDEX.removesuffix(".md")
include_patterns = [*nav.pages(), f"{SETTINGS}/*.md"]

html_theme = "furo"
html_title = "Headrace"
html_static_path = ["_static"]
html_css_files = ["headrace.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
html_show_sourcelink = False

# readers type what pages show into terminals: quotes and dashes stay as they are
smartquotes = False
highlight_language = "text"
# Deep enough for every heading that a document links to.
myst_heading_anchors = 6
myst_enable_extensions = ["attrs_block"]


def setup(app: Any) -> None:
    """Append to each page what is generated for it."""
    app.connect("source-read", lambda _, page, source: source.append(source.pop() + ending(f"{page}.md")))
