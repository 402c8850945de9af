"""A fingerprint of what the cloud serves, by which both sides find out that they mean the same model.

How it is taken: :mod:`aparte.model.fingerprint`. It finds mistakes, not malice: a cloud that wants to
lie can repeat the device's fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aparte.errors import MismatchError

#: Instead of a cut: the cloud serves the model in one piece, for draft mode.
WHOLE = "whole"

_KEYS = ("name", "cut", "config", "tensors", "revision")
#: Left out where it is empty, and missing in greetings of those who do not know it.
_MORE = ("manifest",)


@dataclass(frozen=True)
class Fingerprint:
    """Names and hashes of a served middle, or of a whole model (then ``cut`` is :data:`WHOLE`).

    ``tensors`` is empty where what is served is not on this disk, as on a device that fetched only its own
    shards; then ``revision``, the commit of a model from a hub, has to do. ``manifest`` is the digest over
    all of the tensors, not only samples, where a cloud serves a shard; a device works it out when it is told
    one.
    """

    name: str
    cut: str
    config: str
    tensors: str
    revision: str = ""
    manifest: str = ""

    def to_json(self) -> dict[str, str]:
        more = {key: value for key in _MORE if (value := getattr(self, key))}
        return {key: getattr(self, key) for key in _KEYS} | more

    @classmethod
    def from_json(cls, data: Any) -> Fingerprint:
        """Raises :class:`MismatchError` if ``data`` is not a fingerprint."""
        given = {**dict.fromkeys(_MORE, ""), **data} if isinstance(data, dict) else {}
        if not all(isinstance(given.get(key), str) and len(given[key]) <= 256 for key in (*_KEYS, *_MORE)):
            raise MismatchError("The other side sent no usable model fingerprint; is it the same version?")
        return cls(**{key: given[key] for key in (*_KEYS, *_MORE)})

    def check(self, other: Fingerprint) -> None:
        """Raise :class:`MismatchError`, naming both models, unless ``self`` (ours) equals ``other``."""
        if self.cut != other.cut and WHOLE in (self.cut, other.cut):
            cut = other.cut if self.cut == WHOLE else self.cut
            raise MismatchError(
                f"One side is in draft mode, with {self.name} in one piece on the cloud, and the other side "
                f"in split mode, with cut {cut}. For split mode start the server with `aparte serve MODEL "
                f"--cut {cut}`; for draft mode, in which the cloud sees the text, start it with "
                "`aparte serve MODEL --whole` and the device with --target draft."
            )
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
        weighed = self.tensors and other.tensors
        if not weighed and self.revision and other.revision and self.revision != other.revision:
            raise MismatchError(
                f"This side runs {self.name} at revision {self.revision[:8]}, the other side {other.name} at "
                f"{other.revision[:8]}. Start both with the same revision."
            )
        if self.manifest and other.manifest and self.manifest != other.manifest:
            raise MismatchError(
                f"The middle of {self.name} here has another manifest ({self.manifest[:15]}) than the shard "
                f"of {other.name} on the other side ({other.manifest[:15]}): some weights differ. Make "
                "the shard again with `aparte shard`, from the model that the device has."
            )
