"""Prompts that members of a group share: keys and values are stored once, and a decode step reads them once
for all members.

A row of the slot cache then holds only what follows its prompt. Attention to both parts is computed apart and
joined by the weights of their sums (:func:`workers.engines.generation.local.cache.shared_attention`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from workers.engines.generation.local.cache import SharedStep, SlotCache, hide

LEAST_SHARED: Final = 128
"""Tokens of the shortest prompt that is shared: to read a shorter one again takes no longer than a second call."""


@dataclass(slots=True, eq=False)
class SharedPrompt:
    tokens: np.ndarray
    row: int
    """Of the cache of prompts."""
    num_members: int = 0
    """Occupants of the slot table that attend to it."""
    is_stored: bool = False
    """Whether its keys and values are computed."""
    is_current: bool = True
    """Whether new members may join: its keys and values are of the weights of today."""

    @property
    def size(self) -> int:
        """Tokens that are stored; the last one of a prompt goes through a decode step."""
        return self.tokens.size - 1


class SharedPrompts:
    """Prompts of the occupants, in the first rows of a cache of their own."""

    def __init__(self, num_layers: int, max_rows: int) -> None:
        self.cache = SlotCache(num_layers, max_rows)
        self._held: list[SharedPrompt] = []

    def join(self, tokens: np.ndarray, *, is_group: bool) -> SharedPrompt | None:
        """Return the prompt with one more member. None if it is too short, or neither held nor of a group."""
        if tokens.size <= LEAST_SHARED:
            return None
        alike = (held for held in self._held if held.is_current and np.array_equal(held.tokens, tokens))
        prompt = next(alike, None)
        if prompt is None:
            if not is_group:
                return None
            prompt = SharedPrompt(tokens, len(self._held))
            self._held.append(prompt)
            self.cache.max_length = max(self.cache.max_length, prompt.size)
        prompt.num_members += 1
        return prompt

    def leave(self, prompt: SharedPrompt) -> None:
        """Free a prompt's row with its last member; the last row takes its place."""
        prompt.num_members -= 1
        if prompt.num_members:
            return
        last = self._held.pop()
        if last is not prompt:
            self.cache.move([prompt.row], [last.row], last.size)
            last.row = prompt.row
            self._held[last.row] = last
        if not self._held:
            self.cache.release()

    def outdate(self, *, recompute: bool) -> None:
        """The weights are new: compute every prompt again, or let nobody join those of earlier weights."""
        for prompt in self._held:
            if recompute:
                prompt.is_stored = False
            else:
                prompt.is_current = False

    def step(
        self, prompts: Sequence[SharedPrompt | None], device: torch.device, dtype: torch.dtype
    ) -> SharedStep | None:
        """Return how rows with these prompts attend to them; None if none has one."""
        members: list[list[int]] = [[] for _ in self._held]
        places = np.zeros((2, len(prompts)), np.int64)
        for row, prompt in enumerate(prompts):
            if prompt is not None:
                places[:, row] = prompt.row, len(members[prompt.row])
                members[prompt.row].append(row)
        most = max(map(len, members), default=0)
        if most == 0:
            return None
        # a prompt with fewer members repeats one; one whose members all wait for their next window reads for row 0
        queries = np.array([(rows + (rows[:1] or [0]) * most)[:most] for rows in members])
        sizes = torch.tensor([prompt.size for prompt in self._held], device=device)
        longest = int(sizes.max())
        has = np.array([prompt is not None for prompt in prompts])
        return SharedStep(
            cache=self.cache,
            stored=np.array([0 if prompt is None else prompt.size for prompt in prompts]),
            queries=torch.from_numpy(queries).to(device),
            prompts=torch.from_numpy(places[0]).to(device),
            members=torch.from_numpy(places[1]).to(device),
            has_prompt=None if has.all() else torch.from_numpy(has).to(device)[:, None, None, None],
            longest=longest,
            mask=None
            if int(sizes.min()) == longest
            else hide(torch.arange(longest, device=device) >= sizes[:, None], dtype),
        )
