"""A plan as files that ``headrace up`` takes: a run file that includes the person's own, and a fleet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from pipeline.plan.devices import PER_HOST, Device
from pipeline.plan.planner import Candidate, Placed
from pipeline.plan.roles import Roles, Split
from pipeline.preflight.model_folder import model_digest
from protocol.errors import ConfigError

RUN_FILE, FLEET_FILE = "run.toml", "fleet.toml"
_HEAD = "# Predicted:"
Tree = dict[str, Any]


def run_settings(placed: Placed, roles: Roles) -> Tree:
    """Return the settings of a plan, without those of its fleet."""
    candidate, config = placed.candidate, roles.config
    engines, on_cores = candidate.engines, candidate.engines[0].device.is_cpu
    generation: Tree = {"window_tokens": min(candidate.window, roles.work.longest)}
    if not on_cores:
        generation["num_slots"] = min(each.slots for each in engines)
        share = min(roles.engine_bytes(each.tensor, each.slots) / each.device.num_bytes for each in engines)
        shares = any(len(group.roles) > 1 for group in candidate.groups if "generator" in group.roles)
        limit = {"engine_args": {"gpu_memory_utilization": round(share, 3)}} if shares else {}
        generation |= {"engine": "vllm", "vllm": {"tensor_parallel_size": engines[0].tensor} | limit}
    found: Tree = {"staleness": {"eta": candidate.staleness}, "generation": generation}
    if not on_cores:
        recomputed = candidate.learner.recomputed
        found["model"] = {"dtype": config.types.learner, "gradient_checkpointing": recomputed or False}
    found["learner"] = _split(candidate.learner.split)
    if not on_cores:
        found["learner"]["micro_batch_tokens"] = candidate.learner.micro_tokens
    if candidate.critic is not None:
        found["value"] = _split(candidate.critic.split)
    if joins(candidate):
        found["wire"] = {"transport": "tcp"}
    return found


def _split(split: Split) -> Tree:
    zero: Tree = {"stage": split.stage} | ({"offload_optimizer": {"device": "cpu"}} if split.offload else {})
    more: Tree = {"deepspeed": zero} if split.stage else {"tensor_parallel": split.tensor} if split.tensor > 1 else {}
    return {"backend": split.backend, "ranks": split.ranks} | more


def own_gpus(candidate: Candidate) -> dict[str, list[int]]:
    """Return the GPUs of each role, for ``fleet.gpus``; empty on cores, on several hosts, and with kinds whose numbers
    nobody knows."""
    number, device = candidate.devices[0]
    if device.is_cpu or len(candidate.devices) > 1 or number > PER_HOST:
        return {}
    found, first = dict[str, list[int]](), 0
    for group in candidate.groups:
        here = list(range(first, first + group.number))
        first += group.number
        for role in group.roles:
            engine = candidate.engines[0]
            found[role] = here[: engine.number * engine.tensor] if role == "generator" else here
    return found


def joins(candidate: Candidate) -> list[str]:
    """Return the commands that start the generators, if ``headrace up`` cannot give them their GPUs."""
    on_cores = candidate.engines[0].device.is_cpu
    apart = any(group.roles == ("generator",) for group in candidate.groups)
    if on_cores or own_gpus(candidate) or not (apart or candidate.engines[0].number > 1):
        return []
    used = dict[Device, int]()
    for group in candidate.groups:
        if "generator" not in group.roles:
            number, device = group.devices[0]
            used[device] = used.get(device, 0) + number
    lines = list[str]()
    for each in candidate.engines:
        next_ = used.get(each.device, 0)
        for _ in range(each.number):
            if next_ % PER_HOST + each.tensor > PER_HOST:
                next_ += -next_ % PER_HOST
            host, first = divmod(next_, PER_HOST)
            visible = ",".join(str(first + n) for n in range(each.tensor))
            command = "headrace fleet join REDIS_URL --token generator.token"
            lines.append(f"CUDA_VISIBLE_DEVICES={visible} {command}  # {each.device.name}, host {host + 1}")
            next_ += each.tensor
    return lines


def fleet_settings(placed: Placed, roles: Roles) -> Tree:
    candidate = placed.candidate
    found: Tree = {"generator": 0 if joins(candidate) else sum(each.number for each in candidate.engines), "reward": 1}
    gpus = own_gpus(candidate)
    if roles.work.has_reference:
        found["reference"] = len(gpus.get("reference", [0]))
    if gpus:
        found["gpus"] = gpus
    return found | {
        "planned_for": model_digest(roles.config.model.path, with_weights=False),
        "planned_update_s": round(placed.period_s, 4),
    }


def _merged(under: Tree, over: Tree) -> Tree:
    """Return the settings of both; ``over`` wins."""
    both = {**under, **over}
    return {
        key: _merged(under[key], value) if isinstance(value, dict) and isinstance(under.get(key), dict) else value
        for key, value in both.items()
    }


def _may_replace(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace").startswith(_HEAD)
    except OSError:
        return not path.exists()


def write_plan(
    placed: Placed, roles: Roles, folder: Path, base: Path | Tree, *, given: Tree | None = None, name: str = ""
) -> None:
    """Write both files. ``base``: the person's run file, which is included, or the settings that it would have; ``given``:
    what was set beside it; ``name``: another name for the run. Raises ConfigError for a plan that cannot be executed,
    for files that are there and not a plan's, and for a folder that cannot be written."""
    if needs := placed.candidate.needs():
        raise ConfigError(f"no plan that fits can be started by this version, since it needs {' and '.join(needs)}")
    predicted = f"{_HEAD} an update every {placed.period_s:.3g} s. By headrace plan.\n"
    settings = _merged(given or {}, run_settings(placed, roles))
    if name:
        settings["run"] = settings.get("run", {}) | {"name": name}
    if isinstance(base, Path):
        if base.resolve() == (folder / RUN_FILE).resolve():
            raise ConfigError(f"{base} would include itself; expected another folder for --write")
        settings = {"include": [str(base.resolve())], **settings}
    else:
        settings = _merged(base, settings)
    for each in (RUN_FILE, FLEET_FILE):
        if not _may_replace(folder / each):
            raise ConfigError(f"{folder / each} is there, and no plan's; expected another folder for --write")
    by_hand = joins(placed.candidate)
    notes = ["Generators are started by hand, each on its GPUs, once the run is up:", *by_hand] if by_hand else []
    comments = predicted + "".join(f"# {line}\n" for line in notes)
    files = {
        RUN_FILE: predicted + tomli_w.dumps(settings),
        FLEET_FILE: comments + tomli_w.dumps({"fleet": fleet_settings(placed, roles)}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
