"""The manifest of a run, stored in the ledger, with which other hosts join it.

It contains the resolved configuration, where a *place* stands for each path, and each file's place,
size, digest and roles. A place is a path below the joined host's folder of files. Prompt files keep
their names, because prompt ids begin with them.

A generator needs prompts, and the model's folder without weights, which come from the learner. A
reward worker needs the reward model, a reference worker its model, an environment worker the tokenizer and
the folders that its tools search. All need the code folders that the configuration names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.config.cross_checks import SEARCH
from pipeline.config.data_sets import GENERATED_VERIFIER
from pipeline.config.public import kept_settings
from pipeline.config.schema import RunConfig
from pipeline.data.places import local_file
from pipeline.files.code_copies import digest_of
from protocol.errors import ConfigError
from protocol.headrace import PACKAGES
from protocol.ids import ELASTIC_ROLES, Role

# The version of Headrace, and a digest of its sources. All hosts of a run must have the same, since
# messages, scripts and sampling must agree.

_ROOT = Path(__file__).parents[3]
_NUM_DIGITS = 12


class CodeVersion(msgspec.Struct, frozen=True):
    version: str
    digest: str
    """First 12 hex digits of the sources' sha256."""

    def __str__(self) -> str:
        return f"{self.version} (sources {self.digest})"


def own_version() -> CodeVersion:
    """Return the version of the running Headrace."""
    try:
        version = metadata.version("headrace")
    except metadata.PackageNotFoundError:
        version = "of a source tree"
    return CodeVersion(version, digest_of(_ROOT, *PACKAGES)[:_NUM_DIGITS])


def check_same(theirs: CodeVersion, ours: CodeVersion) -> None:
    if theirs == ours:
        return
    if theirs.version != ours.version:
        remedy = f"install headrace {theirs.version} on this host"
    else:
        remedy = "both are of one version, with other sources: install the same commit on both hosts"
    raise ConfigError(f"this host has Headrace {ours}, and the run was started with {theirs}; {remedy}")


