"""Where one sequential step's time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aparte.measure.decomposition import Bandwidth, decompose_all, waited_for
from aparte.measure.plot_file import STYLES
from aparte.measure.prompts import digest
from aparte.measure.reproduce import paper_a
from aparte.measure.reproduce.lab import WAN, Lab
from aparte.measure.reproduce.section import Figure, Table, number
from aparte.speculate.settings import Decoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY = "latency"
TITLE = "Latency of one step"
PAPER = "paper-a"
WHAT = (
    f"One token at a time over an emulated link ({WAN}), the mean of all steps after the prompt, from the clocks of "
    "both sides. Transfer is bytes over bandwidth."
)
_PARTS = (
    ("network", "network"),
    ("device", "device"),
    ("cloud", "cloud"),
    ("codec", "serialisation and frames"),
)


def run(lab: Lab) -> dict[str, Any]:
    (prompt,) = lab.prompts(1)
    writer = lab.emulated(WAN)
    decoding = Decoding("sequential", in_flight=1)
    lab.write(writer, prompt, decoding, 4)
    lab.progress("latency", 0, 1)
    steps = waited_for(lab.write(writer, prompt, decoding, lab.scale.latency_tokens).steps)
    lab.progress("latency", 1, 1)
    total = decompose_all(steps, Bandwidth(WAN.mbps, WAN.mbps))
    mean = total.per(max(1, len(steps)))
    return {
        "parts": mean.to_json(),
        "network": mean.network_ms,
        "device": mean.device_ms,
        "cloud": mean.cloud_ms + mean.queue_ms,
        "codec": mean.codec_ms,
        "total": mean.total_ms,
        "fixed": mean.total_ms - WAN.rtt_ms,
        "accounted": total.known_ms / total.total_ms,
        "steps": len(steps),
        "rtt_ms": WAN.rtt_ms,
        "mbps": WAN.mbps,
        "prompts": digest([prompt]),
    }


def tables(found: dict[str, Any]) -> list[Table]:
    names = [*_PARTS, ("total", "total"), ("fixed", "fixed overhead: total less the round trip")]
    rows = [
        [label, *(number(value) for value in paper_a.LATENCY[key]), number(found[key])]
        for key, label in names
    ]
    parts = found["parts"]
    rows.insert(1, ["of it transfer, up and down", "", "", number(parts["up_ms"] + parts["down_ms"], 2)])
    return [[["ms", "paper A, 7B", "paper A, 12B", "here"], *rows]]


def figures(found: dict[str, Any]) -> list[Figure]:
    def draw(axes: Axes) -> None:
        rows = [
            ("paper A, 7B", [paper_a.LATENCY[key][0] for key, _ in _PARTS]),
            ("paper A, 12B", [paper_a.LATENCY[key][1] for key, _ in _PARTS]),
            ("here", [found[key] for key, _ in _PARTS]),
        ]
        left = [0.0] * len(rows)
        for index, (_, label) in enumerate(_PARTS):
            widths = [values[index] for _, values in rows]
            axes.barh(
                [name for name, _ in rows], widths, left=left, label=label, color=STYLES[index][0], height=0.6
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_xlabel("milliseconds per step")
        axes.invert_yaxis()

    return [Figure("latency", "Where a sequential step's time goes", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    return [
        f"A step takes {found['total']:.0f} ms, {found['network'] / found['total']:.0%} of it on the network "
        f"(paper A: {77.4 / 120.2:.0%} and {78.5 / 124.7:.0%}); fixed overhead {found['fixed']:.0f} ms "
        "(42.9 and 46.3).",
        f"Device and cloud take {found['device']:.0f} and {found['cloud']:.0f} ms of a much smaller model on one "
        "processor that they share, where the paper has a GPU each.",
        f"The clocks of both sides account for {found['accounted']:.1%} of the wall time.",
    ]
