"""Complaints about peers are logged few at a time, and none is forgotten."""

from __future__ import annotations

from pathlib import Path

import structlog
import zmq

from protocol.errors import MalformedMessage
from protocol.inbound import Inbound
from protocol.log_limiter import LOG_EVERY_S, MAX_LOGGED, LogLimiter
from protocol.zeromq import CurveKeys
from protocol.zeromq.curve import DOMAIN, KeyAuthenticator


def test_one_peer_is_logged_once_a_minute_with_the_number_left_out():
    now = 0.0
    log_limiter = LogLimiter(lambda: now)
    assert [log_limiter.due("a", "kind") for _ in range(4)] == [0, None, None, None]
    assert log_limiter.due("a", "another kind") == 0
    now = LOG_EVERY_S
    assert log_limiter.due("a", "kind") == 3
    assert log_limiter.due("a", "kind") is None


def test_invented_names_get_few_lines_and_no_memory():
    now = 0.0
    log_limiter = LogLimiter(lambda: now)
    for minute in range(3):
        now = minute * LOG_EVERY_S
        told = [log_limiter.due(f"{minute}-{number}", "kind") for number in range(5_000)]
        left_out = 5_000 - MAX_LOGGED if minute else 0
        assert [number for number in told if number is not None] == [left_out] + [0] * (MAX_LOGGED - 1)


def test_a_peer_is_complained_of_after_many_others_were():
    now = 0.0
    log_limiter = LogLimiter(lambda: now)
    for number in range(10_000):
        log_limiter.due(str(number), "kind")
    now = LOG_EVERY_S
    assert log_limiter.due("an honest one", "kind") is not None


def test_a_keyholder_who_invents_names_fills_no_log():
    inbound = Inbound("here", max_bytes=1 << 20, clock=lambda: 0.0)
    with structlog.testing.capture_logs() as logs:
        for number in range(3_000):
            inbound.refuse(f"name-{number}" + "x" * 500, MalformedMessage("no"))
    assert len(logs) == MAX_LOGGED
    assert max(len(entry["peer"]) for entry in logs) <= 80
    assert sum(peer.num_refused for peer in inbound.stats()) == 3_000


def test_an_outsider_who_makes_a_key_for_each_connection_fills_no_log(tmp_path: Path):
    keys = CurveKeys.load_or_create(tmp_path / "keys")
    (keys.folder / "broken.pub").write_text("no key")
    with zmq.Context() as context:
        authenticator = KeyAuthenticator(context, keys)
        try:
            with structlog.testing.capture_logs() as logs:
                for _ in range(200):
                    public, _ = zmq.curve_keypair()
                    assert authenticator.callback(DOMAIN, public) is False
        finally:
            authenticator.stop()
    assert len([entry for entry in logs if entry["event"] == "connection refused: unknown key"]) == MAX_LOGGED
    # and one of the file without a key
    assert len(logs) <= MAX_LOGGED + 1
