"""How many transmissions in a row a TCP connection's peer has not acknowledged, from the kernel.

The peer's kernel acknowledges all data, probes of a full mailbox, and keep-alives, even if its
process is busy or frozen. So a missing acknowledgement means a lost host or cable, never
back-pressure. ``TCP_USER_TIMEOUT``, a limit of unacknowledged time, would also cut off full
mailboxes: https://www.rfc-editor.org/rfc/rfc5482.
"""

from __future__ import annotations

import os
import socket
import struct

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
"""Only Linux has it."""
_HEAD = struct.Struct("4B")
"""State, congestion state, retransmissions, probes: start of ``struct tcp_info`` (linux/tcp.h)."""


def num_unanswered(descriptor: int) -> int:
    """Return the peer's unacknowledged transmissions in a row; 0 where unknown.

    The descriptor stays open. A closed one, or one of no TCP connection, gives 0.
    """
    if _TCP_INFO is None or descriptor < 0:
        return 0
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            _, _, num_retransmissions, num_probes = _HEAD.unpack(
                connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _HEAD.size)
            )
    except OSError:
        return 0
    return max(num_retransmissions, num_probes)
