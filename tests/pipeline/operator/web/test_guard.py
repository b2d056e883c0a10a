"""Rules of requests to the page's server, as data, without a socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline.operator.web.guard import HEADERS, RequestRules, check_place, kept_token, new_token, own_names
from protocol.errors import ConfigError

TOKEN = "t" * 43
RULES = RequestRules(TOKEN, own_names("127.0.0.1"))
GOOD = {"host": "127.0.0.1:8421", "authorization": f"Bearer {TOKEN}"}


def status(method: str = "GET", path: str = "/api/runs", **changes: str | None) -> int:
    headers = {name.replace("_", "-"): value for name, value in (GOOD | changes).items() if value is not None}
    refused = RULES.refusal(method, path, headers)
    return 200 if refused is None else refused.status


def test_every_figure_needs_the_token_and_the_page_itself_does_not() -> None:
    assert status() == 200
    assert status(authorization=None) == 401
    assert status(authorization=f"Bearer {TOKEN[:-1]}u") == 401
    assert status(authorization=f"Basic {TOKEN}") == 401
    assert status(authorization="Bearer ") == 401
    assert status("GET", "/", authorization=None) == 200
    assert status("GET", "/static/main.js", authorization=None) == 200
    assert status("POST", "/", authorization=None) == 405


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8421", "127.0.0.1:1", "[::1]:8421", "LOCALHOST:8421", "192.0.2.7:8421"]
)
def test_own_names_and_addresses_are_answered(host: str) -> None:
    assert status(host=host) == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8421", "localhost.evil.example:8421", "", None])
def test_a_foreign_name_that_points_here_reads_nothing(host: str | None) -> None:
    assert status(host=host) == 421
    assert status("GET", "/", host=host) == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:9999", "null", "http://localhost:8421"])
def test_another_pages_change_is_refused(origin: str) -> None:
    change = {"origin": origin, "content_type": "application/json"}
    assert status("POST", "/api/runs/demo/scale", **change) == 403


def test_a_change_comes_from_this_page_as_json() -> None:
    path, own = "/api/runs/demo/scale", "http://127.0.0.1:8421"
    assert status("POST", path, origin=own, content_type="application/json; charset=utf-8") == 200
    # A client that is no browser names no origin.
    assert status("POST", path, content_type="application/json") == 200
    assert status("POST", path, origin=own, content_type="text/plain") == 415
    assert status("POST", path, origin=own) == 415
    assert status("POST", path, origin=own, content_type="application/json", authorization=None) == 401


def test_the_policy_of_content_allows_own_files_alone() -> None:
    parts = [part.strip().partition(" ") for part in HEADERS["content-security-policy"].split(";")]
    policy = {name: value for name, _, value in parts}
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert not any(word in HEADERS["content-security-policy"] for word in ("unsafe", "http:", "https:", "data:", "*"))


def test_a_token_is_new_each_time_and_long() -> None:
    assert new_token() != new_token()
    assert len(new_token()) >= 43


def test_a_token_file_is_made_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = kept_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert kept_token(path) == token


def test_a_token_file_that_others_may_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(new_token())
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640, so others may read it; expected 0600: chmod 600"):
        kept_token(path)
    path.write_text("secret")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="has 6 characters; expected at least 32"):
        kept_token(path)
    with pytest.raises(ConfigError, match="No such file or directory; name a file in a folder that you may write to"):
        kept_token(tmp_path / "absent" / "token")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", socket.gethostname() + ".example"])
def test_an_address_that_others_reach_needs_a_token_file(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssh -L 8421:127\.0\.0\.1:8421 HOST"):
        check_place(host, None, 8421)
    check_place(host, tmp_path / "token", 8421)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_an_address_of_this_machine_alone_needs_none(host: str) -> None:
    check_place(host, None, 8421)


def test_the_machines_full_name_is_answered_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "Box.Example.org")
    rules = RequestRules(TOKEN, own_names("0.0.0.0"))
    for host in ("Box.Example.org", "box.example.org:8421"):
        assert rules.refusal("GET", "/api/runs", {**GOOD, "host": host}) is None
