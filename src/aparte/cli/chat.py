"""``aparte chat``: several turns with one model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.drafting import choose_decoding, drafter_for
from aparte.cli.generate import stream, summarize
from aparte.cli.output import PrefillBar, note, print_json
from aparte.cli.remember import check_remember
from aparte.cli.setup import Setup, connect
from aparte.config import TARGETS, Compute, Cut, Decoding, Drafting, LinkSettings, Sampling, Stopping
from aparte.errors import AparteError, UserError

HELP = "Ctrl-C stops an answer. /reset starts a new conversation, /help shows this, /exit (or Ctrl-D) leaves."


def chat(
    model: options.Model,
    cloud: options.Cloud = None,
    target: options.TargetOption = TARGETS[0],
    cut: options.CutOption = str(Cut()),
    decode: options.Decode = Decoding.decode,
    draft: options.Draft = Decoding.draft,
    draft_length: options.DraftLength = "auto",
    accept: options.Accept = Drafting.accept,
    return_states: options.ReturnStates = Drafting.return_states,
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
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    step_timeout: options.StepTimeout = LinkSettings.step_timeout_s,
    remember: options.Remember = False,
    stats: Annotated[bool, typer.Option("--stats", help="A line of numbers after each answer.")] = False,
    json: options.Json = False,
) -> None:
    """Talk with MODEL. A follow-up only sends what is new; the cloud keeps the shared beginning.

    Reads lines from standard input; with --json it prints one JSON object per answer.
    """
    where = Cut.parse(cut)
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
        linked=not (cloud is None and rtt is None and mbps is None),
        remember=remember,
    )
    check_remember(decoding, remember)
    stopping = Stopping(max_new_tokens, tuple(stop or ()))
    setup = Setup(
        model=model,
        cut=where,
        compute=Compute(dtype, device),  # type: ignore[arg-type]
        cloud=cloud,
        rtt_ms=rtt,
        mbps=mbps,
        wire=wire,
        token=options.read_token(token_file),
        ca_file=tls_ca,
        settings=LinkSettings(step_timeout_s=step_timeout),
        target=target,
        drafting=drafting,
    )
    start = [{"role": "system", "content": system}] if system else []
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
            messages.append({"role": "user", "content": line})
            prefill = PrefillBar(quiet=json)
            try:
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
                messages.pop()
                continue
            failure = stream(answer, pieces, prefill, quiet=json)
            # What was said stays said, also if it was stopped or the cloud went away.
            if answer.text or failure is None:
                messages.append({"role": "assistant", "content": answer.text})
            else:
                messages.pop()
            failed = failure if isinstance(failure, AparteError) else None
            if json:
                print_json(answer.to_json() | ({"error": str(failure)} if failure else {}))
            elif failed is not None:
                note(f"Error: {failed}")
            elif stats:
                summarize(answer)
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
