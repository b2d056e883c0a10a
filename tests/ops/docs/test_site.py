"""Claims about the documentation site: it has every document, setting and command, and nothing on
it leads nowhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from ops.docs import generated, nav
from ops.docs.self_contained import loaded_from_elsewhere
from ops.docs.site import ROOT, Site, collect, site_problems, unfound, unlisted
from pipeline.cli import headrace
from pipeline.config.describe import in_toml, settings
from pipeline.process.exit_codes import ExitCode


@pytest.fixture(scope="module")
def site() -> Site:
    return collect()


def test_every_link_and_anchor_of_every_page_leads_somewhere(site: Site) -> None:
    assert site.wrong == []
    assert len(site.pages) > 50


def test_every_document_is_a_page_or_is_left_out_for_a_reason() -> None:
    documents = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert unlisted(documents.splitlines()) == []
    assert unlisted(["new.md"]) == ["new.md is on no page: add it to ops/docs/nav.py"]
    assert {path for path in nav.LEFT_OUT if not (ROOT / path).is_file()} == set()


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# There\n")
    page = "[a](b.md)\n[b](b.md#there)\n[c](b.md#gone)\n[d](c.md)\n[e](../x.md)\n[f](#here)\n# Here\n"
    (tmp_path / "a.md").write_text(page)
    assert unfound("a.md", page, tmp_path) == [
        "a.md:3: b.md#gone: no such heading", "a.md:4: c.md: no such file", "a.md:5: ../x.md: no such file",
    ]  # fmt: skip
    made = Site(pages={"x/a.md": "", "b.md": "# There\n"}, files={"f.json"})
    assert site_problems(made, "x/a.md", "[a](../b.md#there) [b](../files/f.json)\n[c](c.md)\n[d](../b.md#gone)") == [
        "line 2: c.md: no such page", "line 3: ../b.md#gone: no such heading",
    ]  # fmt: skip


def test_every_setting_is_shown_with_its_default_unit_and_effect(site: Site) -> None:
    all_settings = list(settings())
    assert len(all_settings) > 200
    for setting in all_settings:
        page = site.pages[f"reference/settings/{setting.key.partition('.')[0]}.md"]
        _, _, rest = page.partition(f"# {setting.key}\n")
        shown = rest.partition("\n#")[0]
        assert generated.plain(setting.description) in shown, setting.key
        assert in_toml(setting.default).replace("|", "\\|") in shown, setting.key
        assert setting.unit is None or f"unit: {generated.plain(setting.unit)}" in shown, setting.key


def commands(group: click.Group, words: str) -> list[tuple[str, click.Command]]:
    context = click.Context(group, info_name=words)
    found = [(f"{words} {name}", group.get_command(context, name)) for name in group.list_commands(context)]
    below = [one for name, command in found if isinstance(command, click.Group) for one in commands(command, name)]
    return [(name, command) for name, command in found if command is not None] + below


def test_every_command_and_option_is_shown(site: Site) -> None:
    page = site.pages["reference/commands.md"]
    found = commands(headrace, "headrace")
    assert len(found) > 30
    for words, command in found:
        _, _, rest = page.partition(f"\n{'#' * len(words.split())} {words}\n")
        assert rest, words
        shown = re.split(r"\n##+ ", rest)[0]
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        if isinstance(command, click.Group):
            inner = command.list_commands(click.Context(command))
            assert [name for name in inner if f"| `{words} {name}` |" not in shown] == [], words
        else:
            assert [option for option in options if option not in shown] == [], words


def test_every_exit_code_has_its_meaning(site: Site) -> None:
    page = site.pages["reference/exit-codes.md"]
    rows = {
        line.split("|")[1].strip(): line.split("|")[3].strip() for line in page.splitlines() if line.startswith("| ")
    }
    assert {str(code.value) for code in ExitCode} <= set(rows)
    assert all(rows[str(code.value)] for code in ExitCode)


def test_every_rule_and_metric_is_shown(site: Site) -> None:
    for name in generated.BUILT_IN:
        assert f'name = "{name}"' in site.pages["concepts/rules.md"]
    assert "`headrace_sampled_tokens` | counter | `run`, `role`, `worker` |" in site.pages["reference/metrics.md"]
    assert "| `accuracy` | Mean raw accuracy of the batch." in site.pages["reference/metrics.md"]


def test_marks_of_markdown_in_a_text_are_shown_as_they_are() -> None:
    assert generated.plain("a*b <c> [d] | `e|f*`") == "a\\*b \\<c\\> \\[d\\] \\| `e\\|f*`"
    assert generated.code("a|b") == "`a\\|b`"


def test_the_source_folder_has_pages_and_the_files_that_they_link_to(tmp_path: Path, site: Site) -> None:
    (tmp_path / "old.md").write_text("gone\n")
    site.write(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")} == set(site.pages)
    name = "ops/results/demos-60-updates.json"
    assert (tmp_path / "files" / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "text", "address"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>', "https://cdn.example/x.js"),
        ("a.html", '<link rel="stylesheet" href="//cdn.example/x.css">', "//cdn.example/x.css"),
        ("a.html", "<img src='http://example/x.png'>", "http://example/x.png"),
        ("a.css", "@import url(https://fonts.example/f.css);", "https://fonts.example/f.css"),
        ("a.css", "@font-face { src: url('https://fonts.example/f.woff2') }", "https://fonts.example/f.woff2"),
        ("a.js", 'fetch("https://example/search.json")', "https://example/search.json"),
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_found(tmp_path: Path, name: str, text: str, address: str) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "b.html").write_text(
        '<a href="https://example.org">a link is not loaded</a><script src="own.js"></script>'
    )
    assert loaded_from_elsewhere(tmp_path) == [f"{name} loads {address}"]
