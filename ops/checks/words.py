"""``python -m ops.checks.words [PATH...]``: holds the repository's prose to the rules of plain
English.

Prose is docstrings, comments and sentences in string literals of Python, comments in Lua, TOML,
shell and the Makefile, and Markdown. Code, tables and quoted text are not prose. CONTRIBUTING has
the rules. A finding is printed as ``path:line: rule: text``, and the exit code is then 1."""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

MAX_WORDS = 25
"""Words of a sentence; a code span counts as one."""
MAX_COLUMNS = 100
"""Characters of a line of prose, indentation included."""
MAX_TEST_NAME = 80
"""Characters of a test function's name."""

_SUFFIXES = frozenset({".py", ".md", ".lua", ".toml", ".sh"})
_COMMANDS = frozenset({Path("Makefile"), Path(".ci/run")})
"""Files without a suffix whose comments are prose."""
_FEWEST_SPACES = 4
"""Of a string literal that is taken for a sentence."""
_GIT_S = 60.0

_SCRIPT_TABLE = re.compile(r"-- (?:(?:Uses|Reads|Writes|Returns|Errors)\b|(?:KEYS|ARGV)\[| {4})")
"""A line of the table in a Lua script's header."""

_PRONOUN = re.compile(r"\b(nobody|whoever|somebody|someone|no one|anybody|anyone|everybody|everyone)\b", re.IGNORECASE)
_BARE = re.compile(r"(What|Who|Whose)\b(?!.*\?)|One (is|has|that|who|which|whose|can|may|must|was)\b")
_VERB = re.compile(r"\b(tells?|told|telling|hears?|heard|asks|asked|asking|says?|said|saying)\b", re.IGNORECASE)
_HEADER = re.compile(r"\*(Consumes|Produces|Waits for)\*")
_OWNER = re.compile(
    r"TaskGroup|create_task|threading\.|Popen|subprocess|multiprocessing|asyncio\.run\(|os\.fork|argparse"
)
"""In the source of a module that owns a task, a thread or a process."""

_PRAGMA = re.compile(r"#\s*(noqa|type:|pyright|fmt|pragma|ruff|isort|!)")
_CODE = re.compile(r"``.+?``|`[^`]+`|https?://\S+")
_CLAUSE_END = re.compile(r"[;:]\s+")
"""Between the parts of an error message: what, got; expected; do this."""
_CODE_LIST = re.compile(r"\bX(?:,? X\b)+")
"""Code spans one after another are one word, as a list of settings is."""
_SENTENCE_END = re.compile(r"(?<=[.!?:;])['\")*]*\s+(?=[A-Z0-9`*\"(\[])")
_NOT_PROSE = ("|", "#", ">", "<", "[^", "    ")
_ITEM = re.compile(r"([-*+]|\d+\.)\s+")
_ENTRY = re.compile(r"[*\w]+: ")
_FENCES = ("```", "====")
"""Around code, and around a table without a head in a docstring."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of prose: as it is in the file, and without the marks of a comment or docstring."""

    number: int
    whole: str
    text: str
    is_message: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A place that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class _Module:
    """A Python file, parsed once: its syntax tree, all nodes of the tree, and its comments."""

    source: str
    tree: ast.Module
    nodes: list[ast.AST]
    comments: list[tokenize.TokenInfo]

    @classmethod
    def of(cls, source: str) -> _Module:
        """Parse a file. Raises SyntaxError for Python that is not."""
        tree = ast.parse(source)
        return cls(source, tree, list(ast.walk(tree)), _comments(source))


def findings(path: Path, source: str) -> list[Finding]:
    """Return every finding of a file, by line. Raises SyntaxError for Python that is not."""
    found = list[Finding]()
    match path.suffix:
        case ".py":
            module = _Module.of(source)
            stretches = list(_python(module, with_messages=path.parts[0] != "tests"))
            found += _structure(path, module)
        case ".md":
            stretches = [_lines(source, 1)]
        case suffix:
            stretches = [list(_marked(source, "--" if suffix == ".lua" else "#"))]
    for stretch in stretches:
        for paragraph in paragraphs(stretch):
            for line in paragraph:
                is_breakable = " " in line.text.strip() and "http" not in line.whole
                if is_breakable and len(line.whole.rstrip()) > MAX_COLUMNS:
                    found.append(Finding(path, line.number, "columns", line.text.strip()))
            text = " ".join(line.text.strip() for line in paragraph)
            broken = _broken(text, is_message=paragraph[0].is_message)
            found += [Finding(path, paragraph[0].number, rule, words) for rule, words in broken]
    return sorted(set(found), key=lambda finding: (finding.line, finding.rule, finding.text))


