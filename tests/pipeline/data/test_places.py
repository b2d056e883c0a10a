"""Claims about data files in object stores: fetched once, and the same bytes for a whole run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.config.load import load_config, read_resolved, write_resolved
from pipeline.config.schema import RunConfig
from pipeline.data.places import local_file, pin_data
from pipeline.files.object_store import ObjectStore
from protocol.errors import ConfigError, DataError, StorageFailed

ROW = b'{"question": "1+2=", "answer": "#### 3"}\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "data"


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/bucket"
    store = ObjectStore(url)
    for name in ("train-0.jsonl", "train-1.jsonl", "deep/test.jsonl"):
        store.put_bytes(name, ROW + name.encode())
    return url


def config_of(*names: str) -> RunConfig:
    listed = ", ".join(f'"{name}"' for name in names)
    return load_config([], ["model.path=x", f"data.train=[{listed}]"])


def test_a_url_is_fetched_once_and_its_digest_stands_in_the_resolved_configuration(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pin_data(config_of(f"{bucket}/train-0.jsonl"))
    [entry] = config.data.train
    assert str(entry).startswith(f"{bucket}/train-0.jsonl#sha256=")
    write_resolved(config, tmp_path)
    again = pin_data(read_resolved(tmp_path))
    assert again.data.train == config.data.train
    # A worker has no credentials, and needs none.
    monkeypatch.setattr(ObjectStore, "__init__", lambda *_: pytest.fail("the store was asked"))
    path = local_file(again.data.train[0])
    assert path.name == "train-0.jsonl", "ids of prompts begin with the file's name"
    assert path.read_bytes() == ROW + b"train-0.jsonl"


def test_a_pattern_names_each_object_by_itself(bucket: str) -> None:
    names = [str(one).partition("#")[0] for one in pin_data(config_of(f"{bucket}/train-*.jsonl")).data.train]
    assert names == [f"{bucket}/train-0.jsonl", f"{bucket}/train-1.jsonl"]
    with pytest.raises(DataError, match="no object matches"):
        pin_data(config_of(f"{bucket}/other-*.jsonl"))


def test_an_object_that_has_changed_is_refused_and_one_that_has_not_is_fetched_again(bucket: str, cache: Path) -> None:
    [entry] = pin_data(config_of(f"{bucket}/train-0.jsonl")).data.train
    for file in cache.rglob("*.jsonl"):
        file.unlink()
    assert local_file(entry).read_bytes() == ROW + b"train-0.jsonl"
    for file in cache.rglob("*.jsonl"):
        file.unlink()
    ObjectStore(bucket).put_bytes("train-0.jsonl", ROW + b"changed")
    with pytest.raises(DataError, match=r"train-0\.jsonl has changed since the run began: .*start a new run"):
        local_file(entry)


def test_a_copy_that_others_may_have_made_is_refused(bucket: str, cache: Path) -> None:
    [entry] = pin_data(config_of(f"{bucket}/train-0.jsonl")).data.train
    for folder in (cache, cache.parent):
        folder.chmod(0o777)
        for use in (lambda: local_file(entry), lambda: pin_data(config_of(f"{bucket}/train-1.jsonl"))):
            with pytest.raises(ConfigError, match=f"chmod 700 {folder}, or"):
                use()
        folder.chmod(0o700)
    assert local_file(entry).read_bytes() == ROW + b"train-0.jsonl"


def test_a_missing_object_and_a_url_with_a_password_are_told_in_sentences(bucket: str) -> None:
    with pytest.raises(DataError, match="no such bucket or object"):
        pin_data(config_of(f"{bucket}/none.jsonl"))
    with pytest.raises(ConfigError, match="credentials come from") as refused:
        config_of("s3://key:hidden@bucket/train.jsonl")
    assert "hidden" not in str(refused.value)


def test_a_full_disk_is_named_with_the_folder_that_lacks_room(
    bucket: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, _: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageFailed, match=rf"{cache} cannot hold .*make room"):
        pin_data(config_of(f"{bucket}/train-0.jsonl"))
    assert not list(cache.glob(".partial*"))


def test_a_generated_set_without_its_package_is_told_with_the_extra_to_install() -> None:
    if find_spec("reasoning_gym") is not None:
        pytest.skip("reasoning-gym is installed here")
    with pytest.raises(ConfigError, match=r"^reasoning-gym://chain_sum.*pip install 'headrace\[reasoning-gym\]'"):
        pin_data(config_of("reasoning-gym://chain_sum"))
