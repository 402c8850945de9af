"""``aparte tokens``: who may use a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, write
from aparte.config import ServerLimits, TokenLimits

tokens_app = typer.Typer(
    help="Name, list and revoke the tokens that a server takes.", no_args_is_help=True, rich_markup_mode=None
)

FileOption = Annotated[
    Path, typer.Option("--file", metavar="FILE", help="The server's --tokens file.", show_default=False)
]
MaxSessions = Annotated[
    int | None, typer.Option(metavar="N", help="Most sessions at a time.", show_default=False)
]
TokensPerSecond = Annotated[
    float | None,
    typer.Option(
        metavar="N", help="Most tokens per second, those of prompts and drafts included.", show_default=False
    ),
]
BytesPerSecond = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most bytes per second, both ways, like 2MB.", show_default=False),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most memory for all its sessions, like 1GB.", show_default=False),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="What the token is called.", show_default=False)]


@tokens_app.command("add")
def add(
    name: Name,
    file: FileOption,
    max_sessions: MaxSessions = None,
    tokens_per_second: TokensPerSecond = None,
    bytes_per_second: BytesPerSecond = None,
    memory: Memory = None,
    json: options.Json = False,
) -> None:
    """Make a token and print it, once: FILE only keeps its hash. Makes FILE if there is none."""
    from aparte.cloud.keys import FIRST, KeyFile

    limits = _limits(max_sessions, tokens_per_second, bytes_per_second, memory)
    keys = KeyFile(file) if file.exists() else None
    if keys is None:
        keys, first = KeyFile.create(file)
        token = first if name == FIRST else keys.add(name, limits)
        if name == FIRST:
            keys.limit(FIRST, limits)
        else:
            keys.revoke(FIRST)
    else:
        token = keys.add(name, limits)
    if json:
        print_json({"name": name, "token": token})
    else:
        write(f"{token}\n")
        note("It is not kept and cannot be shown again. The device reads it from --token-file.")


@tokens_app.command("limit")
def limit(
    name: Name,
    file: FileOption,
    max_sessions: MaxSessions = None,
    tokens_per_second: TokensPerSecond = None,
    bytes_per_second: BytesPerSecond = None,
    memory: Memory = None,
    json: options.Json = False,
) -> None:
    """Give a token other limits; those left out are lifted. A running server takes them up by itself."""
    from aparte.cloud.keys import KeyFile, limits_text

    keys = KeyFile(file)
    keys.limit(name, _limits(max_sessions, tokens_per_second, bytes_per_second, memory))
    limits = keys.limits_of(name)
    if json:
        print_json({"name": name, "limits": _given(limits)})
    else:
        note(f"{name}: {limits_text(limits) or 'no limits of its own'}")


@tokens_app.command("list")
def list_names(file: FileOption, json: options.Json = False) -> None:
    """The names of the tokens in FILE, with their limits."""
    from aparte.cloud.keys import KeyFile, limits_text

    keys = KeyFile(file)
    if json:
        limits = {name: _given(keys.limits_of(name)) for name in keys.names}
        print_json({"names": list(keys.names), "limits": limits})
    else:
        lines = (f"{name} {limits_text(keys.limits_of(name))}" for name in keys.names)
        write("".join(f"{line.rstrip()}\n" for line in lines))


@tokens_app.command("revoke")
def revoke(name: Name, file: FileOption, json: options.Json = False) -> None:
    """Take a token back. A running server ends its sessions within a second or two."""
    from aparte.cloud.keys import KeyFile

    keys = KeyFile(file)
    keys.revoke(name)
    if json:
        print_json({"revoked": name, "names": list(keys.names)})
    else:
        note(f"{name} is revoked.")


def _limits(
    max_sessions: int | None,
    tokens_per_second: float | None,
    bytes_per_second: str | None,
    memory: str | None,
) -> TokenLimits:
    num_bytes, size = (
        None if text is None else ServerLimits.parse_bytes(text) for text in (bytes_per_second, memory)
    )
    return TokenLimits(max_sessions, tokens_per_second, num_bytes, size)


def _given(limits: TokenLimits) -> dict[str, float]:
    """Those that there are, by name."""
    return {name: value for name, value in vars(limits).items() if value is not None}
