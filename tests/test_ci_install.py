"""``.ci/install.py``: uv finds what pip finds, or leaves the installation to pip."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

INSTALL: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "install.py"))
uv_variables = INSTALL["uv_variables"]


def test_pips_indexes_and_certificate_are_uvs() -> None:
    settings = {
        "index-url": "https://one/simple", "extra-index-url": "https://two/simple https://three/simple",
        "find-links": "/a /b", "cert": "/ca.pem", "constraint": "/c.txt", "timeout": "60", "no-input": "true",
    }  # fmt: skip
    found = uv_variables(settings)
    assert found == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://one/simple",
        "UV_EXTRA_INDEX_URL": "https://two/simple https://three/simple",
        "UV_FIND_LINKS": "/a,/b",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_CONSTRAINT": "/c.txt",
    }


@pytest.mark.parametrize("name", ["proxy", "trusted-host", "no-index"])
def test_a_setting_that_uv_would_not_follow_leaves_the_installation_to_pip(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        uv_variables({"index-url": "https://one/simple", name: "x"})


def test_what_uv_leaves_is_installed_by_make() -> None:
    lines = (Path(__file__).parents[1] / ".ci" / "run").read_text().splitlines()
    at = lines.index("python3 .ci/install.py || true")
    assert lines[at + 1] == "make .venv/.dev"
