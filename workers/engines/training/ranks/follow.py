"""The other ranks than 0: they wait for rank 0's next command and carry it out.

A wait lasts at most the group's time limit, within which rank 0 reports several times that it is
still there. When rank 0 is gone, this process ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.load import read_resolved
from pipeline.process.exit_codes import exit_code_of
from protocol.errors import HeadraceError
from protocol.ids import Role
from workers.engines.training.ranks.group import Group, peers
from workers.engines.training.ranks.messages import Command, Idle, Stop, decode


def follow(group: Group, obey: Callable[[Command], Any]) -> None:
    """Carry out commands until rank 0 stops. Raises EngineDied, and the errors of ``obey``."""
    with peers():
        while not isinstance(command := decode(group.broadcast_bytes(None)), Stop):
            if not isinstance(command, Idle):
                obey(command)


def follower(role: Role, run_dir: Path, rank: int) -> int:
    """Run one of the other ranks of a run's learner or value worker; return the exit code."""
    from workers.engines.training.ranks import build

    try:
        config = read_resolved(run_dir)
        ranks, backend = build.ranked_training(config) if role is Role.LEARNER else build.ranked_value(config)
        follow(ranks.group, backend.obey)
    except HeadraceError as error:
        sys.stderr.write(f"{role}, rank {rank}: {error}\n")
        return exit_code_of(error)
    return 0
