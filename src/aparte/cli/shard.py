"""``aparte shard``: the middle of a model, for a disk that must not hold the rest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar, write
from aparte.config import Compute, Cut

if TYPE_CHECKING:
    from aparte.model.shard import Manifest


def shard(
    model: options.Model,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to make, for `aparte serve`.", show_default=False)
    ],
    cut: options.CutOption = str(Cut()),
    json: options.Json = False,
) -> None:
    """Write the middle layers of MODEL, and nothing else of it, to DIR, with a manifest.

    Copy DIR to the machine that is rented, and start `aparte serve DIR` there: its disk never holds
    embedding, first and last layers, final norm or head.
    """
    where = Cut.parse(cut)
    with progress_bar(quiet=json) as progress:
        from aparte.model.needed import needed_by_cloud
        from aparte.model.parts import Blueprint
        from aparte.model.registry import resolve
        from aparte.model.shard_writer import write_shard

        folder = resolve(model, wanted=needed_by_cloud(where), tokenizer=False, progress=progress)
        blueprint = Blueprint.open(folder, Compute("float32", "cpu"))
        manifest = write_shard(blueprint, where, model, out, progress)
    if json:
        print_json(summary_of(manifest, out))
        return
    size = size_of(out)
    note(
        f"{out}: layers {where.front} to {manifest.layers - where.back - 1} of {manifest.model}, "
        f"{len(manifest.tensors)} tensors, {size / 1e6:,.1f} MB, manifest {manifest.digest}"
    )
    note(f"Copy it to the other machine and start there: aparte serve {out.name} --cut {where}")


def show_manifest(folder: Path, *, json: bool) -> None:
    """Look through the shard in ``folder`` and print its manifest."""
    from aparte.model.shard import check_shard

    with progress_bar(quiet=json) as progress:
        manifest = check_shard(folder, progress)
    if json:
        print_json(manifest.to_json())
        return
    lines = [
        f"model     {manifest.model}",
        f"cut       {manifest.cut} of {manifest.layers} layers",
        f"digest    {manifest.digest}",
        f"config    {', '.join(sorted(manifest.config))}",
        f"tensors   {len(manifest.tensors)}, each as listed; no others",
        *(
            f"  {name}  {tensor.dtype} {'x'.join(map(str, tensor.shape))}  {tensor.sha256}"
            for name, tensor in manifest.tensors.items()
        ),
    ]
    write("\n".join(lines) + "\n")


def summary_of(manifest: Manifest, folder: Path) -> dict[str, object]:
    return {
        "folder": str(folder),
        "model": manifest.model,
        "cut": str(manifest.cut),
        "layers": manifest.layers,
        "tensors": len(manifest.tensors),
        "size_bytes": size_of(folder),
        "digest": manifest.digest,
    }


def size_of(folder: Path) -> int:
    from aparte.model import folders

    return folders.size_of(folder)
