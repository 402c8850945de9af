"""Every family writes what ``generate`` writes, however it is decoded, and the table in docs says so.

After a change run ``APARTE_WRITE_DOCS=1 pytest tests/model/test_families.py`` to write the table anew.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.load import load_engine
from aparte.config import Compute, Cut, Sampling
from aparte.decode import Job, decode
from aparte.errors import CheckpointError
from aparte.model.families import FAMILIES, REFUSED
from aparte.model.linear import packed_available
from aparte.model.parts import Blueprint
from aparte.model.stage import Item
from aparte.session import Session
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.settings import Decoding
from aparte.step import ROOT, Step, chain_parents
from aparte.target.split import DeviceParts, SplitTarget
from drafters import Oracle, RandomTrees
from running import FLOAT32
from tiny import VARIANTS, tiny_model

LAYERS = 3
CUT = Cut(1, 1)
#: Prompt and answer within the sliding windows of 8, and far beyond them.
LENGTHS = {"short": (4, 4), "long": (14, 18)}
MODES = ("sequential", "tree", "auto", "lookahead", "pipelined")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


@dataclass
class Subject:
    """A tiny model: what the library writes with it, and the same model in parts."""

    folder: Path
    target: SplitTarget
    texts: dict[str, tuple[list[int], list[int]]]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], bool]:
    """Whether a model was exact in a mode, as the tests below find."""
    return {}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(name: str) -> Subject:
        folder = tmp_path_factory.mktemp(name)
        tiny_model(name, layers=LAYERS).save_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        texts = {}
        for length, (prompt, answer) in LENGTHS.items():
            tokens = [(37 * place + 11) % 250 for place in range(prompt)]
            output = model.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, prompt, dtype=torch.long),
                do_sample=False,
                max_new_tokens=answer,
                eos_token_id=None,
            )
            texts[length] = tokens, output[0, prompt:].tolist()
        whole = torch.tensor([[*texts["long"][0], *texts["long"][1]]])
        blueprint = Blueprint.open(folder, FLOAT32)
        link = InProcessLink(load_engine(Blueprint.open(folder, FLOAT32), CUT, "tiny"), "float32")
        target = SplitTarget(DeviceParts(blueprint, CUT), link, "float32")
        return Subject(folder, target, texts, model(whole).logits[0])

    return make


def drafter_for(mode: str, text: Sequence[int]) -> Drafter:
    if mode == "sequential":
        return Nothing()
    if mode == "tree":
        return RandomTrees(text, seed=1)
    return Oracle(text, block=3) if mode == "pipelined" else make_drafter(Decoding(mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_written_is_what_the_library_writes(
    subjects: Any, results: dict[tuple[str, str], bool], name: str, mode: str
) -> None:
    subject = subjects(name)
    results[name, mode] = False
    for prompt, expected in subject.texts.values():
        subject.target.reset()
        job = Job(
            tuple(prompt),
            Sampling(),
            len(expected),
            frozenset(),
            12,
            in_flight=3 if mode == "pipelined" else 1,
        )
        blocks = list(decode(subject.target, Session(), drafter_for(mode, [*prompt, *expected]), job))
        assert [token for block in blocks for token in block.tokens] == expected
        if mode == "sequential":
            assert len(blocks) == len(expected)
        if mode == "pipelined" and len(expected) > 8:
            assert sum(block.record.ahead for block in blocks) > 0
    results[name, mode] = True


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_library(subjects: Any, name: str) -> None:
    """In steps of other sizes than the library's one, so that the sliding windows of a cache are seen."""
    subject = subjects(name)
    tokens = torch.tensor([token for part in subject.texts["long"] for token in part])
    blueprint = Blueprint.open(subject.folder, FLOAT32)
    stage, (embed, head) = blueprint.stage(range(LAYERS)), blueprint.ends()
    cache, rows = stage.new_cache(), []
    for number, start in enumerate(range(0, len(tokens), 7)):
        piece = tokens[start : start + 7]
        step = Step(
            number, 0, start - 1 if start else ROOT, start, chain_parents(start - 1, start, len(piece))
        )
        rows.append(head(stage.forward(cache, step, embed(piece))))
    torch.testing.assert_close(torch.cat(rows), subject.logits, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not packed_available(), reason="this CPU has no packed half-precision kernels")
