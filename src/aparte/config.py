"""What a user can set, validated on construction; that of speculation is in `aparte.speculate.settings`.

The dataclasses here are the only source of the command line's defaults. They are frozen: a setting
never changes behind the back of code that read it.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from aparte.errors import CutError, UserError

DEFAULT_MODEL = "smollm2-135m"

DtypeName = Literal["auto", "packed16", "int8", "nf4", "float32", "bfloat16", "float16"]
#: How keys and values are kept; ``model`` is what the layers compute in.
KvName = Literal["model", "float16", "float8", "int8"]
WireName = Literal["auto", "float16", "bfloat16", "float32"]

#: Weights that share a scale in ``nf4``, and bytes of a weight with its part of the scale.
NF4_GROUP = 64
NF4_BYTES = 0.5 + 4 / NF4_GROUP
#: Where the model is: divided, whole behind a link, or whole on this machine.
TARGETS = ("split", "draft", "local")
#: In which order several clouds are asked: as they are given, or the nearest first.
FAILOVERS = ("order", "latency")
#: Most candidates that a draft may name for a token.
MAX_TOP = 256


def cache_dir() -> Path:
    """Folder for downloaded and converted models: ``$APARTE_CACHE`` or the platform's cache folder."""
    if override := os.environ.get("APARTE_CACHE"):
        return Path(override).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("aparte")


def state_dir() -> Path:
    """Folder for what a server has to keep: ``$APARTE_STATE`` or the platform's folder for data."""
    if override := os.environ.get("APARTE_STATE"):
        return Path(override).expanduser()
    from platformdirs import user_data_path

    return user_data_path("aparte")


def one_of(value: str, names: tuple[str, ...], what: str) -> None:
    """Raise a :class:`UserError` that lists the known ``names`` unless ``value`` is one of them."""
    if value not in names:
        raise UserError(f"Unknown {what} {value!r}. Known: {', '.join(names)}.")


@dataclass(frozen=True)
class Cut:
    """Where the model is divided: the first ``front`` and last ``back`` layers stay on the device."""

    front: int = 2
    back: int = 2

    def __post_init__(self) -> None:
        if self.front < 1 or self.back < 1:
            raise CutError(
                f"Cut {self} keeps no layer on one side of the middle. Both numbers must be at least 1: "
                "with 0 the cloud would receive plain embeddings, or write the text itself."
            )

    @classmethod
    def parse(cls, text: str) -> Cut:
        """Read ``"K,M"``."""
        try:
            front, back = (int(part) for part in text.split(","))
        except ValueError:
            raise CutError(f"Cut {text!r} is not of the form K,M; for example --cut 2,2.") from None
        return cls(front, back)

    def check(self, layers: int) -> None:
        """Raise :class:`CutError` unless a middle of at least one layer is left of ``layers``."""
        if self.front + self.back >= layers:
            raise CutError(
                f"Cut {self} leaves nothing for the cloud: the model has {layers} layers, "
                f"so K + M must be at most {layers - 1}."
            )

    def middle(self, layers: int) -> range:
        """Indices of the layers that run on the cloud."""
        self.check(layers)
        return range(self.front, layers - self.back)

    def __str__(self) -> str:
        return f"{self.front},{self.back}"


@dataclass(frozen=True)
class Compute:
    """What numbers a part computes with, and where."""

    dtype: DtypeName = "auto"
    device: str = "auto"
    #: How keys and values are kept.
    kv: KvName = "model"
    #: A node's result does not depend on the nodes computed with it, to the bit.
    batch_invariant: bool = False
    #: Steps of few nodes are recorded as CUDA graphs.
    graphs: bool = False

    def __post_init__(self) -> None:
        one_of(self.dtype, get_args(DtypeName), "dtype")
        one_of(self.kv, get_args(KvName), "kv")
        if self.device.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise UserError(f"Unknown device {self.device!r}. Known: auto, cpu, cuda, cuda:N, mps.")


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits. ``temperature == 0`` is greedy and ignores the rest."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 switches it off).")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be 0 (off) or a positive number of tokens.")
        if not 0 <= self.min_p < 1:
            raise UserError(f"min_p is {self.min_p}; it must be at least 0 (off) and below 1.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; it must be between 0 and 2**63 - 1.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Penalties:
    """What is taken from, or added to, a token's logit for what the answer holds so far, or always.

    ``frequency`` counts per occurrence in the answer, ``presence`` once; ``bias`` is added to the logits of
    the tokens it names. Zeros and an empty ``bias`` change nothing.
    """

    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("frequency", self.frequency), ("presence", self.presence)):
            if not -2 <= value <= 2:
                raise UserError(f"The {name} penalty is {value}; it must be between -2 and 2 (0 is off).")
        if not all(token >= 0 and -100 <= value <= 100 for token, value in self.bias):
            raise UserError("A logit bias names a token id that is none, or is not between -100 and 100.")

    @property
    def active(self) -> bool:
        return bool(self.frequency or self.presence or self.bias)


