"""``aparte chat``: several turns with one model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.generate import show, summarize
from aparte.cli.output import PrefillBar, note, print_json
from aparte.cli.protection import report_cadence
from aparte.cli.setup import open_model
from aparte.config import TARGETS, Compute, Cut, LinkSettings, Sampling, Stopping
from aparte.errors import AparteError, UserError
from aparte.options import Options
from aparte.privacy.protection import Protection
from aparte.speculate.settings import Decoding, Drafting

HELP = "Ctrl-C stops an answer. /reset starts a new conversation, /help shows this, /exit (or Ctrl-D) leaves."


def chat(
    model: options.Model,
    cloud: options.Clouds = None,
    target: options.TargetOption = TARGETS[0],
    cut: options.CutOption = str(Cut()),
    decode: options.Decode = Decoding.decode,
    draft: options.Draft = Decoding.draft,
    draft_length: options.DraftLength = "auto",
    accept: options.Accept = Drafting.accept,
    return_states: options.ReturnStates = Drafting.return_states,
    draft_top: options.DraftTop = Drafting.top,
    draft_for: options.DraftFor = Drafting.goal,
    ngram: options.Ngram = Decoding.ngram,
    max_nodes: options.MaxNodes = Decoding.max_nodes,
    in_flight: options.InFlight = Decoding.in_flight,
    max_new_tokens: options.MaxNewTokens = Stopping.max_new_tokens,
    temperature: options.Temperature = Sampling.temperature,
    top_p: options.TopP = Sampling.top_p,
    top_k: options.TopK = Sampling.top_k,
    min_p: options.MinP = Sampling.min_p,
    seed: options.Seed = Sampling.seed,
    stop: options.Stop = None,
    system: options.System = None,
    rtt: options.Rtt = None,
    mbps: options.Mbps = None,
    wire: options.Wire = "auto",
    defence: options.Defence = Protection.defence,
    constant_shape: options.Shape = None,
    private_ends: options.Ends = None,
    pseudonyms: options.NameList = None,
    spacy_model: options.SpacyModel = None,
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    kv: options.Kv = Compute.kv,
    batch_invariant: options.BatchInvariant = Compute.batch_invariant,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    pin: options.Pin = None,
    failover: options.Failover = LinkSettings.failover,
    connect_timeout: options.ConnectTimeout = LinkSettings.connect_timeout_s,
    step_timeout: options.StepTimeout = LinkSettings.step_timeout_s,
    answer_timeout: options.AnswerTimeout = LinkSettings.answer_timeout_s,
    retries: options.Retries = LinkSettings.retries,
    remember: options.Remember = False,
    record: options.Record = None,
    stats: Annotated[bool, typer.Option("--stats", help="A line of numbers after each answer.")] = False,
    json: options.Json = False,
) -> None:
    """Talk with MODEL. A follow-up only sends what is new; the cloud keeps the shared beginning.

    Reads lines from standard input; with --json it prints one JSON object per answer.
    """
    asked = Options(max_new_tokens, temperature, top_p, top_k, min_p, seed, tuple(stop or ()))
    failed: AparteError | None = None
    with open_model(
        model,
        quiet=json,
        cloud=cloud or (),
        target=target,
        cut=cut,
        decode=decode,
        draft=draft,
        draft_length=Drafting.parse_length(draft_length),
        accept=accept,
        return_states=return_states,
        draft_top=draft_top,
        draft_for=draft_for,
        ngram=ngram,
        max_nodes=max_nodes,
        in_flight=in_flight,
        remember=remember,
        rtt_ms=rtt,
        mbps=mbps,
        wire=wire,
        defence=defence,
        constant_shape=constant_shape,
        private_ends=private_ends,
        pseudonyms=pseudonyms,
        spacy_model=spacy_model,
        dtype=dtype,
        device=device,
        kv=kv,
        batch_invariant=batch_invariant,
        token=options.read_token(token_file),
        ca_file=tls_ca,
        pins=pin or (),
        failover=failover,
        connect_timeout_s=connect_timeout,
        step_timeout_s=step_timeout,
        answer_timeout_s=answer_timeout,
        retries=retries,
        record=record,
    ) as ready:
        conversation = ready.chat(system, **vars(asked))
        if not json:
            note(HELP)
        for line in _lines(prompt="" if json or not sys.stdin.isatty() else "\n> "):
            if line == "/exit":
                break
            if line == "/help":
                note(HELP)
                continue
            if line == "/reset":
                conversation.reset()
                continue
            prefill = PrefillBar(quiet=json)
            try:
                written = conversation.stream(line, on_prefill=prefill)
            except UserError as error:
                note(f"Error: {error}")
                continue
            failure = show(written, prefill, quiet=json)
            failed = failure if isinstance(failure, AparteError) else None
            if json:
                print_json(written.answer.to_json() | ({"error": str(failure)} if failure else {}))
            elif failed is not None:
                note(f"Error: {failed}")
            elif stats:
                summarize(written.answer)
            report_cadence(ready, quiet=json)
    if failed is not None:
        raise failed


def _lines(prompt: str) -> Iterator[str]:
    """Lines that hold something, until the end of input. Ctrl-C at the prompt clears the line."""
    if prompt:
        import readline  # noqa: F401 - gives input() line editing and history
    while True:
        try:
            line = input(prompt) if prompt else _read_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /exit leaves)")
            continue
        if line.strip():
            yield line.strip()


def _read_line() -> str:
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(
            "A line on standard input is not valid UTF-8. Convert it first, e.g. with iconv."
        ) from None
