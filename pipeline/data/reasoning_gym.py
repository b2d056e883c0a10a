"""Questions that the package reasoning-gym generates, and their verifier ``reasoning-gym``.

    reasoning-gym://chain_sum?size=1000&seed=7&min_terms=2

The query holds the dataset's own settings: JSON values, else text. Without ``size`` there are 500 questions; without
``seed`` it is 0. A run records the package's version (``chain_sum@0.1.25``) and the rows' digest.

Rows are written by a process whose hashes have no random seed, because some datasets depend on the order of sets."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlencode

from pipeline.config.data_sets import GENERATED_PREFIX, GENERATED_VERIFIER
from pipeline.config.import_path import import_extra
from pipeline.rewards.verifier import Response, Verdict, VerifierOutcome
from protocol import headrace
from protocol.errors import ConfigError, DataError

NAME: Final = GENERATED_VERIFIER
"""Of the package and its extra, too."""
_URL: Final = re.compile(
    re.escape(GENERATED_PREFIX) + r"(?P<name>\w+)(?:@(?P<version>[^?#/]+))?(?:\?(?P<query>[^#]*))?"
)
_LIMIT_S: Final = 600.0
_MAX_ERROR_CHARS = 2_000
_MAX_CLOSE = 3


@dataclass(frozen=True, slots=True)
class GeneratedSet:
    name: str
    version: str
    """Of the package; empty if the URL names none."""
    settings: dict[str, Any]

    def __str__(self) -> str:
        given = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.settings.items()}
        return f"{GENERATED_PREFIX}{self.name}{self.version and f'@{self.version}'}?{urlencode(given)}"

    @property
    def file_name(self) -> str:
        return f"{self.name}.jsonl"

    def checked(self) -> GeneratedSet:
        """Return the set with the version that is installed. Raises ConfigError if there is none, or it is not the
        one that the URL names."""
        try:
            installed = metadata.version(NAME)
        except metadata.PackageNotFoundError:
            import_extra("reasoning_gym", NAME, str(self))
            raise
        if self.version not in ("", installed):
            raise ConfigError(
                f"{self}: the installed {NAME} is {installed}, which may ask and judge otherwise; install {self.version}, "
                "or start a new run"
            )
        return dataclasses.replace(self, version=installed)

    def write(self, path: Path) -> None:
        """Write the rows as JSONL. Raises DataError."""
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
        command = headrace.command(__name__, str(self), str(path))
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise DataError(
                f"{self}: its {self.settings['size']} questions were not generated in {_LIMIT_S:g} s; lower size"
            ) from None
        if done.returncode:
            raise DataError(done.stderr.strip()[-_MAX_ERROR_CHARS:])


def parse_generated(url: str) -> GeneratedSet:
    """Raises DataError if it is not written as at the top of this file."""
    found = _URL.fullmatch(url)
    if found is None:
        raise DataError(f"{url}: expected {GENERATED_PREFIX}DATASET?SETTING=VALUE&...; correct it")
    settings = {"size": 500, "seed": 0} | {
        key: _value(text) for key, text in parse_qsl(found["query"] or "", keep_blank_values=True)
    }
    for name, least in (("size", 1), ("seed", 0)):
        if type(settings[name]) is not int or settings[name] < least:
            raise DataError(f"{url}: {name} is {settings[name]!r:.40}; expected a whole number from {least}")
    return GeneratedSet(found["name"], found["version"] or "", settings)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@lru_cache(maxsize=64)
def _dataset(url: str) -> Any:
    """Return the package's dataset. Raises ConfigError or DataError if it has none with this name and settings."""
    wanted = parse_generated(url).checked()
    factory = import_extra("reasoning_gym.factory", NAME, url)
    known = cast("dict[str, tuple[type, Any]]", factory.DATASETS)
    if wanted.name not in known:
        close = difflib.get_close_matches(wanted.name, known, n=_MAX_CLOSE) or sorted(known)
        raise DataError(f"{url}: {NAME} {wanted.version} has no dataset {wanted.name!r}; it has {', '.join(close)}")
    settings = [field.name for field in dataclasses.fields(known[wanted.name][1])]
    if unknown := sorted(wanted.settings.keys() - set(settings)):
        raise DataError(f"{url}: {wanted.name} has no setting {unknown[0]!r}; it has {', '.join(settings)}")
    try:
        return factory.create_dataset(wanted.name, **wanted.settings)
    except Exception as error:
        raise DataError(
            f"{url}: {NAME} refuses these settings with {type(error).__name__}: {error}; correct them"
        ) from error


def main() -> None:
    """Write a set's rows to a file."""
    url, path = sys.argv[1:]
    try:
        dataset = _dataset(url)
        with Path(path).open("w") as file:
            for index in range(len(dataset)):
                file.write(json.dumps(_row(url, dataset[index])) + "\n")
    except (ConfigError, DataError, OSError) as error:
        sys.exit(str(error))


def _row(url: str, entry: dict[str, Any]) -> dict[str, Any]:
    """``metadata`` is a Python literal: JSON has no tuples, and some datasets compare tuples."""
    metadata_text = repr(_plain(entry["metadata"]))
    ast.literal_eval(metadata_text)
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "verifier": NAME,
        "dataset": url,
        "metadata": metadata_text,
    }


def _plain(value: Any) -> Any:
    """Return a value without NumPy's types."""
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


def warm_up() -> None:
    import_extra("reasoning_gym", NAME, f"the verifier {NAME}")


def verify(responses: Sequence[Response], /) -> list[VerifierOutcome]:
    """Score the text in the last ``<answer>`` of each response, else all of it after its thinking, by the dataset's
    own ``score_answer``."""
    return [_score(response) for response in responses]


def _score(response: Response) -> Verdict:
    from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

    dataset = _dataset(response.extra["dataset"])
    entry = {
        "question": response.prompt_text,
        "answer": response.answer or None,
        "metadata": ast.literal_eval(response.extra["metadata"]),
    }
    said = extract_answer(response.response_text)
    if said is None:
        said = response.response_text.rpartition("</think>")[2].strip()
    try:
        return Verdict(accuracy=float(dataset.score_answer(said, entry)))
    except Exception as error:  # noqa: BLE001  some datasets raise what parsing the answer raises
        return Verdict(accuracy=0.0, reason=f"{type(error).__name__}: {error}"[:200])
