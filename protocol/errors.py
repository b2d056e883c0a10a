"""The error tree of Headrace: every exception that one part may raise for another to handle.

    HeadraceError
    ├── ConfigError (ValueError)          a setting is wrong; nothing was started
    │   └── DataError (ValueError)        a prompt file, a model or a checkpoint is missing or malformed
    ├── WireError                         a message cannot be read; it is counted and dropped, never a crash
    │   ├── MalformedMessage (ValueError) truncated, not MessagePack, wrong shape
    │   ├── UnknownVersion (ValueError)   written by another schema version
    │   ├── UnknownMessage (ValueError)   a type this receiver does not know
    │   ├── ChecksumMismatch (ValueError) the body is not what was sent
    │   └── MessageTooLarge (ValueError)  over the size limit; refused before decoding
    ├── ChannelClosed (ConnectionError)   the channel was closed by its owner
    ├── DeadlineExceeded (TimeoutError)   a wait reached its deadline
    ├── LedgerError                       the durable ledger cannot do what was asked
    │   ├── LedgerUnavailable (ConnectionError)  no server answers; try again later
    │   │   └── LedgerDiskFailed          the server answers, but its disk takes no writes
    │   ├── LedgerRefused (PermissionError)  the server does not take this run's name or password
    │   ├── LedgerFull (MemoryError)      the server refuses writes; admission must stop
    │   ├── LedgerMismatch (ValueError)   the run was opened with another specification
    │   └── Fenced (PermissionError)      a newer incarnation of this worker exists; stop at once
    ├── EngineError                       an engine cannot go on
    │   ├── WeightsRejected (ValueError)  published weights cannot be taken: their names or shapes do not fit
    │   │   └── WeightsDamaged            the bytes of a version are not those that were published
    │   ├── Diverged (FloatingPointError) optimiser steps, or what the weights compute, are not finite
    │   ├── EngineDied                    what an engine runs on has ended or hangs; its work goes on elsewhere
    │   └── ParityFailed                  an engine's log-probs are not those of the weights that it was given
    ├── StorageFailed (OSError)           the disk refused a checkpoint; the one before is untouched
    └── VerifierError                     a reward function raised or ran out of time; never scored as wrong

Each class also inherits the standard error that it refines, so a caller may catch either. A message
says what failed, what was got, what was expected, and what to do about it.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of everything that Headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A setting is wrong; nothing was started."""


class DataError(ConfigError):
    """A prompt file, a model or a checkpoint is missing or malformed."""


class WireError(HeadraceError):
    """A message cannot be read. Receivers count it, name the peer and drop it."""


class MalformedMessage(WireError, ValueError):
    """The bytes are truncated, are not MessagePack, or have the wrong shape."""


class UnknownVersion(WireError, ValueError):
    """The message was written by another schema version."""


class UnknownMessage(WireError, ValueError):
    """The message type is not one that this receiver knows."""


class ChecksumMismatch(WireError, ValueError):
    """The body is not what was sent."""


class MessageTooLarge(WireError, ValueError):
    """The message is over the size limit and was refused before decoding."""


class ChannelClosed(HeadraceError, ConnectionError):
    """The channel was closed by its owner."""


class DeadlineExceeded(HeadraceError, TimeoutError):
    """A wait reached its deadline."""


class LedgerError(HeadraceError):
    """The durable ledger cannot do what was asked."""


class LedgerUnavailable(LedgerError, ConnectionError):
    """No ledger server answers; the caller backs off and tries again."""


class LedgerDiskFailed(LedgerUnavailable):
    """The ledger server answers and refuses writes: its append-only file cannot be written, as a
    rule on a full disk.
    """


class LedgerRefused(LedgerError, PermissionError):
    """The ledger server answers and does not take the name or password that it was given; it would
    refuse them again.
    """


class LedgerFull(LedgerError, MemoryError):
    """The ledger refuses writes for want of memory; admission must stop until it shrinks."""


class LedgerMismatch(LedgerError, ValueError):
    """The run's ledger was opened with another specification."""


class Fenced(LedgerError, PermissionError):
    """A newer incarnation of this worker exists; this one must stop at once."""


class EngineError(HeadraceError):
    """A generation, scoring or training engine cannot go on."""


class WeightsRejected(EngineError, ValueError):
    """Published weights cannot be taken: they do not fit the model, or are not what
    was announced.
    """


class WeightsDamaged(WeightsRejected):
    """The bytes of a version are not those that were published: they do not match its digest, or
    cannot be read.
    """


class Diverged(EngineError, FloatingPointError):
    """Training has diverged: optimiser steps, or the logits of published weights, are not finite. A
    restart cannot help.
    """


class EngineDied(EngineError):
    """What an engine runs on has ended, failed or hangs. A new engine may do better; what this one
    held goes on elsewhere.
    """


class ParityFailed(EngineError):
    """After a weight update an engine computes other log-probs than the learner: it must not sample
    under the new version.
    """


class StorageFailed(HeadraceError, OSError):
    """The disk refused to hold a checkpoint; the one before is untouched."""


class VerifierError(HeadraceError):
    """A reward function raised or ran out of time. The response is retried elsewhere, never scored
    as wrong.
    """
