"""Converts a GGUF file, once, to a model folder that :class:`~aparte.model.checkpoint.Checkpoint` reads.

Quantized tensors become float32, 16-bit ones stay as they are. What the converted model computes is
what the file's numbers say: nothing is rounded again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from aparte.config import cache_dir
from aparte.errors import CheckpointError
from aparte.model import folders
from aparte.model.checkpoint import INDEX, WEIGHTS
from aparte.model.folders import Progress, quiet
from aparte.model.gguf_config import model_config
from aparte.model.gguf_file import MAGIC, GgufFile
from aparte.model.gguf_tensors import Source, sources

if TYPE_CHECKING:
    import torch

_SHARD_BYTES = 2 * 10**9
#: Vocabularies whose text is split before every single digit, which transformers' conversion leaves out.
_DIGIT_SPLITTING = frozenset(
    {"smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b"}
)
#: Ways of splitting text that the conversion knows. It takes any other for GPT-2's.
_SPLITTING = _DIGIT_SPLITTING | frozenset(
    {
        "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling",
        "llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe", "tekken",
        "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "qwen35", "gpt-4o", "llama4", "kanana2",
    }
)  # fmt: skip


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
    _write_weights(file, sources(file, config), folder, lambda done, total: progress(label, done, total))
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


def _load(file: GgufFile, source: Source) -> torch.Tensor:
    try:
        return source.load()
    except NotImplementedError:
        raise CheckpointError(
            f"{file.path} is quantized as {source.tensor.kind.name}, which cannot be read. "
            "Use another quantization, for example Q8_0 or Q4_K_M."
        ) from None


def _write_weights(
    file: GgufFile, found: dict[str, Source], folder: Path, progress: Callable[[int, int], None]
) -> None:
    from safetensors.torch import save_file

    needed = sum(source.nbytes for source in found.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"Converting {file.path} needs {needed / 1e9:.1f} GB and {folder.parent} has {free / 1e9:.1f} GB "
            "free. Make room, or set APARTE_CACHE to a folder with room."
        )
    shards = list(_shards(found))
    weight_map: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, 1):
        filename = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in shard:
            tensors[name] = _load(file, found[name])
            done += tensors[name].nbytes
            progress(done, needed)
        save_file(tensors, folder / filename, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, filename))
    if len(shards) > 1:
        index = {"metadata": {"total_size": needed}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(found: dict[str, Source]) -> Iterator[list[str]]:
    """Names in groups that fit :data:`_SHARD_BYTES`, so that no more than that is held in memory."""
    shard: list[str] = []
    size = 0
    for name, source in found.items():
        if shard and size + source.nbytes > _SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += source.nbytes
    yield shard


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    from tokenizers import normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    splitting = file.metadata.get("tokenizer.ggml.pre", "default")
    if file.need("tokenizer.ggml.model") == "gpt2" and splitting not in _SPLITTING:
        raise CheckpointError(
            f"{file.path} splits text before tokenizing it in a way that is not supported ({splitting}). "
            "Use the model as safetensors."
        )
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise file.damaged(
            f"its tokenizer does not convert ({' '.join(str(error).split())[:200]})"
        ) from error
    if splitting == "command-r":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    if splitting in _DIGIT_SPLITTING:
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
