"""``aparte audit``: what the cloud can learn from what it receives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar, write
from aparte.config import Compute, Cut, WireName, one_of
from aparte.errors import UserError


def audit(
    model: options.Model,
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, report.md, results.json.", show_default=False)
    ],
    cuts: Annotated[
        str | None,
        typer.Option(
            metavar="K,M …",
            help="Cuts to audit, like '2,2 8,8'. By default four, with --quick two.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text to attack and to train attackers on: lines, or JSON with full_text and spans or "
            "with turns. May be repeated: each file is a domain. By default a small sample that ships.",
            show_default=False,
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Questions as in Spec-Bench (.jsonl with turns): whether defences change the answers.",
            show_default=False,
        ),
    ] = None,
    attacks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Names joined by commas. By default all.", show_default=False),
    ] = None,
    defences: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="none, int8 to int2, noise:EPSILON, random-cut:LOW-HIGH, private-ends=FILE, joined by "
            "commas.",
            show_default=False,
        ),
    ] = None,
    attacker_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most tokens of own text for an attacker. By default 1000000, with --quick 3000.",
            show_default=False,
        ),
    ] = None,
    attacker_ends: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Private ends that the attacker trained itself, to prepare for those under audit.",
            show_default=False,
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Attack this recording (of --record) instead, as its cloud could.",
            show_default=False,
        ),
    ] = None,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="With --recorded: print the text that was read.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few minutes instead of over an hour.")] = False,
    finished_only: Annotated[
        bool,
        typer.Option("--finished-only", help="Attack nothing: report what interrupted runs finished."),
    ] = False,
    wire: options.Wire = "auto",
    seed: Annotated[int, typer.Option(help="Of the split, the noise and the training.")] = 0,
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    json: options.Json = False,
) -> None:
    """Attack what MODEL's device would send, and measure what defences cost. Nothing leaves this machine.

    An interrupted audit goes on when started again with the same options and folder.
    """
    if recorded is not None:
        useless = {
            "--cuts": cuts,
            "--attacks": attacks,
            "--attacker-tokens": attacker_tokens,
            "--attacker-ends": attacker_ends,
            "--quick": quick,
            "--finished-only": finished_only,
            "--wire": wire != "auto",
        }
        if given := [name for name, value in useless.items() if value]:
            raise UserError(
                f"{given[0]} has no use with --recorded: what was sent, and how, is in the recording. "
                "Leave it out."
            )
        where = Compute(dtype, device)  # type: ignore[arg-type]
        _audit_recorded(model, recorded, out, where, _names(defences), text or [], seed, reveal, json)
        return
    if reveal:
        raise UserError("--reveal shows what was read from a recording. Give one with --recorded.")
    from aparte.model.registry import resolve
    from aparte.privacy.audit import run_audit
    from aparte.privacy.plots import check_plots
    from aparte.privacy.report import verdict, write_report
    from aparte.privacy.settings import AuditSettings

    one_of(wire, WireName.__args__, "wire format")  # type: ignore[attr-defined]
    settings = AuditSettings(
        model,
        cuts=tuple(map(Cut.parse, (cuts or "").split())),
        texts=tuple(text or ()),
        questions=questions,
        attacks=_names(attacks),
        defences=_names(defences),
        attacker_tokens=attacker_tokens,
        quick=quick,
        seed=seed,
        wire=wire,  # type: ignore[arg-type]
        attacker_ends=attacker_ends,
    )
    check_plots()
    with progress_bar() as progress:
        folder = resolve(model, progress=progress)
        compute = Compute(dtype, device)  # type: ignore[arg-type]
        results = run_audit(folder, settings, compute, out, progress, note, finished_only=finished_only)
    write_report(results, out)
    for sentence in verdict(results):
        note(sentence)
    note(f"The report is in {out / 'report.html'}.")
    if json:
        print_json(results)


def _audit_recorded(
    model: str,
    file: Path,
    out: Path,
    compute: Compute,
    defences: tuple[str, ...],
    texts: list[Path],
    seed: int,
    reveal: bool,
    json: bool,
) -> None:
    from aparte.model.registry import resolve
    from aparte.privacy.recorded import audit_recording
    from aparte.privacy.recorded_report import sentences, write_results
    from aparte.privacy.texts import load_passages

    if len(defences) > 1:
        raise UserError("A recording was made with one defence. Name that one with --defences.")
    with progress_bar() as progress:
        folder = resolve(model, progress=progress)
        results, read = audit_recording(
            folder,
            file,
            compute,
            progress,
            defence=defences[0] if defences else "none",
            passages=[passage for text in texts for passage in load_passages(text)],
            seed=seed,
        )
    results = {"model": model, "recorded": file.name, **results}
    write_results(results, out)
    for sentence in sentences(results):
        note(sentence)
    if reveal and not json:
        for number, text in enumerate(read, start=1):
            write(f"Session {number}: {text}\n")
    if json:
        print_json(results | ({"texts": read} if reveal else {}))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
