"""Every message that goes over a link, and the envelope around it.

Fields are only ever appended, with defaults; each message has a golden byte file in the tests. The
codec writes envelope and body as MessagePack maps with named fields, so that the plain ``msgpack``
package reads any of them.
"""

from __future__ import annotations

import msgspec

from protocol.arrays import Uint8Vector
from protocol.trajectory import TrajectoryChunk

SCHEMA_VERSION = 1
BASE_VERSION = -1
"""In place of a policy version: the weights below the versions, when those are adapters."""


class WeightsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="weights_request", omit_defaults=True):
    """A generator on another host asks the learner for a range of a published weight file, or of
    what changed in it.
    """

    version: int
    """0 or more, or BASE_VERSION."""
    offset: int
    """First byte wanted."""
    max_bytes: int
    """Upper bound of the answer's data."""
    base: int = -1
    """A version that the asker holds: a delta from it will do. -1: none."""


class WeightsPart(msgspec.Struct, frozen=True, kw_only=True, tag="weights_part", omit_defaults=True):
    """A range of a published weight file, or of a delta. ``data`` is empty when the version is no
    longer held.
    """

    version: int
    offset: int
    total_bytes: int
    """Size of the whole file, or of the whole delta; 0 when the version is no longer held."""
    data: Uint8Vector = msgspec.field(name="data:|u1")
    """uint8 [bytes of this part]"""
    base: int = -1
    """The version that the delta starts from; -1: these are bytes of the version itself."""


Message = TrajectoryChunk | WeightsRequest | WeightsPart
"""What a mailbox may deliver."""
