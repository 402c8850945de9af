"""The ``aparte`` command: registers the subcommands and turns errors into sentences and exit codes.

Nothing here imports torch; the commands do, when they run.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from aparte import __version__
from aparte.cli.audit import audit
from aparte.cli.bench import bench_app
from aparte.cli.bridge import bridge_app
from aparte.cli.chat import chat
from aparte.cli.demo import demo
from aparte.cli.doctor import doctor
from aparte.cli.forget import forget
from aparte.cli.gateway import gateway
from aparte.cli.generate import generate
from aparte.cli.models import models_app
from aparte.cli.plan import plan
from aparte.cli.privatize import privatize
from aparte.cli.record import record_app
from aparte.cli.reproduce import reproduce
from aparte.cli.rtt import rtt
from aparte.cli.serve import serve
from aparte.cli.shard import shard
from aparte.cli.status import status
from aparte.cli.tokens import tokens_app
from aparte.cli.verify import verify
from aparte.cli.wan import wan
from aparte.errors import AparteError

app = typer.Typer(
    name="aparte",
    help="Run a language model on two machines: text stays on this device, a rented GPU does the middle.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve)
app.command()(shard)
app.command()(generate)
app.command()(chat)
app.command()(verify)
app.command()(demo)
app.command()(audit)
app.command()(privatize)
app.command()(forget)
app.command()(gateway)
app.command()(status)
app.command("wan")(wan)
app.command("plan")(plan)
app.command("rtt")(rtt)
app.command("doctor")(doctor)
app.command("reproduce")(reproduce)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.add_typer(bridge_app, name="bridge")
app.add_typer(tokens_app, name="tokens")
app.add_typer(record_app, name="record")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"aparte {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 the user's mistake, 130 interrupted."""
    _settle_threads()
    try:
        app()
    except AparteError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left; nothing more to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("APARTE_DEBUG"):
            raise
        # The message may hold anything, so only its type is shown.
        typer.echo(
            f"Error: something unexpected happened ({type(error).__name__}). "
            "This is a bug; run again with APARTE_DEBUG=1 for the details and report it.",
            err=True,
        )
        sys.exit(1)


def _settle_threads() -> None:
    """Tell OpenMP how its threads should wait, before torch loads it; what the user set stays.

    Both sides compute in short bursts with long waits between. Unbound, the threads of a burst often wake
    on the same core and stay there for some 10 ms; and threads that spin for long after a burst take the
    core from whoever shares the machine. Measured in docs/architecture.md, "Threads".
    """
    if sys.platform != "linux" or "OMP_NUM_THREADS" in os.environ:
        return
    os.environ.setdefault("OMP_PROC_BIND", "true")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
