"""Data sets and models from the Hugging Face hub.

Data: ``hf://datasets/OWNER/NAME@REVISION/FILE``, where FILE may contain ``*`` and ``?``. Models and
tokenizers: ``hf://OWNER/NAME@REVISION``. REVISION is a branch, tag or commit, by default ``main``.
The package ``huggingface_hub`` fetches, caches and reads the token; ``HF_TOKEN``, ``HF_HOME``,
``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` work as usual. A run records the commit (for models: that
commit's folder in the cache), so that all its workers and every resume read the same bytes. Pickled
weights are not fetched.

Progress goes to a bar of ``pipeline.process.progress_bar`` and the package draws nothing. For
fetches it accepts a class of progress bars; for uploads it does not, so its own class is patched
meanwhile."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

from pipeline.config.base import Section
from pipeline.config.data_sets import HUB_PREFIX
from pipeline.config.load import HUB_MODEL
from pipeline.config.schema import RunConfig
from pipeline.process.progress_bar import ProgressBar, progress
from protocol.errors import ConfigError, DataError

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
        """Whether it names a single file of a single commit."""
        return bool(_COMMIT.fullmatch(self.revision)) and not set(self.file) & set("*?[")


def parse_hub_name(name: str) -> HubSource:
    """Parse a name. Raises DataError if it names no data set or no file."""
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
    """Fetch the files that match and return each with its commit; without a network the cache is
    used. Raises DataError if data set or file does not exist, access is denied, or there is neither
    network nor cache."""
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
    """Return the local copy of a pinned file, fetching it if it is not cached. Raises DataError."""
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


_MODEL_NAME: Final = re.compile(r"(?P<repository>[^/@]+/[^/@]+)(?:@(?P<revision>.+))?")
_MODEL_FILES: Final = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_MODEL_FOLDER: Final = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


def pin_models(config: RunConfig) -> RunConfig:
    """Return the configuration with each hub model replaced by the local folder of its commit.
    Raises ConfigError if a model does not exist, access is denied, there is neither network nor
    cache, or a path is a GGUF file."""
    return _with_models(config, _pinned_model)


def with_hub_names(config: RunConfig) -> RunConfig:
    """Return the configuration with each hub cache folder that is missing on this host replaced by
    its hub name; the run was started on another host."""
    return _with_models(config, _renamed)


def _with_models(config: RunConfig, changed_path: Callable[[Path | None], Path | None]) -> RunConfig:
    """Return the configuration with every model path replaced by what ``changed_path`` returns for
    it, unless None."""
    model = {name: path for name in ("path", "reference_path") if (path := changed_path(getattr(config.model, name)))}
    changed: dict[str, Section] = {"model": config.model.model_copy(update=model)} if model else {}
    if path := changed_path(config.value.path):
        changed["value"] = config.value.model_copy(update={"path": path})
    if config.reward.model is not None and (path := changed_path(config.reward.model.path)):
        reward_model = config.reward.model.model_copy(update={"path": path})
        changed["reward"] = config.reward.model_copy(update={"model": reward_model})
    return config.model_copy(update=changed) if changed else config


def _renamed(path: Path | None) -> Path | None:
    name = None if path is None or path.exists() else hub_name(path)
    return Path(f"hf://{name}") if name else None


def pinned_model(path: Path) -> Path:
    """Return a model's folder; a hub name is fetched. Raises like ``pin_models``."""
    return _pinned_model(path) or path


def hub_name(folder: Path) -> str | None:
    """Return ``OWNER/NAME@COMMIT`` for a folder in the hub's cache, else None."""
    found = _MODEL_FOLDER.fullmatch(folder.parent.parent.name)
    return f"{found['owner']}/{found['name']}@{folder.name}" if found and folder.parent.name == "snapshots" else None


def _pinned_model(path: Path | None) -> Path | None:
    """Return the fetched folder of a hub name; None for a local path."""
    if path is None:
        return None
    if not str(path).startswith(HUB_MODEL):
        refuse_gguf(path)
        return None
    name = str(path).removeprefix(HUB_MODEL).lstrip("/")
    found = _MODEL_NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"hf://{name}: expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION; correct the name")
    return _fetch_model(found["repository"], found["revision"] or "main")


def _fetch_model(repository: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    name = f"hf://{repository}@{revision}"
    with plain_errors(name, repository, "model"), fetching(name) as bars:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_MODEL_FILES, tqdm_class=bars))


Kind = Literal["model", "dataset"]

_WORDS: Final[dict[Kind, tuple[str, str, str, type[ConfigError | DataError]]]] = {
    "model": ("model", "", "", ConfigError),
    "dataset": ("data set", "datasets/", "--repo-type dataset ", DataError),
}
"""By kind: what to call it, the prefix of its pages, an option of ``hf download``, the error to raise."""


