"""What a cloud could make of a recording: vocabulary matching on the states that it really got, and traffic.

The recording (:mod:`aparte.wire.record`) holds what the cloud received and nothing that it did not: no
tokens, so that there is no truth to score against. Vocabulary matching needs none. It runs candidates through
the public front and takes the one whose state is the received one, within the distance that a trial on the
attacker's own text allows; that a wrong token passes is then as rare as in the trial. Where the device
rounded or added noise, say with which ``--defences``; if right and wrong candidates overlap there, the attack
falls back to probability, and ``found_share`` is not known.

Assumptions: the public weights. Cost: as for :mod:`aparte.privacy.vocabulary`.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aparte.config import Compute, Cut
from aparte.errors import FrameError, UserError
from aparte.measure.recorded import codec_of
from aparte.model.parts import Blueprint, Progress
from aparte.privacy.attack import Case
from aparte.privacy.defence import Defence
from aparte.privacy.defences import Nothing, parse_defence
from aparte.privacy.matching import Matcher
from aparte.privacy.observe import Observer
from aparte.privacy.private_ends import PrivateEndsDefence
from aparte.privacy.sample import sample_passages
from aparte.privacy.specimen import Specimen, bounds_of
from aparte.privacy.texts import Passage, cut_to_length
from aparte.privacy.vocabulary import TOKENS, match
from aparte.step import ROOT
from aparte.text.tokenizer import Codec
from aparte.wire.playback import Exchange, Visit, visits
from aparte.wire.record import Recording, read_recording
from aparte.wire.tensors import TensorCodec

#: Tokens per text of the attacker's own.
LENGTH = 192
LEAST_TOKENS = 6
#: Texts by whose states noise is calibrated, as on the device.
CALIBRATION_TEXTS = 12


@dataclass(frozen=True)
class Row:
    """A node of the text's path: its state, and the exchange that brought it."""

    state: torch.Tensor
    exchange: int


def committed_path(visit: Visit, codec: TensorCodec) -> tuple[list[Row], int]:
    """The nodes that became text, in order, and how many others were sent.

    The last step's outcome is not in the recording. Of it the first node counts, which was the target's
    choice, or, if it brought the prompt, the chain that it begins with.
    """
    prompt = _prompt(visit.exchanges)
    nodes: dict[int, tuple[int, Row]] = {}  # slot -> parent, row
    sent, tip = 0, ROOT
    for index, exchange in enumerate(visit.exchanges):
        step = exchange.sent.step
        try:
            states = codec.decode(exchange.sent.payload, len(step)).float()
        except FrameError:
            continue
        nodes = {slot: node for slot, node in nodes.items() if slot < step.base}
        for slot, parent, state in zip(step.slots, step.parents, states, strict=True):
            nodes[slot] = (parent, Row(state, index))
        sent += len(step)
        tip = step.commit
        for slot, parent in zip(step.slots, step.parents, strict=True):
            if parent != tip or (tip != step.commit and index >= prompt):
                break
            tip = slot
    path: list[Row] = []
    while tip in nodes:
        tip, row = nodes[tip]
        path.append(row)
    return path[::-1], sent - len(path)


