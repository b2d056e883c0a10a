"""The ranks of one worker as a torch process group.

The launcher's environment describes the group; a lone rank needs none. A wait for other ranks lasts
at most the group's time limit, and ends at once when a rank has died.

Tensors on the host go over gloo, those on GPUs over NCCL; both stay on this host's loopback and
shared memory. Ranks find each other through a file in a folder that only this user can read, so no
socket listens for strangers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from protocol.errors import ConfigError, EngineDied
from workers.engines.model.loading import resolve_device
from workers.engines.training.ranks.launch import GROUP_FILE, LOOPBACK, RANK_DIR

_DIGEST_BYTES = 32
_TRANSPORTS = ("gloo", "NCCL", "ProcessGroup", "pair closure")
"""Each error of a collective mentions one of them."""


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's view of a worker's ranks. Torch's errors are raised unchanged: see :func:`peers`."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """All ranks, in one dimension."""
    tensor: int = 1
    """Ranks that follow one another compute the same tokens, each with its part of every layer's matrices."""

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    @property
    def num_shares(self) -> int:
        """Shares that a batch is divided into."""
        return self.size // self.tensor

    @property
    def share(self) -> int:
        return self.rank // self.tensor

    @property
    def tells(self) -> bool:
        """Whether this rank's figures count: the others of its share have the same."""
        return self.rank % self.tensor == 0

    @property
    def grid(self) -> DeviceMesh:
        """The ranks by share ("data") and part of a layer ("tensor")."""
        return _grid(self.device.type, self.num_shares, self.tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` with that of rank ``source``, in place, and return it."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> np.ndarray:
        """Return the ``data`` of rank ``source`` on every rank, as a writable uint8 array."""
        length = self.broadcast(torch.tensor([len(data) if data is not None else 0], dtype=torch.int64), source)
        if data is not None:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            buffer = torch.empty(int(length), dtype=torch.uint8)
        return self.broadcast(buffer, source).numpy()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the elementwise maximum of ``tensor`` over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def agree(self, digest: bytes, what: str) -> None:
        """Raise ConfigError on all ranks if their 32-byte digests of ``what`` differ."""
        if len(digest) != _DIGEST_BYTES:
            raise ValueError(f"a digest of {len(digest)} bytes was given; expected {_DIGEST_BYTES}")
        if self.size == 1:
            return
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        told = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(told, mine)
        if others := [rank for rank in range(1, self.size) if not torch.equal(told[rank], told[0])]:
            raise ConfigError(
                f"ranks {', '.join(map(str, others))} of {self.size} have a different {what} than rank 0; all ranks "
                f"of a worker read the same run folder: do not change it while they start, and start the run again"
            )


def join(device: str, *, timeout_s: float) -> Group:
    """Join the ranks that the launcher started; without a launcher, return a group of one.

    A process joins once; later calls return the same group. With several ranks, each takes the GPU
    of its own number. No collective may take longer than ``timeout_s``. Raises ConfigError (no such
    device, fewer GPUs than ranks) or EngineDied (the others did not arrive in time)."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    here = _device(device, rank, size)
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        store = FileStore(str(Path(os.environ[RANK_DIR]) / GROUP_FILE), size) if size > 1 else HashStore()
        if here.type == "cuda":
            torch.cuda.set_device(here)
        backend, limit = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
        with peers():
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return Group(rank, size, here, init_device_mesh(here.type, (size,)))


@cache
def _grid(device: str, data: int, tensor: int) -> DeviceMesh:
    return init_device_mesh(device, (data, tensor), mesh_dim_names=("data", "tensor"))


@contextmanager
def peers() -> Iterator[None]:
    """Raise EngineDied when a rank is lost or late. Wraps every exchange with other ranks."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in _TRANSPORTS):
            raise
        raise EngineDied(
            f"rank {os.environ.get('RANK', '0')} cannot reach the other ranks of its worker: {str(error).splitlines()[0]}; "
            "one of them has ended or is stuck; all of them restart from the last checkpoint"
        ) from error


def _device(name: str, rank: int, size: int) -> torch.device:
    device = resolve_device(name)
    if size == 1 or device.type == "cpu":
        return device
    if size > torch.cuda.device_count():
        raise ConfigError(
            f"{size} ranks need a GPU each, but there are {torch.cuda.device_count()}; lower the number of ranks, "
            "or set the device to cpu"
        )
    return torch.device("cuda", rank)
