"""Options that several commands share. Defaults come from :mod:`aparte.config`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from aparte.errors import UserError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="smollm2-135m, a local folder, a GGUF file or a hub id.", show_default=False
    ),
]
CutOption = Annotated[
    str, typer.Option("--cut", metavar="K,M", help="First K and last M layers stay on the device.")
]
Dtype = Annotated[
    str,
    typer.Option(help="Compute: auto, packed16 (x86 CPU), int8, nf4 (4 bits), float32, bfloat16, float16."),
]
Kv = Annotated[
    str,
    typer.Option(help="Keys and values are kept as: model (what it computes in), float16, float8, int8."),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="A node's numbers do not depend on the nodes computed with it, to the bit. Slower.",
    ),
]
Graphs = Annotated[
    bool,
    typer.Option(
        "--graphs", help="Record steps of few nodes as CUDA graphs, which start with less delay. GPU only."
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Cloud = Annotated[
    str | None,
    typer.Option(
        help="ws://host:port, wss://host:port or ssh://user@host/port. Without it: a middle of our own."
    ),
]
Clouds = Annotated[
    list[str] | None,
    typer.Option(
        "--cloud",
        help="ws://host:port, wss://host:port or ssh://user@host/port; more than one: where the first is "
        "away, the next is asked. Without it: a middle of our own.",
        show_default=False,
    ),
]
Wire = Annotated[str, typer.Option(help="Numbers on the wire: auto (16 bits), float16, bfloat16, float32.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the server's token (or set APARTE_TOKEN).", show_default=False)
]
TlsCa = Annotated[
    Path | None, typer.Option(help="PEM certificate to trust, for a server with its own.", show_default=False)
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SHA256",
        help="sha256:… of the server's certificate, as it prints it; may be repeated.",
        show_default=False,
    ),
]
Rtt = Annotated[float | None, typer.Option(metavar="MS", help="Emulate this round trip.")]
Mbps = Annotated[float | None, typer.Option(metavar="N", help="Emulate this bandwidth, Mbit/s each way.")]
Decode = Annotated[
    str,
    typer.Option(
        help="auto, sequential, jacobi, lookahead; or context, recycling, runner-up, common, bridge, model, "
        "joined by +."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="DRAFT",
        help="Model of the same tokens that drafts here; in draft mode also bridge, context, shallow:K, "
        "joined by +.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        help="split: the cloud does the middle. draft: it verifies what this device drafts, and sees the "
        "text. local: no cloud.",
    ),
]
DraftLength = Annotated[
    str, typer.Option(metavar="D", help="Draft mode: tokens per block, or auto: as many as pay.")
]
DraftFor = Annotated[
    str,
    typer.Option(
        metavar="GOAL",
        help="Draft mode: what an automatic draft length is for: speed, or little time of the cloud.",
    ),
]
Accept = Annotated[
    str, typer.Option(help="Draft mode, with a temperature: coupled (same text for a seed) or rejection.")
]
ReturnStates = Annotated[
    bool,
    typer.Option(
        "--return-states/--no-return-states", help="Draft mode: have hidden states returned for the bridge."
    ),
]
DraftTop = Annotated[
    int,
    typer.Option(
        metavar="K", help="Draft mode: candidates named per token; by rejection sampling they are sent."
    ),
]
Ngram = Annotated[int, typer.Option(help="n-gram size of lookahead, 3 to 7.")]
MaxNodes = Annotated[
    int | None,
    typer.Option(
        help="Speculative nodes per round trip. By default as the link and both sides make worth while, "
        "12 for jacobi and lookahead.",
        show_default=False,
    ),
]
InFlight = Annotated[
    int | None,
    typer.Option(
        help="Most steps under way at a time, 1 to 8; 1 waits for each. By default as many as pay, up to 4, "
        "where the decoding mode allows it.",
        show_default=False,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this probability.")]
TopK = Annotated[int, typer.Option(help="Keep the K most probable tokens; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this times as probable as the best.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text, whatever the decoding mode.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.", show_default=False)
]
System = Annotated[str | None, typer.Option(help="System message of the conversation.", show_default=False)]
Remember = Annotated[
    bool,
    typer.Option("--remember", help="Keep what the drafter learns, on this device; see aparte forget."),
]
Defence = Annotated[
    str,
    typer.Option(
        help="Split mode, for what is sent: none, int8 to int2, noise:EPSILON, random-cut:LOW-HIGH."
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        "--constant-shape",
        metavar="N[@MS]",
        help="Split mode: every step with N nodes and the same bytes, one every MS milliseconds.",
        show_default=False,
    ),
]
Ends = Annotated[
    Path | None,
    typer.Option(
        "--private-ends",
        metavar="FILE",
        help="Split mode: front and back of this device's own, from aparte privatize.",
        show_default=False,
    ),
]
NameList = Annotated[
    Path | None,
    typer.Option(
        "--pseudonyms",
        metavar="FILE",
        help="Replace the names in FILE, and numbers and addresses, before the model sees them; restore "
        "them in the answer.",
        show_default=False,
    ),
]
SpacyModel = Annotated[
    str | None,
    typer.Option(
        "--spacy-model",
        metavar="NAME",
        help="spaCy model by which Presidio finds names for --pseudonyms: an installed one, or a folder.",
        show_default=False,
    ),
]
Failover = Annotated[
    str,
    typer.Option(
        metavar="ORDER", help="Which of several clouds is asked first: order (as given) or latency (nearest)."
    ),
]
ConnectTimeout = Annotated[float, typer.Option(metavar="S", help="Longest wait for a connection.")]
StepTimeout = Annotated[float, typer.Option(metavar="S", help="Longest wait for one answer of the cloud.")]
AnswerTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="S", help="Longest time for a whole answer; without it no limit.", show_default=False
    ),
]
Retries = Annotated[
    int, typer.Option(help="Attempts to find the cloud again before an answer is given up; 0 is none.")
]


Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep what the cloud saw: every frame, as sent and received (see aparte record).",
        show_default=False,
    ),
]


def read_token(file: Path | None) -> str | None:
    """The bearer token from ``file``, else from ``$APARTE_TOKEN``."""
    if file is None:
        token, where = os.environ.get("APARTE_TOKEN", ""), "APARTE_TOKEN"
        if not token:
            return None
    else:
        where = f"The token file {file}"
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where} cannot be read: {error}.") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"{where} must hold one ASCII token and nothing else.")
    return token


def read_text(text: str) -> str:
    """A prompt argument; ``-`` reads standard input, which has to be UTF-8."""
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"Standard input is not valid UTF-8 (at byte {error.start}). "
                "Convert it first, for example with iconv."
            ) from None
    else:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("The prompt is not valid UTF-8. Convert it first, e.g. with iconv.") from None
    if not text.strip():
        raise UserError("The prompt is empty. Give some text, or - to read standard input.")
    return text
