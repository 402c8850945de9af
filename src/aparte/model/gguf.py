"""Converts a GGUF file, once, to a model folder that :class:`~aparte.model.checkpoint.Checkpoint` reads.

Quantized tensors become float32, 16-bit ones stay as they are. What the converted model computes is
what the file's numbers say: nothing is rounded again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aparte.config import cache_dir
from aparte.errors import CheckpointError
from aparte.model import folders
from aparte.model.checkpoint import INDEX, WEIGHTS
from aparte.model.folders import Progress, quiet
from aparte.model.gguf_config import ROPE_FACTORS, model_config
from aparte.model.gguf_file import MAGIC, GgufFile

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_SHARD_BYTES = 2 * 10**9
#: Vocabularies whose text is split before every single digit, which transformers' conversion leaves out.
_DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "codeshell"})


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file that begins like GGUF, or is named so."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def converted_dir() -> Path:
    """Where conversions of users' own GGUF files are kept."""
    return cache_dir() / "gguf"


def convert(
    path: Path, progress: Progress | None = None, *, folder: Path | None = None, source: str | None = None
) -> Path:
    """The model folder for the GGUF file ``path``; made on first use, as ``folder`` or in the cache.

    A conversion in the cache belongs to one state of one file: its path, size and time of change.
    ``source`` is what the folder's manifest says it was made from; the path unless given.
    """
    progress = progress or quiet
    try:
        path = path.resolve(strict=True)
        state = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    if folder is None:
        key = hashlib.sha256(f"{path}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:12]
        folder = converted_dir() / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', path.stem)[:80]}-{key}"
    source = source or str(path)
    return folders.make(folder, source, lambda partial: _convert(path, partial, progress), progress)


def _convert(path: Path, folder: Path, progress: Progress) -> None:
    label = f"Converting {path.name}"
    progress(label, 0, 0)
    file = GgufFile(path)
    config = model_config(file)
    names = _tensor_names(file, config)
    _write_weights(file, names, config, folder, lambda done, total: progress(label, done, total))
    config.save_pretrained(folder)
    ends = config.eos_token_id
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends,
        "pad_token_id": config.pad_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    progress(f"Converting the tokenizer of {path.name}", 0, 0)
    _write_tokenizer(file, folder)


def _tensor_names(file: GgufFile, config: PretrainedConfig) -> dict[str, str]:
    """Hugging Face tensor name to GGUF's, after checking that names and shapes all match."""
    import torch
    from gguf import MODEL_ARCH, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config, trust_remote_code=False).state_dict()
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    arch = MODEL_ARCH[file.metadata["general.architecture"].upper()]
    table = get_tensor_name_map(arch, config.num_hidden_layers)
    names: dict[str, str] = {}
    for name, weight in expected.items():
        stem, _, suffix = name.rpartition(".")
        names[name] = f"{table.get_name(stem)}.{suffix}"
        tensor = file.tensors.get(names[name])
        if tensor is None:
            raise file.damaged(f"tensor {names[name]} is missing")
        if tensor.shape != tuple(weight.shape):
            raise file.damaged(f"tensor {tensor.name} is of shape {tensor.shape}, not {tuple(weight.shape)}")
    if extra := sorted(set(file.tensors) - set(names.values()) - {ROPE_FACTORS}):
        raise CheckpointError(
            f"{file.path} has a tensor {extra[0]} that {config.model_type} models have no use for, so it "
            "would not run as it was meant to. Use the model as safetensors."
        )
    return names


def _load(file: GgufFile, name: str, gguf_name: str, config: PretrainedConfig) -> torch.Tensor:
    try:
        weight = file.tensors[gguf_name].load()
    except NotImplementedError:
        raise CheckpointError(
            f"{file.path} is quantized as {file.tensors[gguf_name].kind.name}, which cannot be read. "
            "Use another quantization, for example Q8_0 or Q4_K_M."
        ) from None
    if file.metadata["general.architecture"] != "llama" or not re.search(r"\.[qk]_proj\.", name):
        return weight
    # llama.cpp rotates neighbouring dimensions, Hugging Face those half a head apart: undo its reordering.
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _write_weights(
    file: GgufFile, names: dict[str, str], config: PretrainedConfig, folder: Path, progress: Any
) -> None:
    from safetensors.torch import save_file

    needed = sum(_converted_bytes(file, gguf_name) for gguf_name in names.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"Converting {file.path} needs {needed / 1e9:.1f} GB and {folder.parent} has {free / 1e9:.1f} GB "
            "free. Make room, or set APARTE_CACHE to a folder with room."
        )
    shards = list(_shards(file, names))
    weight_map: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, 1):
        filename = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in shard:
            tensors[name] = _load(file, name, names[name], config)
            done += tensors[name].nbytes
            progress(done, needed)
        save_file(tensors, folder / filename, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, filename))
    if len(shards) > 1:
        index = {"metadata": {"total_size": needed}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _converted_bytes(file: GgufFile, gguf_name: str) -> int:
    tensor = file.tensors[gguf_name]
    return math.prod(tensor.shape) * (2 if tensor.kind.name in ("F16", "BF16") else 4)


def _shards(file: GgufFile, names: dict[str, str]) -> Iterator[list[str]]:
    """Names in groups that fit :data:`_SHARD_BYTES`, so that no more than that is held in memory."""
    shard: list[str] = []
    size = 0
    for name, gguf_name in names.items():
        num_bytes = _converted_bytes(file, gguf_name)
        if shard and size + num_bytes > _SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += num_bytes
    yield shard


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    file.need("tokenizer.ggml.model")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise file.damaged(
            f"its tokenizer does not convert ({' '.join(str(error).split())[:200]})"
        ) from error
    if file.metadata.get("tokenizer.ggml.pre") in _DIGIT_SPLITTING:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_bytes())
    for key in ("is_local", "local_files_only"):  # how it was loaded, not what it is
        settings.pop(key, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
