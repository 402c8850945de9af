"""Does the split model write what the unsplit one writes? (Paper A, section 6.5, with the right logits.)

Three writers per prompt: the unsplit model through the library's own ``generate``; the split model, one
token per round trip; and the split model with speculation. Logits are recorded where each token was
decided, so the self-perplexity of a speculative run is that of the text it wrote.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from aparte.answer import Writer
from aparte.config import Sampling, Stopping
from aparte.model.parts import Blueprint, convert
from aparte.speculate.common import CommonTable
from aparte.speculate.drafter import Drafter, Outcome, make_drafter
from aparte.speculate.neural import TreeModel
from aparte.speculate.settings import Decoding
from aparte.speculate.tree import DraftTree


@dataclass(frozen=True)
class Written:
    """Tokens and the logits that decided each of them, ``[T, V]``."""

    tokens: list[int]
    logits: torch.Tensor

    @property
    def nll(self) -> float:
        """Sum of negative log-likelihoods of the tokens under the logits that decided them."""
        log_probabilities = self.logits.log_softmax(dim=-1)
        chosen = log_probabilities.gather(1, torch.tensor(self.tokens)[:, None])
        return float(-chosen.sum())


class Reference:
    """The unsplit model, run by ``transformers`` alone: its cache, its masks, its ``generate``."""

    def __init__(self, blueprint: Blueprint, eos: frozenset[int]) -> None:
        self._model = load_unsplit(blueprint)
        self._device = blueprint.precision.device
        self._eos = sorted(eos)

    @torch.inference_mode()
    def write(self, prompt: Sequence[int], max_new_tokens: int) -> Written:
        """Greedy continuation."""
        tokens = torch.tensor([list(prompt)], device=self._device)
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._eos or None,
            pad_token_id=self._eos[0] if self._eos else 0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return Written(
            [int(token) for token in output.sequences[0, len(prompt) :]],
            torch.cat([row.float().cpu() for row in output.logits]),
        )


def load_unsplit(blueprint: Blueprint, layers: int | None = None) -> Any:
    """The model of ``transformers`` in our precision; only its first ``layers``, if that is given."""
    from transformers import AutoConfig, AutoModelForCausalLM

    precision, folder = blueprint.precision, blueprint.checkpoint.folder
    settings: dict[str, Any] = {}
    if layers is not None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        settings["config"] = config
    with _no_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=precision.dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **settings,
        )
    table = model.get_input_embeddings().weight.data
    table.copy_(table.to(precision.table))  # as the device keeps it
    head = model.get_output_embeddings()
    model.set_output_embeddings(nn.Identity())
    convert(model, precision)
    ends = nn.ModuleList([head])  # which has numbers of its own, as on the device
    convert(ends, replace(precision, linears=precision.head))
    model.set_output_embeddings(ends[0])
    return model.eval()


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Silence the library's own progress bars; the switch is global, so it is set back."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class _Recorder:
    """A drafter that passes everything on and keeps the logits of the path that was taken."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.runs_ahead = inner.runs_ahead
        self.rows: list[torch.Tensor] = []

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        return self._inner.propose(context, budget)

    def observe(self, outcome: Outcome) -> None:
        # What was known before was recorded then.
        taken = [0, *(1 + node for node in outcome.accepted.path)][outcome.known :]
        self.rows.append(outcome.logits[taken].cpu())
        self._inner.observe(outcome)


def write_split(
    writer: Writer,
    prompt: Sequence[int],
    decoding: Decoding,
    max_new_tokens: int,
    models: Mapping[str, TreeModel | CommonTable] | None = None,
) -> Written:
    """Greedy continuation by the split model; ``models`` are the neural ones that ``decoding`` needs."""
    recorder = _Recorder(make_drafter(decoding, models=models))
    answer = writer.complete(
        prompt,
        recorder,
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(max_new_tokens=max_new_tokens),
    )
    return Written(answer.token_ids, torch.cat(recorder.rows)[: len(answer.token_ids)])


