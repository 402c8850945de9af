"""The bridge as an edge model: with true states it drafts what split mode drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aparte.answer import Writer
from aparte.bridge.draft import BridgeDraft
from aparte.bridge.edge import EdgeBridge, EdgeParts
from aparte.bridge.file import Bridge, find_bridge, load_bridge, save_bridge
from aparte.bridge.teacher import Teacher
from aparte.config import DEFAULT_MODEL, Compute, Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from aparte.session import Session
from aparte.speculate.drafter import Outcome
from aparte.speculate.neural import Guess
from aparte.speculate.settings import Decoding
from aparte.speculate.tree import DraftTree
from aparte.target.split import SplitTarget
from bridge.conftest import CUT, new_net
from running import FLOAT32

PROMPT = "the cat sat on the mat and the dog sat on the log and the cat"
DRAFT_IDS = torch.arange(0, 300, 2)


@pytest.fixture(scope="session")
def bridge_file(teacher: Teacher, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edge") / "bridge.safetensors"
    fingerprint = take_fingerprint(Blueprint.open(llama_folder, FLOAT32), CUT, "tiny")
    save_bridge(path, new_net(teacher).half().float(), DRAFT_IDS, fingerprint)
    return path


@pytest.fixture
def blueprint(llama_folder: Path) -> Blueprint:
    return Blueprint.open(llama_folder, FLOAT32)


@pytest.fixture
def bridge(bridge_file: Path, blueprint: Blueprint) -> Bridge:
    return load_bridge(bridge_file, blueprint, CUT)


@pytest.fixture
def parts(bridge: Bridge, blueprint: Blueprint) -> EdgeParts:
    return EdgeParts(bridge, blueprint, CUT)


def same(one: Guess | None, other: Guess | None) -> None:
    assert one is not None
    assert other is not None
    assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
    assert one.tokens[0] == other.tokens[0]


class Both:
    """Drafts with the edge model and with split mode's bridge, and compares what they say."""

    runs_ahead = False

    def __init__(self, edge: EdgeBridge, draft: BridgeDraft) -> None:
        self._edge = edge
        self._draft = draft
        self.compared = 0

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        theirs = self._draft.begin(context)
        ours = self._edge.begin(context)
        if theirs is None:
            return DraftTree()
        same(ours, theirs)
        a, b = theirs.tokens[:2]
        for parents, tokens in (([-1, -1], [a, b]), ([1, 0], [a, b]), ([2], [b])):
            expected = self._draft.extend(parents, tokens)
            for one, other in zip(self._edge.extend(parents, tokens), expected, strict=True):
                same(one, other)
        self.compared += 1
        return DraftTree((a, b, a), (-1, -1, 1), (0.5, 0.3, 0.2))

    def observe(self, outcome: Outcome) -> None:
        pass


def test_with_true_states_it_drafts_what_split_mode_drafts(
    llama_folder: Path, bridge: Bridge, blueprint: Blueprint, parts: EdgeParts
) -> None:
    writer = open_writer(Blueprint.open(llama_folder, FLOAT32), "tiny", CUT, wire="float32")
    writer.codec.eos = frozenset()
    target = writer.target
    assert isinstance(target, SplitTarget)
    edge = EdgeBridge(parts, writer.session, target.keep_states())
    both = Both(edge, BridgeDraft(EdgeParts(bridge, blueprint, CUT), target, writer.session))
    for prompt in (PROMPT, "a dog", PROMPT + " sat"):  # the last one keeps a part of the rows
        write(writer, both, prompt)
    assert both.compared > 40


def write(writer: Writer, drafter: object, prompt: str, count: int = 24) -> list[int]:
    answer, pieces = writer.write(
        writer.codec.encode(prompt),
        drafter,  # type: ignore[arg-type]
        sampling=Sampling(),
        decoding=Decoding("bridge", max_nodes=8),
        stopping=Stopping(max_new_tokens=count),
    )
    list(pieces)
    return answer.token_ids


