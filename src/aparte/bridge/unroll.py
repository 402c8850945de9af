"""Running the bridge as it will be used, for all positions of a sequence at once.

Unroll 1 guesses the middle's output at every position from true states before it; unroll ``j`` from the
guesses of unroll ``j - 1`` at the position before, as when ``j`` tokens are drafted in a row. Attention has
to see what it would see then: true rows up to where drafting began, guessed rows from there on. (The
training-time test of EAGLE-3, here through the bridge and through the model's own back.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from aparte.bridge.net import BridgeNet
from aparte.bridge.teacher import Teacher, run_layer

KeysValues = tuple[torch.Tensor, torch.Tensor]


class _Recorder:
    """Keeps what a layer adds, and shows it ``given`` rows and everything added so far."""

    def __init__(self, given: dict[int, KeysValues] | None = None) -> None:
        self.rows: dict[int, list[KeysValues]] = {layer: [row] for layer, row in (given or {}).items()}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> KeysValues:
        rows = self.rows.setdefault(layer_idx, [])
        rows.append((keys, values))
        if len(rows) == 1:
            return keys, values
        return torch.cat([row[0] for row in rows], dim=2), torch.cat([row[1] for row in rows], dim=2)


@dataclass(frozen=True)
class Guessed:
    """Unroll ``depth``: the guessed middle outputs and the back's outputs after the norm, ``[B, T, D]``.

    Positions before ``depth - 1`` mean nothing, because nothing could be drafted there.
    """

    depth: int
    middle: torch.Tensor
    final: torch.Tensor


def unroll(
    net: BridgeNet, teacher: Teacher, front: torch.Tensor, middle: torch.Tensor, depth: int
) -> Iterator[Guessed]:
    """Guesses of depth ``1 .. depth`` from true states ``[B, T, D]``, differentiable in ``net``."""
    length = front.shape[1]
    positions = torch.arange(length, device=front.device)[None]
    rotary = teacher.rotary(front, position_ids=positions)
    back = list(teacher.layers[teacher.middle.stop :])
    true_rows = _true_rows(teacher, middle, positions, rotary)
    bridge_rows = _Recorder()
    back_rows = _Recorder(true_rows)
    previous = shifted(middle)
    for level in range(1, depth + 1):
        entered = net.enter(front, previous)
        mask = None if level == 1 else _mask(length, level - 1, front.device)
        hidden = run_layer(net.layer, entered.to(teacher.dtype), mask, positions, rotary, bridge_rows)
        guess = net.exit(hidden)
        states = guess.to(teacher.dtype)
        mask = _mask(length, level, front.device)
        for layer in back:
            states = run_layer(layer, states, mask, positions, rotary, back_rows)
        yield Guessed(level, guess, teacher.norm(states))
        previous = shifted(guess)


def shifted(states: torch.Tensor) -> torch.Tensor:
    """``[B, T, D]``, each row that of the position before; zeros in front."""
    return torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)


@torch.no_grad()
def _true_rows(
    teacher: Teacher, middle: torch.Tensor, positions: torch.Tensor, rotary: Any
) -> dict[int, KeysValues]:
    """Keys and values of the back's layers on the true states."""
    recorder = _Recorder()
    states = middle.to(teacher.dtype)
    for layer in teacher.layers[teacher.middle.stop :]:
        states = run_layer(layer, states, None, positions, rotary, recorder)
    return {layer: rows[0] for layer, rows in recorder.rows.items()}


def _mask(length: int, guessed: int, device: torch.device) -> torch.Tensor:
    """``[1, 1, T, (1 + guessed) T]``: who sees what when ``guessed`` rows of the past are drafted.

    The first ``T`` columns are rows from true states, seen up to where drafting began (in the bridge,
    whose first drafted row has true inputs, that is one further than in the back); then one block of
    columns for each unroll that has guessed rows, of which a position sees exactly one.
    """
    rows = torch.arange(length, device=device)[:, None]
    columns = torch.arange(length, device=device)[None]
    blocks = [columns <= rows - guessed]
    blocks += [columns == rows - (guessed - number) for number in range(1, guessed + 1)]
    return torch.cat(blocks, dim=1)[None, None]
