"""The rules of plain English that a tool keeps."""

import subprocess
from pathlib import Path

import pytest

from ops.checks.words import findings, main


def rules(source: str, path: str = "pipeline/module.py") -> list[str]:
    return [finding.rule for finding in findings(Path(path), source)]


LONG = " ".join(["w"] * 26)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (f'"""{LONG}."""\n', "long"),
        (f"# {LONG}.\n", "long"),
        (f'raise ValueError("{LONG}.")\n', "long"),
        ('"""Nobody reads the answer."""\n', "pronoun"),
        ('"""A wait ends. Whoever waits goes on."""\n', "pronoun"),
        ('x = f"{name} is held by somebody else here"\n', "pronoun"),
        ('"""What is left is removed."""\n', "bare"),
        ('"""One is enough."""\n', "bare"),
        ('"""The ledger tells the learner."""\n', "verb"),
        ("# the server says no\n", "verb"),
        (f'"""{"word " * 20}word."""\n', "columns"),
        (f"# {'word ' * 20}word\n", "columns"),
        ("x = 1  # a number\n", "trailing comment"),
        ('"""A sum.\n\n*Consumes* numbers.\n"""\n', "header"),
        (f"def test_{'a' * 76}(): ...\n", "test name"),
    ],
)
def test_a_line_that_breaks_a_rule_is_found(source: str, rule: str) -> None:
    assert rules(source) == [rule]


@pytest.mark.parametrize(
    "source",
    [
        f'"""{" ".join(["w"] * 25)}."""\n',
        f'"""{" ".join(["W"] * 20)}. {" ".join(["W"] * 20)}."""\n',
        '"""What does a claim return? Chunks."""\n',
        '"""A sum.\n\n    nobody says\n"""\n',
        '"""A table.\n\n====\nnobody\n====\n"""\n',
        '"""Run it::\n\n    headrace says something\n"""\n',
        "x = 1  # noqa: F841\n",
        "# Run it:\n#\n#   headrace says something\n",
        f"# {'wide' * 30}\n",
        '"""A loop.\n\n*Consumes* chunks.\n"""\nasync def run():\n    async with TaskGroup(): ...\n',
        f"def test_{'a' * 75}(): ...\n",
        f"x = '{'wide' * 30}'\n",
    ],
)
def test_plain_prose_and_code_pass(source: str) -> None:
    assert rules(source) == []


def test_markdown_is_checked_outside_of_code_tables_and_quotes() -> None:
    page = "Nobody.\n\n```\nnobody\n```\n\n| nobody |\n|---|\n\n> nobody\n\n    nobody\n\n* an item\n* somebody\n"
    found = findings(Path("README.md"), page)
    assert [(finding.line, finding.rule) for finding in found] == [(1, "pronoun"), (15, "pronoun")]


@pytest.mark.parametrize(("name", "mark"), [("a.lua", "--"), ("a.toml", "#"), ("a.sh", "#"), ("Makefile", "#")])
def test_comments_of_other_languages_are_checked(name: str, mark: str) -> None:
    found = findings(Path(name), f"x = 1\n{mark} nobody\n")
    assert [(finding.line, finding.rule) for finding in found] == [(2, "pronoun")]


def test_the_messages_of_tests_may_be_anything() -> None:
    source = 'x = "nobody says what is in this message"\n'
    assert rules(source) == ["pronoun", "verb"]
    assert rules(source, "tests/test_module.py") == []


def test_the_clauses_of_a_message_are_counted_apart() -> None:
    clause = " ".join(["w"] * 20)
    assert rules(f'raise ValueError("{clause}; {clause}: {clause}")\n') == []
    assert rules(f'raise ValueError("{clause}, {clause}; {clause}")\n') == ["long"]
    assert rules(f"# {clause}; {clause}\n") == ["long"]


def test_settings_in_code_spans_are_a_list_and_no_sentence() -> None:
    settings = " ".join(["`a.b=1`"] * 30)
    assert rules(f"- **a row**: `file.toml`, {settings}\n", "page.md") == ["columns"]
    assert rules("- *a* is b\n- c " + "`d` and " * 26 + "\n", "page.md") == ["columns", "long"]


def test_a_pattern_is_no_prose() -> None:
    assert rules('x = r"nobody says what is \\b here"\n') == []


def test_a_finding_names_file_line_and_rule_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clean.md").write_text("A page.\n")
    (tmp_path / "other.md").write_text("A page.\n\nNobody reads it.\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], check=True, timeout=60)
    for arguments, code in (([], 1), (["clean.md"], 0)):
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        assert ending.value.code == code
    assert capsys.readouterr().out == "other.md:3: pronoun: 'Nobody': Nobody reads it.\n"


def test_an_indented_line_of_a_message_is_an_example_and_no_prose() -> None:
    assert rules('x = "Examples of this command:\\n  nobody reads this line"\n') == []
    assert rules('x = "Examples of this command:\\nnobody reads this line"\n') == ["pronoun"]
