"""Providers: a direct path against one through a relay, told apart by the handshake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aparte.measure.doctor import examine
from aparte.measure.doctor_path import Door
from aparte.measure.emulated_path import EmulatedPath, emulated_path
from aparte.measure.plot_file import STYLES
from aparte.measure.prompts import digest
from aparte.measure.reproduce import paper_a
from aparte.measure.reproduce.lab import Figures, Lab
from aparte.measure.reproduce.section import Figure, Table, number
from aparte.speculate.settings import Decoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY = "providers"
TITLE = "Providers: a direct path and a relayed one"
PAPER = "paper-a"
PATHS = {"direct": EmulatedPath((80.0,), 100.0), "relayed": EmulatedPath((20.0, 280.0), 100.0)}
WHAT = (
    "Two emulated paths to the same cloud: a direct one of 80 ms, and a relay that takes the connection after 20 ms "
    "with the cloud 280 ms behind it, as in front of the paper's second provider. `aparte doctor` examines both; then "
    "one answer is written over each, one token at a time."
)


def run(lab: Lab) -> dict[str, Any]:
    from aparte.address import parse_address
    from aparte.device import open_writer

    settings = lab.settings
    (prompt,) = lab.prompts(1)
    address = parse_address(lab.cloud.url().split("://")[1])
    rows: dict[str, Any] = {}
    for name in lab.counted("providers", list(PATHS)):
        path = PATHS[name]
        with emulated_path(address, path) as url:
            found = examine(Door(url, lab.cloud.token, near_ms=path.near_ms))
            if found.failure is not None:
                raise found.failure
            writer = open_writer(
                lab.blueprint, settings.model, settings.cut, cloud=url, token=lab.cloud.token, parts=lab.parts
            )
            try:
                one_by_one = Decoding("sequential", in_flight=1)
                lab.write(writer, prompt, one_by_one, 3)
                answer = lab.write(writer, prompt, one_by_one, lab.scale.provider_tokens)
            finally:
                writer.target.close()
        told = found.to_json()
        kept = ("tcp_rtt_ms", "ws_rtt_ms", "first_byte_ms", "relayed", "relay_adds_ms")
        problems = [problem for problem in told["problems"] if "takes the connection" in problem]
        rows[name] = {
            **{key: told[key] for key in kept},
            "path": str(path),
            "problems": problems,
            "tok_s": Figures.of([answer]).to_json()["tok_s"],
        }
    return {"rows": rows, "prompts": digest([prompt])}


def tables(found: dict[str, Any]) -> list[Table]:
    head = ["", "paper A: round trip, ms", "paper A: tok/s", "connect, ms", "WebSocket, ms", "first byte, ms"]
    rows = []
    for name, row in found["rows"].items():
        trip, speed = paper_a.PROVIDERS[name]
        rows.append(
            [
                f"{name}: {row['path']}",
                trip,
                number(speed),
                *(number(row[key]) for key in ("tcp_rtt_ms", "ws_rtt_ms", "first_byte_ms")),
                {True: "yes", False: "no", None: "unknown"}[row["relayed"]],
                number(row["tok_s"]),
            ]
        )
    return [[[*head, "relayed, says `doctor`", "tok/s here"], *rows]]


def figures(found: dict[str, Any]) -> list[Figure]:
    def draw(axes: Axes) -> None:
        names = list(found["rows"])
        series = (("tcp_rtt_ms", "connect"), ("ws_rtt_ms", "WebSocket ping"), ("first_byte_ms", "first byte"))
        for offset, (key, label) in enumerate(series):
            places = [place + 0.27 * (offset - 1) for place in range(len(names))]
            values = [found["rows"][name][key] or 0.0 for name in names]
            bars = axes.bar(places, values, width=0.25, color=STYLES[offset][0], label=label)
            axes.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=8)
        axes.set_xticks(range(len(names)), [f"{name}\n{found['rows'][name]['path']}" for name in names])
        axes.set_ylabel("milliseconds")

    return [Figure("providers", "Handshake against what the cloud itself answers", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    direct, relayed = found["rows"]["direct"], found["rows"]["relayed"]
    apart = direct["relayed"] is False and relayed["relayed"] is True
    return [
        f"`aparte doctor` {'tells the two apart' if apart else 'does NOT tell the two apart'}: the direct path's ping "
        f"takes as long as its connect, the relayed one's {relayed['relay_adds_ms']:.0f} ms more; "
        f"{direct['tok_s']:.1f} against {relayed['tok_s']:.1f} tok/s (paper A: 10.9 and 1.2).",
        "The paper's relayed provider was slower than its round trip explains (200 to 400 ms would be 2 to 4 tok/s). What "
        "else its gateway did, a plain delay does not show.",
        "The first byte of a new connection comes late behind a relay, which connects to the cloud only then.",
        "The emulator cannot delay a connect on this machine, so the examination waits for the first hop's round trip "
        "itself; pings and bytes go through the emulator.",
    ]
