"""``aparte generate``: one answer."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.drafting import choose_decoding, drafter_for
from aparte.cli.output import PrefillBar, RoundTripMarks, note, print_json, write
from aparte.cli.protection import open_pseudonyms, report_cadence, settle
from aparte.cli.remember import check_remember
from aparte.cli.setup import Setup, connect
from aparte.config import TARGETS, Compute, Cut, Decoding, Drafting, LinkSettings, Sampling, Stopping
from aparte.errors import AparteError, UserError
from aparte.privacy.protection import Protection
from aparte.privacy.restore import Restorer

if TYPE_CHECKING:
    from aparte.answer import Answer, Piece


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
    text = options.read_text(prompt)
    if raw and system:
        raise UserError(
            "--system belongs to a conversation; with --raw there is none. Leave one of them out."
        )
    names = open_pseudonyms(pseudonyms, quiet=json, spacy_model=spacy_model)
    hide: Callable[[str], str] = names.hide if names else str
    text, system = hide(text), hide(system) if system else None
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
    with connect(setup, quiet=json) as writer:
        if raw:
            tokens = writer.codec.encode(text)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            tokens = writer.codec.encode_chat([*messages, {"role": "user", "content": text}])
        prefill = PrefillBar(quiet=json)
        kept = drafter_for(decoding, sampling, setup, writer, remember=remember, quiet=json)
        with kept as drafter:
            answer, pieces = writer.write(
                tokens,
                drafter,
                sampling=sampling,
                decoding=decoding,
                stopping=stopping,
                on_prefill=prefill,
            )
            restorer = names.restorer() if names else Restorer({})
            failure = stream(answer, pieces, prefill, restorer, marks=marks, quiet=json)
        if json:
            print_json(restored(answer, restorer) | ({"error": str(failure)} if failure else {}))
        else:
            summarize(answer)
        report_cadence(writer, quiet=json)
        if isinstance(failure, AparteError):
            raise failure
        if failure is not None:
            raise KeyboardInterrupt


def stream(
    answer: Answer,
    pieces: Iterator[Piece],
    prefill: PrefillBar,
    restorer: Restorer | None = None,
    *,
    marks: bool = False,
    quiet: bool = False,
) -> BaseException | None:
    """Print what ``restorer`` makes of the pieces as they come. Returns what ended the answer early, if
    anything did.

    The first Ctrl-C ends the answer after the step under way, with everything in order; the second one
    ends it at once.
    """
    restorer = restorer or Restorer({})
    shown = RoundTripMarks()
    interrupted = False
    failure: BaseException | None = None
    try:
        with _first_interrupt() as was_interrupted:
            for piece in pieces:
                prefill.close()
                text = restorer.feed(piece.text)
                if marks and not quiet:
                    shown.show(replace(piece, text=text))
                elif not quiet:
                    write(text)
                if was_interrupted():
                    interrupted = True
                    break
    except (AparteError, KeyboardInterrupt) as error:
        failure = error
    finally:
        prefill.close()
        closer: Any = pieces
        closer.close()
        rest = restorer.finish()
    if not quiet and (answer.text or failure is None):
        write(f"{rest}\n")
    if interrupted and answer.finish_reason is None:
        failure = KeyboardInterrupt("interrupted")
    return failure


def restored(answer: Answer, restorer: Restorer) -> dict[str, Any]:
    """The answer's JSON with the text as it was shown; ``token_ids`` are the model's."""
    return answer.to_json() | {"text": restorer.text}


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
