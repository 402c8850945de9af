"""Rotary embeddings that are others for long texts: ``generate`` computes a text anew there; so do we."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aparte.adjust import AdjustedTarget
from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.load import load_engine
from aparte.config import Cut, Sampling, ServerLimits
from aparte.decode import Job, decode
from aparte.errors import SlotError, UserError
from aparte.model.families import longest_context, rotary_switch, uniform_context
from aparte.model.parts import Blueprint
from aparte.model.stage import Item, Stage
from aparte.privacy.shape import ConstantShape, ShapeSettings
from aparte.session import Session
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.settings import Decoding
from aparte.step import ROOT, Step, chain_parents
from aparte.target.base import Target
from aparte.target.draft import DraftTarget
from aparte.target.local import LocalTarget
from aparte.target.split import DeviceParts, SplitTarget
from dialogue import open_link
from drafters import Oracle, RandomTrees
from running import FLOAT32, running_server
from tiny import tiny_model

#: The length beyond which the tiny model's embeddings are others.
SWITCH = 128
CUT = Cut(1, 1)
TEXT = [(37 * place + 11) % 250 for place in range(200)]


class Reference:
    """What the library writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._known: dict[tuple[int, int], list[int]] = {}

    def text(self, prompt: int, count: int) -> list[int]:
        """After the first tokens of the text."""
        if (prompt, count) not in self._known:
            self._known[prompt, count] = self.after(TEXT[:prompt], count)
        return self._known[prompt, count]

    def after(self, prompt: Sequence[int], count: int) -> list[int]:
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
        )
        answer: list[int] = output[0, len(prompt) :].tolist()
        return answer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("longrope")
    tiny_model("phi3-longrope", layers=3).save_pretrained(folder)
    return Reference(folder)


@pytest.fixture(scope="module")
def parts(reference: Reference) -> DeviceParts:
    return DeviceParts(Blueprint.open(reference.folder, FLOAT32), CUT)


@pytest.fixture(scope="module")
def split(reference: Reference, parts: DeviceParts) -> SplitTarget:
    engine = load_engine(Blueprint.open(reference.folder, FLOAT32), CUT, "tiny")
    return SplitTarget(parts, InProcessLink(engine, "float32"), "float32")


def written(
    target: Target, session: Session, prompt: int, count: int, drafter: Drafter, in_flight: int = 1
) -> list[int]:
    job = Job(tuple(TEXT[:prompt]), Sampling(), count, frozenset(), 12, in_flight=in_flight)
    return [token for block in decode(target, session, drafter, job) for token in block.tokens]


def drafter_for(mode: str, text: Sequence[int]) -> Drafter:
    if mode == "sequential":
        return Nothing()
    if mode == "tree":
        return RandomTrees(text, seed=1)
    return Oracle(text, block=3) if mode == "pipelined" else make_drafter(Decoding(mode))


@pytest.mark.parametrize("mode", ["sequential", "tree", "auto", "lookahead", "pipelined"])
def test_an_answer_that_grows_too_long_is_what_the_library_writes(
    reference: Reference, split: SplitTarget, mode: str
) -> None:
    prompt, count = SWITCH - 10, 24
    expected = reference.text(prompt, count)
    split.reset()
    drafter = drafter_for(mode, [*TEXT[:prompt], *expected])
    assert written(split, Session(), prompt, count, drafter, 3 if mode == "pipelined" else 1) == expected


def test_it_matters_which_embeddings_are_used(reference: Reference, tmp_path: Path) -> None:
    """Otherwise these tests would show nothing."""
    prompt, count = SWITCH - 10, 24
    expected = reference.text(prompt, count)
    config = AutoConfig.from_pretrained(reference.folder)
    assert config.rope_parameters["short_factor"] != config.rope_parameters["long_factor"]
    for factors in ("short_factor", "long_factor"):
        same = AutoConfig.from_pretrained(reference.folder)
        chosen = same.rope_parameters[factors]
        same.rope_parameters |= {"short_factor": chosen, "long_factor": chosen}
        model: Any = AutoModelForCausalLM.from_pretrained(reference.folder, config=same, dtype=torch.float32)
        logits = model(torch.tensor([[*TEXT[:prompt], *expected]])).logits[0, prompt - 1 : -1]
        assert logits.argmax(-1).tolist() != expected


@pytest.mark.parametrize("prompt", [SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 20])
@pytest.mark.parametrize("way", ["split", "local"])
def test_prompts_around_that_length(reference: Reference, split: SplitTarget, prompt: int, way: str) -> None:
    expected = reference.text(prompt, 4)
    target: Target = split if way == "split" else LocalTarget(Blueprint.open(reference.folder, FLOAT32))
    target.reset()
    drafter = RandomTrees([*TEXT[:prompt], *expected], seed=2)
    assert written(target, Session(), prompt, 4, drafter) == expected


def test_conversations_go_there_and_back(reference: Reference, split: SplitTarget) -> None:
    split.reset()
    session = Session()
    near = SWITCH - 2
    for prompt, count in ((20, 4), (SWITCH + 12, 4), (SWITCH + 14, 4), (30, 4), (near, 6), (near, 6)):
        drafter = RandomTrees([*TEXT[:prompt], *reference.text(prompt, count)], seed=3)
        assert written(split, session, prompt, count, drafter) == reference.text(prompt, count)


def test_a_long_text_goes_on_from_what_is_there(reference: Reference, split: SplitTarget) -> None:
    split.reset()
    session = Session()
    written(split, session, SWITCH + 12, 2, Nothing())
    job = Job(tuple(TEXT[: SWITCH + 20]), Sampling(), 1, frozenset(), 0)
    (block,) = decode(split, session, Nothing(), job)
    assert block.reused >= SWITCH + 12


