"""Rotary embeddings as a GGUF file's settings and factor tensors describe them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from aparte.errors import CheckpointError

if TYPE_CHECKING:
    from aparte.model.gguf_architectures import Settings
    from aparte.model.gguf_file import GgufFile

#: Rotary factors of Llama 3.1 and later. Not a weight: they become part of the configuration.
ROPE_FACTORS = "rope_freqs.weight"
#: Phi-3's factors, for texts within and beyond its original context. Not weights either.
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


def factor_tensors(arch: str) -> frozenset[str]:
    """Tensors that become part of the configuration."""
    return frozenset({SHORT_FACTORS, LONG_FACTORS} if arch == "phi3" else {ROPE_FACTORS})


def parameters(settings: Settings, head_dim: int, *, partly: bool = False) -> dict[str, Any]:
    """``rope_parameters`` of the configuration. ``partly``: a part of each head may stay as it is."""
    file = settings.file
    theta = settings.get("rope.freq_base") or 10000.0
    share = _share(settings, head_dim, partly)
    if ROPE_FACTORS in file.tensors:
        return _llama3(file, theta, head_dim)
    kind, factor = settings.get("rope.scaling.type") or "none", settings.get("rope.scaling.factor")
    if kind == "none" or factor in (None, 0, 1):
        return {"rope_type": "default", "rope_theta": theta, **share}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor, **share}
    original = settings.get("rope.scaling.original_context_length")
    if kind == "yarn" and original and settings.get("rope.scaling.yarn_ext_factor", 1.0) == 1.0:
        more = {
            name: value
            for name, key in (
                ("attention_factor", "yarn_attn_factor"),
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
            )
            if (value := settings.get(f"rope.scaling.{key}")) is not None
        }
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            **more,
            **share,
        }
    raise CheckpointError(
        f"{file.path} stretches its context in a way that is not supported ({kind}). "
        "Use the model as safetensors."
    )


def longrope(settings: Settings, head_dim: int, values: dict[str, Any]) -> dict[str, Any]:
    """Phi-3's: plain, or with factors for each dimension, two sets of them."""
    tensors = settings.file.tensors
    if SHORT_FACTORS not in tensors and LONG_FACTORS not in tensors:
        settings.read.add("rope.scaling.attn_factor")  # says nothing without factors
        return parameters(settings, head_dim, partly=True)
    factors = {}
    for name, tensor in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        if tensor not in tensors:
            raise settings.file.damaged(f"tensor {tensor} is missing")
        factors[name] = [float(factor) for factor in tensors[tensor].load().flatten()]
    original = values["original_max_position_embeddings"]
    stretch = max(1.0, values["max_position_embeddings"] / original)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    attention = settings.get("rope.scaling.attn_factor", usual)
    return {
        "rope_type": "longrope",
        "rope_theta": settings.get("rope.freq_base") or 10000.0,
        "factor": stretch,
        "original_max_position_embeddings": original,
        **factors,
        # The file has it in single precision: what follows from the lengths anyway is not rounded to that.
        **({} if math.isclose(attention, usual, rel_tol=1e-6) else {"attention_factor": attention}),
        **_share(settings, head_dim, partly=True),
    }


def _share(settings: Settings, head_dim: int, partly: bool) -> dict[str, float]:
    """Which part of each head rotates, if not all of it."""
    rotated = settings.get("rope.dimension_count") or head_dim
    if rotated == head_dim:
        return {"partial_rotary_factor": 1.0} if partly else {}
    if not isinstance(rotated, int) or not 0 < rotated < head_dim:
        raise settings.file.damaged(f"it rotates {rotated} of {head_dim} dimensions per head")
    if not partly:
        raise CheckpointError(
            f"{settings.file.path} rotates {rotated} of {head_dim} dimensions per head, which is not "
            "supported. Use the model as safetensors."
        )
    share = rotated / head_dim
    # transformers multiplies and rounds down, which must not lose one.
    return {"partial_rotary_factor": share if int(head_dim * share) == rotated else math.nextafter(share, 1)}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's stretched rotary embedding, of which GGUF keeps only the resulting factors.

    The settings are recovered from the largest factor and the constants that all these models share,
    and accepted if they reproduce the file's factors.
    """
    import torch

    stored = file.tensors[ROPE_FACTORS].load().double()
    low, high, original, factor = 1.0, 4.0, 8192, float(stored.max())
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=1e-3):
        raise CheckpointError(
            f"{file.path} has rotary factors that are not Llama 3's, which is not supported. "
            "Use the model as safetensors."
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
