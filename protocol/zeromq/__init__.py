"""The only importer of pyzmq: mailboxes and links between processes.

    transport   ZmqTransport: one context, one authenticator, and everything made with them
    links       PUSH and PULL: one link per sender, one mailbox per worker
    requests    DEALER and ROUTER: requests and answers
    sockets     options, binding, and waiting on a socket in asyncio
    curve       keys, and the permitted peers
    door        counts of refused connections

ZeroMQ loses data silently when a peer dies. So nothing here is an only copy: the ledger's is."""

from protocol.zeromq.curve import CurveKeys
from protocol.zeromq.transport import ZmqTransport

__all__ = ["CurveKeys", "ZmqTransport"]
