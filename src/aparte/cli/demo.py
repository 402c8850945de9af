"""``aparte demo``: one private generation behind an emulated WAN, and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.generate import show
from aparte.cli.output import PrefillBar, note, print_json, progress_bar, show_table, write
from aparte.cli.setup import open_model
from aparte.config import DEFAULT_MODEL, Cut
from aparte.errors import AparteError

if TYPE_CHECKING:
    from aparte.answer import Answer
    from aparte.api import Aparte

_MODES = ("sequential", "lookahead", "auto")
PROMPT = "Write a Python function that checks whether a number is prime, then explain it line by line."


def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = PROMPT,
    rtt: Annotated[float, typer.Option(metavar="MS", help="Round trip to emulate.")] = 80,
    mbps: options.Mbps = None,
    cut: options.CutOption = str(Cut()),
    max_new_tokens: options.MaxNewTokens = 96,
    json: options.Json = False,
) -> None:
    """Ask the default model something, with its middle in another process behind an 80 ms round trip."""
    answers: dict[str, Answer] = {}
    with open_model(DEFAULT_MODEL, quiet=json, cut=cut, rtt_ms=rtt, mbps=mbps) as model:
        tokens = model.encode(prompt)
        if not json:
            note(f"\nYou, on the device: {prompt}")
            note("Each colour (or each part between bars) is one round trip:\n")
        answers["auto"] = _write(model, tokens, "auto", max_new_tokens, live=not json)
        if not json:
            note("\nThe same with lookahead, one token at a time, and with the model in one piece ...")
        with progress_bar(quiet=json) as progress:
            for mode in ("lookahead", "sequential"):
                progress(mode, 0, 1)
                answers[mode] = _write(model, tokens, mode, max_new_tokens, live=False)
                progress(mode, 1, 1)
            progress("unsplit model", 0, 1)
            unsplit = _unsplit(model, tokens, max_new_tokens)
            progress("unsplit model", 1, 1)
    identical = all(answer.token_ids == unsplit for answer in answers.values())
    if json:
        print_json(
            {
                "identical": identical,
                "rtt_ms": rtt,
                "mbps": mbps,
                **{name: answer.to_json() for name, answer in answers.items()},
            }
        )
    else:
        show_table(
            f"{DEFAULT_MODEL}, cut {Cut.parse(cut)}, {rtt:g} ms round trip",
            ["", *_MODES],
            _rows(*(answers[mode] for mode in _MODES)),
        )
        write(f"identical to the unsplit model: {'yes' if identical else 'no'}\n")
        if not identical:
            note(
                "The numbers on the wire have 16 bits, which can tip a near tie between two tokens; "
                "`aparte verify` compares in float32."
            )


def _write(model: Aparte, tokens: list[int], decode: str, max_new_tokens: int, live: bool) -> Answer:
    if decode != model.plan.decoding.decode:
        model.redraft(decode=decode)  # which forgets: each run pays for its own prompt
    written = model.stream(tokens, max_new_tokens=max_new_tokens)
    failure = show(written, PrefillBar(quiet=True), marks=True, quiet=not live)
    if isinstance(failure, AparteError):
        raise failure
    if failure is not None:
        raise KeyboardInterrupt
    return written.answer


def _unsplit(model: Aparte, tokens: list[int], max_new_tokens: int) -> list[int]:
    """What the model writes in one piece, by ``transformers``' own ``generate``."""
    from aparte.measure.verify import Reference
    from aparte.model.parts import Blueprint
    from aparte.model.registry import resolve

    blueprint = Blueprint.open(resolve(model.connection.model), model.connection.compute)
    return Reference(blueprint, model.codec.eos).write(tokens, max_new_tokens).tokens


def _rows(*answers: Answer) -> list[list[str]]:
    def row(label: str, value: Any) -> list[str]:
        return [label, *(value(answer) for answer in answers)]

    return [
        row("tokens", lambda a: str(len(a.token_ids))),
        row("round trips", lambda a: str(a.round_trips)),
        row("tokens per round trip (MAT)", lambda a: f"{a.mat:.2f}"),
        row("tok/s", lambda a: f"{a.tok_s:.2f}"),
        row("bytes per token, up", lambda a: f"{a.bytes_per_token[0]:.0f}"),
        row("bytes per token, down", lambda a: f"{a.bytes_per_token[1]:.0f}"),
    ]
