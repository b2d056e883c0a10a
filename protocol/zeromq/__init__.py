"""The only importer of pyzmq: mailboxes and links between processes.

    transport   ZmqTransport: one context and authenticator; PUSH and PULL: a link per sender, a mailbox per worker
    requests    DEALER and ROUTER: requests and answers
    sockets     options, binding, and waiting on a socket in asyncio
    monitor     unreachable peers and refused connections, from libzmq's socket events
    curve       keys, and the permitted peers

ZeroMQ silently loses data when a peer dies, so nothing here is the only copy: that is in the ledger."""

from protocol.zeromq.curve import CurveKeys
from protocol.zeromq.transport import ZmqTransport

__all__ = ["CurveKeys", "ZmqTransport"]
