"""What a user can set against reading: a defence, a constant shape. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from aparte.errors import UserError
from aparte.privacy.shape import ShapeSettings
from aparte.speculate.settings import Decoding


@dataclass(frozen=True)
class Protection:
    """Settings of a split target. The defence is named as ``aparte audit`` names it."""

    defence: str = "none"
    shape: ShapeSettings | None = None
    #: The file with the private ends of this device.
    ends: Path | None = None

    @classmethod
    def parse(cls, target: str, defence: str, shape: str | None, ends: Path | None = None) -> Protection:
        """Raises :class:`UserError` for what cannot be, or has no use with ``target``."""
        options = {
            "--defence": defence != cls.defence,
            "--constant-shape": shape is not None,
            "--private-ends": ends is not None,
        }
        for option, given in options.items():
            if given and target != "split":
                raise UserError(
                    f"{option} is for --target split, where hidden states are sent. Leave it out, or choose "
                    "that target."
                )
        if ends is not None and defence != cls.defence:
            raise UserError(
                "--defence and --private-ends both change what is sent, and were never measured together. "
                "Choose one of them."
            )
        return cls(defence, None if shape is None else ShapeSettings.parse(shape), ends)

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
