"""How much of the workers' time became trained tokens: the effective time ratio by device. Pure.

A generator's and a scorer's computing counts with the share of written tokens that entered an
update. A learner's counts with the share of trained tokens whose update stands. All is over the
time in which workers were wanted, their restarts and waits included. Tokens in flight at the end
count as not used.

Source: ByteRobust (arXiv 2509.16293) has ETTR by the job's time; this is by each worker's."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.observability.fleet_history import FleetRow
from pipeline.observability.fleet_use import RoleUse, role_uses
from protocol.ids import Role

_AT_WORK = (Role.GENERATOR, Role.REWARD, Role.REFERENCE, Role.VALUE, Role.LEARNER)


def device_share(fleet: Sequence[FleetRow], *, num_response_tokens: int, num_trained_tokens: int) -> float | None:
    """Return productive time over all time of the working roles, from 0 to 1; None without any.

    Args:
        fleet: How the fleet has spent its time so far.
        num_response_tokens: Tokens of the responses in all updates that stand.
        num_trained_tokens: Of these, tokens that carried loss."""
    uses = {use.role: use for use in role_uses(fleet) if use.role in _AT_WORK}
    all_workers = sum(use.workers for use in uses.values())
    if not all_workers:
        return None
    used = _share(num_response_tokens, uses.get(Role.GENERATOR))
    stands = _share(num_trained_tokens, uses.get(Role.LEARNER))
    productive = sum(
        use.workers * use.compute_share * (stands if role == Role.LEARNER else used) for role, use in uses.items()
    )
    return productive / all_workers


def _share(num_tokens: int, of: RoleUse | None) -> float:
    return min(1.0, num_tokens / of.num_tokens) if of is not None and of.num_tokens else 0.0
