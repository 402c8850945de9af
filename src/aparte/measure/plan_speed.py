"""What a step takes, before anything runs: times per side, drafting, and the link, each with its source.

One step costs ``round trip + device + cloud + number formats + bytes over bandwidth``, as paper A's section
6.3 has it, with the bytes that it leaves out. Where a preset was measured, those times are used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aparte.config import Cut, DtypeName
from aparte.measure.plan_presets import Known
from aparte.measure.plan_size import Shape, head_bytes, weight_bytes

#: What a layer takes besides reading its weights. With the bandwidth of paper A's A100 it gives both of the
#: paper's measurements within 4 %: 28 layers of Mistral 7B in 15.9 ms, 36 of NeMo 12B in 21.1 ms.
LAYER_MS = 0.32
CLOUD_BANDWIDTH = 1935.0
DEVICE_BANDWIDTH = 50.0
CODEC_MS = 1.0
#: Share of a step's compute that one more node adds.
CLOUD_NODE_SHARE = 0.01
DEVICE_NODE_SHARE = 0.07
#: Of ``--decode auto`` without trained parts: docs/benchmarks.md, 16 nodes, cold.
AUTO_TOKENS, AUTO_NODES = 2.66, 14.0
#: A frame's header.
HEADER_BYTES = 50
#: Draft mode as paper B measured it, and the block length of its program.
TOKENS_PER_CALL, DRAFT_LENGTH = 4.42, 6
GIVEN = "given"
SPLIT_TABLE = "paper A, latency of one sequential step"


@dataclass(frozen=True)
class Own:
    """What the user knows better. Times in ms, bandwidths of memory in GB/s."""

    device_ms: float | None = None
    cloud_ms: float | None = None
    codec_ms: float | None = None
    node_ms: float | None = None
    mat: float | None = None
    nodes: float | None = None
    device_bandwidth: float | None = None
    cloud_bandwidth: float | None = None
    tokens_per_call: float | None = None
    draft_length: int | None = None


@dataclass(frozen=True)
class Assumption:
    """One number that a plan rests on."""

    name: str
    value: float
    unit: str
    source: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "source": self.source,
        }


@dataclass(frozen=True)
class Drafting:
    """What speculation brings per step: ``tokens`` committed for ``nodes`` more nodes and ``extra_ms``."""

    tokens: float
    nodes: float
    extra_ms: float
    source: str


@dataclass(frozen=True)
class Times:
    """What a step of one node takes on each side, in ms, and how both sides scale."""

    device_ms: float
    cloud_ms: float
    codec_ms: float
    #: What a measured total differs by from the sum of its parts.
    rest_ms: float
    node_ms: float
    device_layer_ms: float
    cloud_layer_ms: float
    device_bandwidth: float
    cloud_bandwidth: float
    assumptions: tuple[Assumption, ...]

    @property
    def fixed_ms(self) -> float:
        """Everything but the link."""
        return self.device_ms + self.cloud_ms + self.codec_ms + self.rest_ms


def step_times(shape: Shape, known: Known, cut: Cut, dtype: DtypeName, own: Own) -> Times:
    """Times of the user's, else measured ones, else from memory bandwidth."""
    notes: list[Assumption] = []

    def note(name: str, value_source: tuple[float, str]) -> float:
        notes.append(Assumption(name, value_source[0], "ms", value_source[1]))
        return value_source[0]

    measured, source = known.measured, _source(known)
    cloud_layer, cloud_source = _cloud_layer(shape, known, cut, dtype, own)
    cloud = note("cloud_ms", (cloud_layer * len(cut.middle(shape.layers)), cloud_source))
    device_layer, device = _device(shape, known, cut, dtype, own, cloud_layer)
    note("device_ms", device)
    note("device_layer_ms", device_layer)
    if own.codec_ms is not None:
        codec = note("codec_ms", (own.codec_ms, GIVEN))
    else:
        assumed = source if "codec_ms" in measured else f"as in {SPLIT_TABLE}"
        codec = note("codec_ms", (measured.get("codec_ms", CODEC_MS), assumed))
    rest = 0.0
    if "fixed_ms" in measured and own == _without_times(own):
        parts = sum(measured[name] for name in ("device_ms", "cloud_ms", "codec_ms"))
        says = f"{source}: its fixed overhead of {measured['fixed_ms']} ms less the sum of its parts"
        rest = note("rest_ms", (measured["fixed_ms"] - parts, says))
    return Times(
        device[0],
        cloud,
        codec,
        rest,
        note("node_ms", _node(known, own, cloud, device[0])),
        device_layer[0],
        cloud_layer,
        own.device_bandwidth or DEVICE_BANDWIDTH,
        own.cloud_bandwidth or CLOUD_BANDWIDTH,
        tuple(notes),
    )


def _without_times(own: Own) -> Own:
    """``own`` without what would replace a measured time of a step."""
    return replace(
        own, device_ms=None, cloud_ms=None, codec_ms=None, device_bandwidth=None, cloud_bandwidth=None
    )


def _source(known: Known) -> str:
    borrowed = known.measured.get("borrowed")
    return str(known.measured.get("source", "")) + (f"; {borrowed}" if borrowed else "")