@dataclass(frozen=True)
class Stopping:
    """When an answer ends, besides the context limit.

    ``eos`` are the tokens that end it; None stands for the model's own.
    """

    max_new_tokens: int = 256
    stop: tuple[str, ...] = field(default=())
    eos: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1.")
        if any(not text for text in self.stop):
            raise UserError("A stop string is empty; leave it out instead.")


@dataclass(frozen=True)
class LinkSettings:
    """How the device talks to the cloud, and how long it bears with it."""

    connect_timeout_s: float = 10.0
    step_timeout_s: float = 120.0
    #: For a whole answer, prompt included; None is no limit.
    answer_timeout_s: float | None = None
    #: How often a lost connection is sought again before the answer is given up; 0 gives up at once.
    retries: int = 10
    #: The wait before the first attempt, at most; it doubles with every further one, up to the longest.
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    #: Which of several clouds is asked first.
    failover: str = FAILOVERS[0]
    #: Prompt tokens per message. Bounds message size, so that no limit of either side bounds the context.
    prefill_chunk: int = 128

    def __post_init__(self) -> None:
        one_of(self.failover, FAILOVERS, "order of several clouds")
        for name in (
            "connect_timeout_s",
            "step_timeout_s",
            "answer_timeout_s",
            "first_wait_s",
            "longest_wait_s",
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} is {value}; it must be a positive number of seconds.")
        if not 0 <= self.retries <= 1000:
            raise UserError(f"retries is {self.retries}; it must be between 0 and 1000.")
        if self.prefill_chunk < 1:
            raise UserError(f"prefill_chunk is {self.prefill_chunk}; it must be at least 1.")


@dataclass(frozen=True)
class ServerLimits:
    """What one client may ask of the server. Checked before anything is allocated."""

    max_sessions: int = 64
    max_nodes_per_step: int = 512
    #: Nodes that may hang below the committed tip at a time.
    max_pending_nodes: int = 2048
    idle_s: float = 300.0
    #: How long a session whose connection was lost waits for its device; 0 ends it at once.
    grace_s: float = 60.0
    #: Bytes that the caches of all sessions may take; None is a share of what is free at the start.
    kv_bytes: int | None = None
    #: Bytes that the cache of one session may take; None is no limit of its own.
    session_kv_bytes: int | None = None
    header_bytes: int = 65_536

    def __post_init__(self) -> None:
        if not (math.isfinite(self.idle_s) and self.idle_s > 0):
            raise UserError(f"The idle time is {self.idle_s} s; it must be positive.")
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            raise UserError(f"The grace time is {self.grace_s} s; it must be 0 (none) or positive.")
        if self.max_sessions < 1:
            raise UserError(f"max_sessions is {self.max_sessions}; it must be at least 1.")
        for size in (self.kv_bytes, self.session_kv_bytes):
            if size is not None and size < 1:
                raise UserError("The memory for sessions must be a positive number of bytes.")

    @staticmethod
    def parse_bytes(text: str) -> int | None:
        """Read ``auto`` (None) or a number of bytes like 2000000000, 500MB or 1.5GB (GB = 10^9 bytes)."""
        if text == "auto":
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB|)", text, re.IGNORECASE)
        if match is None:
            raise UserError(f"{text!r} is not an amount of memory. Use auto, or one like 500MB or 2GB.")
        return int(float(match[1]) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2].upper()])


@dataclass(frozen=True)
class TokenLimits:
    """What the holder of one token may have of a server; None is no limit besides the server's own.

    Tokens are what the server computes: every node of every step, those of prompts and drafts included.
    Bytes are those of messages, both ways.
    """

    max_sessions: int | None = None
    tokens_per_second: float | None = None
    bytes_per_second: float | None = None
    #: Bytes that the caches of all its sessions may take, parked ones included.
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_sessions", "kv_bytes", "tokens_per_second", "bytes_per_second"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} is {value:g}; a limit of a token must be a positive number.")
