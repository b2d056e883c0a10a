"""Checks before a run starts that its mirror can be written to."""

from __future__ import annotations

import threading
from typing import Final

from pipeline.config.schema import RunConfig
from pipeline.files.object_store import ObjectStore
from pipeline.files.urls import join
from pipeline.training.mirror.layout import list_copies
from protocol.errors import ConfigError, HeadraceError, StoreUnavailable

_ANSWER_S: Final = 20.0
_PROBE: Final = "write-probe"


def check_mirror(config: RunConfig, *, is_new: bool) -> str:
    """Return a sentence about ``checkpoint.mirror``. A store that does not answer now does not
    delay the start. ``is_new``: whether the run begins, instead of being resumed.

    Raises ConfigError if the store refuses (no bucket, no credentials), its package is not
    installed, or a new run would write next to copies of another."""
    assert config.checkpoint.mirror is not None, "only a run with a mirror is checked"
    url = join(config.checkpoint.mirror, config.run.name)
    store = ObjectStore(url)
    answered: list[bool | HeadraceError] = []

    def ask() -> None:
        try:
            has_copies = bool(list_copies(store))
            store.put_bytes(_PROBE, b"")
            store.remove([_PROBE])
            answered.append(has_copies)
        except HeadraceError as error:
            answered.append(error)

    # A thread, since a mute store can hold a call for minutes.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    found = answered[0] if answered else StoreUnavailable(f"{url}: no answer within {_ANSWER_S:g} s")
    if isinstance(found, ConfigError):
        raise ConfigError(f"checkpoint.mirror: {found}") from found
    if isinstance(found, HeadraceError):
        return f"checkpoint.mirror: {found}; the run starts, and copies are tried again"
    if found and is_new:
        raise ConfigError(
            f"checkpoint.mirror: {url} already holds copies of a run; continue it with `headrace up --resume "
            f"{url}`, or start another with --set run.name=OTHER"
        )
    return f"checkpoints are copied to {url}"
