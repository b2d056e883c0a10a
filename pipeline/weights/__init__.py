"""How policy versions get from the learner to the generators, and how it is known that they arrived
whole.

``tensorfile`` says what is in a version's bytes (safetensors), ``segments`` are files of them that
two processes map, ``store`` is the learner's shelf of versions, ``delta`` what changed from one
version to the next, ``wire`` the way to another host. The workers' ends are
``workers.learner.weight_publisher`` and ``workers.generator.weight_receiver``.

On one host a version is written once, into memory-backed storage where there is some, and every
generator maps the same pages. Other hosts ask for ranges over ZeroMQ, of the whole version or of
what changed since the one that they hold. Either way tokens are stamped with a version only after
the digest of all its bytes has matched.

Versions that are adapters have a *base*, the frozen weights that they are added to: one file more
on the shelf, under ``BASE_VERSION``, which every announcement names, with its digest. Each
generator makes whole weights of the two.
"""

from __future__ import annotations

from typing import Final

TURNS: Final = "turns"
"""Counter in a generator's heartbeat: turns of decoding that have ended."""
