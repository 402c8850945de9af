"""Runs the sections, keeps what is finished, and gathers it all for the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from aparte import __version__
from aparte.config import one_of
from aparte.errors import UserError
from aparte.measure.origin import commit, load, machine
from aparte.measure.reproduce import (
    hyper,
    identity,
    inversion,
    jacobi,
    latency,
    ngram,
    projection,
    providers,
    scaling,
    spade_section,
    transport,
)
from aparte.measure.reproduce.lab import WAN, Lab
from aparte.measure.reproduce.section import Section
from aparte.measure.reproduce.settings import Settings
from aparte.model.parts import Progress
from aparte.privacy.store import Store

#: In the order of the report.
SECTIONS: tuple[Section, ...] = (
    transport,
    latency,
    projection,
    ngram,
    identity,
    providers,
    scaling,
    inversion,
    jacobi,
    spade_section,
    hyper,
)
#: The folder of finished parts, in that of the report.
PARTS = "parts"


def choose(paper: str, only: Sequence[str] = ()) -> tuple[Section, ...]:
    """The sections of a paper, or those among them that are named. Raises :class:`UserError`."""
    found = tuple(section for section in SECTIONS if paper == "all" or section.PAPER in (paper, "both"))
    for name in only:
        one_of(name, tuple(section.KEY for section in found), "section")
    return tuple(section for section in found if not only or section.KEY in only)


def run_sections(
    settings: Settings, sections: Sequence[Section], folder: Path, progress: Progress
) -> dict[str, Any]:
    """Run what is not finished yet; what ``results.json`` holds.

    Raises :class:`UserError` if the folder holds a run with other settings, or one that goes on.
    """
    parts = folder / PARTS
    store = Store(parts, _fingerprint(settings), "a run")
    try:
        with FileLock(parts / "lock", timeout=0), Lab(settings, parts, store, progress) as lab:
            finished = {}
            for number, section in enumerate(sections):
                progress("sections", number, len(sections))
                finished[section.KEY] = store.part(f"section {section.KEY}", partial(_run, lab, section))
            progress("sections", len(sections), len(sections))
            blueprint = lab.blueprint
    except Timeout:
        raise UserError(f"Another run is writing to {folder}. Wait for it, or give another --out.") from None
    return {
        "model": settings.name,
        "layers": blueprint.layers,
        "hidden_size": blueprint.hidden_size,
        "cut": str(settings.cut),
        "dtype": blueprint.precision.name,
        "wire": blueprint.precision.default_wire,
        "quick": settings.quick,
        "seed": settings.seed,
        "data": None if settings.data is None else settings.data.name,
        "link": {"rtt_ms": WAN.rtt_ms, "mbps": WAN.mbps},
        "version": __version__,
        "seconds": round(sum(section["seconds"] for section in finished.values()), 1),
        "sections": finished,
    }


def _run(lab: Lab, section: Section) -> dict[str, Any]:
    busy, started = load(), time.perf_counter()
    result = section.run(lab)
    return {
        "title": section.TITLE,
        "paper": section.PAPER,
        "machine": machine(),
        "commit": commit(),
        "load": busy,
        "seconds": round(time.perf_counter() - started, 1),
        "result": result,
    }


def _fingerprint(settings: Settings) -> dict[str, Any]:
    """What has to be the same for a run to go on."""
    return {
        "model": settings.model,
        "quick": settings.quick,
        "seed": settings.seed,
        "data": None if settings.data is None else settings.data.name,
        "cut": str(settings.cut),
        "dtype": settings.compute.dtype,
        "device": settings.compute.device,
        "version": __version__,
    }
