"""Objects below one URL of an object store, through fsspec; nothing else imports fsspec.

Calls block. Only the store's own package retries, for a few seconds. Errors are translated:
ConfigError when a retry cannot help (no bucket, no credentials, no package), StoreUnavailable when
it may, StorageFailed when this host's disk is full."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pipeline.files.urls import EXTRAS, check_url, join, scheme_of
from protocol.errors import ConfigError, DataError, StorageFailed, StoreUnavailable

_CONNECT_S: Final = 10
_SILENT_S: Final = 60
"""Longest silence of a store in the middle of an answer."""
_PARTS_AT_ONCE: Final = 2
"""Concurrent parts of a large file, 50 MB each."""
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    # botocore must not retry, since s3fs does
    "s3": {
        "max_concurrency": _PARTS_AT_ONCE,
        "config_kwargs": {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _SILENT_S,
            "retries": {"total_max_attempts": 1},
        },
    },
    "gs": {"timeout": _SILENT_S},
    "file": {"auto_mkdir": True},
}
_NO_CREDENTIALS: Final = frozenset(
    {
        "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
        "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "DefaultCredentialsError",
        "RefreshError", "GoogleAuthError",
    }
)  # fmt: skip
_REFUSED: Final = frozenset({401, 403})
_MAX_REASON_CHARS: Final = 200

Moved = Callable[[int], None]
"""Called with the number of bytes moved since the last call."""


class ObjectStore:
    """The objects below one URL. Names are relative to it."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError: not an object store's URL, or the package for it is not installed."""
        try:
            self.url = check_url(url)
        except ValueError as error:
            raise ConfigError(f"{scheme_of(url)}://...: {error}") from None
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        scheme = scheme_of(self.url)
        with _plain_errors(self.url):
            # No cached instance or listing: others write there too.
            self._files: Any = fsspec.filesystem(  # pyright: ignore[reportUnknownMemberType]
                scheme, skip_instance_cache=True, use_listings_cache=False, **_OPTIONS.get(scheme, {})
            )
        self._root = str(self._files._strip_protocol(self.url))

    def put(self, name: str, path: Path, moved: Moved = lambda _: None) -> None:
        with _plain_errors(join(self.url, name)):
            self._files.put_file(str(path), self._at(name), callback=_callback(moved))

    def put_bytes(self, name: str, data: bytes) -> None:
        """Store a small object in one request."""
        with _plain_errors(join(self.url, name)):
            if scheme_of(self.url) == "file":
                # Only here must folders exist before their files.
                self._files.makedirs(self._files._parent(self._at(name)), exist_ok=True)
            self._files.pipe_file(self._at(name), data)

    def get(self, name: str, path: Path, moved: Moved = lambda _: None) -> None:
        with _plain_errors(join(self.url, name)):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.get_file(self._at(name), str(path), callback=_callback(moved))

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if it does not exist."""
        with _plain_errors(join(self.url, name)):
            try:
                return self._files.cat_file(self._at(name))
            except FileNotFoundError as error:
                if _is_bucket_missing(error):
                    raise
                return None

    def size(self, name: str) -> int | None:
        with _plain_errors(join(self.url, name)):
            try:
                found = self._files.info(self._at(name))
            except FileNotFoundError:
                return None
        return int(found["size"]) if found["type"] == "file" else None

    def names(self, folder: str) -> dict[str, int]:
        """Return the objects in a folder and below it: name to size in bytes."""
        with _plain_errors(join(self.url, folder)):
            try:
                found = self._files.find(self._at(folder), detail=True)
            except FileNotFoundError as error:
                if _is_bucket_missing(error):
                    raise
                return {}
        return {name.removeprefix(self._root).lstrip("/"): int(entry["size"]) for name, entry in found.items()}

    def matching(self, pattern: str) -> list[str]:
        with _plain_errors(join(self.url, pattern)):
            found = self._files.glob(self._at(pattern))
        return sorted(name.removeprefix(self._root).lstrip("/") for name in found)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""
        for name in names:
            with _plain_errors(join(self.url, name)):
                try:
                    self._files.rm_file(self._at(name))
                except FileNotFoundError:
                    continue

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


def _callback(moved: Moved) -> Any:
    from fsspec.callbacks import Callback  # pyright: ignore[reportMissingTypeStubs]

    class Moving(Callback):
        def relative_update(self, inc: int = 1) -> None:
            moved(int(inc))

    return Moving()


@contextmanager
def _plain_errors(url: str) -> Generator[None]:
    """Translate errors of fsspec and of the store's package into ours."""
    try:
        yield
    except (ConfigError, StoreUnavailable, StorageFailed):
        raise
    except Exception as error:
        raise _in_our_words(url, error) from error


def _in_our_words(url: str, error: Exception) -> Exception:
    kind = type(error).__name__
    reason = (str(error).splitlines() or [kind])[0][:_MAX_REASON_CHARS] or kind
    number, code = getattr(error, "errno", None), getattr(error, "code", None)
    scheme = scheme_of(url)
    if isinstance(error, ImportError):
        extra = EXTRAS.get(scheme, scheme)
        return ConfigError(f"{url}: the package for {scheme}:// is not installed; pip install 'headrace[{extra}]'")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StorageFailed(f"{url}: the disk is full ({reason}); make room, and try again")
    is_refused = isinstance(error, PermissionError) or code in _REFUSED or reason.startswith("Forbidden")
    if kind in _NO_CREDENTIALS or is_refused:
        where = {
            "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role",
            "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the machine's account",
        }.get(scheme, "the folder's permissions")
        fault = "the store refuses these credentials" if is_refused else "no usable credentials were found"
        return ConfigError(f"{url}: {fault} ({kind}: {reason}); they come from {where}")
    if isinstance(error, FileNotFoundError):
        what = "there is no such bucket" if _is_bucket_missing(error) else "there is no such bucket or object"
        return DataError(f"{url}: {what} ({reason}); correct the name, or create it")
    return StoreUnavailable(f"{url}: the store failed ({kind}: {reason})")


def _is_bucket_missing(error: FileNotFoundError) -> bool:
    return "specified bucket" in str(error)
