"""Claims about folders of object stores, on the filesystems that fsspec itself brings."""

from __future__ import annotations

import errno
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from pipeline.files.object_store import ObjectStore
from protocol.errors import ConfigError, DataError, StorageFailed, StoreUnavailable


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    place = f"{tmp_path}/bucket" if request.param == "file" else tmp_path.name
    return ObjectStore(f"{request.param}://{place}/run")


def test_what_was_stored_is_found_read_and_removed(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w" * 3_000_000)
    moved: list[int] = []
    assert store.names("") == {}
    store.put("files/weights", tmp_path / "weights")
    store.put_bytes("copies/1.json", b"{}")
    assert store.names("") == {"copies/1.json": 2, "files/weights": 3_000_000}
    assert store.names("copies") == {"copies/1.json": 2}
    assert store.matching("*/*.json") == ["copies/1.json"]
    assert store.read("copies/1.json") == b"{}"
    assert store.size("files/weights") == 3_000_000
    store.get("files/weights", tmp_path / "deep" / "again", moved.append)
    assert (tmp_path / "deep" / "again").read_bytes() == b"w" * 3_000_000
    store.remove(["copies/1.json", "copies/2.json"])
    assert store.read("copies/1.json") is None
    assert store.size("copies/1.json") is None


def test_an_object_that_is_not_there_is_named(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run/files/none: there is no such .*object"):
        store.get("files/none", tmp_path / "none")


def test_a_scheme_without_its_package_says_which_extra_to_install() -> None:
    for scheme, package, extra in (("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")):
        if importlib.util.find_spec(package) is None:
            with pytest.raises(ConfigError, match=rf"pip install 'headrace\[{extra}\]'"):
                ObjectStore(f"{scheme}://bucket/run")


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="credentials come from") as refused:
        ObjectStore("s3://key:hidden@bucket/run")
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageFailed, "the disk is full"),
        (PermissionError("Access Denied"), ConfigError, "refuses these credentials .*come from"),
        (type("NoCredentialsError", (Exception,), {})("none"), ConfigError, "no usable credentials"),
        (FileNotFoundError("The specified bucket does not exist"), DataError, "no such bucket"),
        (TimeoutError(), StoreUnavailable, "the store failed"),
        (type("EndpointConnectionError", (Exception,), {})("refused"), StoreUnavailable, "the store failed"),
    ],
)
def test_an_error_of_a_store_is_told_in_a_sentence_that_says_whether_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], words: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(LocalFileSystem, "put_file", refuse)
    (tmp_path / "a").write_text("a")
    with pytest.raises(kind, match=words) as raised:
        ObjectStore(f"file://{tmp_path}/b").put("a", tmp_path / "a")
    assert type(raised.value) is kind
