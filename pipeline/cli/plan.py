"""``headrace plan``: what to start on these devices, and how fast it will be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import PATH, aligned, echo_json, json_option, set_option

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.plan.planner import Placed, Plans
    from pipeline.plan.profile import Profile
    from pipeline.plan.roles import Roles, Trained

_EPILOG = """\b
Examples:
  headrace plan models/Qwen2.5-7B --devices 8xH200 --algorithm dapo
  headrace plan run.toml --devices 4xH100,8xL4 --budget 20
  headrace plan run.toml --devices 4xH100,8xL4 --write plan && headrace up plan/run.toml --fleet plan/fleet.toml
  headrace plan configs/demo.toml --devices 2xCPU --calibrate
  headrace plan --from runs/demo           # again, from what its work cost

\b
A file of lengths, in tokens:
  prompt_tokens = 300        # means
  response_tokens = 1500
  variation = 0.8            # standard deviation over mean
  trained_share = 0.6        # of the generated tokens: others are filtered
"""


_ROUGH = (
    "from the model's sizes and data sheets alone: published runs of dense models with known lengths took 0.6 to 1.4 times "
    "as long, of experts 2.2 to 2.6 times; --from a short run is nearer"
)


@click.command(epilog=_EPILOG)
@click.argument("model", metavar="[MODEL|RUN_FILE]", required=False, type=PATH)
@click.option("--devices", help="Such as 8xH200 or 4xH100,8xL4; CPU is a core. With --from: the run's cores.")
@click.option("--algorithm", default=None, help="For a model folder.  [default: dapo]")
@click.option("--lengths", "lengths_file", type=PATH, help="File of prompt and response lengths.")
@click.option("--budget", type=click.FloatRange(0.0, min_open=True), help="Most euros an hour.")
@click.option("--costs", "costs_file", type=PATH, help="Costs of one device, as `headrace profile --write` does.")
@click.option("--calibrate", is_flag=True, help="Measure this machine's cores first, for two seconds.")
@click.option("--from", "run", type=PATH, metavar="RUN", help="Plan what this run does again, from what its work cost.")
@click.option("--data", help="Prompts for the run file of a model folder.")
@click.option("--write", type=PATH, metavar="DIR", help="Write run.toml and fleet.toml for `headrace up`.")
@click.option(
    "--time-limit", "time_limit_s", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Seconds."
)
@set_option
@json_option
def plan(
    model: Path | None,
    devices: str | None,
    algorithm: str | None,
    lengths_file: Path | None,
    budget: float | None,
    costs_file: Path | None,
    calibrate: bool,
    run: Path | None,
    data: str | None,
    write: Path | None,
    time_limit_s: float,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find the fastest fleet for a model on these devices: who generates, who learns, how each is split, how far sampling
    runs ahead, how long windows are.

    The model is a folder, or a run file that names it. Predictions are of one update, from the model's sizes and the
    devices' figures, or from measured --costs. Nothing is started."""
    from pipeline.config.load import overrides_as_tree
    from pipeline.plan.costs import read_costs
    from pipeline.plan.devices import CPU, read_devices
    from pipeline.plan.devices import calibrate as measured_core
    from pipeline.plan.planner import candidates, make_plans
    from pipeline.plan.profile import profile_run
    from pipeline.plan.roles import Roles
    from pipeline.plan.transformer import read_transformer
    from pipeline.plan.workload import Lengths, lengths_of, read_lengths, workload
    from pipeline.plan.written import write_plan

    if (model is None) == (run is None):
        raise click.UsageError("expected a model folder, a run file or --from RUN, and one of them")
    for option, value in (("--budget", budget), ("--time-limit", time_limit_s)):
        if value is not None and not math.isfinite(value):
            raise click.UsageError(f"{option} is {value}; expected a finite number")
    if calibrate and costs_file is not None:
        raise click.UsageError("--calibrate measures what --costs has already: leave one out")
    given = Lengths() if lengths_file is None else read_lengths(lengths_file)
    lengths = given if isinstance(given, Lengths) else lengths_of(given)
    costs = None if costs_file is None else read_costs(costs_file)
    profile = None
    if run is not None:
        from pipeline.config.load import load_config, read_resolved

        profile = profile_run(run)
        config, base, costs = read_resolved(run), run / "config.toml", profile.costs
        if overrides:
            config = load_config([base], overrides)
        lengths = profile.lengths
        devices = devices or f"{profile.cores}x{CPU}"
    else:
        assert model is not None
        config, base = _config(model, algorithm, data, devices or "", overrides)
    if devices is None:
        raise click.UsageError("--devices is missing: what do you have? Such as 8xH200, 4xH100,8xL4 or 2xCPU")
    found = read_devices(devices)
    if costs is not None and len(found) > 1:
        raise click.UsageError("measured costs are of one kind of device, and --devices has several: leave one out")
    if calibrate:
        core = measured_core()
        found = [(number, core if device.is_cpu else device) for number, device in found]
    roles = Roles(config, read_transformer(config.model.path), workload(config, lengths), costs)
    plans = make_plans(candidates(roles, found, budget), time_limit_s)
    if write is not None:
        name = "" if run is None else f"{config.run.name}-planned"
        write_plan(plans.best, roles, write, base, given=overrides_as_tree(overrides), name=name)
    if as_json:
        echo_json(_record(plans, roles, profile))
        return
    click.echo("\n".join(_lines(plans, roles, profile)))
    if write is not None:
        click.echo(f"\nheadrace up {write}/run.toml --fleet {write}/fleet.toml")


