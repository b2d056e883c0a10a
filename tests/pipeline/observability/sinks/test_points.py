"""Claims about the names under which sinks show a run."""

from __future__ import annotations

from msgspec.structs import fields, replace

from pipeline.observability.fleet_history import FleetRow, RoleTime
from pipeline.observability.history import EvaluationRow, UpdateRow, ValueRow
from pipeline.observability.sinks.points import Axis, RowNames, fleet_point, plain
from tests.pipeline.observability.rows import evaluation_row, update_row, value_row

SUFFICES = {"update", "at_s", "metrics", "reward_parts", "histograms"}
"""Fields of an update that are no figure: step, time, and tables with names of their own."""


def test_every_figure_of_an_update_has_a_name_in_a_group() -> None:
    row = replace(update_row(3), reward_parts={"length": -0.5}, metrics={"clip_fraction": 0.125})
    point = RowNames().point(row)
    assert (point.series, point.axis, point.step, point.at_s) == ("update", Axis.UPDATE, 3, 1003.0)
    assert point.values["train/reward"] == 0.0
    assert point.values["staleness/mean"] == 0.5
    assert point.values["time/step_s"] == 0.25
    assert point.values["reward/length"] == -0.5
    assert point.values["objective/clip_fraction"] == 0.125
    assert len(point.values) == len([f for f in fields(UpdateRow) if f.name not in SUFFICES]) + 2, "a field has no name"


def test_every_figure_of_the_critic_has_a_name() -> None:
    point = RowNames().point(value_row(4))
    assert (point.series, point.axis, point.step) == ("value", Axis.VALUE, 4)
    assert point.values["value/explained_variance"] == 0.1
    assert point.values["value/gate_open"] == 1.0
    assert len(point.values) == len(fields(ValueRow)) - 3, "step, version and time are no figures"


def test_an_evaluation_stands_at_the_update_that_made_its_version() -> None:
    """After the learner went back, versions are ahead of updates."""
    names = RowNames()
    for update, version in ((1, 1), (2, 2), (3, 7), (4, 8)):
        names.point(update_row(update, version=version))
    row = replace(evaluation_row(1, 7, 0.75), low=0.5, high=1.0, pass_k=8, pass_at_k=0.875)
    point = names.point(row)
    assert (point.series, point.axis, point.step) == ("evaluation/held-out", Axis.UPDATE, 3)
    assert point.values["eval/held-out/accuracy"] == 0.75
    assert point.values["eval/held-out/pass_at_k"] == 0.875
    assert "eval/held-out/pass_low" not in point.values, "it has none"
    assert names.point(evaluation_row(0, 0, 0.5)).step == 0
    left_out = {"number", "at_s", "set", "is_main"}
    whole = replace(row, pass_low=0.1, pass_high=0.9)
    assert len(names.point(whole).values) == len([f for f in fields(EvaluationRow) if f.name not in left_out])


def test_names_of_others_hold_no_sign_that_a_sink_would_refuse() -> None:
    assert plain("AIME 2024 / easy@8") == "AIME_2024_easy@8"
    assert plain("   ") == "_"
    point = RowNames().point(replace(evaluation_row(0, 0, 0.5), set="../a\nb"))
    assert "eval/.._a_b/accuracy" in point.values


def test_a_row_of_the_fleet_has_rates_and_stands_at_its_second() -> None:
    row = FleetRow(
        at_s=1060.0,
        span_s=5.0,
        roles={"learner": RoleTime(1.0, {"input": 0.25, "compute": 0.75}, 500, 1000)},
        num_groups_admitted=7,
        num_groups_dropped={"no_signal": 2},
        queues={"reward": 3},
    )
    point = fleet_point(row, 1000.0)
    assert (point.series, point.axis, point.step, point.at_s) == ("fleet", Axis.FLEET, 60, 1060.0)
    assert point.values["fleet/tokens_per_s/learner"] == 100.0
    assert point.values["fleet/time_share/learner/input"] == 0.25
    assert point.values["fleet/groups_dropped/no_signal"] == 2.0
    assert point.values["fleet/queue/reward"] == 3.0
    assert point.values["fleet/workers/learner"] == 1.0
