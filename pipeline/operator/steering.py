"""Changes to a running run, shared by the command line, the terminal view and the web page.

A change is an entry in the run's registry, which the supervisor reads several times a second, or in
its ledger, which workers ask for work. Evictions are entries in the desired fleet, so that every
supervisor of the run sees them; ``pipeline.supervisor.fleet_edits`` has their rules."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.operator.attached import Attached, workers_of
from protocol.errors import ConfigError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.fleet.state import Worker
    from pipeline.ledger.types import Pause
    from pipeline.runtime.registry.contract import Drain, Eviction, Fleet
    from protocol.ids import Role

_MAX_NAMED = 20
MAX_REASON_CHARS = 300


async def pause(at: Attached, reason: str = "") -> Pause:
    """Stop admitting new groups until ``resume``; return the pause (the earlier one, if any).

    Work in flight is finished and evaluation continues. ``reason`` is the operator's. Raises
    ConfigError: the reason is too long, or all groups are already admitted."""
    if len(reason) > MAX_REASON_CHARS:
        raise ConfigError(f"the reason has {len(reason)} characters; expected at most {MAX_REASON_CHARS}: shorten it")
    if (await at.ledger.totals()).is_closed:
        raise ConfigError(
            f"{at.run_dir} admits no more groups because all its updates are done; `headrace down` ends the run"
        )
    return await at.admin.pause(by=operator(), reason=" ".join(reason.split()))


async def resume(at: Attached) -> Pause | None:
    """Admit new groups again; return the pause that ended, or None."""
    return await at.admin.resume()


def operator() -> str:
    """Return this process's user and host as ``user@host``."""
    try:
        user = getpass.getuser()
    # a container's user may have no name
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


async def change_fleet(at: Attached, wanted: Mapping[Role, int | None]) -> Fleet:
    """Set the number of workers of some roles; return the whole desired fleet.

    None, for generators, means as many as the learner needs. Raises ConfigError: the run is not
    running, has no such role, or the fleet would be too large."""
    return await replace_fleet(at, lambda present: _resized(at, present, wanted))


async def drain(at: Attached, worker: str, replace: bool = False) -> Fleet:
    """Have a worker finish or give back its work and leave; return the desired fleet.

    Its role has one worker fewer, or with ``replace`` gets a new one in its place. Repeating this
    changes nothing. Raises ConfigError: the run is not running, has no such worker, or needs it."""
    from pipeline.runtime.registry.contract import Drain
    from pipeline.supervisor.fleet_edits import drained

    beats = await workers_of(at)
    there = {beat.who.worker: beat.who for beat in beats}
    epoch = there[worker].epoch if worker in there else await at.registry.epoch(worker)

    def change(present: Fleet) -> Fleet:
        one = Drain(worker, epoch, is_replaced=replace)
        if one in present.drains:
            return present
        role = _drainable(at, present, beats, one)
        return drained(present, one, role, beats)

    return await replace_fleet(at, change)


def _drainable(at: Attached, present: Fleet, beats: Sequence[Worker], one: Drain) -> Role:
    """Return the worker's role if it may be drained. Raises ConfigError."""
    from pipeline.supervisor.fleet_plan import wanted_names
    from protocol.ids import ELASTIC_ROLES, Role

    there = {beat.who.worker: beat.who for beat in beats}
    own = wanted_names(present.counts, present.left_out)
    role = role_of(at, present, beats, one.worker)
    if role not in ELASTIC_ROLES:
        raise ConfigError(
            f"{one.worker} is the run's only {role}, and everything waits for it, so it cannot be drained. `headrace run "
            "pause` stops new work, `headrace down` ends the run, and a stuck one is replaced automatically"
        )
    if one.worker not in there and (one.is_replaced or one.worker in present.left_out):
        raise ConfigError(f"{one.worker} is not running: the supervisor is starting it, or it has left")
    if one.is_replaced:
        return role
    others = sum(beat.who.role is role and beat.who.worker != one.worker for beat in staying_guests(present, beats))
    left = present.counts.get(role, 0) - (one.worker in own) + others
    if left < 1:
        raise ConfigError(
            f"{one.worker} is the run's last {role}, and without one the run stops; replace it with `--replace`, or "
            f"first start another one with `headrace scale {role}=2`"
        )
    least = at.settings.fleet.min_generators
    follows_demand = at.settings.fleet.max_generators is not None and not present.is_by_hand
    if role is Role.GENERATOR and one.worker in own and follows_demand and present.counts[role] <= least:
        raise ConfigError(
            f"{one.worker} is one of fleet.min_generators={least}: another would be started at once; `--replace` does just "
            f"that, `headrace scale generator={max(1, least - 1)}` stops following demand"
        )
    return role