def _config(
    model: Path, algorithm: str | None, data: str | None, devices: str, overrides: tuple[str, ...]
) -> tuple[RunConfig, Path | dict[str, Any]]:
    """Return a run's configuration, and what its file includes or begins with."""
    import os

    from pipeline.config.load import load_config, parse_config, settings_to_toml

    on_cores = "cpu" in devices.lower()
    if model.suffix == ".toml":
        if algorithm is not None or data is not None:
            raise click.UsageError("--algorithm and --data are for a model folder; a run file has its own")
        given = overrides if on_cores else ("model.dtype=bfloat16", "generation.engine=vllm", *overrides)
        return load_config([model], given, os.environ), model
    base: dict[str, Any] = {
        "run": {"name": model.name},
        "model": {"path": str(model.resolve())} | ({} if on_cores else {"dtype": "bfloat16"}),
        "data": {"train": [data or "data/train.jsonl"]},
        "algorithm": {"name": algorithm or "dapo"},
        "generation": {} if on_cores else {"engine": "vllm"},
    }
    return parse_config(settings_to_toml(base), "headrace plan", overrides, option="--set"), base


def _record(plans: Plans, roles: Roles, profile: Profile | None) -> dict[str, Any]:
    from pipeline.plan.written import fleet_settings, run_settings

    placed = [_as_record(each, roles) for each in (plans.best, *plans.others)]
    return {
        "best": placed[0] | {"run": run_settings(plans.best, roles), "fleet": fleet_settings(plans.best, roles)},
        "others": placed[1:],
        "proof": "optimal" if plans.is_proven else "bounded",
        "bound_s": plans.bound_s,
        "candidates": plans.num_candidates,
        "solved": plans.num_solved,
        "measured_s": None if profile is None else profile.update_s,
    }


def _as_record(placed: Placed, roles: Roles) -> dict[str, Any]:
    candidate, work = placed.candidate, roles.work
    price = candidate.eur_per_hour
    return {
        "update_s": placed.period_s,
        "tokens_per_s": work.responses * work.response_tokens / placed.period_s,
        "staleness": candidate.staleness,
        "window": candidate.window,
        "mean_staleness": placed.mean_staleness,
        "binding": placed.binding,
        "eur_per_hour": price,
        "eur_per_update": None if price is None else price * placed.period_s / 3600,
        "roles": _roles(placed),
        "seconds": dict(candidate.seconds),
        "memory": candidate.memory(roles),
        "moved": {name: _moved(roles, trained) for name, trained in candidate.trained().items()},
        "needs": candidate.needs(),
    }


