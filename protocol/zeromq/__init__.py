"""The only door to ZeroMQ: mailboxes and links between processes.

*Consumes* messages. *Produces* deliveries. *Waits for* room (senders) and input (mailboxes), each
with a deadline; unblocked by the peer.

    transport   ZmqTransport: one context, one authenticator, and everything made with them
    links       PUSH and PULL: one link per sender, one mailbox per worker
    requests    DEALER and ROUTER: ask and answer
    sockets     options, binding, and waiting on a socket in asyncio
    curve       keys, and who may connect
    door        counting who was refused

ZeroMQ loses data silently when a peer dies, so nothing here is the only copy of anything: the
ledger is.
"""

from protocol.zeromq.curve import CurveKeys
from protocol.zeromq.transport import ZmqTransport

__all__ = ["CurveKeys", "ZmqTransport"]