def _cloud_layer(shape: Shape, known: Known, cut: Cut, dtype: DtypeName, own: Own) -> tuple[float, str]:
    """A middle layer in ms, and where that comes from."""
    if own.cloud_ms is not None:
        return own.cloud_ms / len(cut.middle(shape.layers)), GIVEN
    if known.measured and own.cloud_bandwidth is None:
        layers = len(Cut.parse(known.measured["cut"]).middle(shape.layers))
        return known.measured["cloud_ms"] / layers, f"{_source(known)}, of {layers} layers"
    bandwidth = own.cloud_bandwidth or CLOUD_BANDWIDTH
    return plain_layer_ms(shape, bandwidth, dtype), _by_bandwidth(bandwidth, "cloud")


def _device(
    shape: Shape, known: Known, cut: Cut, dtype: DtypeName, own: Own, cloud_layer: float
) -> tuple[tuple[float, str], tuple[float, str]]:
    """A layer on the device, and all that the device does in a step, in ms, each with its source."""
    bandwidth, ends = own.device_bandwidth or DEVICE_BANDWIDTH, cut.front + cut.back
    if known.measured and own.device_bandwidth is None:
        there = Cut.parse(known.measured["cut"])
        layer = known.measured.get("device_layer_ms", cloud_layer), _source(known)
        whole = known.measured["device_ms"] + layer[0] * (ends - there.front - there.back), _source(known)
    else:
        says = _by_bandwidth(bandwidth, "device")
        layer = plain_layer_ms(shape, bandwidth, dtype), says
        head_ms = shape.table_params * head_bytes(dtype) / bandwidth / 1e6
        whole = layer[0] * ends + head_ms, says
    return layer, whole if own.device_ms is None else (own.device_ms, GIVEN)


def _node(known: Known, own: Own, cloud_ms: float, device_ms: float) -> tuple[float, str]:
    """What one more node takes on both sides, in ms."""
    if own.node_ms is not None:
        return own.node_ms, GIVEN
    if "node_ms" in known.measured:
        return known.measured["node_ms"], _source(known)
    return CLOUD_NODE_SHARE * cloud_ms + DEVICE_NODE_SHARE * device_ms, (
        f"an assumption: {CLOUD_NODE_SHARE:.0%} of the cloud's step, as memory bounds a GPU, and "
        f"{DEVICE_NODE_SHARE:.0%} of the device's, as on the CPU of docs/benchmarks.md"
    )


def auto_drafting() -> Drafting:
    """This project's own training-free drafting."""
    return Drafting(
        AUTO_TOKENS,
        AUTO_NODES,
        0.0,
        "docs/benchmarks.md: smollm2-135m on Spec-Bench, no trained part, cold, at most 16 nodes; "
        "another model and other text differ",
    )


def drafting_of(known: Known, own: Own) -> Drafting:
    """The user's, else what the preset's paper reports, else this project's own."""
    auto = auto_drafting()
    if own.mat is not None or own.nodes is not None:
        given = own.mat if own.mat is not None else auto.tokens
        return Drafting(given, own.nodes if own.nodes is not None else auto.nodes, 0.0, GIVEN)
    lookahead = known.measured.get("lookahead")
    if lookahead is None:
        return auto
    return Drafting(
        lookahead["tokens"],
        0.0,
        lookahead["fixed_ms"] - known.measured["fixed_ms"],
        f"{known.measured['source']}: lookahead; tokens and overhead fitted to its projected column, which "
        "does not follow from the 1.21 to 1.25 tokens per step that it measured; bytes of drafts left out",
    )


def step_bytes(shape: Shape, wire_bytes: int, nodes: float) -> float:
    """Bytes of one message, each way, that carries one node and so many speculative ones."""
    return HEADER_BYTES + (1 + nodes) * shape.hidden * wire_bytes


def transfer_ms(size: float, mbps: float | None) -> float:
    """A message of ``size`` bytes up and another down."""
    return 0.0 if mbps is None else 2 * size * 8 / (mbps * 1e3)


def step_ms(times: Times, rtt_ms: float, mbps: float | None, size: float, drafting: Drafting | None) -> float:
    """One round trip with messages of ``size`` bytes each way."""
    extra_ms = 0.0 if drafting is None else drafting.extra_ms + drafting.nodes * times.node_ms
    return rtt_ms + times.fixed_ms + transfer_ms(size, mbps) + extra_ms


def pass_ms(shape: Shape, layer_ms: float, bandwidth: float, dtype: DtypeName) -> float:
    """The whole model on one machine, one position."""
    return shape.layers * layer_ms + shape.table_params * head_bytes(dtype) / bandwidth / 1e6


def plain_layer_ms(shape: Shape, bandwidth: float, dtype: DtypeName) -> float:
    """A layer by memory bandwidth, GB/s."""
    return LAYER_MS + shape.layer_params * weight_bytes(dtype) / bandwidth / 1e6


def _by_bandwidth(bandwidth: float, side: str) -> str:
    known = {
        CLOUD_BANDWIDTH: "an A100 with 80 GB, paper A's",
        DEVICE_BANDWIDTH: "a laptop's memory; give --device-bandwidth or --device-ms for yours",
    }.get(bandwidth, "given")
    return (
        f"{LAYER_MS} ms per layer (fits paper A's A100) and the weights read once at {bandwidth:g} GB/s "
        f"({side}: {known})"
    )
