"""``python -m ops.docs``: checks the documentation site, and builds it with Sphinx.

``check`` needs nothing but Headrace: every document is a page, and what it links to is there.
``build FOLDER`` checks, then runs Sphinx, which fails at any warning, links and anchors among them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ops.docs.site import ROOT, Site, collect, unlisted

_SPHINX_S = 300.0
_GIT_S = 60.0
_DOCUMENTS = ("git", "ls-files", "*.md")


def main() -> None:
    """Check, or check and build. Exit with 1 when a page is wrong."""
    parser = argparse.ArgumentParser(prog="python -m ops.docs", description="Check or build the documentation site.")
    parser.add_argument("action", choices=("check", "build"))
    parser.add_argument("folder", nargs="?", type=Path, default=Path("site"), help="of the built site (default: site)")
    options = parser.parse_args()
    listed = subprocess.run(_DOCUMENTS, cwd=ROOT, capture_output=True, text=True, check=True, timeout=_GIT_S)
    site = collect()
    wrong = site.wrong + unlisted(listed.stdout.splitlines())
    if not wrong and options.action == "build":
        wrong = _built(site, options.folder)
    for problem in wrong:
        print(problem, file=sys.stderr)
    if wrong:
        sys.exit(1)
    built = f": {options.folder}/index.html" if options.action == "build" else ""
    print(f"{len(site.pages)} pages{built}")


def _built(site: Site, folder: Path) -> list[str]:
    """Run Sphinx and return what is wrong with its pages."""
    if (folder / ".buildinfo").is_file():
        # Sphinx's own mark: an earlier site, whose pages may be gone
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory() as source:
        site.write(Path(source))
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-E", "-c", str(ROOT / "ops/docs")]
        done = subprocess.run(
            [*command, "-d", f"{source}/.doctrees", source, str(folder)], timeout=_SPHINX_S, check=False
        )
    return ["Sphinx refused the pages: its warnings are above"] if done.returncode else []


if __name__ == "__main__":
    main()
