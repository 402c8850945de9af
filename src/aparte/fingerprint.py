"""A fingerprint of what the cloud serves, by which both sides find out that they mean the same model.

How it is taken: :mod:`aparte.model.fingerprint`. It finds mistakes, not malice: a cloud that wants to
lie can repeat the device's fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aparte.errors import MismatchError


@dataclass(frozen=True)
class Fingerprint:
    """Names and hashes of a served middle. ``tensors`` is empty where the middle is not on this disk."""

    name: str
    cut: str
    config: str
    tensors: str

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "cut": self.cut, "config": self.config, "tensors": self.tensors}

    @classmethod
    def from_json(cls, data: Any) -> Fingerprint:
        """Raises :class:`MismatchError` if ``data`` is not a fingerprint."""
        keys = ("name", "cut", "config", "tensors")
        if not isinstance(data, dict) or not all(
            isinstance(data.get(key), str) and len(data[key]) <= 256 for key in keys
        ):
            raise MismatchError("The other side sent no usable model fingerprint; is it the same version?")
        return cls(**{key: data[key] for key in keys})

    def check(self, other: Fingerprint) -> None:
        """Raise :class:`MismatchError`, naming both models, unless ``self`` (ours) equals ``other``."""
        if self.cut != other.cut:
            raise MismatchError(
                f"This side cuts {self.name} at {self.cut}, the other side at {other.cut}. "
                f"Start one of them with --cut {other.cut} or --cut {self.cut}."
            )
        if self.config != other.config:
            raise MismatchError(
                f"This side runs {self.name} (configuration {self.config[:8]}), the other side {other.name} "
                f"({other.config[:8]}): different architectures. Start both with the same model."
            )
        if self.tensors and other.tensors and self.tensors != other.tensors:
            raise MismatchError(
                f"This side runs {self.name} (weights {self.tensors[:8]}), the other side {other.name} "
                f"({other.tensors[:8]}): same architecture, different weights. "
                "Start both with the same model and revision."
            )
