"""The Grafana dashboard asks for nothing that the server does not tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aparte.cloud.telemetry import Level, Telemetry

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "deploy" / "grafana.json").read_text(encoding="utf-8")
)
FUNCTIONS = {"sum", "rate", "histogram_quantile", "by", "ignoring", "group_left", "label_values"}


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def names(query: str) -> set[str]:
    return set(re.findall(r"\b(?:aparte|process)_\w+", query))


@pytest.fixture(scope="module")
def told() -> dict[str, set[str]]:
    """Labels by metric, as a server tells them."""
    about = {"version": "0", "model": "x", "cut": "2,2", "dtype": "float32"}
    telemetry = Telemetry(about, lambda: Level(0, 0, 1, 0, 0, 0, 0, 1, 0))
    found: dict[str, set[str]] = {}
    for line in telemetry.render().decode().splitlines():
        if match := re.match(r"(\w+)(?:{(.*)})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_asks_for_metrics_and_labels_that_there_are(query: str, told: dict[str, set[str]]) -> None:
    assert names(query)
    assert names(query) <= set(told)
    labels = set().union(*(told[name] for name in names(query))) | {"instance", "le"}
    for group in re.findall(r"(?:by|ignoring) \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= labels
    for matchers in re.findall(r"{([^}]*)}", query):
        assert set(re.findall(r"(\w+)=", matchers)) <= labels
    assert query.count("(") == query.count(")")


def test_every_metric_of_ours_is_shown(told: dict[str, set[str]]) -> None:
    """All of the contract's: what is not asked for would not be seen."""
    asked = set().union(*map(names, queries()))
    stems = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in told if name.startswith("aparte_")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert stems <= shown | {"aparte_cloud_info"}


def test_panels_have_titles_places_and_numbers_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
