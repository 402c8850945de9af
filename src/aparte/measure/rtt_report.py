"""What ``aparte rtt`` says: costs, cross-validation, and speeds on other links, cuts and node limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aparte.config import Cut
from aparte.errors import UserError
from aparte.measure.decomposition import Bandwidth
from aparte.measure.rtt_model import Fold, Projector, cross_validate, errors
from aparte.measure.rtt_runs import Measured, Place
from aparte.measure.wan_link import WanProfile

GRID = "5,20,40,80,150x20,100,1000"


def parse_grid(text: str, option: str) -> tuple[WanProfile, ...]:
    """Read ``"5,80x20,100"``: every round trip, ms, with every bandwidth, Mbit/s; unlimited without x."""
    left, separator, right = text.partition("x")
    try:
        rtts = [float(part) for part in left.split(",")]
        rates = [float(part) for part in right.split(",")] if separator else [None]
    except ValueError:
        raise UserError(
            f"{option} {text} is not a grid of links: round trips in ms, an x, and Mbit/s, like {GRID}."
        ) from None
    return tuple(WanProfile(rtt_ms=rtt, mbps=rate) for rtt in rtts for rate in rates)


def parse_cuts(text: str, layers: int) -> tuple[Cut, ...]:
    """Read ``"2,2;4,2"``."""
    cuts = tuple(Cut.parse(part) for part in text.split(";"))
    for cut in cuts:
        cut.check(layers)
    return cuts


class RttReport:
    """Fits the model to what was measured, checks it, and projects from it."""

    def __init__(
        self,
        places: Sequence[Place],
        measured: Measured,
        *,
        cut: Cut,
        layers: int,
        device_layer_ms: float,
        seed: int = 0,
    ) -> None:
        self.places = places
        self.measured = measured
        self.cut = cut
        self.device_layer_ms = device_layer_ms
        self.cloud_layer_ms = measured.cloud_ms / len(cut.middle(layers))
        # Over one link the prompts are what can be left out; over many, a prompt's answer on another link
        # would tell too much, so all of a link's are left out together.
        self.runs = measured.by_link() if len(places) > 1 else measured.runs
        self.folds: list[Fold] = cross_validate(self.runs)
        self._projector = Projector(measured.runs, self.folds, seed)

    @property
    def reference(self) -> Place:
        """The link whose figures stand for all: in the middle by round trip."""
        ordered = sorted(self.places, key=lambda place: (place.rtt_ms, place.bandwidth.mbps_up or 1e9))
        return ordered[len(ordered) // 2]

    def shift_ms(self, cut: Cut) -> float:
        """What another cut adds to both sides' compute: layers that move from the cloud to the device."""
        moved = cut.front + cut.back - self.cut.front - self.cut.back
        return moved * (self.device_layer_ms - self.cloud_layer_ms)

    def projections(
        self, links: Sequence[WanProfile], cuts: Sequence[Cut], limits: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Speeds for every combination; limits outside of what was measured are refused."""
        rows = []
        for limit in limits:
            try:
                self._projector.costs.at(limit)
            except KeyError:
                known = sorted(self._projector.costs.traffic)
                raise UserError(
                    f"A projection to {limit} nodes needs measurements on both sides of it, and there are "
                    f"some at {', '.join(map(str, known))}. Add {limit} to --max-nodes."
                ) from None
            for cut in cuts:
                for link in links:
                    bandwidth = Bandwidth(link.mbps, link.mbps)
                    expected, low, high = self._projector.project(
                        link.rtt_ms, bandwidth, limit, self.shift_ms(cut)
                    )
                    rows.append(
                        {
                            "rtt_ms": link.rtt_ms,
                            "mbps": link.mbps,
                            "cut": str(cut),
                            "max_nodes": limit,
                            "tok_s": round(expected, 3),
                            "low": round(low, 3),
                            "high": round(high, 3),
                        }
                    )
        return rows

    def to_json(self) -> dict[str, Any]:
        """The fields of design section 8, and more; without the projections."""
        figures, costs = self.reference.figures, self._projector.costs
        median, worst = errors(self.folds)
        return {
            "rtt_ms": round(figures.rtt_ms, 3),
            "mbps_up": _rounded(figures.mbps_up),
            "mbps_down": _rounded(figures.mbps_down),
            "jitter_ms": round(figures.jitter_ms, 3),
            "median_error": None if median is None else round(median, 4),
            "worst_error": None if worst is None else round(worst, 4),
            "folds": [fold.to_json() for fold in self.folds],
            "fixed_ms": round(costs.fixed_ms(self.reference.rtt_ms), 3),
            "base_ms": round(costs.base_ms, 3),
            "cooling_ms": round(costs.cooling_ms, 3),
            "drafting_ms": round(costs.drafting_ms, 3),
            "node_ms": round(costs.node_ms, 4),
            "device_layer_ms": round(self.device_layer_ms, 4),
            "cloud_layer_ms": round(self.cloud_layer_ms, 4),
            "acceptance": {
                str(limit): {
                    "mat": round(traffic.tokens, 4),
                    "nodes_per_step": round(traffic.nodes, 3),
                    "bytes_up": round(traffic.bytes_up),
                    "bytes_down": round(traffic.bytes_down),
                }
                for limit, traffic in costs.traffic.items()
            },
            "links": [_link(place) for place in self.places],
            "parts": {str(limit): parts.to_json() for limit, parts in self.measured.parts.items()},
        }


def _link(place: Place) -> dict[str, Any]:
    """A link as set and as measured."""
    set_to = place.profile
    return {
        "emulated_rtt_ms": set_to.rtt_ms if set_to else None,
        "emulated_mbps": set_to.mbps if set_to else None,
        "rtt_ms": round(place.figures.rtt_ms, 3),
        "jitter_ms": round(place.figures.jitter_ms, 3),
        "mbps_up": _rounded(place.figures.mbps_up),
        "mbps_down": _rounded(place.figures.mbps_down),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
