"""A defence at work: what is done to the front's output of every node before it is sent.

Rounding is a function of the row alone. Noise must not be: the same row with fresh noise each time could be
averaged. It must not be a function of the slot or the position either: two guesses for one position would
share their noise, and their difference would show without any. So the noise of a node is drawn from a
secret of this session and **all tokens from the first one to the node's**. A node that is sent again, in
another slot, after a rejection or a lost connection, is sent with the same numbers, down to the last bit;
every other node has noise of its own. Steps stay idempotent, and sequential and speculative runs under one
secret send the same numbers, so they write the same text.

The secret lives as long as the process. A text that is sent in several sessions is sent with as many
independent noises, and the guarantee of one session does not cover their average.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from aparte.config import Cut
from aparte.errors import UserError
from aparte.privacy.defence import Defence
from aparte.privacy.defences import Noise, RandomCut, parse_defence
from aparte.privacy.paths import Paths, gaussian
from aparte.privacy.private_ends import PrivateEndsDefence
from aparte.privacy.protection import Protection
from aparte.privacy.sample import sample_passages
from aparte.privacy.shape import ConstantShape
from aparte.step import ROOT, Step
from aparte.target.base import Target
from aparte.target.split import DeviceParts, SplitTarget
from aparte.text.tokenizer import Codec

#: Texts of the sample by whose states noise is calibrated, and tokens of each.
CALIBRATION_TEXTS = 24
CALIBRATION_TOKENS = 48


class Guard:
    """One session's defence."""

    def __init__(self, defence: Defence, secret: bytes | None = None) -> None:
        """``defence`` is calibrated. ``secret`` is for tests; without it there is a fresh one."""
        self._defence = defence
        self._paths = Paths(secrets.token_bytes(32) if secret is None else secret)
        # Of the noise of a first token and of all others.
        self._sigmas = (defence.sigma(0), defence.sigma(1)) if isinstance(defence, Noise) else None

    def __call__(self, step: Step, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """What is sent instead of ``hidden`` ``[n, D]``, the front's output for the nodes of ``step``."""
        digests, positions = self._paths.follow(step, tokens)
        sent = self._defence.expected(hidden, torch.tensor(positions))
        if self._sigmas is not None:
            width = hidden.shape[1]
            rows = [
                gaussian(digest, width) * self._sigmas[position > 0]
                for digest, position in zip(digests, positions, strict=True)
            ]
            sent = sent + torch.stack(rows).to(hidden.device, hidden.dtype)
        return sent


def draw_cut(text: str, cut: Cut) -> Cut:
    """The cut of a session under the defence ``text``, where the cloud hosts the middle at ``cut``.

    Drawn in a way that nobody can foretell, if the defence draws. Raises :class:`UserError` for an unknown
    defence, and for one that could draw layers which the cloud does not host.
    """
    defence = parse_defence(text)
    if isinstance(defence, PrivateEndsDefence):
        raise UserError("Private ends are not a --defence: set them with --private-ends FILE.")
    if isinstance(defence, RandomCut) and defence.low < cut.front:
        raise UserError(
            f"{text} could draw {defence.low} layers, and with --cut {cut} the cloud hosts none before layer "
            f"{cut.front}. Draw from {cut.front} on, or start both sides with a smaller --cut."
        )
    return secrets.choice(defence.cuts(cut))


def check_draws(text: str, cut: Cut, layers: int) -> None:
    """Raise :class:`UserError` if the defence could draw a cut that a model of ``layers`` does not have."""
    for drawn in parse_defence(text).cuts(cut):
        drawn.check(layers)


def open_guard(text: str, parts: DeviceParts, codec: Codec) -> Guard:
    """The guard for the defence ``text`` on a device with these ``parts``.

    Noise is calibrated on states of a sample that ships, never on what the user writes.
    """
    defence = parse_defence(text)
    if isinstance(defence, Noise):
        passages = sample_passages()
        rows = [
            _front(parts, codec.encode(passage.text)[:CALIBRATION_TOKENS])
            for passage in passages[:: len(passages) // CALIBRATION_TEXTS]
        ]
        defence.calibrate(torch.cat([row[1:] for row in rows]), torch.cat([row[:1] for row in rows]))
    return Guard(defence)


def protect(target: Target, protection: Protection, codec: Codec) -> None:
    """Have ``target`` send as ``protection`` says. It has to be open. Of other targets nothing is asked."""
    if not isinstance(target, SplitTarget):
        return
    guard = shape = None
    defence = parse_defence(protection.defence)
    if isinstance(defence, RandomCut):
        if not defence.low <= target.parts.cut.front <= defence.high:
            raise UserError(
                f"This session's cut is {target.parts.cut}, which {protection.defence} did not draw. Draw it "
                "first, with draw_cut()."
            )
    elif protection.defence != Protection.defence:
        guard = open_guard(protection.defence, target.parts, codec)
    if protection.shape is not None:
        longest = min(target.max_context, target.blueprint.uniform_context)
        shape = ConstantShape(protection.shape, longest)
    target.protect(guard, shape)


def _front(parts: DeviceParts, tokens: Sequence[int]) -> torch.Tensor:
    """The front's output ``[n, D]`` for a text of its own."""
    step = Step(1, 0, ROOT, 0, tuple(range(-1, len(tokens) - 1)))
    return parts.front.forward(parts.front.new_cache(), step, parts.embed(torch.tensor(tokens)))