def test_over_a_real_link_with_tight_limits(reference: Reference, parts: DeviceParts) -> None:
    """The slots that a long text begins at do not count as nodes that nobody committed."""
    limits = ServerLimits(max_nodes_per_step=32, max_pending_nodes=64)
    with running_server(reference.folder, CUT, limits=limits) as (_, url):
        target = SplitTarget(parts, open_link(reference.folder, url, cut=CUT), "float32")
        try:
            expected = reference.text(SWITCH - 10, 24)
            drafter = RandomTrees([*TEXT[: SWITCH - 10], *expected], seed=4)
            session = Session()
            assert written(target, session, SWITCH - 10, 24, drafter) == expected
            other = tuple(TEXT[: SWITCH + 5][::-1])  # shares nothing with what the cloud has
            job = Job(other, Sampling(), 3, frozenset(), 12)
            blocks = list(decode(target, session, Nothing(), job))
            assert [token for block in blocks for token in block.tokens] == reference.after(other, 3)
        finally:
            target.close()


def test_adjusted_logits_follow(reference: Reference, split: SplitTarget) -> None:
    prompt, count = SWITCH - 10, 24
    expected, session = reference.text(prompt, count), Session()
    split.reset()
    target = AdjustedTarget(split, session)
    target.begin(prompt, [lambda _written, logits: logits * 2])
    drafter = RandomTrees([*TEXT[:prompt], *expected], seed=5)
    assert written(target, session, prompt, count, drafter) == expected


@pytest.fixture(scope="module")
def stage(reference: Reference) -> Stage:
    return Blueprint.open(reference.folder, FLOAT32).stage(range(3))


class TestStage:
    @staticmethod
    def item(stage: Stage, length: int, origin: int) -> Item:
        hidden = torch.randn(length, 32, generator=torch.Generator().manual_seed(length))
        step = Step(0, 0, ROOT, origin, chain_parents(ROOT, origin, length))
        return Item(stage.new_cache(), step, hidden)

    def test_long_and_short_texts_share_a_pass(self, stage: Stage) -> None:
        def items() -> list[Item]:
            return [self.item(stage, 9, 0), self.item(stage, SWITCH + 5, SWITCH), self.item(stage, 9, SWITCH)]

        together = stage.forward_many(items())
        for output, item in zip(together, items(), strict=True):
            assert not isinstance(output, Exception)
            alone = stage.forward_one(item).hidden
            torch.testing.assert_close(output.hidden, alone, atol=1e-4, rtol=1e-4)

    def test_the_slot_that_a_text_begins_at_says_which(self, stage: Stage) -> None:
        short, long = (stage.forward_one(self.item(stage, 9, origin)).hidden for origin in (0, SWITCH))
        assert not torch.allclose(short, long, atol=1e-3)

    def test_a_long_text_that_begins_like_a_short_one_is_refused(self, stage: Stage) -> None:
        stage.forward_one(self.item(stage, SWITCH, 0))
        with pytest.raises(SlotError, match="more than 128 tokens has to begin at slot 128"):
            stage.forward_one(self.item(stage, SWITCH + 1, 0))


class TestWhereItEnds:
    """What cannot compute a text anew ends where it would have to."""

    def test_draft_mode(self, reference: Reference) -> None:
        blueprint = Blueprint.open(reference.folder, FLOAT32)

        class Link:
            max_context = 512

        assert DraftTarget(blueprint, Link(), "float32").max_context == SWITCH  # type: ignore[arg-type]

    def test_steps_of_one_shape(self, reference: Reference, parts: DeviceParts) -> None:
        engine = load_engine(Blueprint.open(reference.folder, FLOAT32), CUT, "tiny")
        target = SplitTarget(parts, InProcessLink(engine, "float32"), "float32")
        assert target.max_context == 512
        target.protect(shape=ConstantShape(ShapeSettings.parse("8"), SWITCH))
        assert target.max_context == SWITCH
        expected = reference.text(SWITCH - 10, 24)[:10]
        drafter = RandomTrees([*TEXT[: SWITCH - 10], *expected], seed=6)
        assert written(target, Session(), SWITCH - 10, 24, drafter) == expected
        with pytest.raises(UserError, match="context 128"):
            written(target, Session(), SWITCH, 1, Nothing())

    def test_families_that_the_library_does_not_begin_anew(self) -> None:
        """Their keys stay as they were, so that what is written depends on how the text was passed."""
        rope = tiny_model("phi3-longrope", layers=1).config.rope_parameters
        config = tiny_model("llama", layers=1, rope_parameters=dict(rope)).config
        assert (longest_context(config), uniform_context(config)) == (SWITCH, SWITCH)
        assert rotary_switch(config) is None

    def test_embeddings_that_follow_the_length_all_the_time(self) -> None:
        """Beyond the largest number of positions only, where the context ends anyway."""
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        config = tiny_model("llama", layers=1, rope_parameters=rope).config
        assert longest_context(config) == uniform_context(config) == config.max_position_embeddings


def test_a_session_keeps_its_origin_until_it_restarts() -> None:
    session = Session()
    assert not session.restart(SWITCH)  # nothing was sent: there is nothing to forget
    step = session.chain(3)
    assert (step.commit, step.base, step.parents) == (ROOT, SWITCH, (ROOT, SWITCH, SWITCH + 1))
    session.commit([1, 2, 3], step.slots)
    assert session.chain(1).base == SWITCH + 3
    session.clear()  # the cloud lost it
    assert session.chain(1).base == SWITCH
    assert session.restart(0)
    assert session.chain(1).base == 0
