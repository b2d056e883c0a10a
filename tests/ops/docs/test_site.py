"""Claims about the documentation site: it has every document, setting and command."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ops.docs import generated, nav
from ops.docs.site import ROOT, SETTINGS, ending, problems, tracked, write_source
from pipeline.cli import headrace
from pipeline.config.describe import in_toml, settings
from pipeline.process.exit_codes import ExitCode


def test_every_document_is_a_page_or_is_left_out_for_a_reason() -> None:
    assert problems(tracked("*.md")) == []
    assert problems(["new.md"]) == ["new.md is on no page: add it to ops/docs/nav.py"]
    assert {path for path in nav.LEFT_OUT if not (ROOT / path).is_file()} == set()


def test_every_setting_is_shown_with_its_default_unit_and_effect() -> None:
    pages = generated.settings_pages()
    all_settings = list(settings())
    assert len(all_settings) > 200
    for setting in all_settings:
        page = pages[setting.key.partition(".")[0]]
        _, _, rest = page.partition(f"# {setting.key}\n")
        shown = rest.partition("\n#")[0]
        assert generated.plain(setting.description) in shown, setting.key
        assert in_toml(setting.default).replace("|", "\\|") in shown, setting.key
        assert setting.unit is None or f"unit: {generated.plain(setting.unit)}" in shown, setting.key
        assert all(generated.plain(one.otherwise) in shown for one in setting.read_if), setting.key


def commands(group: click.Group, words: str) -> list[tuple[str, click.Command]]:
    context = click.Context(group, info_name=words)
    found = [(f"{words} {name}", group.get_command(context, name)) for name in group.list_commands(context)]
    below = [one for name, command in found if isinstance(command, click.Group) for one in commands(command, name)]
    return [(name, command) for name, command in found if command is not None] + below


def test_every_command_and_option_is_shown() -> None:
    page = ending("ops/docs/commands.md")
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


def test_every_exit_code_has_its_meaning() -> None:
    page = ending("ops/docs/exit-codes.md")
    rows = {
        line.split("|")[1].strip(): line.split("|")[3].strip() for line in page.splitlines() if line.startswith("| ")
    }
    assert {str(code.value) for code in ExitCode} <= set(rows)
    assert all(rows[str(code.value)] for code in ExitCode)


def test_every_rule_and_metric_is_shown() -> None:
    rules, metrics = ending("ops/docs/rules.md"), ending("ops/docs/metrics.md")
    for name in generated.BUILT_IN:
        assert f'name = "{name}"' in rules
    assert "`headrace_sampled_tokens` | counter | `run`, `role`, `worker` |" in metrics
    assert "| `accuracy` | Mean raw accuracy of the batch." in metrics


def test_marks_of_markdown_in_a_text_are_shown_as_they_are() -> None:
    assert generated.plain("a*b <c> [d] | `e|f*`") == "a\\*b \\<c\\> \\[d\\] \\| `e\\|f*`"
    assert generated.code("a|b") == "`a\\|b`"


def test_the_source_folder_has_the_repositorys_files_and_the_pages_of_settings(tmp_path: Path) -> None:
    write_source(tmp_path)
    for name in (*nav.pages(), "ops/results/demos-60-updates.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()
    assert {path.stem for path in (tmp_path / SETTINGS).iterdir()} == set(generated.settings_pages())
