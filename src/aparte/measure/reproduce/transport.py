"""Transport: from a request per step with base64 in JSON to a binary WebSocket, and speculation on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aparte.measure.plot_file import STYLES
from aparte.measure.reproduce import paper_a
from aparte.measure.reproduce.lab import WAN, Figures, Lab
from aparte.measure.reproduce.section import Figure, Table, number
from aparte.speculate.settings import Decoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY = "transport"
TITLE = "Transport, step by step"
PAPER = "paper-a"
WHAT = (
    f"The same answers over an emulated link ({WAN}), each row with one change more. HTTP is a server and a "
    "client written for this comparison: a request per step, hidden states in base64 within JSON, at first in "
    "float32 with a connection per request. Speeds leave out the prompt."
)

#: Key, what it is, and the paper's row beside it.
ROWS = (
    ("http_new", "HTTP, base64 in JSON, float32, a connection per step", "http"),
    ("http_kept", "the same over one connection, 16 bits", "http_gpu"),
    ("websocket", "binary WebSocket", "websocket"),
    ("lookahead", "and lookahead, n = 3", "lookahead"),
    ("auto", "and this project's drafting (`auto`) instead", ""),
    ("local", "all layers on the device, no cloud", "local"),
)


def run(lab: Lab) -> dict[str, Any]:
    scale = lab.scale
    prompts = lab.prompts(scale.transport_prompts)

    def answers(writer: Any, decoding: Decoding, drafter: Any = None) -> dict[str, Any]:
        lab.write(writer, prompts[0], decoding, 4, drafter)  # what is paid for once
        return Figures.of(
            [lab.write(writer, text, decoding, scale.transport_tokens, drafter) for text in prompts]
        ).to_json()

    one_by_one = Decoding("sequential", in_flight=1)
    rows: dict[str, Any] = {}
    for key in lab.counted("transport", [key for key, *_ in ROWS]):
        if key.startswith("http"):
            rows[key] = _over_http(lab, prompts, keep=key == "http_kept")
        elif key == "local":
            rows[key] = _local(lab, answers, one_by_one)
        else:
            writer = lab.emulated(WAN)
            decoding = one_by_one if key == "websocket" else Decoding(key)
            rows[key] = answers(writer, decoding, lab.automatic(writer) if key == "auto" else None)
    return {"rows": rows, "rtt_ms": WAN.rtt_ms, "mbps": WAN.mbps, "prompts": prompts_digest(prompts)}


def prompts_digest(prompts: Sequence[str]) -> str:
    from aparte.measure.prompts import digest

    return digest(list(prompts))


def _over_http(lab: Lab, prompts: Sequence[str], *, keep: bool) -> dict[str, Any]:
    from aparte.answer import Writer
    from aparte.device import wire_format
    from aparte.measure.http_cloud import http_cloud_process
    from aparte.measure.http_link import HttpLink
    from aparte.measure.wan_process import wan_process
    from aparte.target.split import SplitTarget

    settings, tokens = lab.settings, lab.scale.transport_tokens
    wire = wire_format("auto", lab.blueprint) if keep else "float32"
    with (
        http_cloud_process(settings.model, settings.cut, settings.compute) as (address, token),
        wan_process(address, WAN) as (host, port),
    ):
        link = HttpLink(f"http://{host}:{port}", token, wire, keep=keep)
        writer = Writer(SplitTarget(lab.parts, link, wire), lab.codec, str(settings.cut))
        try:
            decoding = Decoding("sequential", in_flight=1)
            lab.write(writer, prompts[0], decoding, 4)
            before = link.bytes_up
            found = [lab.write(writer, text, decoding, tokens) for text in prompts]
        finally:
            writer.target.close()
    row = Figures.of(found).to_json()
    # What the frames would have been is not what was sent; the prompt is a small part of it.
    sent = link.bytes_up - before - _of_prompts(lab, prompts, link.bytes_up - before, found)
    row["bytes_up_per_token"] = round(sent / max(1, row["tokens"]), 1)
    return row


def _of_prompts(lab: Lab, prompts: Sequence[str], total: int, answers: Sequence[Any]) -> float:
    """The prompts' share of what was sent: bodies grow with their nodes."""
    read = sum(len(lab.codec.encode_chat([{"role": "user", "content": text}])) for text in prompts)
    steps = sum(len(answer.steps) - 1 for answer in answers)
    return total * read / (read + steps)


