"""``aparte verify``: is the split model's text the unsplit model's?"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar, show_table
from aparte.cli.setup import load_models
from aparte.config import Compute, Cut
from aparte.connection import Connection
from aparte.errors import AparteError, UserError
from aparte.speculate.settings import Decoding


def verify(
    model: options.Model,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Text file with a prompt per line, or .jsonl file with a "prompt" per line.',
            show_default=False,
        ),
    ] = None,
    cut: options.CutOption = str(Cut()),
    decode: options.Decode = Decoding.decode,
    draft: options.Draft = Decoding.draft,
    ngram: options.Ngram = Decoding.ngram,
    max_nodes: options.MaxNodes = Decoding.max_nodes,
    in_flight: options.InFlight = Decoding.in_flight,
    max_new_tokens: options.MaxNewTokens = 48,
    wire: options.Wire = "float32",
    dtype: options.Dtype = "float32",
    device: options.DeviceOption = Compute.device,
    kv: options.Kv = Compute.kv,
    batch_invariant: options.BatchInvariant = Compute.batch_invariant,
    graphs: options.Graphs = Compute.graphs,
    json: options.Json = False,
) -> None:
    """Compare MODEL unsplit, split, and split with speculation, token by token and logit by logit.

    In float32 on a float32 wire the tokens have to be equal, and the command fails if they are not.
    With a 16-bit wire it reports what rounding does, and only sequential and speculative must agree;
    with half-precision or 8-bit compute it reports everything and demands nothing. With --batch-invariant
    sequential and speculative logits have to be equal to the bit.
    """
    from aparte.config import WireName, one_of

    decoding = Decoding(decode, ngram, max_nodes, draft=draft, in_flight=in_flight)
    wanted, compute = Cut.parse(cut), Compute(dtype, device, kv, batch_invariant, graphs)  # type: ignore[arg-type]
    one_of(wire, WireName.__args__, "wire format")  # type: ignore[attr-defined]
    texts = read_prompts(prompts)
    with progress_bar(quiet=json) as progress:
        from aparte.device import open_writer, wire_format
        from aparte.measure.verify import Reference, Report
        from aparte.measure.verify import verify as run
        from aparte.model.parts import Blueprint
        from aparte.model.registry import resolve

        blueprint = Blueprint.open(resolve(model, progress=progress), compute)
        writer = open_writer(blueprint, model, wanted, wire=wire, progress=progress)  # type: ignore[arg-type]
        models = load_models(decoding, Connection(model, wanted, compute=compute), writer, quiet=True)
        codec = writer.codec
        progress("unsplit model", 0, 1)
        reference = Reference(blueprint, codec.eos)
        progress("unsplit model", 1, 1)
        encoded = [
            codec.encode_chat([{"role": "user", "content": text}])
            if codec.has_chat_template
            else codec.encode(text)
            for text in texts
        ]
        report = Report(
            blueprint.precision.name,
            wire_format(wire, blueprint),  # type: ignore[arg-type]
            str(wanted),
            decoding.decode,
        )
        for _ in run(
            reference,
            writer,
            encoded,
            report,
            decoding=decoding,
            max_new_tokens=max_new_tokens,
            models=models,
            on_prompt=lambda done, total: progress("prompts", done, total),
        ):
            pass

    result = report.to_json()
    if json:
        print_json(result)
    else:
        perplexity = result["self_perplexity"]
        show_table(
            f"{model}, cut {wanted}, compute {report.dtype}, wire {report.wire}, {len(texts)} prompts",
            ["", "unsplit", "sequential", decoding.decode],
            [
                ["self-perplexity", *(f"{perplexity[name]:.4f}" for name in perplexity)],
            ],
        )
        note(f"Identical tokens: {result['identical_share']:.2%}; all answers: {_yes(report.identical)}")
        note(f"Sequential and {decoding.decode} identical: {_yes(report.speculative_is_sequential)}")
        note(
            f"Largest logit difference: {result['max_logit_diff']:.2g} from the unsplit model, "
            f"{report.speculative_logit_diff:.2g} between sequential and {decoding.decode}"
        )
    # Half-precision arithmetic rounds differently for one row and for many, and a last bit can tip what comes
    # into an 8-bit linear: there it is only reported.
    demanded = batch_invariant or report.dtype in ("float32", "packed16")
    exact = report.dtype == report.wire == "float32" and kv == "model"
    if (
        (demanded and not report.speculative_is_sequential)
        or (exact and not report.identical)
        or (batch_invariant and report.speculative_logit_diff)
    ):
        raise AparteError(
            "The answers differ where they must not. Please report this with the model, the versions of "
            "torch and transformers, and the output of --json."
        )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def read_prompts(file: Path | None) -> list[str]:
    """The built-in prompts, or those of a text or JSON-lines file."""
    if file is None:
        from aparte.measure.prompts import PROMPTS

        return list(PROMPTS)
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The prompts in {file} cannot be read: {error}.") from None
    if not lines:
        raise UserError(f"There are no prompts in {file}.")
    if file.suffix != ".jsonl":
        return lines
    try:
        return [str(jsonlib.loads(line)["prompt"]) for line in lines]
    except (ValueError, KeyError, TypeError):
        raise UserError(f'Every line of {file} must be a JSON object with a "prompt".') from None
