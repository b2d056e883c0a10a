"""Copies a published version to the device while decoding continues, so that a swap is a copy
within the device.

A thread copies a weight file's tensors and ends. The caller checks that it has ended before taking
the tensors.

A version is staged only if the device has room for a second set of weights. With parallel ranks
each rank stages all of them and takes its share. If there is no room or copying fails, the swap
reads the file as if nothing had been staged. A version is identified by its number, since the same
path may hold another one later."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch

from protocol.errors import WeightsRejected
from workers.engines.model.weights_file import PublishedWeights, read_weights

# runs in vLLM's process, whose logging is not ours to set up
_log = logging.getLogger(__name__)

_ROOM = 1.25
"""Free memory needed, as a multiple of the file's size, so that decoding does not run out."""


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # always the same stream, as torch reuses memory per stream
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        self._version = -1
        self._tensors: PublishedWeights | None = None

    def start_reading(self, path: Path, policy_version: int) -> bool:
        """Start copying a version, replacing the previous one; return whether there is room."""
        self._end()
        if _free_bytes(self._device) < _ROOM * path.stat().st_size:
            return False
        self._version = policy_version
        self._thread = threading.Thread(target=self._copy, args=(path,), name="staging", daemon=True)
        self._thread.start()
        return True

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def pop(self, policy_version: int) -> PublishedWeights | None:
        """Return and drop a version, or None if it is not the staged one, which then stays."""
        return self._end() if policy_version == self._version else None

    def _end(self) -> PublishedWeights | None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        tensors, self._tensors = self._tensors, None
        return tensors

    def _copy(self, path: Path) -> None:
        try:
            mapped = read_weights(path)
            with torch.cuda.stream(self._stream):
                copies = {name: tensor.to(self._device, copy=True) for name, tensor in mapped.items()}
            if self._stream is not None:
                self._stream.synchronize()
            self._tensors = PublishedWeights(copies, probe=mapped.probe)
        except (OSError, WeightsRejected, torch.OutOfMemoryError) as error:
            _log.warning("version %d was not staged, so its swap will take longer: %s", self._version, error)


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device: free, or cached by torch and unused."""
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