@pytest.mark.parametrize("name", VARIANTS)
def test_fused_and_packed_layers_compute_what_the_library_does(subjects: Any, name: str) -> None:
    """Up to the rounding of weights to half precision, which both sides share."""
    folder = subjects(name).folder
    hidden = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    step = Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, 12))
    fast, plain = (
        blueprint.stage(range(LAYERS))
        for blueprint in (
            Blueprint.open(folder, Compute("packed16", "cpu")),
            Blueprint.open(folder, Compute("packed16", "cpu"), fused=False),
        )
    )
    got = fast.forward(fast.new_cache(), step, hidden)
    expected = plain.forward(plain.new_cache(), step, hidden)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_sessions_in_one_pass_get_what_each_gets_alone(subjects: Any, name: str) -> None:
    blueprint = Blueprint.open(subjects(name).folder, FLOAT32)
    stage, (embed, _) = blueprint.stage(range(LAYERS)), blueprint.ends()
    if not stage.shares_passes:
        assert name == "gemma2"  # its attention caps scores, which only the library's own does
        return
    steps = [Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, count)) for count in (3, 11)]
    hidden = [embed(torch.arange(5, 5 + len(step))) for step in steps]
    items = [Item(stage.new_cache(), step, rows) for step, rows in zip(steps, hidden, strict=True)]
    for output, step, rows in zip(stage.forward_many(items), steps, hidden, strict=True):
        assert not isinstance(output, Exception)
        alone = stage.forward(stage.new_cache(), step, rows)
        torch.testing.assert_close(output.hidden, alone, atol=1e-4, rtol=1e-4)


def config_of(family: str, folder: Path, **settings: Any) -> Path:
    AutoConfig.for_model(family, **settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["mamba", "jamba", "qwen3_next", "rwkv"])
def test_states_that_cannot_be_taken_back_are_refused_by_name(family: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"'{family}'.*cannot be taken back.*Supported: llama"):
        Blueprint.open(config_of(family, tmp_path), FLOAT32, weightless=True)


@pytest.mark.parametrize(
    ("family", "settings", "cause"),
    [
        ("gemma3", {}, "images"),
        ("llama4_text", {}, "chunked_attention"),
        ("gpt2", {}, "not in one list"),
        ("bart", {}, "encoder"),
        ("bert", {}, "embedding|list|left to right"),
    ],
)
def test_what_the_generic_path_cannot_run_is_refused_by_name(
    family: str, settings: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s)'{family}'.*not supported.*({cause})"):
        Blueprint.open(config_of(family, tmp_path, **settings), FLOAT32, weightless=True)


def test_no_family_is_both_supported_and_refused() -> None:
    assert not FAMILIES.keys() & REFUSED.keys()
    assert {family for family, _ in VARIANTS.values()} == FAMILIES.keys()


# -- The table -------------------------------------------------------------------------------------


def table(results: dict[tuple[str, str], bool]) -> str:
    head = f"| Model | `model_type` | {' | '.join(MODES)} |"
    lines = [head, "|---|---|" + "---|" * len(MODES)]
    for name, (family, _) in VARIANTS.items():
        cells = ["exact" if results[name, mode] else "differs" for mode in MODES]
        lines.append(f"| {name} | `{family}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_documented_table_is_what_was_found(results: dict[tuple[str, str], bool]) -> None:
    if len(results) < len(VARIANTS) * len(MODES):
        pytest.skip("only some of the models or modes were tried")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    documented, after = rest.split(END)
    if os.environ.get("APARTE_WRITE_DOCS"):
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}", encoding="utf-8")
    else:
        assert documented.strip() == table(results)
