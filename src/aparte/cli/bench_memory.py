"""``aparte bench memory``: what loading the parts of a model takes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import print_json, progress_bar, show_table
from aparte.config import Compute, Cut, one_of


def memory(
    model: options.Model,
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="front-back, middle or whole; all of them without it."),
    ] = None,
    cut: options.CutOption = str(Cut()),
    dtype: Annotated[
        list[str] | None, typer.Option(help="As for generate; may be repeated.", show_default=False)
    ] = None,
    device: options.DeviceOption = Compute.device,
    json: options.Json = False,
) -> None:
    """What loading MODEL's parts takes at its peak and afterwards, against the size of their tensors.

    Each part is loaded in a process of its own. Linux only.
    """
    from aparte.measure.memory import PARTS, measure
    from aparte.model.registry import resolve

    wanted = Cut.parse(cut)
    computes = [Compute(name, device) for name in dtype or [Compute.dtype]]  # type: ignore[arg-type]
    parts = part or list(PARTS)
    for name in parts:
        one_of(name, PARTS, "part")
    runs = [(name, compute) for name in parts for compute in computes]
    rows: list[dict[str, Any]] = []
    with progress_bar(quiet=json) as progress:
        folder = resolve(model, progress=progress)
        for done, (name, compute) in enumerate(runs):
            progress("parts", done, len(runs))
            rows.append(measure(folder, wanted, name, compute).to_dict())
        progress("parts", len(runs), len(runs))
    if json:
        print_json({"rows": rows, "model": model, "cut": str(wanted)})
        return
    columns = ("tensors", "runtime", "peak", "held")
    show_table(
        f"{model}, cut {wanted}, MB",
        ["part", "dtype", *columns, "peak / tensors", "held / tensors"],
        [
            [
                row["part"],
                row["dtype"],
                *(f"{row[name] / 1e6:.1f}" for name in columns),
                f"{row['peak_over_tensors']:.2f}",
                f"{row['held_over_tensors']:.2f}",
            ]
            for row in rows
        ],
    )
