"""How a run is split over shards. Pure functions.

A *share* is a shard's part of an update. A claim over several shards has an id that names the claim
of each: ``0=learner-0#1/17+1=learner-0#1/18``."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pipeline.ledger.types import LedgerSpec, Unit
from protocol.errors import ConfigError

_PART = re.compile(r"(\d+)=(.+)")
_LAST_NUMBER = re.compile(r"(\d+)$")


def shard_spec(spec: LedgerSpec, shard: int, num_shards: int) -> LedgerSpec:
    """Return one shard's specification. ``max_bytes`` is of each server, and stays. So does
    ``num_prompts``, since prompts are counted by their places in the whole stream.

    Raises ConfigError when an update's units do not divide."""
    weight = spec.group_size if spec.unit is Unit.GROUP else 1
    if (spec.units_per_update // weight) % num_shards:
        raise ConfigError(
            f"an update's {spec.units_per_update // weight} {_UNITS[spec.unit]} do not divide by the run's {num_shards} ledger "
            f"servers; choose algorithm.groups_per_update as a multiple of {num_shards}, or name other numbers of servers in "
            "ledger.shards"
        )
    return replace(spec, units_per_update=spec.units_per_update // num_shards, shard=shard, num_shards=num_shards)


_UNITS = {Unit.GROUP: "groups", Unit.TRAJECTORY: "trajectories", Unit.CHUNK: "chunks"}


def own_shard(worker: str, num_shards: int) -> int:
    """Return the shard that a worker leases from first: by the number that its name ends with. So a
    role's workers are spread evenly."""
    number = _LAST_NUMBER.search(worker)
    return (int(number[1]) if number else zlib.crc32(worker.encode())) % num_shards


def admission_order(unit: str) -> tuple[int, ...]:
    """Return a unit's place in the order of admission: of ``12``, ``t.12.3`` or ``t.12.3.0``."""
    return tuple(map(int, unit.removeprefix("t.").split(".")))


def group_of(unit: str) -> int:
    """Return the number of a unit's group."""
    return admission_order(unit)[0]


def join_claims(parts: Iterable[tuple[int, str]]) -> str:
    """Return the id of a claim of these shards' claims."""
    return "+".join(f"{shard}={claim}" for shard, claim in sorted(parts))


def split_claim(claim_id: str, num_shards: int) -> list[tuple[int, str]]:
    """Return the shards' claims of an id; none of an id that was made otherwise."""
    parts = [_PART.fullmatch(part) for part in claim_id.split("+")]
    found = [(int(part[1]), part[2]) for part in parts if part is not None]
    is_ours = len(found) == len(parts) and all(shard < num_shards for shard, _ in found)
    return found if is_ours else []


def split_claims(claims: Iterable[str], num_shards: int) -> Mapping[int, tuple[str, ...]]:
    """Return the claims of every shard that these ids name."""
    by_shard: dict[int, list[str]] = {shard: [] for shard in range(num_shards)}
    for claim in claims:
        for shard, part in split_claim(claim, num_shards):
            by_shard[shard].append(part)
    return {shard: tuple(parts) for shard, parts in by_shard.items()}