def role_of(at: Attached, present: Fleet, beats: Sequence[Worker], worker: str) -> Role:
    """Return the role of a worker that is wanted or present. Raises ConfigError."""
    from pipeline.supervisor.fleet_plan import wanted_names

    roles = {beat.who.worker: beat.who.role for beat in beats} | wanted_names(present.counts, present.left_out)
    role = roles.get(worker)
    if role is None:
        known = sorted(roles)
        more = f" and {len(known) - _MAX_NAMED} more" if len(known) > _MAX_NAMED else ""
        names = printable_line(", ".join(known[:_MAX_NAMED]) or "none")
        raise ConfigError(f"{at.run_dir} has no worker {printable_line(worker)}; it has: {names}{more}")
    return role


def staying_guests(present: Fleet, beats: Sequence[Worker]) -> list[Worker]:
    """Return joined hosts' workers that are neither silent nor leaving. The run's
    own workers are not included; ``Fleet.counts`` has those that stay."""
    from pipeline.runtime.registry.waits import Stage
    from pipeline.supervisor.takeover import is_own

    leaving = {drain.worker: drain.epoch for drain in present.drains if not drain.is_replaced}
    return [
        beat
        for beat in beats
        if not is_own(beat.who.worker)
        and not beat.is_silent
        and beat.waiting_for.stage is not Stage.LEAVING
        and beat.who.epoch > leaving.get(beat.who.worker, 0)
        and present.eviction_of(beat.who.worker, beat.host) is None
    ]


async def replace_fleet(at: Attached, change: Callable[[Fleet], Fleet], *, needs_supervisor: bool = True) -> Fleet:
    """Apply ``change`` to the desired fleet; return the result. Raises ConfigError: others keep
    changing it or, with ``needs_supervisor``, the run is not running."""
    from pipeline.supervisor.fleet_edits import edit_fleet

    if needs_supervisor:
        await check_running(at)
    if (fleet := await edit_fleet(at.registry, change)) is not None:
        return fleet
    raise ConfigError(f"the fleet of {at.run_dir} is being changed by others; try again")


async def check_running(at: Attached) -> None:
    """Raise ConfigError unless the run is running under a supervisor."""
    from pipeline.runtime.registry.contract import RunState
    from pipeline.supervisor.run_folder import supervisor_pid

    status = await at.registry.run_status()
    if status.state is not RunState.RUNNING:
        raise ConfigError(f"{at.run_dir} is {status.state}, not running; `headrace up` starts a run")
    pid = supervisor_pid(at.run_dir)
    if pid is None:
        resume = f"`headrace up --resume {at.run_dir}` starts one"
        raise ConfigError(f"{at.run_dir} has no supervisor to change its fleet; {resume}")
    # The state may still be an earlier supervisor's, until this one has set the fleet.
    if pid and status.supervisor not in (0, pid):
        raise ConfigError(f"the supervisor of {at.run_dir} (process {pid}) is still starting; try again in a moment")


def _resized(at: Attached, present: Fleet, wanted: Mapping[Role, int | None]) -> Fleet:
    """Return a copy of the fleet with these worker counts. Raises ConfigError."""
    from pipeline.config.gpus import check_gpus
    from pipeline.runtime.machine import this_machine
    from pipeline.supervisor.fleet_edits import resized
    from pipeline.supervisor.fleet_size import check_fleet_size
    from protocol.ids import Role

    counts = present.counts
    for role in wanted:
        if role not in counts:
            raise ConfigError(
                f"this run has no {role} workers: its roles are {', '.join(counts)}. "
                "A reference worker needs algorithm.kl_coefficient above 0, or reference.always; an environment worker "
                "environment.path or environment.agent"
            )
    numbers = {role: count for role, count in wanted.items() if count is not None}
    follows_demand = at.config.fleet.max_generators is not None
    if len(numbers) < len(wanted) and not follows_demand:
        raise ConfigError(
            "generator=auto: the number of generators follows demand only with fleet.max_generators; set it by `headrace up "
            f"--resume {at.run_dir} --set fleet.max_generators=NUMBER`"
        )
    is_by_hand = (Role.GENERATOR in numbers) if Role.GENERATOR in wanted else present.is_by_hand
    is_by_hand = is_by_hand and follows_demand
    fleet = replace(resized(present, numbers), is_by_hand=is_by_hand, demand="" if is_by_hand else present.demand)
    check_fleet_size(fleet.counts, at.config.fleet.max_workers, this_machine(), at.config.launch.elsewhere)
    check_gpus(at.config, fleet.counts)
    return fleet


