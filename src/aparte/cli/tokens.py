"""``aparte tokens``: who may use a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, write

tokens_app = typer.Typer(
    help="Name, list and revoke the tokens that a server takes.", no_args_is_help=True, rich_markup_mode=None
)

FileOption = Annotated[
    Path, typer.Option("--file", metavar="FILE", help="The server's --tokens file.", show_default=False)
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="What the token is called.", show_default=False)]


@tokens_app.command("add")
def add(name: Name, file: FileOption, json: options.Json = False) -> None:
    """Make a token and print it, once: FILE only keeps its hash. Makes FILE if there is none."""
    from aparte.cloud.keys import FIRST, KeyFile

    keys = KeyFile(file) if file.exists() else None
    if keys is None:
        keys, first = KeyFile.create(file)
        token = first if name == FIRST else keys.add(name)
        if name != FIRST:
            keys.revoke(FIRST)
    else:
        token = keys.add(name)
    if json:
        print_json({"name": name, "token": token})
    else:
        write(f"{token}\n")
        note("It is not kept and cannot be shown again. The device reads it from --token-file.")


@tokens_app.command("list")
def list_names(file: FileOption, json: options.Json = False) -> None:
    """The names of the tokens in FILE."""
    from aparte.cloud.keys import KeyFile

    names = KeyFile(file).names
    if json:
        print_json({"names": list(names)})
    else:
        write("".join(f"{name}\n" for name in names))


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
