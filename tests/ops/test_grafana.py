"""Claims about the Grafana dashboard: every expression is of metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.docs.whole_fleet import whole_collector

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "ops" / "grafana" / "headrace.json").read_text(encoding="utf-8"))
OURS = re.compile(r"\b(headrace_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
COUNTED = re.compile(r"\b(?:rate|increase)\(\s*(headrace_\w+)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [(title, target["expr"]) for title, target in TARGETS]
EXPRESSIONS += [(note["name"], note["expr"]) for note in DASHBOARD["annotations"]["list"]]


@pytest.fixture(scope="module")
def samples() -> dict[str, list[dict[str, str]]]:
    """The labels of every sample of a run that shows all there is, by name."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in whole_collector().collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def matchers(selector: str) -> Iterator[tuple[str, str]]:
    for label, value in MATCHER.findall(selector):
        if value != "$run":
            yield label, value


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_each_expression_asks_for_metrics_and_labels_that_exist(
    title: str, expression: str, samples: dict[str, list[dict[str, str]]]
) -> None:
    found = OURS.findall(expression)
    assert found, f"{title} asks for no metric of a run"
    labels: set[str] = set()
    for name, selector in found:
        assert name in samples, f"{title}: there is no {name}"
        labels |= samples[name][0].keys()
        assert 'run=~"$run"' in selector, f"{title}: {name} is of all runs, whichever are chosen"
        for label, value in matchers(selector):
            assert label in samples[name][0], f"{title}: {name} has no label {label}"
            assert value in {labels[label] for labels in samples[name]}, f"{title}: no {label} is ever {value}"
    for group in GROUPING.findall(expression):
        for label in filter(None, map(str.strip, group.split(","))):
            assert label in labels, f"{title}: no metric here has the label {label}"


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_rates_are_of_counters_alone(title: str, expression: str) -> None:
    assert all(name.endswith("_total") for name in COUNTED.findall(expression)), title


@pytest.mark.parametrize(("title", "target"), TARGETS)
def test_each_legend_names_labels_that_its_expression_keeps(
    title: str, target: dict[str, Any], samples: dict[str, list[dict[str, str]]]
) -> None:
    kept: set[str] = set()
    for name, _ in OURS.findall(target["expr"]):
        kept |= samples[name][0].keys()
    if (by := re.search(r"\b(?:sum|avg|max|min) by \(([^)]*)\)", target["expr"])) is not None:
        kept = {label.strip() for label in by[1].split(",")}
    assert set(LEGEND.findall(target["legendFormat"])) <= kept, title
    assert "run" in LEGEND.findall(target["legendFormat"]), f"{title}: two runs would look alike"


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert 36 <= DASHBOARD["schemaVersion"] <= 42, "Grafana 10 to 12"
    assert DASHBOARD["uid"] == "headrace" and "id" not in DASHBOARD, "Grafana gives the number"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    chosen = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert chosen["datasource"]["type"] == "datasource" and chosen["datasource"]["query"] == "prometheus"
    assert chosen["run"]["definition"] == "label_values(headrace_run_info, run)"
    for title, target in TARGETS:
        assert target["datasource"]["uid"] == "${datasource}", f"{title} is tied to one Grafana's data source"
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
