"""Carries policy versions from the learner to the generators, verified by digest.

``tensorfile`` is the file format of a version (safetensors), ``shared_files`` are files that several
processes map, ``store`` holds the learner's versions, and ``delta`` encodes the difference between two
versions. The workers' ends are ``workers.learner.weight_publisher`` and
``workers.generator.weight_receiver``.

On one host a version is written once, to memory-backed storage if there is any, and every generator maps the
same pages, also if learner and generator share a GPU. A generator samples with a version only after the digest
of all its bytes has matched.

Other hosts fetch a delta, or all *parts* of a version, over ZeroMQ. One worker per host fetches
(``host_folder``, ``host_fetch``, ``wire``). It serves each part to other hosts once that part's digest has
matched (``digest``, ``relay``).

Adapters have a *base*: the frozen weights to which they are added, published as a separate file under
``BASE_VERSION``. Every announcement includes its digest, and each generator merges the two."""

from __future__ import annotations

from typing import Final

TURNS: Final = "turns"
"""Counter in a generator's heartbeat: finished turns of decoding."""
PARTS: Final = "weights_parts"
"""Counter in a generator's heartbeat: parts of a version received so far, during a transfer."""
