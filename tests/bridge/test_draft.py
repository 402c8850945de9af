"""Drafting with a bridge: what it guesses is what was trained, and the text does not depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aparte.answer import Writer
from aparte.bridge.draft import BridgeDraft, BridgeParts
from aparte.bridge.file import load_bridge, save_bridge
from aparte.bridge.net import BridgeNet
from aparte.bridge.teacher import Teacher
from aparte.bridge.unroll import unroll
from aparte.config import Sampling, Stopping
from aparte.device import open_writer
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import Outcome, make_drafter
from aparte.speculate.neural import Guess
from aparte.speculate.settings import Decoding
from aparte.speculate.tree import DraftTree
from aparte.target.base import Ask
from aparte.target.split import SplitTarget
from bridge.conftest import CUT, new_net
from running import FLOAT32

PROMPT = "the cat sat on the mat and the dog sat on the log and the cat"
DRAFT_IDS = torch.arange(0, 300, 2)


@pytest.fixture(scope="session")
def net(teacher: Teacher) -> BridgeNet:
    net = new_net(teacher)
    # What is saved in half precision should be compared in it.
    return net.half().float()


@pytest.fixture
def writer(llama_folder: Path) -> Writer:
    writer = open_writer(Blueprint.open(llama_folder, FLOAT32), "tiny", CUT, wire="float32")
    writer.codec.eos = frozenset()
    return writer


@pytest.fixture
def draft(writer: Writer, net: BridgeNet, llama_folder: Path, tmp_path: Path) -> BridgeDraft:
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    path = tmp_path / "bridge.safetensors"
    save_bridge(path, net, DRAFT_IDS, take_fingerprint(blueprint, CUT, "tiny"))
    parts = BridgeParts(load_bridge(path, blueprint, CUT), blueprint)
    assert isinstance(writer.target, SplitTarget)
    return BridgeDraft(parts, writer.target, writer.session)


def tokens_of(
    writer: Writer, drafter: object, sampling: Sampling | None = None, decoding: Decoding | None = None
) -> list[int]:
    answer, pieces = writer.write(
        writer.codec.encode(PROMPT),
        drafter,  # type: ignore[arg-type]
        sampling=sampling or Sampling(),
        decoding=decoding or Decoding("bridge", max_nodes=8),
        stopping=Stopping(max_new_tokens=40),
    )
    list(pieces)
    return answer.token_ids


class _Watcher:
    """Drafts a chain and some branches with the bridge, and keeps what it said."""

    runs_ahead = False

    def __init__(self, draft: BridgeDraft) -> None:
        self._draft = draft
        self.said: list[tuple[tuple[int, ...], tuple[int, ...], Guess]] = []
        self.refused = 0

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        first = self._draft.begin(context)
        if first is None:
            self.refused += 1
            return DraftTree()
        a, b = first.tokens[:2]
        below = self._draft.extend([-1, -1], [a, b])
        c = below[1].tokens[0]
        deeper = self._draft.extend([1, 0], [c, c])
        for path, guess in (
            ((), first),
            ((a,), below[0]),
            ((b,), below[1]),
            ((b, c), deeper[0]),
            ((a, c), deeper[1]),
        ):
            self.said.append((tuple(context), path, guess))
        return DraftTree((a, b, c), (-1, -1, 1), (0.5, 0.3, 0.2))

    def observe(self, outcome: Outcome) -> None:
        pass


def test_drafting_says_what_training_saw(
    writer: Writer, draft: BridgeDraft, net: BridgeNet, teacher: Teacher
) -> None:
    watcher = _Watcher(draft)
    tokens_of(writer, watcher)
    assert watcher.refused <= 1  # the first step carries the prompt
    assert len(watcher.said) > 50
    head = teacher.head[DRAFT_IDS]
    for context, path, guess in watcher.said:
        sequence = torch.tensor([*context, *path])
        front, middle = _true_states(teacher, sequence)
        with torch.no_grad():
            *_, last = unroll(net, teacher, front, middle, 1 + len(path))
            probabilities = (last.final[0, -1] @ head.T).softmax(dim=-1)
        best = probabilities.topk(len(guess.tokens))
        assert guess.probabilities == pytest.approx(best.values.tolist(), abs=2e-4), path
        assert guess.tokens[0] == int(DRAFT_IDS[best.indices[0]])


def _true_states(teacher: Teacher, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from aparte.bridge.teacher import RowsCache

    cache = RowsCache(1, len(tokens))
    states = [teacher.step(token[None], cache)[0] for token in tokens]
    front = torch.stack([state.front for state in states], dim=1).clone()
    return front, torch.stack([state.middle for state in states], dim=1).clone()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)])
@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("mode", ["bridge", "bridge+context+recycling", "auto"])
def test_the_text_is_that_of_sequential_decoding(
    writer: Writer, draft: BridgeDraft, sampling: Sampling, in_flight: int, mode: str
) -> None:
    expected = tokens_of(writer, make_drafter(Decoding("sequential")), sampling, Decoding("sequential"))
    decoding = Decoding(mode, in_flight=in_flight)
    drafter = make_drafter(decoding, models={"bridge": draft})
    assert tokens_of(writer, drafter, sampling, decoding) == expected
    # A second answer of the same conversation finds everything in order.
    assert tokens_of(writer, drafter, sampling, decoding) == expected


def test_leaves_steps_under_way_alone(writer: Writer, draft: BridgeDraft) -> None:
    tokens_of(writer, make_drafter(Decoding("sequential")), decoding=Decoding("sequential"))
    context = [*writer.session.tokens, 5]
    assert draft.begin(context) is not None
    assert draft.begin(context[:-1]) is None
    assert draft.begin([*context, 6]) is None
    target = writer.target
    assert isinstance(target, SplitTarget)
    target.submit(writer.session.chain(1), [5], Ask(0))
    assert draft.begin(context) is None
    target.collect()
    assert draft.begin(context) is not None
