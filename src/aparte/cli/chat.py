"""``aparte chat``: several turns with one model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.drafting import choose_decoding, drafter_for
from aparte.cli.generate import restored, stream, summarize
from aparte.cli.output import PrefillBar, note, print_json
from aparte.cli.protection import open_pseudonyms, report_cadence, settle
from aparte.cli.remember import check_remember
from aparte.cli.setup import Setup, connect
from aparte.config import TARGETS, Compute, Cut, Decoding, Drafting, LinkSettings, Sampling, Stopping
from aparte.errors import AparteError, UserError
from aparte.privacy.protection import Protection
from aparte.privacy.restore import Restorer

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
    protection = Protection.parse(target, defence, constant_shape, private_ends)
    hosted = Cut.parse(cut)
    where = settle(protection, hosted)
    sampling = Sampling(temperature, top_p, top_k, min_p, seed)
    decoding, drafting = choose_decoding(
        target,
        model,
        where,
        sampling=sampling,
        decode=decode,
        draft=draft,
        ngram=ngram,
        max_nodes=max_nodes,
        in_flight=in_flight,
        draft_length=draft_length,
        accept=accept,
        return_states=return_states,
        draft_top=draft_top,
        draft_for=draft_for,
        linked=bool(cloud) or rtt is not None or mbps is not None,
        remember=remember,
    )
    check_remember(decoding, remember)
    decoding = protection.limit(decoding)
    names = open_pseudonyms(pseudonyms, quiet=json, spacy_model=spacy_model)
    hide: Callable[[str], str] = names.hide if names else str
    stopping = Stopping(max_new_tokens, tuple(map(hide, stop or ())))
    setup = Setup(
        model=model,
        cut=where,
        compute=Compute(dtype, device, kv, batch_invariant),  # type: ignore[arg-type]
        clouds=tuple(cloud or ()),
        rtt_ms=rtt,
        mbps=mbps,
        wire=wire,
        token=options.read_token(token_file),
        ca_file=tls_ca,
        pins=tuple(pin or ()),
        settings=LinkSettings(
            connect_timeout_s=connect_timeout,
            step_timeout_s=step_timeout,
            answer_timeout_s=answer_timeout,
            retries=retries,
            failover=failover,
        ),
        target=target,
        drafting=drafting,
        protection=protection,
        record=record,
        hosted=hosted,
    )
    # What the model sees, stand-ins and all, so that a follow-up begins with what the cloud holds.
    start = [{"role": "system", "content": hide(system)}] if system else []
    failed: AparteError | None = None
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(connect(setup, quiet=json))
        kept = drafter_for(decoding, sampling, setup, writer, remember=remember, quiet=json)
        drafter = stack.enter_context(kept)
        messages = list(start)
        if not json:
            note(HELP)
        for line in _lines(prompt="" if json or not sys.stdin.isatty() else "\n> "):
            if line == "/exit":
                break
            if line == "/help":
                note(HELP)
                continue
            if line == "/reset":
                messages = list(start)
                continue
            prefill = PrefillBar(quiet=json)
            asked = len(messages)
            try:
                messages.append({"role": "user", "content": hide(line)})
                answer, pieces = writer.write(
                    writer.codec.encode_chat(messages),
                    drafter,
                    sampling=sampling,
                    decoding=decoding,
                    stopping=stopping,
                    on_prefill=prefill,
                )
            except UserError as error:
                note(f"Error: {error}")
                del messages[asked:]
                continue
            restorer = names.restorer() if names else Restorer({})
            failure = stream(answer, pieces, prefill, restorer, quiet=json)
            if names:
                names.answered(answer.text)
            # What was said stays said, also if it was stopped or the cloud went away.
            if answer.text or failure is None:
                messages.append({"role": "assistant", "content": answer.text})
            else:
                messages.pop()
            failed = failure if isinstance(failure, AparteError) else None
            if json:
                print_json(restored(answer, restorer) | ({"error": str(failure)} if failure else {}))
            elif failed is not None:
                note(f"Error: {failed}")
            elif stats:
                summarize(answer)
            report_cadence(writer, quiet=json)
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