def traffic_of(visit: Visit, path: list[Row]) -> dict[str, Any]:
    """What sizes, times and shapes tell without any attack on states."""
    exchanges = visit.exchanges
    prompt = _prompt(exchanges)
    kept = Counter(row.exchange for row in path)
    answering = exchanges[prompt:]
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(answering)]
    return {
        "messages_up": len(exchanges),
        "distinct_sizes_up": len({exchange.bytes_up for exchange in exchanges}),
        "bytes_up": sum(exchange.bytes_up for exchange in exchanges),
        "bytes_down": sum(exchange.bytes_down for exchange in exchanges),
        "prompt_steps": prompt,
        "tokens": len(path),
        "tokens_by_step": [kept[index] for index in range(prompt, len(exchanges))],
        "gap_p50_ms": round(sorted(gaps)[len(gaps) // 2] * 1e3, 1) if gaps else None,
    }


def _prompt(exchanges: list[Exchange]) -> int:
    """Steps that carried the prompt: those sent before the first answer came."""
    answers = [exchange.answered_at_s for exchange in exchanges if exchange.result is not None]
    first = min(answers, default=0.0)
    return max(1, sum(exchange.at_s < first for exchange in exchanges)) if exchanges else 0


class RecordedAudit:
    """Attacks one recording with one model."""

    def __init__(
        self,
        blueprint: Blueprint,
        recording: Recording,
        *,
        defence: str = "none",
        passages: list[Passage] | None = None,
        seed: int = 0,
        progress: Progress,
    ) -> None:
        """Raises :class:`UserError` if the recording is not of this model, or holds no states."""
        about = recording.about
        if about.get("target") != "split":
            raise UserError(
                "This recording is of draft mode, where the cloud gets the text itself. There is nothing to "
                "attack."
            )
        self._codec = codec_of(about)
        if about.get("width") != blueprint.hidden_size or about.get("layers") != blueprint.layers:
            raise UserError(
                f"The recording is of {about.get('model')}, with {about.get('layers')} layers of width "
                f"{about.get('width')}; this model has {blueprint.layers} of {blueprint.hidden_size}. Name "
                "the model that was recorded."
            )
        self._cut = Cut.parse(str(about.get("cut")))
        self._visits = [visit for visit in visits(recording.messages) if visit.exchanges]
        if not self._visits:
            raise UserError("The recording holds no steps. Record an answer first.")
        self._seed = seed
        self._progress = progress
        self._tokenizer = Codec(blueprint.checkpoint.folder)
        own = cut_to_length(
            [self._tokenizer.encode(passage.text) for passage in passages or sample_passages(seed)],
            LEAST_TOKENS,
            LENGTH,
        )
        chosen = parse_defence(defence)
        if isinstance(chosen, PrivateEndsDefence):
            raise UserError(
                "Who got a recording does not have the private ends that made it. Leave them out: the attack "
                "goes on with the public ones."
            )
        if len(chosen.cuts(self._cut)) > 1:
            raise UserError("A recording has one cut. Give the --defences that was on, without random-cut.")
        specimen = Specimen(blueprint, bounds_of([self._cut], blueprint.layers), progress)
        wire = str(about["wire"])
        self._setting = defence
        self._observer = Observer(specimen, self._cut, wire, self._calibrated(chosen, specimen, own), seed)
        self._own = own[CALIBRATION_TEXTS:] or own

    def run(self) -> tuple[dict[str, Any], list[str]]:
        """The results, and the text as it was read from each session."""
        case = Case(self._observer, (), self._own, TOKENS, self._progress, self._seed)
        sessions = case.pairs()
        started = time.perf_counter()
        matcher = Matcher(self._observer, sessions, self._seed)
        prepared_s = time.perf_counter() - started
        rows, texts = [], []
        for number, visit in enumerate(self._visits):
            self._progress("vocabulary matching", number, len(self._visits))
            row, text = self._attack(matcher, visit)
            rows.append(row)
            texts.append(text)
        self._progress("vocabulary matching", len(self._visits), len(self._visits))
        return {
            "cut": str(self._cut),
            "defence": self._setting,
            "by": "distance" if matcher.rest.accept is not None else "probability",
            "attacker_tokens": sum(len(seen.tokens) for seen in sessions),
            "prepared_s": round(prepared_s, 2),
            "sessions": rows,
        }, texts

    def _attack(self, matcher: Matcher, visit: Visit) -> tuple[dict[str, Any], str]:
        path, rejected = committed_path(visit, self._codec)
        traffic = traffic_of(visit, path)
        started = time.perf_counter()
        if not path:
            return {"positions": 0, "found_share": None, "rejected_nodes": rejected, "traffic": traffic}, ""
        found = match(matcher, torch.stack([row.state for row in path]))
        share = None
        if matcher.rest.accept is not None:
            limits = [matcher.tolerance(place).accept or matcher.rest.accept for place in range(len(path))]
            near = [distance <= limit for distance, limit in zip(found.distances, limits, strict=True)]
            share = sum(near) / len(near)
        text = self._tokenizer.decode([int(ranked[0]) for ranked in found.ranked])
        return {
            "positions": len(path),
            "found_share": None if share is None else round(share, 4),
            "distance": round(found.distance, 6),
            "rejected_nodes": rejected,
            "seconds": round(time.perf_counter() - started, 2),
            "traffic": traffic,
        }, text

    def _calibrated(self, defence: Defence, specimen: Specimen, own: list[list[int]]) -> Defence:
        plain = Observer(specimen, self._cut, "float32", Nothing(), self._seed)
        seen = plain.watch(own[:CALIBRATION_TEXTS])
        defence.calibrate(torch.cat([one.up[1:] for one in seen]), torch.cat([one.up[:1] for one in seen]))
        return defence


def audit_recording(
    folder: Path,
    file: Path,
    compute: Compute,
    progress: Progress,
    *,
    defence: str = "none",
    passages: list[Passage] | None = None,
    seed: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """Attack the recording in ``file`` with the model in ``folder``."""
    recording = read_recording(file)
    with torch.no_grad():
        return RecordedAudit(
            Blueprint.open(folder, compute),
            recording,
            defence=defence,
            passages=passages,
            seed=seed,
            progress=progress,
        ).run()