def _local(lab: Lab, answers: Any, decoding: Decoding) -> dict[str, Any]:
    from aparte.device import open_local_writer

    writer = open_local_writer(lab.blueprint, progress=lab.progress)
    try:
        found: dict[str, Any] = answers(writer, decoding)
        return found
    finally:
        writer.target.close()


def tables(found: dict[str, Any]) -> list[Table]:
    rows = found["rows"]
    table: Table = [["", "paper A, tok/s", "tok/s", "ms per step", "tokens per step", "bytes up per token"]]
    table.append(["HTTP, pickled tensors, base64 (not run: nothing is pickled here)", "1.4", *[""] * 4])
    for key, label, paper in ROWS:
        row = rows[key]
        said = paper_a.TRANSPORT.get(paper)
        table.append(
            [
                label,
                number(said),
                number(row["tok_s"]),
                number(row["step_ms"]),
                number(row["mat"], 2),
                number(row["bytes_up_per_token"], 0) if key != "local" else "",
            ]
        )
    return [table]


def figures(found: dict[str, Any]) -> list[Figure]:
    shown = [(key, label.replace("`", ""), paper) for key, label, paper in ROWS if key != "local"]

    def draw(axes: Axes) -> None:
        for offset, (values, label, style) in enumerate(
            (
                ([paper_a.TRANSPORT.get(paper) for *_, paper in shown], "paper A", STYLES[1]),
                ([found["rows"][key]["tok_s"] for key, *_ in shown], "here", STYLES[0]),
            )
        ):
            places = [place + 0.4 * (offset - 0.5) for place in range(len(shown))]
            bars = axes.bar(places, [value or 0 for value in values], width=0.38, color=style[0], label=label)
            axes.bar_label(bars, [number(value) for value in values], fontsize=8)
        names = ("HTTP,\nnew connections", "HTTP,\none connection", "WebSocket", "lookahead", "auto")
        axes.set_xticks(range(len(shown)), names)
        axes.set_ylabel("tokens per second")

    return [Figure("transport", f"tok/s by transport, {found['rtt_ms']:g} ms", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    rows = found["rows"]
    speed = {key: rows[key]["tok_s"] for key in rows}
    size = rows["http_new"]["bytes_up_per_token"] / rows["websocket"]["bytes_up_per_token"]
    step = {key: rows[key]["step_ms"] for key in rows}
    costs = (
        f"A connection per step costs {step['http_new'] - step['http_kept']:.0f} ms of a step, a second round trip for "
        f"the most part; base64 in JSON over a kept one {step['http_kept'] - step['websocket']:.0f} ms."
        if step["http_new"] > step["http_kept"] > step["websocket"]
        else "What a connection per step and base64 cost does not show here: the differences are lost in noise."
    )
    return [
        f"From HTTP with a connection per step to a binary WebSocket: {speed['http_new']:.1f} to "
        f"{speed['websocket']:.1f} tok/s, {speed['websocket'] / speed['http_new']:.1f} times "
        f"(paper A: 3.9 to 7.8); with `auto` {speed['auto']:.1f}.",
        f"{costs} In 32 bits it is {size:.1f} times the bytes of the binary frame, which at this model's width and this "
        "bandwidth is little time. Paper A's states are seven times as wide or more, and its first versions sent masks and rotary tables "
        "with them.",
        "The paper's second row differs from its first by running on the GPU; ours by keeping the connection.",
        f"Lookahead does {speed['lookahead'] / speed['websocket']:.2f} times the sequential speed here, 1.12 times "
        "there.",
        f"All layers on the device: {speed['local']:.0f} tok/s, so this model needs no cloud. It is here because it "
        "fits, to measure the way.",
    ]