async def evict(at: Attached, *, worker: str = "", host: str = "", reason: str = "") -> Fleet:
    """Remove a worker, or all workers of a joined host, at once; return the desired fleet.

    Their epochs are fenced off, and other workers take over what they held. Repeating this changes
    nothing. Raises ConfigError: the run is not running, has no such worker or host, or needs it."""
    from pipeline.runtime.registry.contract import Eviction
    from pipeline.supervisor.fleet_edits import MAX_REASON_CHARS, evicted

    if len(reason) > MAX_REASON_CHARS:
        raise ConfigError(f"the reason has {len(reason)} characters; expected at most {MAX_REASON_CHARS}: shorten it")
    words = " ".join(reason.split()) or "by hand"
    one = Eviction(worker, host, words, operator(), time.time())
    beats = await workers_of(at)

    def change(present: Fleet) -> Fleet:
        if any((before.worker, before.host) == (worker, host) for before in present.evictions):
            return present
        if host:
            _check_host(present, beats, host)
            return evicted(present, one)
        role = role_of(at, present, beats, worker)
        _check_others(present, beats, worker, role)
        return evicted(present, one, role)

    return await replace_fleet(at, change)


async def readmit(at: Attached, *, worker: str = "", host: str = "") -> Fleet:
    """Let an evicted worker or joined host work again; return the desired fleet. Raises ConfigError
    if it is not evicted."""
    from pipeline.supervisor.fleet_edits import readmitted
    from protocol.ids import Role

    def change(present: Fleet) -> Fleet:
        found = next((one for one in present.evictions if (one.worker, one.host) == (worker, host)), None)
        if found is None:
            raise ConfigError(f"{printable_line(worker or host)} is not evicted; {_evicted(present.evictions)}")
        follows_demand = found.worker.startswith(f"{Role.GENERATOR}-") and not present.is_by_hand
        return readmitted(present, found, most=at.config.fleet.max_generators if follows_demand else None)

    return await replace_fleet(at, change, needs_supervisor=False)


def _evicted(evictions: Sequence[Eviction]) -> str:
    names = ", ".join(one.worker or f"--host {one.host}" for one in evictions)
    return f"evicted are: {printable_line(names)}" if names else "none is"


def _check_others(present: Fleet, beats: Sequence[Worker], worker: str, role: Role) -> None:
    """Raise ConfigError if the role would have no worker left, or none that works."""
    from pipeline.supervisor.fleet_plan import wanted_names
    from protocol.ids import ELASTIC_ROLES

    name = printable_line(worker)
    if role not in ELASTIC_ROLES:
        raise ConfigError(
            f"{name} is the run's only {role}, so it cannot be evicted. If it is stuck, it is replaced automatically; "
            "`headrace down` ends the run"
        )
    own = wanted_names(present.counts, present.left_out)
    guests = staying_guests(present, beats)
    others = sum(beat.who.role is role and beat.who.worker != worker for beat in guests)
    if present.counts.get(role, 0) - (worker in own) + others < 1:
        raise ConfigError(
            f"{name} is the run's last {role}, so it cannot be evicted; start another one first with `headrace "
            f"scale {role}=2`"
        )
    working = {beat.who.worker for beat in _at_work(present, beats) if beat.who.role is role}
    if working == {worker}:
        raise ConfigError(
            f"{name} is the only {role} that works, so it cannot be evicted: the others are absent, silent or starting. "
            "`headrace why` says why"
        )


def _check_host(present: Fleet, beats: Sequence[Worker], host: str) -> None:
    """Raise ConfigError if the host is unknown, the run's own, or has a role's last working worker."""
    from pipeline.supervisor.takeover import is_own

    there = [beat for beat in beats if beat.host == host]
    if not there:
        hosts = printable_line(", ".join(sorted({beat.host for beat in beats})) or "none")
        raise ConfigError(f"no worker of this run is on {printable_line(host)}; its hosts: {hosts}")
    own = [beat.who.worker for beat in there if is_own(beat.who.worker)]
    if own:
        names = printable_line(", ".join(own[:5]))
        raise ConfigError(
            f"{printable_line(host)} has workers of this run's own supervisor ({names}), so it is not a joined "
            f"host. Evict them one by one with `headrace fleet evict WORKER`; if a launcher chose the host, remove "
            f"it from [launch]"
        )
    working = _at_work(present, beats)
    for role in {beat.who.role for beat in working if beat.host == host}:
        if not any(beat.who.role is role and beat.host != host for beat in working):
            raise ConfigError(
                f"{printable_line(host)} has the run's last {role} that works, so it cannot be evicted; first run "
                f"`headrace scale {role}=1`, or join another host with `headrace fleet join`"
            )


def _at_work(present: Fleet, beats: Sequence[Worker]) -> list[Worker]:
    """Return the workers that stay and have begun their work."""
    from pipeline.supervisor.fleet_plan import wanted_names

    own = wanted_names(present.counts, present.left_out)
    mine = [beat for beat in beats if beat.who.worker in own and not beat.is_silent]
    return [beat for beat in (*mine, *staying_guests(present, beats)) if beat.waiting_for.is_in_service]
