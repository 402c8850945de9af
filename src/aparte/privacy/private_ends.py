"""Private ends as a defence under audit (:mod:`aparte.privatize`): where it was trained, and how it sends.

Source: the private front and back of arXiv 2606.14210, with a mask of our own. The attackers know
everything but the file. Those who only have the public weights attack with those; the adaptive ones are in
:mod:`aparte.privacy.adaptive`. Cost: what :mod:`aparte.privacy.price` measures.

Under audit a mask is drawn from the generator that the audit hands in, where a device draws it from its key
and the text. To whoever has not got the key both are the same, as no two nodes of an audit share a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from aparte.config import Cut
from aparte.errors import CheckpointError
from aparte.model.parts import Blueprint
from aparte.privacy.defences import Nothing
from aparte.privatize.ends import PrivateEnds, drawn
from aparte.privatize.file import load_ends

PREFIX = "private-ends="


@dataclass
class PrivateEndsDefence(Nothing):
    """The private ends in ``file``; of use once it was opened for a model."""

    file: Path = Path()
    ends: PrivateEnds | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return "private-ends"

    @property
    def setting(self) -> str:
        return f"{PREFIX}{self.file}"

    @property
    def cancels(self) -> bool:
        return True

    def describe(self) -> str:
        recipe = {} if self.ends is None else dict(self.ends.settings.get("recipe", {}))
        rank = recipe.get("rank")
        return (
            f"A secret front and back: weights changed by {'full' if rank == 0 else f'rank {rank}'} updates, "
            f"{recipe.get('steps')} training steps of strength {recipe.get('strength')}, and a mask: "
            f"{0 if self.ends is None else self.ends.veil.size} coordinates of every state are those of "
            "secret decoys, which the device takes out again behind the middle."
        )

    def open(self, blueprint: Blueprint, cut: Cut) -> PrivateEnds:
        """Load the file. Raises :class:`UserError` if it is not of this model and cut."""
        if self.ends is None:
            self.ends = load_ends(self.file, blueprint, cut)
        return self.ends

    def trained_for(self) -> Cut:
        """The cut in the file's header."""
        try:
            with safe_open(self.file, framework="pt") as file:
                return Cut.parse((file.metadata() or {}).get("cut", ""))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.file} can't be read as private ends ({type(error).__name__}). Train some with "
                "`aparte privatize`."
            ) from error

    def protect(self, hidden: torch.Tensor, position: int, generator: torch.Generator) -> torch.Tensor:
        if self.ends is None:
            raise ValueError("these private ends were not opened")
        veil, states = self.ends.veil, hidden.float().cpu()
        keys = torch.randint(256, (len(hidden), 32), generator=generator, dtype=torch.uint8)
        uniform, normal = zip(*(drawn(bytes(key.tolist()), veil.size) for key in keys), strict=True)
        mask = veil.mask(states, veil.values(torch.stack(uniform), torch.stack(normal)))
        if position == 0:
            mask[0] = 0
        return (states + mask).to(hidden.device, hidden.dtype)


def fits(defence: object, cut: Cut) -> bool:
    """Whether ``defence`` can be audited at ``cut``: private ends at their own only."""
    return not isinstance(defence, PrivateEndsDefence) or defence.trained_for() == cut
