"""How large a message may be, how many frames it has, how deep it may nest.

*Consumes* sizes. *Produces* nothing, or the WireError that says what is over which limit. *Waits for* nothing.

The decoder keeps two more limits by itself: a list that claims more elements than there are bytes is refused before it is
allocated, and nesting, also within fields that nobody reads, ends at the interpreter's recursion limit with an error.
"""

from __future__ import annotations

from protocol.errors import MessageTooLarge

NUM_FRAMES = 2
"""Envelope and body."""
MAX_DEPTH = 64
"""Nesting of ``Prompt.extra``, the only field whose depth its type does not fix."""
MAX_ENVELOPE_BYTES = 1024


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise MessageTooLarge when a message is over the limit."""
    if num_bytes > max_bytes:
        raise MessageTooLarge(
            f"message of {num_bytes} bytes is over the limit of {max_bytes}; raise wire.max_message_mb on every worker, "
            "or send less at once"
        )
