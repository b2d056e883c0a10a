"""The error tree of Headrace: every exception that one part may raise for another to handle.

Each class also inherits the standard error that it refines. A message says what failed, the value found, the
value expected, and what to do."""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of all errors that Headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A setting is wrong; nothing was started."""


class DataError(ConfigError):
    """A prompt file, a model or a checkpoint is missing or malformed."""


class WireError(HeadraceError):
    """A message cannot be read. Receivers count it, name the peer and drop it."""


class MalformedMessage(WireError, ValueError):
    """The bytes are truncated, are not MessagePack, or have the wrong shape."""


class UnknownVersion(WireError, ValueError):
    """The message was written with another schema version."""


class UnknownMessage(WireError, ValueError):
    """This receiver does not know the message type."""


class ChecksumMismatch(WireError, ValueError):
    """The body is not the one that was sent."""


class MessageTooLarge(WireError, ValueError):
    """The message exceeds the size limit and was refused before decoding."""


class PeerRefused(WireError, PermissionError):
    """The sender's key is no longer permitted."""


class ChannelClosed(HeadraceError, ConnectionError):
    """The channel was closed by its owner."""


class DeadlineExceeded(HeadraceError, TimeoutError):
    """A wait reached its deadline."""


class LedgerError(HeadraceError):
    """The durable ledger cannot do what was requested."""


class LedgerUnavailable(LedgerError, ConnectionError):
    """No ledger server answers. The caller backs off and tries again."""


class LedgerDiskFailed(LedgerUnavailable):
    """The ledger's append-only file cannot be written, usually because the disk is full."""


class LedgerRefused(LedgerError, PermissionError):
    """The ledger server refuses the user name or password. Retrying is useless."""


class LedgerFull(LedgerError, MemoryError):
    """The ledger is out of memory and refuses writes. Admission must stop until it shrinks."""


class LedgerMismatch(LedgerError, ValueError):
    """The run's ledger was opened with another specification."""


class Fenced(LedgerError, PermissionError):
    """A newer incarnation of this worker exists. This one must stop at once."""


class EnvironmentFailed(HeadraceError, ValueError):
    """An environment raised, or returned what no trajectory can go on with. The turn is tried again; it is not wrong."""


class EngineError(HeadraceError):
    """A generation, scoring or training engine cannot continue."""


class WeightsRejected(EngineError, ValueError):
    """Published weights do not fit the model, or are not those that were announced."""


class WeightsDamaged(WeightsRejected):
    """A version's bytes do not match its published digest, or cannot be read."""


class Diverged(EngineError, FloatingPointError):
    """Optimiser steps, or the logits of published weights, are not finite. A restart cannot help."""


class StepDiffered(EngineError):
    """Repeating an optimiser step gave another result, so the machine cannot be trusted."""


class EngineDied(EngineError):
    """An engine's process or device has ended, failed or hung. Its work continues elsewhere."""


class EngineProcessDied(EngineDied):
    """An engine's own processes have ended or hang. The process that drove them is well, and may start others."""


class ParityFailed(EngineError):
    """After a weight update an engine's log-probs differ from the learner's, so it must not sample."""


class StorageFailed(HeadraceError, OSError):
    """A checkpoint could not be written to the disk; the previous one is untouched."""


class StoreUnavailable(HeadraceError, ConnectionError):
    """An object store does not answer. A later try may succeed; the run does not wait for it."""
