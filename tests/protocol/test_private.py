"""Where an account keeps what is its own. (Private folders themselves: ``test_endpoints``.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.private import user_cache, user_state


def test_an_accounts_places_follow_xdg_or_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # an empty variable counts as none
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert user_cache("here", "a") == Path("/home/ada/.cache/headrace/here/a")
    assert user_state("joined") == Path("/home/ada/.local/state/headrace/joined")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert (user_cache(), user_state("joined")) == (Path("/scratch/headrace"), Path("/state/headrace/joined"))


def test_an_account_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", str)
    with pytest.raises(ConfigError, match="no home folder; set HOME, or XDG_CACHE_HOME to a folder"):
        user_cache("files")
