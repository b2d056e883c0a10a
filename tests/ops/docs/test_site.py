"""Claims about the documentation site: it has every document, setting and command."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from ops.docs import generated, nav
from ops.docs.site import ROOT, Site, collect, unlisted
from pipeline.cli import headrace
from pipeline.config.describe import in_toml, settings
from pipeline.process.exit_codes import ExitCode


@pytest.fixture(scope="module")
def site() -> Site:
    return collect()


def test_every_file_that_a_page_links_to_is_there(site: Site) -> None:
    assert site.wrong == []


def test_every_document_is_a_page_or_is_left_out_for_a_reason() -> None:
    documents = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert unlisted(documents.splitlines()) == []
    assert unlisted(["new.md"]) == ["new.md is on no page: add it to ops/docs/nav.py"]
    assert {path for path in nav.LEFT_OUT if not (ROOT / path).is_file()} == set()


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