def _moved(roles: Roles, trained: Trained) -> list[dict[str, Any]]:
    """Return what a rank sends for an optimiser step, by collective, the most first."""
    rows = [
        {
            "by": "send" if flow.kind == "move" else str(flow.kind),
            "ranks": flow.ranks,
            "what": flow.what,
            "bytes": round(sent),
        }
        for flow, sent in roles.moved(trained)
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def _roles(placed: Placed) -> dict[str, str]:
    """Return what each role has, in words."""
    candidate = placed.candidate
    on = {
        role: " and ".join(f"{number} {device.name}" for number, device in group.devices)
        for group in candidate.groups
        for role in group.roles
    }
    each = ", ".join(
        f"{e.number}" + (f" on {e.tensor}" if e.tensor > 1 else "") + f", each of {e.slots} slots"
        for e in candidate.engines
    )
    learner = candidate.learner
    words = {"generator": each, "learner": learner.split.in_words()}
    if learner.recomputed:
        words["learner"] += f", {learner.recomputed} layers recomputed"
    if candidate.critic is not None:
        words["value"] = candidate.critic.split.in_words()
    return {role: f"{place}: {words[role]}" if role in words else place for role, place in on.items()}


def _lines(plans: Plans, roles: Roles, profile: Profile | None) -> list[str]:
    best, work = plans.best, roles.work
    record = _as_record(best, roles)
    proof = (
        "no plan is 1 % faster" if plans.is_proven else f"bounded: time was short, none is below {plans.bound_s:.3g} s"
    )
    rows = [["role", "devices", "s an update"]]
    rows += [[role, words, f"{best.candidate.seconds[role]:.3g}"] for role, words in record["roles"].items()]
    money = record["eur_per_update"]
    rate = record["tokens_per_s"]
    price = "no price is known" if money is None else f"{money:.3g} EUR an update, {record['eur_per_hour']:.3g} an hour"
    share = f"in windows of {best.candidate.window}, {work.trained_share:.0%} of what is generated"
    update = f"{work.responses} responses of {work.response_tokens:.0f} tokens, prompts of {work.prompt_tokens:.0f}"
    needs = best.candidate.needs()
    lines = [
        f"an update every {best.period_s:.3g} s, {rate:,.0f} trained response tokens a second ({proof})",
        *([f"  not here    this version cannot start it: it needs {' and '.join(needs)}"] if needs else []),
        f"  limited by  {best.binding}",
        f"  staleness   at most {best.candidate.staleness}, {best.mean_staleness:.2g} on average",
        f"  cost        {price}",
        f"  update      {update}, {share}",
        f"  searched    {plans.num_candidates} fleets that fit, {plans.num_solved} exact schedules",
        "",
        *(f"  {line}" for line in aligned(rows)),
        "",
        *(f"  {line}" for line in aligned([["memory", "GB of", "by role"], *map(_memory_row, record["memory"])])),
    ]
    if any(record["moved"].values()):
        rows = [["moved", "GB a step", "by collective"], *map(_moved_row, *zip(*record["moved"].items(), strict=True))]
        lines += ["", *(f"  {line}" for line in aligned(rows))]
    if plans.others:
        others = [["next", "s", "EUR an update", "what it needs besides"]]
        for other in plans.others:
            one = _as_record(other, roles)
            money = one["eur_per_update"]
            words = "; ".join(f"{role} {place}" for role, place in one["roles"].items())
            needs = " and ".join(one["needs"]) or "nothing"
            others.append([words, f"{other.period_s:.3g}", "-" if money is None else f"{money:.3g}", needs])
        lines += ["", *(f"  {line}" for line in aligned(others))]
    if profile is not None:
        lines += ["", _compared(profile, best.period_s)]
        planned = sum(each.number for each in best.candidate.engines)
        if best.candidate.cores and planned > profile.generators:
            lines.append(
                f"generators: {planned}, in the run {profile.generators}. Full cores slow one another: plan again from a run "
                "of this fleet"
            )
    elif roles.measured is None:
        lines += ["", _ROUGH]
    return lines


def _memory_row(row: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{role} {size:.1f}" for role, size in row["roles"].items())
    return [row["device"], f"{sum(row['roles'].values()):.1f} of {row['gb']:g}", parts]


def _moved_row(role: str, moved: list[dict[str, Any]]) -> list[str]:
    """Say what a rank sends; what is less than a thousandth is left out."""
    total = sum(row["bytes"] for row in moved)
    parts = (
        f"{row['by']} of {row['what']} over {row['ranks']} {_gb(row['bytes'])}"
        for row in moved
        if row["bytes"] > total / 1000
    )
    return [f"a rank of the {role}", _gb(total), ", ".join(parts) or "nothing"]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.0f}" if num_bytes >= 1e11 else f"{num_bytes / 1e9:.3g}"


def _compared(profile: Profile, planned_s: float) -> str:
    """Say how far the measured period is from the plan that the run was started with, or from this one."""
    of = "this plan"
    if profile.planned_update_s is not None:
        planned_s, of = profile.planned_update_s, "the plan it was started with"
    off = profile.update_s / planned_s - 1
    verdict = "more than 10 %: start this plan" if abs(off) > 0.1 else "within 10 %"
    return f"measured: an update every {profile.update_s:.3g} s, {off:+.0%} from {of} ({planned_s:.3g} s): {verdict}"
