"""What the kernel knows of a TCP connection's other end: how often in a row it was asked in vain.

*Consumes* the descriptor of a connection. *Produces* a number. *Waits for* nothing.

Every segment of data is answered by the other end's kernel, every probe of a full mailbox's
connection and every keep-alive of an idle one, too, however busy or frozen its process is. So what
is not answered is a host or a cable, never back-pressure. (A limit on the time of unanswered data,
``TCP_USER_TIMEOUT``, would cut full mailboxes off as well: https://www.rfc-editor.org/rfc/rfc5482.)
"""

from __future__ import annotations

import os
import socket
import struct

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
"""Linux has it."""
_HEAD = struct.Struct("4B")
"""State, state of congestion control, retransmissions, probes: the begin of ``struct tcp_info``
(linux/tcp.h).
"""


def num_unanswered(descriptor: int) -> int:
    """Return how many transmissions in a row the peer has not answered; 0 where that cannot be
    told.

    The descriptor is looked at and left open. One that is closed meanwhile, or is no TCP
    connection, tells nothing.
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
