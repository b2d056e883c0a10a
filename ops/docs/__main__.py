"""``python -m ops.docs FOLDER`` builds the documentation site with Sphinx.

Every document must be a page. Sphinx fails at any warning, including dead links and anchors."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ops.docs import nav
from ops.docs.site import ROOT, problems, tracked, write_source

_SPHINX_S = 900.0
_REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url={0}"><a href="{0}">Headrace</a>\n'


def main() -> None:
    """Build the site; exit with 1 if a page is wrong."""
    parser = argparse.ArgumentParser(prog="python -m ops.docs", description="Build the documentation site.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("site"), help="folder of the built site (default: site)"
    )
    folder: Path = parser.parse_args().folder
    if found := problems(tracked("*.md")):
        sys.exit("\n".join(found))
    if (folder / ".buildinfo").is_file():
        # an earlier site, by Sphinx's own mark; its pages may be gone
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory() as source:
        write_source(Path(source))
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-E", "-c", str(ROOT / "ops/docs")]
        command += ["-d", f"{source}/.doctrees", source, str(folder.resolve())]
        if subprocess.run(command, cwd=ROOT, timeout=_SPHINX_S, check=False).returncode:
            sys.exit("Sphinx refused the pages: its warnings are above")
    (folder / "index.html").write_text(_REDIRECT.format(nav.INDEX.replace(".md", ".html")), encoding="utf-8")
    print(f"{len(list(nav.pages()))} pages: {folder}/index.html")


if __name__ == "__main__":
    main()