MAX_CODE_FILES: Final = 5_000
MAX_CODE_BYTES: Final = 256 << 20
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")
_NOT_NEEDED: Final = (".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
"""Other weight formats, which no engine reads."""

Setting = tuple[str | int, ...]
"""Path of a setting: keys of tables and positions in lists."""


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    """Relative, with ``/``, such as ``data/train-0/train.jsonl``."""
    num_bytes: int
    digest: str
    roles: tuple[Role, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    code: CodeVersion
    settings: dict[str, Any]
    """The resolved configuration without passwords; paths are places."""
    places: tuple[tuple[str | int, ...], ...]
    """The settings whose values are places."""
    files: tuple[ManifestFile, ...] = ()
    endpoint: str = ""
    """Where the run's host serves the files."""
    public_key: str = ""
    """CURVE key of ``endpoint``."""
    has_reference: bool = False
    trouble: str = ""
    """Why no host can join; empty if hosts can."""

    def files_of(self, role: Role) -> list[ManifestFile]:
        return [file for file in self.files if role in file.roles]


class ManifestHead(msgspec.Struct, frozen=True):
    """What manifests of all versions of Headrace have in common."""

    code: CodeVersion


@dataclass(frozen=True, slots=True)
class _Needed:
    path: Path
    place: str
    roles: tuple[Role, ...]


def make_manifest(config: RunConfig) -> tuple[Manifest, dict[str, Path]]:
    """Return a run's manifest without an endpoint, and this host's file of each digest.

    Reads every file once. Raises ConfigError: a code folder is too large; DataError: a prompt file
    cannot be found; OSError."""
    settings = kept_settings(config)
    settings["ledger"].pop("url")
    settings["value"]["path"] = None
    places: list[Setting] = []
    needed: list[_Needed] = []

    def put(setting: Setting, place: str, files: Iterable[_Needed]) -> None:
        put_setting(settings, setting, place)
        places.append(setting)
        needed.extend(files)

    if config.has_generated_data:
        # of which the places below say nothing
        settings["reward"]["verifiers"] = [*config.reward.verifiers, GENERATED_VERIFIER]
    for setting, entry in _prompt_files(config):
        path = local_file(entry)
        place = f"data/{'-'.join(map(str, setting[1:]))}/{path.name}"
        put(setting, place, [_Needed(path, place, (Role.GENERATOR,))])
    put(("model", "path"), "model", _model_files(config))
    if config.model.reference_path is not None:
        place = "reference_model"
        put(("model", "reference_path"), place, _folder(config.model.reference_path, place, (Role.REFERENCE,)))
    for name in ("standard_template", "judge_template"):
        template = getattr(config.guidance, name)
        if template is not None:
            put(("guidance", name), name, [_Needed(template, name, (Role.REFERENCE,))])
    if config.reward.model is not None:
        place = "reward_model"
        put(("reward", "model", "path"), place, _folder(config.reward.model.path, place, (Role.REWARD,)))
    code = (
        ("reward", "path", config.reward.path),
        ("algorithm", "path", config.algorithm.path),
        ("environment", "folders", config.environment.folders),
    )
    for section, name, folders in code:
        for index, folder in enumerate(folders):
            place = f"code/{section}-{index}/{folder.name}"
            put((section, name, index), place, _code(folder, place, f"{section}.{name}"))
    for index, tool in enumerate(config.environment.tools):
        if tool.startswith(SEARCH):
            folder = Path(tool.removeprefix(SEARCH)).resolve()
            place = f"searched/{index}/{folder.name}"
            files = _code(folder, place, "environment.tools", (Role.ENVIRONMENT,))
            put(("environment", "tools", index), SEARCH + place, files)
    files, served = _digested(needed)
    return Manifest(
        code=own_version(), settings=settings, places=tuple(places), files=files, has_reference=config.has_reference
    ), served


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def digest_file(path: Path) -> str:
    """Return a file's digest, ``sha256:HEX``. Raises OSError."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def put_setting(settings: dict[str, Any], setting: Setting, value: object) -> None:
    """Set one setting in a tree of tables and lists. Raises LookupError or TypeError: there is no
    such table."""
    setting_at(settings, setting[:-1])[setting[-1]] = value


def setting_at(settings: dict[str, Any], setting: Setting) -> Any:
    """Return one setting of a tree. Raises LookupError or TypeError if it does not exist."""
    held: Any = settings
    for key in setting:
        held = held[key]
    return held


def _prompt_files(config: RunConfig) -> Iterator[tuple[Setting, Path | str]]:
    """Yield setting and path of every prompt file. A run's patterns are already resolved."""
    groups: list[tuple[Setting, tuple[Path | str, ...]]] = [
        (("data", "train"), config.data.train),
        (("data", "responses"), config.data.responses),
        (("data", "evaluation"), config.data.evaluation),
        *((("data", "sets", index, "train"), one.train) for index, one in enumerate(config.data.sets)),
        *((("evaluation", "sets", index, "files"), one.files) for index, one in enumerate(config.evaluation.sets)),
    ]
    for setting, entries in groups:
        for index, entry in enumerate(entries):
            yield (*setting, index), entry


def _model_files(config: RunConfig) -> Iterator[_Needed]:
    """Yield the start model's files: weights only for a reference, the tokenizer also for guidance and environments."""
    is_reference = config.has_reference and config.model.reference_path is None
    weighing = (Role.REFERENCE,) if is_reference else ()
    reading = (Role.REFERENCE,) if config.needs_guidance else weighing
    for file in _folder(config.model.path, "model", (Role.GENERATOR, Role.ENVIRONMENT, *reading)):
        if not file.path.name.endswith(_WEIGHTS):
            yield file
        elif weighing:
            yield _Needed(file.path, file.place, weighing)


def _folder(folder: Path, place: str, roles: tuple[Role, ...]) -> Iterator[_Needed]:
    for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*.jinja")]):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_NOT_NEEDED):
            yield _Needed(path, f"{place}/{path.relative_to(folder).as_posix()}", roles)


def _code(folder: Path, place: str, setting: str, roles: tuple[Role, ...] = ELASTIC_ROLES) -> Iterator[_Needed]:
    """Yield the files of a folder without caches and hidden files. Raises ConfigError if it is
    too large."""
    num_files = num_bytes = 0
    for path in _walk(folder):
        num_files, num_bytes = num_files + 1, num_bytes + path.stat().st_size
        if num_files > MAX_CODE_FILES or num_bytes > MAX_CODE_BYTES:
            raise ConfigError(
                f"{setting} names {folder}, which has more than {MAX_CODE_FILES} files or {MAX_CODE_BYTES >> 20} MiB, and "
                "joining hosts would fetch all of it; expected a folder of what workers read only: move that into a "
                "separate folder"
            )
        yield _Needed(path, f"{place}/{path.relative_to(folder).as_posix()}", roles)


def _walk(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir():
            # skip virtual environments
            if not path.is_symlink() and not (path / "pyvenv.cfg").exists():
                yield from _walk(path)
        elif path.is_file():
            yield path


def _digested(needed: Iterable[_Needed]) -> tuple[tuple[ManifestFile, ...], dict[str, Path]]:
    digests: dict[Path, str] = {}
    files: list[ManifestFile] = []
    served: dict[str, Path] = {}
    for one in needed:
        digest = digests[one.path] = digests.get(one.path) or digest_file(one.path)
        served[digest] = one.path
        files.append(ManifestFile(place=one.place, num_bytes=one.path.stat().st_size, digest=digest, roles=one.roles))
    return tuple(files), served
