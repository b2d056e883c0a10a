"""JSON of others that is nested without end is refused in a sentence, or left out: it ends no process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ops.emulated.state import LearnedState
from pipeline.config import CHANGES_NAME
from pipeline.config.changed import changed_settings
from pipeline.config.rewards import EndpointSection
from pipeline.data.end_tokens import _read as read_generation_config
from pipeline.data.files import BadRow, read_rows
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.files.object_store import ObjectStore
from pipeline.ledger.address import LEDGER_FILE, read_address
from pipeline.ledger.redis.client import connect
from pipeline.observability.settings_changes import read_changes
from pipeline.preflight.model_folder import _json as read_value_config
from pipeline.preflight.model_folder import _tokenizer_limit, read_model_config
from pipeline.rewards.endpoint import UNREADABLE, verdict_of
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.joining.home import HomeEntry, HomeWriter
from pipeline.supervisor.joining.join import _decoded as decoded_manifest
from pipeline.supervisor.joining.manifest import Manifest, ManifestHead
from pipeline.supervisor.launchers.hosts import _decoded as decoded_report
from pipeline.training.checkpoints import MANIFEST_FILE, sealed_digests
from pipeline.training.mirror.layout import read_copy
from pipeline.training.snapshots import read_manifest
from protocol.errors import HeadraceError
from workers.engines.model.checkpoint_files import parse_training_state

NESTED = b'{"a":' + b"[" * 100_000
"""An object, since a decoder of one refuses a list before it looks inside."""
IN_A_LIST = b"[" + NESTED


def file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    """Return a reader of a file ``name`` of a folder."""

    def reader(folder: Path, junk: bytes) -> object:
        (folder / name).write_bytes(junk)
        return read(folder)

    return reader


def tokenizer_config(folder: Path) -> object:
    (folder / "tokenizer.json").write_text("{}")
    return load_text_tokenizer(folder)


def mirrored(folder: Path) -> object:
    return read_copy(ObjectStore(folder.as_uri()), "copy.json")


REFUSED: dict[str, Callable[[Path, bytes], object]] = {
    "model": file("config.json", lambda folder: read_model_config(folder, with_weights=False)),
    "tokenizer": file("tokenizer.json", load_text_tokenizer),
    "tokenizer's settings": file("tokenizer_config.json", tokenizer_config),
    "tokenizer's limit": file("tokenizer_config.json", _tokenizer_limit),
    "value model": file("config.json", lambda folder: read_value_config(folder / "config.json", "absent")),
    "end tokens": file(
        "generation_config.json", lambda folder: read_generation_config(folder / "generation_config.json")
    ),
    "manifest's head": lambda _, junk: decoded_manifest(junk, ManifestHead),
    "manifest": lambda _, junk: decoded_manifest(junk, Manifest),
    "another host's report": lambda _, junk: decoded_report("hostb", junk.decode()),
    "mirror's copy": file("copy.json", mirrored),
    "checkpoint": file(MANIFEST_FILE, sealed_digests),
    "training state": lambda folder, junk: parse_training_state(junk, folder),
    "emulated state": lambda folder, junk: LearnedState.parse(junk, folder),
    "snapshot": lambda _, junk: read_manifest(junk),
    "ledger's address": file(LEDGER_FILE, read_address),
    "changed settings": lambda folder, junk: file(CHANGES_NAME, changed_settings)(folder, IN_A_LIST),
    "settings' changes": lambda folder, junk: file(CHANGES_NAME, read_changes)(folder, IN_A_LIST),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nested_json_of_others_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError) as refused:
        REFUSED[name](tmp_path, NESTED)
    assert "\n" not in str(refused.value)


def test_a_nested_line_of_data_is_a_bad_row_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(NESTED + b'\n{"prompt": "a"}\n')
    bad, good = read_rows(path)
    assert isinstance(bad, BadRow) and not isinstance(good, BadRow)


def test_a_nested_entry_of_a_joined_host_is_refused(tmp_path: Path) -> None:
    nested = msgspec.msgpack.encode({"pieces": []})[:-1] + b"\x91" * 100_000
    unknown = b"\x81\xa1z" + b"\x91" * 100_000
    for junk in (nested, unknown):
        assert HomeWriter(tmp_path).write(junk) == HomeEntry()


async def test_a_nested_fleet_counts_as_none() -> None:
    client = connect("redis://127.0.0.1:1")
    nested = b'{"evictions":"[{\\"a\\":' + b"[" * 100_000 + b'"}'
    assert RedisRegistry(client, "demo")._fleet(nested) is None
    await client.aclose()


def test_a_nested_reply_of_an_endpoint_is_unreadable() -> None:
    settings = EndpointSection(url="http://127.0.0.1:1")
    for junk in (NESTED, b"[" * 100_000):
        with pytest.raises(UNREADABLE):
            verdict_of(settings, str, junk.decode())
