"""``aparte serve``: the cloud."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aparte.address import DEFAULT_PORT
from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar
from aparte.config import Compute, Cut, ServerLimits, one_of, state_dir
from aparte.errors import UserError
from aparte.fingerprint import WHOLE, Fingerprint

if TYPE_CHECKING:
    from aparte.cloud.keys import Keyring
    from aparte.cloud.server import MiddleServer


#: Ways to come by a certificate besides --tls-cert.
TLS_MODES = ("auto",)


def serve(
    model: options.Model,
    cut: options.CutOption = str(Cut()),
    whole: Annotated[
        bool, typer.Option("--whole", help="Serve all of MODEL, for draft mode: this server sees the text.")
    ] = False,
    inner_cuts: Annotated[
        bool,
        typer.Option("--inner-cuts", help="Let a session use fewer of the hosted layers, for random-cut."),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = DEFAULT_PORT,
    token_file: options.TokenFile = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Named tokens, hashed (see aparte tokens); made with a first one if it is not there.",
            show_default=False,
        ),
    ] = None,
    tls: Annotated[
        str | None,
        typer.Option(
            metavar="auto",
            help="auto: a certificate of our own, made at the first run, and tokens if none are given.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where --tls auto keeps certificate and tokens.", show_default=False
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain.", show_default=False)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key.", show_default=False)] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other machines in without token or TLS.")
    ] = False,
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    kv: options.Kv = Compute.kv,
    batch_invariant: options.BatchInvariant = Compute.batch_invariant,
    graphs: options.Graphs = Compute.graphs,
    idle: Annotated[
        float, typer.Option(metavar="S", help="Seconds after which an idle session is dropped.")
    ] = ServerLimits.idle_s,
    grace: Annotated[
        float, typer.Option(metavar="S", help="Seconds for which a lost device's session waits for it.")
    ] = ServerLimits.grace_s,
    max_sessions: Annotated[int, typer.Option(help="Most sessions at a time.")] = ServerLimits.max_sessions,
    kv_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Memory for all sessions, like 2GB; auto: a share of what is free."
        ),
    ] = "auto",
    session_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory for one session, like 500MB.", show_default=False),
    ] = None,
    show_manifest: Annotated[
        bool, typer.Option("--show-manifest", help="Check the shard MODEL, print what is in it, and end.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run replicas on Ray Serve (extra: ray), behind one address.")
    ] = False,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN-MAX|auto",
            help="With --ray: how many, as the queue asks for (auto, the default) or fixed.",
            show_default=False,
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(metavar="N", min=1, help="Split every layer over N GPUs (or CPU processes).")
    ] = 1,
    log_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="Lines on standard error: text, or json.")
    ] = "text",
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="The least that is logged: debug, info, warning, error.")
    ] = "info",
    exit_with_parent: Annotated[int | None, typer.Option(hidden=True, metavar="PID")] = None,
    json: options.Json = False,
) -> None:
    """Serve the middle layers of MODEL: the untrusted side. Loads nothing else of it.

    MODEL may be a folder that `aparte shard` made. With --whole it serves the whole model to devices that
    draft (--target draft), and sees their text.
    """
    from aparte.cloud import door, journal

    if show_manifest:
        from aparte.cli.shard import show_manifest as show

        show(Path(model), json=json)
        return
    journal.check(log_format, log_level)
    if tokens is not None and token_file is not None:
        raise UserError("--tokens holds all tokens of a server, --token-file the only one. Give one of them.")
    token = options.read_token(token_file) if tokens is None else None
    if tls is not None or state is not None:
        if tls_cert is not None or tls_key is not None:
            raise UserError("--tls auto makes a certificate, --tls-cert brings one. Leave one of them out.")
        folder = state or state_dir()
        tls_cert = tls_key = _own_certificate(tls, folder)
        if token is None and tokens is None:
            tokens = folder / "tokens"
    context = door.tls_context(tls_cert, tls_key)
    has_token = token is not None or tokens is not None
    door.check(host, has_token=has_token, has_tls=context is not None, insecure=insecure)
    limits = ServerLimits(
        idle_s=idle,
        grace_s=grace,
        max_sessions=max_sessions,
        kv_bytes=ServerLimits.parse_bytes(kv_memory),
        session_kv_bytes=None if session_memory is None else ServerLimits.parse_bytes(session_memory),
    )
    where = None if whole else _cut_of(model, cut)
    if whole and cut != str(Cut()):
        raise UserError("--cut has no use with --whole, which serves the model in one piece. Leave one out.")
    if inner_cuts and (ray or tensor_parallel > 1):
        raise UserError("--inner-cuts is for one process. Leave out --ray and --tensor-parallel, or it.")
    if whole and inner_cuts:
        raise UserError("--inner-cuts has no use with --whole, where there is no cut. Leave one out.")
    if replicas is not None and not ray:
        raise UserError("--replicas is for Ray Serve. Give --ray too, or leave it out.")
    compute = Compute(dtype, device, kv, batch_invariant, graphs)  # type: ignore[arg-type]

    keys, shown_token = _open_keys(tokens, token)

    from aparte.cloud.serving import Served

    served = Served(model, where, compute, limits, tensor_parallel, inner=inner_cuts)
    if ray:
        if (log_format, log_level) != ("text", "info"):
            raise UserError("Replicas log by way of Ray. Leave out --log-format and --log-level with --ray.")
        from aparte.cli.serve_ray import serve_on_ray

        address = (host, port, tls_cert, tls_key)
        serve_on_ray(
            served,
            keys,
            replicas or "auto",
            address,
            token=shown_token,
            parent=exit_with_parent,
            json=json,
        )
        return
    with progress_bar(quiet=json) as progress:
        from aparte.cloud.server import MiddleServer, compute_thread

        worker = compute_thread()
        engine = worker.submit(served.load, progress).result()

    journal.set_up(log_format, log_level)
    pin = None if tls_cert is None else door.pin_of(tls_cert)
    server = MiddleServer(engine, worker=worker, keys=keys, tls=context)
    asyncio.run(_run(server, host, port, pin, shown_token, exit_with_parent, json))


def _own_certificate(tls: str | None, folder: Path) -> Path:
    """The file in ``folder`` with our own key and certificate, made now if there is none."""
    from aparte.cloud.certificate import own_certificate

    if tls is None:
        raise UserError("--state is where --tls auto keeps its files. Give --tls auto, or leave it out.")
    one_of(tls, TLS_MODES, "way to come by a certificate")
    path, made = own_certificate(folder)
    if made:
        note(f"Made a certificate of our own, {path}.")
    return path


def _cut_of(model: str, cut: str) -> Cut:
    """The cut to serve: a shard's own, unless another one is asked for (which is refused later)."""
    from aparte.model.shard import is_shard, read_manifest

    where = Cut.parse(cut)
    folder = Path(model).expanduser()
    return read_manifest(folder).cut if where == Cut() and is_shard(folder) else where


