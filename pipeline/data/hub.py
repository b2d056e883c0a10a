"""Files of a data set on the Hugging Face hub, by name: ``hf://datasets/OWNER/NAME@REVISION/FILE``.

FILE may have ``*`` and ``?``; ``@REVISION`` is a branch, tag or commit, by default ``main``. The
package ``huggingface_hub`` fetches, caches and reads the token: ``HF_TOKEN``, ``HF_HOME``,
``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` mean the same as everywhere. A run keeps the names with the
commit, so that all its workers, and every resume, read the same bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from pipeline.config.data_sets import HUB_PREFIX
from pipeline.data.hub_errors import plain_errors
from pipeline.data.hub_progress import fetching
from protocol.errors import DataError

_NAME: Final = re.compile(
    re.escape(HUB_PREFIX) + r"(?P<repository>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_READABLE: Final = (".jsonl", ".ndjson", ".json", ".parquet")
_MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a data set on the hub, or a pattern of files."""

    repository: str
    revision: str
    file: str

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.repository}@{self.revision.replace('/', '%2F')}/{self.file}"

    @property
    def is_pinned(self) -> bool:
        """Whether it names one file of one commit."""
        return bool(_COMMIT.fullmatch(self.revision)) and not set(self.file) & set("*?[")


def parse_hub_name(name: str) -> HubSource:
    """Read a name. Raises DataError when it names no data set, or no file."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise DataError(
            f"{name}: expected {HUB_PREFIX}OWNER/NAME/FILE or {HUB_PREFIX}OWNER/NAME@REVISION/FILE; correct the name"
        )
    revision = (found["revision"] or "main").replace("%2F", "/").replace("~", "refs/convert/")
    source = HubSource(found["repository"], revision, found["file"] or "")
    if not source.file:
        with plain_errors(str(source), source.repository, "dataset"):
            _refuse_file(source, "names no file")
    return source


def pin(source: HubSource) -> list[HubSource]:
    """Fetch what a pattern names and return each file with its commit. Without a network the cache
    serves. Raises DataError: no such data set or file, no access, or no network."""
    if source.is_pinned:
        return [source]
    from huggingface_hub import snapshot_download

    with plain_errors(str(source), source.repository, "dataset"):
        with fetching(str(source)) as bars:
            folder = Path(
                snapshot_download(
                    source.repository,
                    repo_type="dataset",
                    revision=source.revision,
                    allow_patterns=[source.file],
                    tqdm_class=bars,
                )
            )
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        found = [name for name in names if fnmatchcase(name, source.file)]
        if not found:
            _refuse_file(source, "matches no file")
    return [replace(source, revision=folder.name, file=name) for name in found]


def fetch(source: HubSource) -> Path:
    """Return the local copy of a pinned file: the cache's, else fetched. Raises DataError."""
    from huggingface_hub import hf_hub_download

    with plain_errors(str(source), source.repository, "dataset"), fetching(str(source)) as bars:
        return Path(
            hf_hub_download(
                source.repository, source.file, repo_type="dataset", revision=source.revision, tqdm_class=bars
            )
        )


def _refuse_file(source: HubSource, fault: str) -> None:
    from huggingface_hub import HfApi

    there = HfApi().list_repo_files(source.repository, repo_type="dataset", revision=source.revision)
    readable = sorted(name for name in there if name.endswith(_READABLE))
    more = ", ..." if len(readable) > _MAX_LISTED else ""
    listed = ", ".join(readable[:_MAX_LISTED]) or "none that is JSONL or Parquet"
    raise DataError(f"{source} {fault}; the data set has {listed}{more}: name one of them, or a pattern with *")