@dataclass
class Report:
    """The comparison, prompt by prompt; written out as in design section 8."""

    dtype: str
    wire: str
    cut: str
    decode: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    _nll: dict[str, float] = field(default_factory=dict)
    _tokens: dict[str, int] = field(default_factory=dict)

    def add(self, unsplit: Written, sequential: Written, speculative: Written) -> dict[str, Any]:
        """Compare one prompt's three answers."""
        for name, written in (
            ("unsplit", unsplit),
            ("sequential", sequential),
            ("speculative", speculative),
        ):
            self._nll[name] = self._nll.get(name, 0.0) + written.nll
            self._tokens[name] = self._tokens.get(name, 0) + len(written.tokens)
        row = {
            "tokens": len(unsplit.tokens),
            "same_tokens": min(shared(unsplit, sequential), shared(unsplit, speculative)),
            "identical": unsplit.tokens == sequential.tokens == speculative.tokens,
            "speculative_is_sequential": sequential.tokens == speculative.tokens,
            "max_logit_diff": max(largest_gap(unsplit, sequential), largest_gap(unsplit, speculative)),
            "speculative_logit_diff": largest_gap(sequential, speculative),
        }
        self.rows.append(row)
        return row

    @property
    def identical_share(self) -> float:
        """Share of the unsplit model's tokens that both split runs wrote before any difference."""
        total = sum(row["tokens"] for row in self.rows)
        return sum(row["same_tokens"] for row in self.rows) / total if total else 1.0

    @property
    def identical(self) -> bool:
        return all(row["identical"] for row in self.rows)

    @property
    def speculative_is_sequential(self) -> bool:
        return all(row["speculative_is_sequential"] for row in self.rows)

    @property
    def speculative_logit_diff(self) -> float:
        """Largest difference between sequential and speculative logits after the same text."""
        return max((row["speculative_logit_diff"] for row in self.rows), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The fields of design section 8, and one row per prompt."""
        perplexity = {name: round(math.exp(nll / self._tokens[name]), 6) for name, nll in self._nll.items()}
        return {
            "identical_share": round(self.identical_share, 6),
            "identical": self.identical,
            "speculative_is_sequential": self.speculative_is_sequential,
            "max_logit_diff": max((row["max_logit_diff"] for row in self.rows), default=0.0),
            "speculative_logit_diff": self.speculative_logit_diff,
            "self_perplexity": perplexity,
            "prompts": len(self.rows),
            "dtype": self.dtype,
            "wire": self.wire,
            "cut": self.cut,
            "decode": self.decode,
            "rows": self.rows,
        }


def shared(left: Written, right: Written) -> int:
    """Number of tokens before the first difference."""
    pairs = zip(left.tokens, right.tokens, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(len(left.tokens), len(right.tokens))
    )


def largest_gap(left: Written, right: Written) -> float:
    """Largest difference of two logits that were computed after the same text."""
    rows = min(shared(left, right) + 1, len(left.tokens), len(right.tokens))
    return float((left.logits[:rows] - right.logits[:rows]).abs().max()) if rows else 0.0


def verify(
    reference: Reference,
    writer: Writer,
    prompts: Sequence[Sequence[int]],
    report: Report,
    *,
    decoding: Decoding,
    max_new_tokens: int,
    models: Mapping[str, TreeModel | CommonTable] | None = None,
    on_prompt: Callable[[int, int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run all three on each prompt, fill ``report`` and yield its rows as they come."""
    for done, prompt in enumerate(prompts):
        if on_prompt:
            on_prompt(done, len(prompts))
        unsplit = reference.write(prompt, max_new_tokens)
        sequential = write_split(writer, prompt, Decoding(decode="sequential"), max_new_tokens)
        speculative = write_split(writer, prompt, decoding, max_new_tokens, models)
        yield report.add(unsplit, sequential, speculative)
    if on_prompt:
        on_prompt(len(prompts), len(prompts))
