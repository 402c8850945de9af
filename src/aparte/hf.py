"""A model on two machines for scripts that were written for Hugging Face ``transformers``.

>>> from aparte.hf import AparteForCausalLM
>>> model = AparteForCausalLM.from_pretrained("smollm2-135m", cloud="ws://127.0.0.1:7600")
>>> tokens = model.generate(**tokenizer("Why is", return_tensors="pt"), max_new_tokens=16)

``generate`` takes and gives what that of ``transformers`` does. What it cannot do as asked it refuses by
name; nothing that would change the text is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from aparte.answer import Answer
from aparte.api import Aparte
from aparte.errors import UserError
from aparte.options import Options

#: Settings that are followed, with what ``transformers`` takes where nobody says anything.
_FOLLOWED: dict[str, Any] = {
    "max_length": None,
    "max_new_tokens": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "pad_token_id": None,
    "eos_token_id": None,
}
#: Settings that do not change the text: of caches, of beams that there are none of, of other drafting.
_WITHOUT_EFFECT = frozenset(
    [
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "disable_compile",
        "compile_config", "prefill_chunk_size", "early_stopping", "length_penalty", "bos_token_id",
        "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
        "max_matching_ngram_size", "transformers_version", "_from_model_config",
    ]
)  # fmt: skip
#: Settings for which 1 is "off"; for all others it is 0, False, or nothing.
_ONE_IS_OFF = frozenset(
    [
        "num_beams", "num_beam_groups", "typical_p", "repetition_penalty", "encoder_repetition_penalty",
        "guidance_scale",
    ]
)  # fmt: skip
_DEFAULT_NEW_TOKENS = 20


@dataclass
class AparteOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """As of ``transformers``, and what each row took."""

    answers: list[Answer] | None = None


class AparteForCausalLM:
    """What scripts use of a causal language model: ``generate``, and what describes it."""

    main_input_name = "input_ids"

    def __init__(self, model: Aparte) -> None:
        self._model = model
        self.config: Any = model.blueprint.config
        folder = model.blueprint.checkpoint.folder
        if (folder / "generation_config.json").is_file():
            self.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        else:
            self.generation_config = GenerationConfig.from_model_config(self.config)
        if self.generation_config.eos_token_id is None:
            self.generation_config.eos_token_id = sorted(model.codec.eos) or None

    @classmethod
    def from_pretrained(cls, model: str, **settings: Any) -> AparteForCausalLM:
        """Connect as :meth:`aparte.Aparte.connect` does, with its ``settings``: ``cloud``, ``cut``, …"""
        return cls(Aparte.connect(model, **settings))

    @property
    def aparte(self) -> Aparte:
        """The model underneath, which can do more."""
        return self._model

    @property
    def device(self) -> torch.device:
        """Where this machine's part of the model computes. Inputs may be anywhere."""
        return self._model.blueprint.precision.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.blueprint.precision.dtype

    def can_generate(self) -> bool:
        return True

    def eval(self) -> AparteForCausalLM:
        """Itself: it is never anything else."""
        return self

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        **settings: Any,
    ) -> Tensor | AparteOutput:
        """Continue each row of ``input_ids`` ``[B, T]``; rows are written one after the other.

        Gives ``[B * num_return_sequences, T + new]``, padded on the right. With ``do_sample`` every row has a
        seed of torch's global generator, so that ``torch.manual_seed`` makes it repeatable; the draws
        themselves are this package's own. Raises :class:`UserError` for settings that cannot be followed.
        """
        if inputs is not None and input_ids is not None:
            raise UserError("inputs and input_ids are the same thing. Give one of them.")
        ids = inputs if inputs is not None else input_ids
        if ids is None or ids.ndim != 2 or not ids.shape[1] or ids.is_floating_point():
            raise UserError("generate needs input_ids: token ids of shape [B, T], with at least one token.")
        config = self._followed(generation_config, settings)
        rows = list(_unpadded(ids, attention_mask))
        copies = int(config["num_return_sequences"])
        if copies > 1 and not config["do_sample"]:
            raise UserError("num_return_sequences above 1 needs do_sample: greedy rows would be the same.")
        if streamer is not None and len(rows) * copies > 1:
            raise UserError("A streamer shows one row. Leave it out, or give a batch of one.")
        eos = _ids(config["eos_token_id"])
        new_tokens = _new_tokens(config, ids.shape[1])
        answers = []
        for row in rows:
            for _ in range(copies):
                options = _options(config, new_tokens, eos)
                answers.append(self._write(row, options, streamer))
        padding = config["pad_token_id"]
        if padding is None:
            padding = eos[0] if eos else 0
        sequences = _joined(ids.repeat_interleave(copies, 0), answers, int(padding))
        if not config["return_dict_in_generate"]:
            return sequences
        return AparteOutput(sequences=sequences, answers=answers)

    def close(self) -> None:
        """End all sessions."""
        self._model.close()

    def __enter__(self) -> AparteForCausalLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises :class:`UserError`: logits of whole sequences are not to be had from two machines."""
        raise UserError("A split model only generates: call model.generate(...) instead of model(...).")

    def _write(self, row: list[int], options: Options, streamer: Any) -> Answer:
        if streamer is None:
            return self._model.generate(row, **vars(options))
        streamer.put(torch.tensor([row]))
        with self._model.stream(row, **vars(options)) as stream:
            for part in stream:
                for token in part.tokens:
                    streamer.put(torch.tensor([token]))
        streamer.end()
        return stream.answer

    def _followed(self, given: GenerationConfig | None, settings: dict[str, Any]) -> dict[str, Any]:
        """The values of :data:`_FOLLOWED`: of ``settings``, else of ``given``, else of the model."""
        layers = [config.to_dict() for config in (self.generation_config, given) if config is not None]
        merged: dict[str, Any] = {}
        for layer in layers:
            merged |= {name: value for name, value in layer.items() if value is not None}
        merged |= settings
        for name, value in merged.items():
            if name in _FOLLOWED or name in _WITHOUT_EFFECT or _is_off(name, value):
                continue
            raise UserError(
                f"generate cannot follow {name}={value!r} with a split model. Leave it out; what it follows: "
                f"{', '.join(_FOLLOWED)}."
            )
        chosen = _FOLLOWED | {name: value for name, value in merged.items() if name in _FOLLOWED}
        for name, default in _FOLLOWED.items():
            if chosen[name] is None:
                chosen[name] = default
        return chosen


def _is_off(name: str, value: Any) -> bool:
    if isinstance(value, int | float):
        return value == (1 if name in _ONE_IS_OFF else 0)
    return value is None or (isinstance(value, list | tuple | dict) and not value)


def _options(config: dict[str, Any], new_tokens: int, eos: tuple[int, ...]) -> Options:
    if not config["do_sample"]:
        return Options(max_new_tokens=new_tokens, eos=eos)
    return Options(
        max_new_tokens=new_tokens,
        temperature=float(config["temperature"]),
        top_k=int(config["top_k"]),
        top_p=float(config["top_p"]),
        min_p=float(config["min_p"]),
        seed=int(torch.randint(2**62, ())),
        eos=eos,
    )


def _new_tokens(config: dict[str, Any], length: int) -> int:
    if config["max_new_tokens"] is not None:
        return int(config["max_new_tokens"])
    if config["max_length"] is None:
        return _DEFAULT_NEW_TOKENS
    if (left := int(config["max_length"]) - length) < 1:
        raise UserError(
            f"The prompt has {length} tokens, and max_length is {config['max_length']}, prompt included. "
            "Give max_new_tokens instead."
        )
    return left


def _unpadded(ids: Tensor, mask: Tensor | None) -> Iterator[list[int]]:
    """Each row without the padding on its left."""
    if mask is None:
        yield from ids.tolist()
        return
    if mask.shape != ids.shape:
        raise UserError(
            f"attention_mask has the shape {list(mask.shape)}, input_ids {list(ids.shape)}; they must agree."
        )
    for row, kept in zip(ids.tolist(), mask.bool().tolist(), strict=True):
        first = kept.index(True) if any(kept) else len(kept)
        if not all(kept[first:]) or first == len(kept):
            raise UserError(
                "attention_mask may leave out tokens on the left only, and not all of them. Tokenize with "
                "padding_side='left'."
            )
        yield row[first:]


def _joined(ids: Tensor, answers: Sequence[Answer], padding: int) -> Tensor:
    longest = max(len(answer.token_ids) for answer in answers)
    written = [answer.token_ids + [padding] * (longest - len(answer.token_ids)) for answer in answers]
    return torch.cat([ids, torch.tensor(written, dtype=ids.dtype, device=ids.device)], dim=1)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(token) for token in value)
