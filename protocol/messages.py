"""Every message that goes over a link.

Fields are only ever appended, with defaults; the tests keep golden bytes of every message."""

from __future__ import annotations

import msgspec

from protocol.arrays import Uint8Vector
from protocol.trajectory import TrajectoryChunk

SCHEMA_VERSION = 1
BASE_VERSION = -1
"""In place of a policy version: the base weights of adapters."""


class WeightsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="weights_request", omit_defaults=True):
    """Requests a range of a published weight file, or of a delta, from the learner or a relay."""

    version: int
    """0 or more, or BASE_VERSION."""
    offset: int
    """First byte wanted."""
    max_bytes: int
    """Upper bound of the answer's data."""
    base: int = -1
    """A version that the requester holds: a delta from it will do. With ``digest``, only that delta
    will do. -1: none."""
    digest: str = ""
    """The announced digest of the version; empty: any file of that number."""
    wants_digests: bool = False
    """Requests the digests of the version's parts in place of its bytes."""
    apart: bool = False
    """Accepts data in a separate frame, as ``WeightsPart.apart`` says."""


class WeightsPart(msgspec.Struct, frozen=True, kw_only=True, tag="weights_part", omit_defaults=True):
    """A range of a published weight file, or of a delta. ``data`` is empty when that is gone."""

    version: int
    offset: int
    total_bytes: int
    """Size of the whole file, or of the whole delta; 0 when the version is gone."""
    data: Uint8Vector = msgspec.field(name="data:|u1")
    """uint8 [bytes of this part]"""
    base: int = -1
    """The version that the delta starts from; -1: bytes of the version itself."""
    is_coming: bool = False
    """The source lacks these bytes and is receiving them: repeat the request."""
    apart: int = 0
    """Bytes of ``data`` that travel in a frame of their own behind the body, as they lie in memory.
    No checksum covers them: the requester has digests of the version and its parts."""


class FileRequest(msgspec.Struct, frozen=True, kw_only=True, tag="file_request", omit_defaults=True):
    """Requests a range of a file of the run's manifest, from the run's host."""

    digest: str
    """As in the manifest: ``sha256:hex``."""
    offset: int
    """First byte wanted."""
    max_bytes: int
    """Upper bound of the answer's data."""


class FilePart(msgspec.Struct, frozen=True, kw_only=True, tag="file_part", omit_defaults=True):
    """A range of a file. ``data`` is empty when no such file is served."""

    digest: str
    offset: int
    total_bytes: int
    """Size of the whole file; 0 when it is not served."""
    data: Uint8Vector = msgspec.field(name="data:|u1")
    """uint8 [bytes of this part]"""


Message = TrajectoryChunk | WeightsRequest | WeightsPart | FileRequest | FilePart
"""All messages of a mailbox."""
