"""The bridge's network: from the front's output and the previous position's middle output to this one's.

What the middle will answer for a token is guessed from what went into it (the front's output for that
token) and from what it answered for the token before, which the device has because it came back. One
decoder layer of the model's own family does that, with attention over the earlier positions; the
device's own back and head turn the guess into a distribution. Where the token before is drafted as well,
the bridge feeds on its own guess.
"""

from __future__ import annotations

import torch
from torch import nn

#: Standardised inputs are limited to this many standard deviations: the first positions of a sequence
#: carry activations thousands of times larger than all others.
LIMIT = 12.0


class BridgeNet(nn.Module):
    """``join`` mixes both inputs, ``layer`` looks back, ``leave`` corrects the result."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        """``layer`` is a decoder layer of the family with attention over ``width``-wide states."""
        super().__init__()
        self.join = nn.Linear(2 * width, width, bias=False)
        self.layer = layer
        self.leave = nn.Linear(width, width, bias=False)
        for name in ("front_mean", "middle_mean"):
            self.register_buffer(name, torch.zeros(width))
        for name in ("front_std", "middle_std"):
            self.register_buffer(name, torch.ones(width))

    front_mean: torch.Tensor
    front_std: torch.Tensor
    middle_mean: torch.Tensor
    middle_std: torch.Tensor

    def begin_as_copy(self) -> None:
        """Start training from "the middle answers as for the token before, sent through ``layer``"."""
        width = self.leave.out_features
        with torch.no_grad():
            self.join.weight.zero_()
            self.join.weight[:, width:] = torch.eye(width)
            self.leave.weight.zero_()

    def enter(self, front: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Both ``[..., D]`` -> the layer's input, in the range of the middle's outputs."""
        joined = torch.cat(
            [
                standardise(front, self.front_mean, self.front_std),
                standardise(previous, self.middle_mean, self.middle_std),
            ],
            dim=-1,
        )
        mixed: torch.Tensor = self.join(joined)
        return mixed * self.middle_std + self.middle_mean

    def exit(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output ``[..., D]`` -> a guess of the middle's output."""
        correction: torch.Tensor = self.leave(standardise(hidden, self.middle_mean, self.middle_std))
        return hidden + correction * self.middle_std


def standardise(states: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """``(states - mean) / std``, limited."""
    return ((states - mean) / std).clamp(-LIMIT, LIMIT)
