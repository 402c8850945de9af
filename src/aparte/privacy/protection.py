"""What a user can set against reading: a defence, a constant shape. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aparte.config import Decoding
from aparte.errors import UserError
from aparte.privacy.shape import ShapeSettings


@dataclass(frozen=True)
class Protection:
    """Settings of a split target. The defence is named as ``aparte audit`` names it."""

    defence: str = "none"
    shape: ShapeSettings | None = None

    @classmethod
    def parse(cls, target: str, defence: str, shape: str | None) -> Protection:
        """Raises :class:`UserError` for what cannot be, or has no use with ``target``."""
        for option, given in (("--defence", defence != cls.defence), ("--constant-shape", shape is not None)):
            if given and target != "split":
                raise UserError(
                    f"{option} is for --target split, where hidden states are sent. Leave it out, or choose "
                    "that target."
                )
        return cls(defence, None if shape is None else ShapeSettings.parse(shape))

    def limit(self, decoding: Decoding) -> Decoding:
        """``decoding`` within the shape: its steps are filled by guesses first, and one is under way at a
        time. Raises :class:`UserError` if the user wants something else."""
        if self.shape is None:
            return decoding
        if decoding.max_nodes is not None or decoding.in_flight is not None:
            raise UserError(
                "--constant-shape says how many nodes a step has, and sends one step at a time. Leave out "
                "--max-nodes and --in-flight."
            )
        return replace(decoding, max_nodes=max(1, self.shape.nodes - 1), in_flight=1)
