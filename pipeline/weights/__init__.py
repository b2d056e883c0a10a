"""Carries policy versions from the learner to the generators, verified by digest.

``tensorfile`` is a version's file format (safetensors). ``shared_files`` are files that several
processes map. ``store`` holds the learner's versions. ``delta`` is the difference of two versions.
The workers' ends are ``workers.learner.weight_publisher`` and
``workers.generator.weight_receiver``.

On one host a version is written once, to memory-backed storage where the host has some, and every
generator maps the same pages. Tokens get a version only after the digest of all its bytes has
matched.

Other hosts fetch a delta, or all *parts* of a version, over ZeroMQ. One worker of a host fetches
(``host_folder``, ``host_fetch``, ``wire``). It serves each part to other hosts once the digest of
the part has matched (``digest``, ``relay``, ``serving``).

Adapters have a *base*, the frozen weights that they are added to: one more file, under
``BASE_VERSION``. Every announcement has its digest. Each generator merges the two."""

from __future__ import annotations

from typing import Final

TURNS: Final = "turns"
"""Counter in a generator's heartbeat: finished turns of decoding."""
PARTS: Final = "weights_parts"
"""Counter in a generator's heartbeat: parts of versions that have come, while they come."""
