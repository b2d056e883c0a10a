"""Brings whole tensors to rank 0, for published weights and checkpoints: each rank sends what rank 0 lacks, once, and no
rank gets what it does not need. Torch's own gathering makes every tensor whole on every rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from pipeline.plan.layouts.route import Transfer, route
from workers.engines.training.ranks.group import Group
from workers.engines.training.ranks.lending import ShareRange


class WholeTensors:
    def __init__(self, group: Group) -> None:
        self._group = group
        self._routes: dict[str, tuple[Transfer, ...]] = {}
        """By parameter; its optimiser state is split alike."""

    @torch.no_grad()
    def on_lead(
        self, name: str, piece: ShareRange | None, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the whole tensor on rank 0, None on all others. All ranks call it, each with its piece."""
        group = self._group
        if name not in self._routes:
            self._routes[name] = self._route(piece, math.prod(shape))
        made = torch.empty(math.prod(shape), dtype=dtype, device=group.device) if group.is_lead else None
        if made is not None and piece is not None:
            made[piece.start : piece.start + piece.numbers.numel()] = piece.numbers
        for source, _, ((first, end),) in self._routes[name]:
            if made is not None:
                dist.recv(made[first:end], source)
            elif source == group.rank:
                assert piece is not None, "the route is made of pieces"
                dist.send(piece.numbers[first - piece.start : end - piece.start].contiguous(), 0)
        return None if made is None else made.view(shape)

    def _route(self, piece: ShareRange | None, length: int) -> tuple[Transfer, ...]:
        own = (piece.start, piece.start + piece.numbers.numel()) if piece is not None else (0, 0)
        told = torch.zeros(self._group.size, 2, dtype=torch.int64, device=self._group.device)
        told[self._group.rank] = torch.tensor(own)
        ranges = [tuple(row) for row in self._group.sum(told).tolist()]
        have = {rank: [((first, end),)] for rank, (first, end) in enumerate(ranges) if end > first}
        return route(have, {0: [((0, length),)]} if length else {})
