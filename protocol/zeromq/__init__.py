"""The only importer of pyzmq: mailboxes and links between processes.

    transport   ZmqTransport: one context and authenticator; PUSH and PULL: a link per sender, a mailbox per worker
    requests    DEALER and ROUTER: requests and answers
    sockets     options, binding, and waiting on a socket in asyncio
    monitor     unreachable peers and refused connections, from libzmq's events of a socket
    curve       keys, and the permitted peers

ZeroMQ loses data silently when a peer dies. So nothing here is an only copy: the ledger's is."""

from protocol.zeromq.curve import CurveKeys
from protocol.zeromq.transport import ZmqTransport

__all__ = ["CurveKeys", "ZmqTransport"]
