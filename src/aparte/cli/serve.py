"""``aparte serve``: the cloud."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar
from aparte.config import Compute, Cut, ServerLimits
from aparte.errors import UserError
from aparte.fingerprint import WHOLE

if TYPE_CHECKING:
    from aparte.cloud.engine import Engine
    from aparte.cloud.keys import Keyring
    from aparte.cloud.server import MiddleServer

DEFAULT_PORT = 7600


def serve(
    model: options.Model,
    cut: options.CutOption = str(Cut()),
    whole: Annotated[
        bool, typer.Option("--whole", help="Serve all of MODEL, for draft mode: this server sees the text.")
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
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain.", show_default=False)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key.", show_default=False)] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other machines in without token or TLS.")
    ] = False,
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
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

    With --whole it serves the whole model to devices that draft (--target draft), and sees their text.
    """
    from aparte.cloud import door, journal

    journal.check(log_format, log_level)
    if tokens is not None and token_file is not None:
        raise UserError("--tokens holds all tokens of a server, --token-file the only one. Give one of them.")
    token = options.read_token(token_file) if tokens is None else None
    tls = door.tls_context(tls_cert, tls_key)
    has_token = token is not None or tokens is not None
    door.check(host, has_token=has_token, has_tls=tls is not None, insecure=insecure)
    limits = ServerLimits(
        idle_s=idle,
        grace_s=grace,
        max_sessions=max_sessions,
        kv_bytes=ServerLimits.parse_bytes(kv_memory),
    )
    where = None if whole else Cut.parse(cut)
    if whole and cut != str(Cut()):
        raise UserError("--cut has no use with --whole, which serves the model in one piece. Leave one out.")
    compute = Compute(dtype, device)  # type: ignore[arg-type]

    keys = _open_keys(tokens, token)

    with progress_bar(quiet=json) as progress:
        from aparte.cloud.server import MiddleServer, compute_thread
        from aparte.model.needed import needed_by_cloud
        from aparte.model.parts import Blueprint
        from aparte.model.registry import resolve

        needed = None if where is None else needed_by_cloud(where)
        folder = resolve(model, wanted=needed, tokenizer=False, progress=progress)

        def load() -> Engine:
            blueprint = Blueprint.open(folder, compute)
            engine: Engine
            if where is None:
                from aparte.cloud.verifier import load_verifier

                engine = load_verifier(blueprint, model, limits, progress)
            else:
                from aparte.cloud.load import load_engine

                engine = load_engine(blueprint, where, model, limits, progress)
            engine.probe()
            return engine

        worker = compute_thread()
        engine = worker.submit(load).result()

    journal.set_up(log_format, log_level)
    pin = None if tls_cert is None else door.pin_of(tls_cert)
    server = MiddleServer(engine, worker=worker, keys=keys, tls=tls)
    asyncio.run(_run(server, host, port, pin, exit_with_parent, json))


def _open_keys(file: Path | None, token: str | None) -> Keyring | None:
    from aparte.cloud.keys import FIRST, KeyFile, Keyring

    if file is None:
        return None if token is None else Keyring.of(token)
    if file.exists():
        return KeyFile(file)
    keys, first = KeyFile.create(file)
    note(f"Made {file} with a token called {FIRST}. It is shown this once, for the device's --token-file:")
    note(first)
    return keys


async def _run(
    server: MiddleServer, host: str, port: int, pin: str | None, parent: int | None, json: bool
) -> None:
    actual = await server.start(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"{'wss' if pin else 'ws'}://{shown}:{actual}"
    fingerprint = server.engine.fingerprint
    if json:
        print_json({"listening": url, "model": fingerprint.to_json(), "cut": fingerprint.cut, "pin": pin})
    elif fingerprint.cut == WHOLE:
        note(f"Serving the whole of {fingerprint.name} at {url} (Ctrl-C stops)")
    else:
        note(f"Serving the middle of {fingerprint.name}, cut {fingerprint.cut}, at {url} (Ctrl-C stops)")
    if fingerprint.cut == WHOLE:
        note("This server sees text: prompts and answers reach it as tokens.")
    if pin and not json:
        reached = "HOST" if host in ("", "0.0.0.0", "::") else shown
        note(f"On the device: --cloud wss://{reached}:{actual} --pin {pin}")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    watcher = asyncio.create_task(_watch_parent(parent, stop))
    await stop.wait()
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    await server.close()


async def _watch_parent(parent: int | None, stop: asyncio.Event) -> None:
    """End with the process that started this one, so that no server is left behind."""
    while parent is not None:
        if os.getppid() != parent:
            stop.set()
        await asyncio.sleep(1)
