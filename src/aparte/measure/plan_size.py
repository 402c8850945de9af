"""How many numbers a model has and where they lie, from its configuration alone.

For dense decoders: attention with grouped keys and values, and a gated feed-forward network, as in the
families that this version runs. 1 GB is 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aparte.config import NF4_BYTES, Cut, DtypeName
from aparte.errors import CheckpointError

GB = 1e9
#: Python, torch and what they load. An assumption: some 0.3 GB on a CPU, 0.5 GB with a CUDA context.
RUNTIME_BYTES = 0.5e9
#: Rows that a side works on at a time: a chunk of the prompt.
_WORK_ROWS = 128
_WEIGHT_BYTES = {"float32": 4.0, "int8": 1.0, "nf4": NF4_BYTES}  # the others are 16 bits wide
_CACHE_BYTES = {"float32": 4, "packed16": 4, "int8": 4}  # packed linears compute, and cache, in float32
#: What makes a model another kind than this arithmetic is about.
_STRANGE = ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    tied: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> Shape:
        """Read a ``config.json``. Raises :class:`CheckpointError` if it is of another kind."""
        if strange := [key for key in _STRANGE if config.get(key)]:
            raise CheckpointError(
                f"{name} is not a dense decoder ({strange[0]} is set), and plans are for those only."
            )
        family = config.get("model_type")

        def need(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if type(value) is not int or value < 1:
                raise CheckpointError(
                    f"The configuration of {name} has no usable {key}. Is it that of a language model?"
                )
            return value

        hidden, heads = need("hidden_size"), need("num_attention_heads")
        return cls(
            layers=need("num_hidden_layers"),
            hidden=hidden,
            intermediate=need("intermediate_size"),
            heads=heads,
            kv_heads=need("num_key_value_heads", heads),
            head_dim=need("head_dim", hidden // heads),
            vocab=need("vocab_size"),
            max_context=need("max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2" or bool(config.get("attention_bias")),
            output_bias=bool(config.get("attention_bias")) and family != "qwen2",
            mlp_bias=bool(config.get("mlp_bias")),
            head_norms=family == "qwen3",
        )

    @property
    def layer_params(self) -> int:
        """Of one decoder layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = self.hidden * (2 * queries + 2 * keys) + 3 * self.hidden * self.intermediate
        count += 2 * self.hidden  # norms
        count += (queries + 2 * keys) * self.attention_bias + self.hidden * self.output_bias
        count += (2 * self.intermediate + self.hidden) * self.mlp_bias
        return count + 2 * self.head_dim * self.head_norms

    @property
    def table_params(self) -> int:
        """Of the embedding; the LM head has as many."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """Of the whole model, as a checkpoint counts them."""
        return self.layers * self.layer_params + self.table_params * (1 if self.tied else 2) + self.hidden


@dataclass(frozen=True)
class Memory:
    """What one side holds, in bytes."""

    layers: float
    embedding: float
    head: float
    kv: float
    runtime: float

    @property
    def weights(self) -> float:
        return self.layers + self.embedding + self.head

    @property
    def held(self) -> float:
        """Weights and cache: what a GPU's memory is chosen by."""
        return self.weights + self.kv

    def to_json(self) -> dict[str, float]:
        """In GB."""
        parts = {
            "weights_gb": self.weights,
            "layers_gb": self.layers,
            "embedding_gb": self.embedding,
            "head_gb": self.head,
            "kv_gb": self.kv,
            "runtime_gb": self.runtime,
            "total_gb": self.held + self.runtime,
        }
        return {name: round(value / GB, 3) for name, value in parts.items()}


def weight_bytes(dtype: DtypeName) -> float:
    """Per weight."""
    return _WEIGHT_BYTES.get(dtype, 2)


def head_bytes(dtype: DtypeName) -> float:
    """Per weight of the LM head, which is not kept in 4 bits."""
    return 2 if dtype == "nf4" else weight_bytes(dtype)


def kv_bytes_per_token(shape: Shape, layers: int, dtype: DtypeName) -> int:
    """Keys and values of one position in so many layers."""
    return 2 * layers * shape.kv_heads * shape.head_dim * _CACHE_BYTES.get(dtype, 2)


def device_memory(shape: Shape, cut: Cut, dtype: DtypeName, context: int) -> Memory:
    """Front, back and both ends. Tied weights count twice: a table to look up, a matrix to multiply with."""
    layers = cut.front + cut.back
    return _memory(shape, layers, dtype, context, ends=True)


def cloud_memory(shape: Shape, cut: Cut, dtype: DtypeName, context: int, users: int) -> Memory:
    """The middle, with a cache for every user."""
    return _memory(shape, len(cut.middle(shape.layers)), dtype, context * users, ends=False)


def whole_memory(shape: Shape, dtype: DtypeName, context: int, users: int = 1) -> Memory:
    """The model in one piece."""
    return _memory(shape, shape.layers, dtype, context * users, ends=True)


def _memory(shape: Shape, layers: int, dtype: DtypeName, positions: int, *, ends: bool) -> Memory:
    size = weight_bytes(dtype)
    head = shape.table_params * head_bytes(dtype) if ends else 0
    # The table is looked up in, not multiplied with, and stays in 16 bits where matrices are narrower.
    table = max(head, shape.table_params * 2) if ends else 0
    logits = 32 * shape.vocab * 4 if ends else 0  # of the nodes of one step, in float32
    work = _WORK_ROWS * (3 * shape.intermediate + 4 * shape.hidden) * 4 + logits
    return Memory(
        layers=layers * shape.layer_params * size,
        embedding=table,
        head=head + (shape.hidden * size if ends else 0),
        kv=positions * kv_bytes_per_token(shape, layers, dtype),
        runtime=RUNTIME_BYTES + work,
    )
