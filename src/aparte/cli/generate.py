"""``aparte generate``: one answer."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import PrefillBar, RoundTripMarks, note, print_json, write
from aparte.cli.protection import report_cadence
from aparte.cli.setup import open_model
from aparte.config import TARGETS, Compute, Cut, LinkSettings, Sampling, Stopping
from aparte.errors import AparteError, UserError
from aparte.options import Options
from aparte.privacy.protection import Protection
from aparte.speculate.settings import Decoding, Drafting

if TYPE_CHECKING:
    from aparte.answer import Answer
    from aparte.talk import Stream


def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.", show_default=False)],
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
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
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
    marks: Annotated[bool, typer.Option("--marks", help="Mark the tokens of each round trip.")] = False,
    json: options.Json = False,
) -> None:
    """Write one answer to PROMPT: the text stays here, the middle layers run on the cloud.

    With --target draft the whole model runs on the cloud, which then sees the text, and this device drafts.
    """
    asked = Options(max_new_tokens, temperature, top_p, top_k, min_p, seed, tuple(stop or ()))
    text = options.read_text(prompt)
    if raw and system:
        raise UserError(
            "--system belongs to a conversation; with --raw there is none. Leave one of them out."
        )
    messages = [{"role": "system", "content": system}] if system else []
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
        prefill = PrefillBar(quiet=json)
        conversation = text if raw else [*messages, {"role": "user", "content": text}]
        written = ready.stream(conversation, raw=raw, on_prefill=prefill, **vars(asked))
        failure = show(written, prefill, marks=marks, quiet=json)
        answer = written.answer
        if json:
            print_json(answer.to_json() | ({"error": str(failure)} if failure else {}))
        else:
            summarize(answer)
        report_cadence(ready, quiet=json)
        if isinstance(failure, AparteError):
            raise failure
        if failure is not None:
            raise KeyboardInterrupt


def show(
    written: Stream, prefill: PrefillBar, *, marks: bool = False, quiet: bool = False
) -> BaseException | None:
    """Print an answer as it comes. Returns what ended it early, if anything did.

    The first Ctrl-C ends the answer after the step under way, with everything in order; the second one
    ends it at once.
    """
    shown = RoundTripMarks()
    printed = 0
    interrupted = False
    failure: BaseException | None = None
    try:
        with _first_interrupt() as was_interrupted:
            for part in written:
                prefill.close()
                printed += len(part.text)
                if marks and not quiet:
                    shown.show(part.piece)
                elif not quiet:
                    write(part.text)
                if was_interrupted():
                    interrupted = True
                    break
    except (AparteError, KeyboardInterrupt) as error:
        failure = error
    finally:
        prefill.close()
        written.close()
    answer = written.answer
    if not quiet and (answer.text or failure is None):
        write(f"{answer.text[printed:]}\n")
    if interrupted and answer.finish_reason is None:
        failure = KeyboardInterrupt("interrupted")
    return failure


def summarize(answer: Answer) -> None:
    """One line about what the answer took."""
    note(
        f"{len(answer.token_ids)} tokens in {answer.round_trips} round trips (MAT {answer.mat:.2f}), "
        f"{answer.tok_s:.1f} tok/s, {answer.bytes_up / 1e3:.0f} kB up, {answer.bytes_down / 1e3:.0f} kB down"
        + (f", {answer.reconnects} reconnects" if answer.reconnects else "")
        + ("" if answer.finish_reason else "; unfinished")
    )


@contextlib.contextmanager
def _first_interrupt() -> Iterator[Any]:
    """Turns the first SIGINT into a flag; the next one interrupts as usual."""
    flag = False

    def remember(*_: object) -> None:
        nonlocal flag
        flag = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: flag
    finally:
        signal.signal(signal.SIGINT, previous)
