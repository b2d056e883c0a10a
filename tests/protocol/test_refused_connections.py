"""Connections that a listening socket refuses are counted."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from protocol.zeromq import CurveKeys
from protocol.zeromq.monitor import RefusedConnections


def test_a_door_ends_with_its_context_though_its_socket_is_still_open(tmp_path: Path) -> None:
    failed: list[threading.ExceptHookArgs] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=context.underlying)
    listening = own.socket(zmq.ROUTER)
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        refused = RefusedConnections(context, listening, CurveKeys.load_or_create(tmp_path / "keys"))
        (watching,) = set(threading.enumerate()) - before
        # It waits for all sockets, that of the events among them.
        ending = threading.Thread(target=context.destroy, kwargs={"linger": 0})
        ending.start()
        refused.join()
        assert not watching.is_alive()
        listening.close(linger=0)
        ending.join(10.0)
    assert not ending.is_alive()
    assert failed == []
