"""``aparte serve``: the cloud."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from concurrent.futures import Executor
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
    max_sessions: Annotated[int, typer.Option(help="Most sessions at a time.")] = ServerLimits.max_sessions,
    kv_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Memory for all sessions, like 2GB; auto: a share of what is free."
        ),
    ] = "auto",
    exit_with_parent: Annotated[int | None, typer.Option(hidden=True, metavar="PID")] = None,
    json: options.Json = False,
) -> None:
    """Serve the middle layers of MODEL: the untrusted side. Loads nothing else of it.

    With --whole it serves the whole model to devices that draft (--target draft), and sees their text.
    """
    from aparte.cloud import door

    token = options.read_token(token_file)
    tls = door.tls_context(tls_cert, tls_key)
    door.check(host, has_token=token is not None, has_tls=tls is not None, insecure=insecure)
    limits = ServerLimits(
        idle_s=idle, max_sessions=max_sessions, kv_bytes=ServerLimits.parse_bytes(kv_memory)
    )
    where = None if whole else Cut.parse(cut)
    if whole and cut != str(Cut()):
        raise UserError("--cut has no use with --whole, which serves the model in one piece. Leave one out.")
    compute = Compute(dtype, device)  # type: ignore[arg-type]

    with progress_bar(quiet=json) as progress:
        from aparte.cloud.server import compute_thread
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

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("websockets").setLevel(logging.ERROR)
    asyncio.run(_run(engine, worker, host, port, token, tls, exit_with_parent, json))


async def _run(
    engine: Engine,
    worker: Executor,
    host: str,
    port: int,
    token: str | None,
    tls: object,
    parent: int | None,
    json: bool,
) -> None:
    from aparte.cloud.server import MiddleServer

    server = MiddleServer(engine, worker=worker, token=token, tls=tls)  # type: ignore[arg-type]
    actual = await server.start(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"{'wss' if tls else 'ws'}://{shown}:{actual}"
    fingerprint = engine.fingerprint
    if json:
        print_json({"listening": url, "model": fingerprint.to_json(), "cut": fingerprint.cut})
    elif fingerprint.cut == WHOLE:
        note(f"Serving the whole of {fingerprint.name} at {url} (Ctrl-C stops)")
    else:
        note(f"Serving the middle of {fingerprint.name}, cut {fingerprint.cut}, at {url} (Ctrl-C stops)")
    if fingerprint.cut == WHOLE:
        note("This server sees text: prompts and answers reach it as tokens.")
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
