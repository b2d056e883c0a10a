"""Every message that is sent over a link.

Fields are only ever appended, with defaults; the tests keep golden bytes of every message."""

from __future__ import annotations

import msgspec

from protocol.arrays import Uint8Vector
from protocol.trajectory import TrajectoryChunk

SCHEMA_VERSION = 1
BASE_VERSION = -1
"""Takes the place of a policy version, for the base weights of adapters."""


class WeightsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="weights_request", omit_defaults=True):
    """Requests a range of a published weight file, or of a delta, from the learner or a relay."""

    version: int
    """Policy version, 0 or more, or BASE_VERSION."""
    offset: int
    """First byte wanted."""
    max_bytes: int
    """Upper limit of the answer's data."""
    base: int = -1
    """A version that the requester has, so that a delta from it is enough. With ``digest``, only that delta
    will do. -1 if none."""
    digest: str = ""
    """The announced digest of the version; if empty, any file of that number."""
    wants_digests: bool = False
    """Requests the digests of the version's parts instead of its bytes."""
    apart: bool = False
    """Whether data may come in a separate frame (``WeightsPart.apart``)."""


class WeightsPart(msgspec.Struct, frozen=True, kw_only=True, tag="weights_part", omit_defaults=True):
    """A range of a published weight file, or of a delta. ``data`` is empty when that no longer exists."""

    version: int
    offset: int
    total_bytes: int
    """Size of the whole file or delta; 0 when the version no longer exists."""
    data: Uint8Vector = msgspec.field(name="data:|u1")
    """uint8 [bytes of this part]"""
    base: int = -1
    """The version to which the delta applies; -1 for bytes of the version itself."""
    is_coming: bool = False
    """The source is still receiving these bytes; repeat the request."""
    apart: int = 0
    """Bytes of ``data`` that travel in a separate frame after the body, as they are in memory. No checksum
    covers them, since the requester has digests of the version and its parts."""


class FileRequest(msgspec.Struct, frozen=True, kw_only=True, tag="file_request", omit_defaults=True):
    """Requests a range of a file in the run's manifest, from the run's host."""

    digest: str
    """The file's digest as in the manifest: ``sha256:hex``."""
    offset: int
    """First byte wanted."""
    max_bytes: int
    """Upper limit of the answer's data."""


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