@contextmanager
def plain_errors(name: str, repository: str, kind: Kind) -> Iterator[None]:
    """Turn the package's errors about a repository into ConfigError (model) or DataError (data set)
    that start with ``name``. The text never contains a token."""
    from huggingface_hub import constants, errors

    words, pages, option, raised = _WORDS[kind]
    hub = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        remedy = f"accept their terms at {hub}/{pages}{repository}, and set HF_TOKEN"
        raise raised(f"{name}: access must be requested from its owners; {remedy}") from error
    except errors.RepositoryNotFoundError as error:
        remedy = "correct the name, or set HF_TOKEN to a token that may read it"
        raise raised(f"{name}: {hub} has no {words} {repository}, or it is private; {remedy}") from error
    except errors.RevisionNotFoundError as error:
        raise raised(f"{name}: {repository} has no such revision; name a branch, a tag or a commit") from error
    except errors.RemoteEntryNotFoundError as error:
        raise raised(f"{name}: {repository} has no such file in this revision; correct the name") from error
    except errors.HFValidationError as error:
        raise raised(f"{name}: {repository} is not the name of a {words}; expected OWNER/NAME") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "try again later, or set HF_TOKEN if it is 401 or 403"
        raise raised(f"{name}: {hub} answered with status {status}; {remedy}") from error
    except (OSError, errors.EntryNotFoundError) as error:
        lacks = f"{hub} cannot be reached, and the cache {constants.HF_HUB_CACHE} lacks it ({type(error).__name__})"
        fetch = f"Run `hf download {option}{repository}` where there is a network and copy the cache"
        raise raised(f"{name}: {lacks}. {fetch}, or give a local path") from error


_MB = 1e6


@contextmanager
def fetching(what: str) -> Generator[type[Any]]:
    """Show a fetch's progress; yields the class of progress bars to pass to the package."""
    with progress(f"fetching {what}", unit="MB") as bar:
        yield _counting(bar)


class UploadCourse:
    """Progress of an upload that sends its files one after another."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._before = self._here = self._size = 0.0

    @contextmanager
    def file(self, name: str, num_bytes: int) -> Generator[None]:
        """Count one file, which the block uploads."""
        self._here, self._size = 0.0, float(num_bytes)
        self._bar.detail(name)
        yield
        self._before += num_bytes
        self._bar.reach(self._before / _MB)

    def reach(self, num_bytes: float) -> None:
        """Report bytes done of the current file. The package has several bars per file; the furthest counts."""
        self._here = max(self._here, min(num_bytes, self._size))
        self._bar.reach((self._before + self._here) / _MB)


@contextmanager
def uploading(what: str, num_bytes: int) -> Generator[UploadCourse]:
    """Show the progress of the uploads in this block; the package's own bars stay hidden."""
    # imported here because most commands upload nothing
    from huggingface_hub.utils import tqdm

    with progress(f"uploading {what}", total=num_bytes / _MB, unit="MB") as bar:
        shown = UploadCourse(bar)
        begin: Callable[..., None] = tqdm.__init__

        def quiet(one: Any, *arguments: Any, **options: Any) -> None:
            begin(one, *arguments, **(options | {"disable": True}))

        def update(one: Any, n: float | None = 1) -> None:
            one.n += n or 0
            shown.reach(one.n)

        # Any, because the class itself is patched
        hub_bar: Any = tqdm
        hub_bar.__init__, hub_bar.update = quiet, update
        try:
            yield shown
        finally:
            hub_bar.__init__ = begin
            # restores the inherited method
            del hub_bar.update


def _counting(bar: ProgressBar) -> type[Any]:
    # imported here because most commands fetch nothing
    from tqdm.auto import tqdm

    class HubBar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        """A hidden bar of the package. Bars that count bytes are forwarded; the furthest is shown."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            self._counts_bytes = options.get("unit") == "B"
            self._done = float(options.get("initial") or 0.0)
            super().__init__(*arguments, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            self._done += n or 0.0
            if self._counts_bytes and self.total:
                bar.reach(self._done / _MB, self.total / _MB)

    return HubBar


_MAGIC: Final = b"GGUF"


def refuse_gguf(path: Path) -> None:
    """Raise ConfigError, with the command that converts it, for a GGUF file or a folder with one
    that is not a model folder."""
    file = _gguf_of(path)
    if file is not None:
        folder = file.with_suffix("") if file.suffix else file.with_name(f"{file.name}-model")
        command = shlex.join(["python", "-m", "workers.engines.convert_gguf", str(file), str(folder)])
        raise ConfigError(
            f"{file} is a GGUF file; expected a model folder in Hugging Face format: pip install 'headrace[gguf]', run "
            f"`{command}` and name the new folder"
        )


def _gguf_of(path: Path) -> Path | None:
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
        return files[0] if files else None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(len(_MAGIC)) == _MAGIC else None