def _open_keys(file: Path | None, token: str | None) -> tuple[Keyring | None, str | None]:
    """Who may come in, and the token if it was made just now."""
    from aparte.cloud.keys import FIRST, KeyFile, Keyring

    if file is None:
        return None if token is None else Keyring.of(token), None
    if file.exists():
        return KeyFile(file), None
    keys, first = KeyFile.create(file)
    note(f"Made {file} with a token called {FIRST}. It is shown this once, for the device's --token-file:")
    note(first)
    return keys, first


async def _run(
    server: MiddleServer,
    host: str,
    port: int,
    pin: str | None,
    token: str | None,
    parent: int | None,
    json: bool,
) -> None:
    actual = await server.start(host, port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # Not before: whoever reads that it is ready may stop it at once.
    announce(server.engine.fingerprint, host, actual, pin, token, json=json)
    watcher = asyncio.create_task(_watch_parent(parent, stop))
    await stop.wait()
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    await server.close()


def announce(
    fingerprint: Fingerprint,
    host: str,
    port: int,
    pin: str | None,
    token: str | None,
    *,
    json: bool,
    **more: object,
) -> None:
    """Say what is served where, and with what ``token`` if it was made just now; as JSON with ``more``."""
    shown = f"[{host}]" if ":" in host else host
    url = f"{'wss' if pin else 'ws'}://{shown}:{port}"
    if json:
        print_json(
            {"listening": url, "model": fingerprint.to_json(), "cut": fingerprint.cut, "pin": pin, **more}
        )
    elif fingerprint.cut == WHOLE:
        note(f"Serving the whole of {fingerprint.name} at {url} (Ctrl-C stops)")
    else:
        note(f"Serving the middle of {fingerprint.name}, cut {fingerprint.cut}, at {url} (Ctrl-C stops)")
    if fingerprint.cut == WHOLE:
        note("This server sees text: prompts and answers reach it as tokens.")
    if pin and not json:
        reached = "HOST" if host in ("", "0.0.0.0", "::") else shown
        target = "--target draft" if fingerprint.cut == WHOLE else f"--cut {fingerprint.cut}"
        given = f"APARTE_TOKEN={token} " if token else ""
        note("On the device, with MODEL as it is called there:")
        note(f"{given}aparte chat MODEL {target} --cloud wss://{reached}:{port} --pin {pin}")


async def _watch_parent(parent: int | None, stop: asyncio.Event) -> None:
    """End with the process that started this one, so that no server is left behind."""
    while parent is not None:
        if os.getppid() != parent:
            stop.set()
        await asyncio.sleep(1)