def step_by_step(parts: EdgeParts, tokens: Sequence[int]) -> Guess | None:
    """What a new edge model says that reads one token after the other."""
    edge, guess = EdgeBridge(parts, Session()), None
    for stop in range(1, len(tokens) + 1):
        guess = edge.begin(tokens[:stop])
    return guess


class TestWithoutStates:
    def test_a_whole_text_at_once_is_the_same_as_token_by_token(self, parts: EdgeParts) -> None:
        tokens = [5 + number % 250 for number in range(160)]  # more than one pass
        same(EdgeBridge(parts, Session()).begin(tokens), step_by_step(parts, tokens))

    def test_whatever_was_drafted_and_rolled_back_before(self, parts: EdgeParts) -> None:
        pick = random.Random(1)
        edge, context = EdgeBridge(parts, Session()), [5, 6, 7]
        for _ in range(12):
            same(edge.begin(context), step_by_step(parts, context))
            paths: list[list[int]] = []
            for _ in range(pick.randint(0, 3)):
                parents = [pick.randrange(-1, len(paths)) for _ in range(2)]
                tokens = [pick.randrange(5) for _ in parents]
                guesses = edge.extend(parents, tokens)
                for parent, token, guess in zip(parents, tokens, guesses, strict=True):
                    paths.append([*(paths[parent] if parent >= 0 else []), token])
                    same(guess, step_by_step(parts, [*context, *paths[-1]]))
            if paths and pick.random() < 0.6:
                context = [*context, *pick.choice(paths), pick.randrange(5)]
            else:
                context = [*context[: pick.randint(1, len(context))], pick.randrange(5)]

    def test_what_it_cannot_start_from(self, parts: EdgeParts) -> None:
        edge = EdgeBridge(parts, Session())
        assert edge.begin([]) is None
        assert edge.begin([300]) is None
        assert edge.begin([1] * parts.max_context) is None
        assert edge.begin([1, 2]) is not None
        with pytest.raises(ValueError, match="parent"):
            edge.extend([3], [1])
        assert edge.extend([], []) == []


class TestStates:
    def test_a_prompt_whose_states_are_under_way_is_waited_for(
        self, llama_folder: Path, parts: EdgeParts
    ) -> None:
        writer = open_writer(Blueprint.open(llama_folder, FLOAT32), "tiny", CUT, wire="float32")
        target = writer.target
        assert isinstance(target, SplitTarget)
        edge = EdgeBridge(parts, writer.session, states := target.keep_states())
        prompt = [7] * 60
        assert edge.begin(prompt) is None
        writer.session.commit(prompt[:50], range(50))
        assert edge.begin(prompt) is None  # sent, not answered
        states.put_middle_at(range(50), torch.zeros(50, 32))
        assert edge.begin(prompt) is not None
        writer.session.clear()
        states.expect(writer.session.chain(1))
        assert states.returned(range(50)) == 0


class TestMemory:
    def test_every_part_is_counted(self, parts: EdgeParts, llama_folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(llama_folder, local_files_only=True)
        assert parts.whole_parameters == sum(value.numel() for value in model.parameters())
        layer = sum(value.numel() for value in model.model.layers[0].parameters())
        table = model.model.embed_tokens.weight.numel()
        bridge = layer + 3 * 32 * 32 + 4 * 32 + 150 * 32
        assert parts.parameters == table + 4 * layer + bridge + 32

    @pytest.mark.model
    def test_of_the_default_model_it_is_two_fifths_at_most(self, default_model: Path) -> None:
        blueprint = Blueprint.open(default_model, Compute())
        path = find_bridge(DEFAULT_MODEL, Cut())
        assert path is not None
        parts = EdgeParts(load_bridge(path, blueprint, Cut()), blueprint, Cut())
        assert 0.3 < parts.parameters / parts.whole_parameters <= 0.4