def paragraphs(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yield paragraphs, list items and argument entries, without code, tables and headings."""
    kept = list[Line]()
    is_code, literal_indent, last = False, None, 0
    for line in lines:
        text, indent = line.text.strip(), len(line.text) - len(line.text.lstrip())
        if text.startswith(_FENCES):
            is_code, text = not is_code, ""
        elif is_code or (literal_indent is not None and (not text or indent > literal_indent)):
            continue
        literal_indent = None
        is_other = not text or text.startswith(_NOT_PROSE) or (not kept and line.text.startswith("    "))
        is_start = _ITEM.match(text) or (indent and _ENTRY.match(text)) or line.number != last + 1
        if kept and (is_other or is_start):
            yield kept
            kept = []
        last = line.number
        if is_other:
            continue
        kept.append(line)
        if text.endswith("::"):
            literal_indent = indent
    if kept:
        yield kept


def _broken(paragraph: str, *, is_message: bool) -> Iterator[tuple[str, str]]:
    """Yield the rules that a paragraph's sentences break, with the sentence. A clause of a message
    counts as one."""
    for sentence in _SENTENCE_END.split(_CODE_LIST.sub("X", _CODE.sub("X", _unmarked(paragraph)))):
        text = sentence.strip()
        clauses = _CLAUSE_END.split(text) if is_message else [text]
        num_words = max(map(_num_words, clauses))
        if num_words > MAX_WORDS:
            yield "long", f"{num_words} words: {text}"
        if pronoun := _PRONOUN.search(text):
            yield "pronoun", f"{pronoun.group()!r}: {text}"
        if _BARE.match(text):
            yield "bare", text
        if verb := _VERB.search(text):
            yield "verb", f"{verb.group()!r}: {text}"


def _num_words(text: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def _unmarked(paragraph: str) -> str:
    """Return a paragraph without the mark of a list item."""
    mark = _ITEM.match(paragraph)
    return paragraph[mark.end() :] if mark else paragraph


def _structure(path: Path, module: _Module) -> Iterator[Finding]:
    """Yield findings of names, of headers, and of comments that stand behind code."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = f"{len(node.name)} characters: {node.name}"
            if node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME:
                yield Finding(path, node.lineno, "test name", found)
    about = ast.get_docstring(module.tree, clean=False) or ""
    if _HEADER.search(about) and not _OWNER.search(module.source.replace(about, "", 1)):
        yield Finding(path, 1, "header", "*Consumes* ... of a module that owns no task, thread or process")
    for token in module.comments:
        if token.line[: token.start[1]].strip():
            yield Finding(path, token.start[0], "trailing comment", token.string)


def _python(module: _Module, *, with_messages: bool) -> Iterator[list[Line]]:
    """Yield docstrings, comments and, with messages, string literals that are sentences.

    Indented lines of a message are an example or a table. A text with a backslash is a pattern."""
    nodes, source_lines = module.nodes, module.source.splitlines()
    docstrings = [n.value for n in nodes if isinstance(n, ast.Expr) and _is_text(n.value)]
    for value in docstrings:
        stretch = _lines("\n".join(source_lines[value.lineno - 1 : value.end_lineno]), value.lineno)
        margin = min((_indent(line) for line in stretch if line.text.strip()), default=0)
        yield [Line(line.number, line.whole, line.text[margin:].replace('"""', "")) for line in stretch]
    yield [Line(t.start[0], t.line.rstrip("\n"), _uncommented(t.string, "#")) for t in module.comments]
    if not with_messages:
        return
    parts = {id(value) for n in nodes if isinstance(n, ast.JoinedStr) for value in n.values}
    parts.update(map(id, docstrings))
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif _is_text(node) and id(node) not in parts:
            text = str(node.value)
        else:
            continue
        if text.count(" ") >= _FEWEST_SPACES and "\\" not in text:
            lines = enumerate(text.splitlines())
            yield [Line(node.lineno + at, "", line, is_message=True) for at, line in lines if not line.startswith("  ")]


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _comments(source: str) -> list[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [t for t in tokens if t.type == tokenize.COMMENT and not _PRAGMA.match(t.string)]


def _marked(source: str, mark: str) -> Iterator[Line]:
    """Yield the comments that have a line to themselves."""
    for line in _lines(source, 1):
        if line.text.lstrip().startswith(mark) and not _SCRIPT_TABLE.match(line.text):
            yield Line(line.number, line.whole, _uncommented(line.text.lstrip(), mark))


def _uncommented(comment: str, mark: str) -> str:
    """Return a comment's text, whose code is indented by four spaces, as in Markdown."""
    text = comment.lstrip(mark + "!").removeprefix(" ")
    return "    " + text.lstrip() if text.startswith("  ") else text


def _lines(text: str, first: int) -> list[Line]:
    return [Line(first + at, line, line) for at, line in enumerate(text.splitlines())]


def _indent(line: Line) -> int:
    return len(line.text) - len(line.text.lstrip())


def repository_findings(paths: Sequence[Path] = ()) -> Iterator[Finding]:
    """Yield the findings of the tracked files below the working directory, or of those below the
    paths."""
    command = ["git", "ls-files", "--", *map(str, paths)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S)
    for path in map(Path, listed.stdout.splitlines()):
        if (path.suffix in _SUFFIXES or path in _COMMANDS) and path.is_file():
            yield from findings(path, path.read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the tracked files, or those below the paths. Exit with 1 when a rule is broken."""
    parser = argparse.ArgumentParser(prog="python -m ops.checks.words", description="Check plain English.")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders (default: all)")
    parser.add_argument("--count", action="store_true", help="print how many findings there are of each rule")
    options = parser.parse_args(arguments)
    counted = Counter[str]()
    for finding in repository_findings(options.paths):
        counted[finding.rule] += 1
        if not options.count:
            print(finding)
    if options.count:
        print(", ".join(f"{rule}: {count}" for rule, count in counted.most_common()) or "no findings")
    sys.exit(1 if counted else 0)


if __name__ == "__main__":
    main()
