"""``aparte gateway``: an OpenAI-compatible API on this device."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from aparte.address import format_address, is_loopback
from aparte.cli import options
from aparte.cli.output import note, print_json
from aparte.cli.protection import read_pseudonyms
from aparte.cli.setup import open_model, what_is_seen
from aparte.config import TARGETS, Compute, Cut, LinkSettings
from aparte.errors import UserError
from aparte.privacy.protection import Protection
from aparte.speculate.settings import Decoding, Drafting

DEFAULT_PORT = 8000
DEFAULT_SESSIONS = 4
KEY_VARIABLE = "APARTE_API_KEY"


def gateway(
    model: options.Model,
    cloud: options.Clouds = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = DEFAULT_PORT,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients have to send; others on this machine may see it.", show_default=False
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with that key (or set APARTE_API_KEY).", show_default=False)
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Further name of the model; may be repeated.", show_default=False),
    ] = None,
    sessions: Annotated[int, typer.Option(help="Most answers at a time; needs a cloud.")] = DEFAULT_SESSIONS,
    target: options.TargetOption = TARGETS[0],
    cut: options.CutOption = str(Cut()),
    decode: options.Decode = Decoding.decode,
    draft: options.Draft = Decoding.draft,
    draft_length: options.DraftLength = "auto",
    draft_for: options.DraftFor = Drafting.goal,
    accept: options.Accept = Drafting.accept,
    return_states: options.ReturnStates = Drafting.return_states,
    ngram: options.Ngram = Decoding.ngram,
    max_nodes: options.MaxNodes = Decoding.max_nodes,
    in_flight: options.InFlight = Decoding.in_flight,
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
    json: options.Json = False,
) -> None:
    """Serve MODEL on this device as an OpenAI-compatible API: applications keep their text here.

    The middle layers run on the cloud, as with generate. There is a chat at http://127.0.0.1:8000/.
    """
    key = _read_key(api_key, api_key_file)
    if key is None and not is_loopback(host):
        raise UserError(
            f"{host} can be reached from other machines, and anybody there could use the gateway. Give a key "
            "with --api-key-file, or listen on 127.0.0.1."
        )
    replaced = read_pseudonyms(pseudonyms, quiet=json, spacy_model=spacy_model)
    with contextlib.ExitStack() as stack:
        # Before the model is loaded: a port that is taken should show at once.
        listener = stack.enter_context(_listen(host, port))
        app_module = _import_app()
        from aparte.gateway.hiding import Hiding

        hiding = None if replaced is None else Hiding(replaced.names, replaced.finders)
        ready = stack.enter_context(
            open_model(
                model,
                quiet=json,
                sessions=sessions,
                cloud=cloud or (),
                target=target,
                cut=cut,
                decode=decode,
                draft=draft,
                draft_length=Drafting.parse_length(draft_length),
                draft_for=draft_for,
                accept=accept,
                return_states=return_states,
                ngram=ngram,
                max_nodes=max_nodes,
                in_flight=in_flight,
                wire=wire,
                defence=defence,
                constant_shape=constant_shape,
                private_ends=private_ends,
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
            )
        )
        name = Path(model).name if Path(model).exists() else model
        url = f"http://{format_address(listener.getsockname()[:2])}"
        if not is_loopback(host):
            note("Nothing encrypts the way to this gateway: who listens there reads the text, and the key.")
        if json:
            print_json({"listening": url, "base_url": f"{url}/v1", "model": name})
        else:
            note(f"{name} answers at {url}/v1, and to people at {url}/ (Ctrl-C stops)")
        application = app_module.create_app(
            ready, name, key=key, aliases=tuple(alias or ()), hiding=hiding, verdict=what_is_seen(ready.side)
        )
        _serve(application, listener)


def _import_app() -> Any:
    try:
        import uvicorn  # noqa: F401 - only to know that it is there

        from aparte.gateway import app
    except ImportError as error:
        raise UserError(
            f"The gateway needs the package {error.name}. Install it with `pip install 'aparte[gateway]'`."
        ) from None
    return app


def _serve(application: Any, listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        application,
        log_level="critical",  # its tracebacks could hold text
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise UserError(
            f"Cannot listen on {host}:{port} ({error.strerror or error}). Choose another --port."
        ) from None
    with listener:
        yield listener


def _read_key(key: str | None, file: Path | None) -> str | None:
    """The key from the command line, from ``file``, or from the environment."""
    if key is not None and file is not None:
        raise UserError("--api-key and --api-key-file both give a key. Leave one of them out.")
    where = "--api-key"
    if key is None and file is not None:
        where = f"The key file {file}"
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where} cannot be read: {error}.") from None
    elif key is None:
        where, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE) or None
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"{where} must hold one ASCII key and nothing else.")
    return key
