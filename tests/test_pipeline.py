"""Steps sent ahead: the text never depends on them, and what was wrong about them leaves no trace."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aparte.answer import Writer
from aparte.cloud.engine import Engine
from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.load import load_engine
from aparte.cloud.server import MiddleServer
from aparte.config import Cut, Sampling, ServerLimits, Stopping
from aparte.decode import Committed, Job, decode
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.model.cache import SlotCache
from aparte.model.parts import Blueprint
from aparte.model.stage import Stage
from aparte.model.tree import SlotTree
from aparte.pipeline import likeliest_leaf, path_tokens
from aparte.session import Session
from aparte.speculate.accept import accept
from aparte.speculate.drafter import Drafter, Nothing, Outcome, make_drafter
from aparte.speculate.settings import Decoding
from aparte.speculate.tree import DraftTree
from aparte.step import Step
from aparte.target.base import Ask, Target
from aparte.target.local import LocalTarget
from aparte.target.split import DeviceParts, SplitTarget
from aparte.text.tokenizer import Codec
from aparte.wire.frames import Frame
from dialogue import PROMPT, open_link, wait_until
from drafters import Adversary, Oracle, all_drafters
from running import FLOAT32, running_server
from tiny import save_tiny

COUNT = 48
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=5)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
NAMES = ("oracle", "adversary", "random", "broken", "half right", "auto", "lookahead", "jacobi")


class HalfRight(Oracle):
    """The truth, but for a wrong token now and then, so that some steps sent ahead are of use."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        tokens = tuple(
            (token + 1) % 250 if (len(context) + place) % 13 == 0 else token
            for place, token in enumerate(tree.tokens)
        )
        return DraftTree(tokens, tree.parents, tree.probabilities)


def drafter_named(name: str, text: Sequence[int]) -> Drafter:
    if name in ("auto", "lookahead", "jacobi"):
        return make_drafter(Decoding(name))
    return {**all_drafters(text), "half right": HalfRight(text, block=4)}[name]


class Conversation:
    """A target and a session, for answers without an end-of-sequence token."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.session = Session()

    def blocks(
        self,
        prompt: Sequence[int] = PROMPT,
        drafter: Drafter | None = None,
        *,
        in_flight: int = 1,
        sampling: Sampling = GREEDY,
        count: int = COUNT,
        **more: Any,
    ) -> Iterator[Committed]:
        job = Job(
            tuple(prompt), sampling, count, frozenset(), more.pop("max_nodes", 8), in_flight=in_flight, **more
        )
        return decode(self.target, self.session, drafter or Nothing(), job)

    def tokens(self, *args: Any, **settings: Any) -> list[int]:
        return [token for block in self.blocks(*args, **settings) for token in block.tokens]


@pytest.fixture(scope="module")
def parts(llama_folder: Path) -> DeviceParts:
    return DeviceParts(Blueprint.open(llama_folder, FLOAT32), Cut())


@pytest.fixture(scope="module")
def shared(llama_folder: Path) -> Iterator[tuple[MiddleServer, str]]:
    with running_server(llama_folder) as (server, url):
        yield server, url


@pytest.fixture(params=["local", "in-process", "server"])
def conversation(
    request: pytest.FixtureRequest, llama_folder: Path, parts: DeviceParts, shared: tuple[MiddleServer, str]
) -> Iterator[Conversation]:
    if request.param == "local":
        yield Conversation(LocalTarget(Blueprint.open(llama_folder, FLOAT32)))
        return
    link: Any = (
        InProcessLink(load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny"), "float32")
        if request.param == "in-process"
        else open_link(llama_folder, shared[1])
    )
    target = SplitTarget(parts, link, "float32")
    yield Conversation(target)
    target.close()


@pytest.fixture(scope="module")
def truth(llama_folder: Path) -> dict[str, list[int]]:
    """What the unsplit model writes after :data:`PROMPT`, one token at a time."""
    plain = Conversation(LocalTarget(Blueprint.open(llama_folder, FLOAT32)))
    return {name: plain.tokens(sampling=sampling, count=150) for name, sampling in SAMPLINGS.items()}


# -- Exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_same_whatever_is_sent_ahead(
    conversation: Conversation, truth: dict[str, list[int]], name: str, in_flight: int, how: str
) -> None:
    drafter = drafter_named(name, [*PROMPT, *truth[how]])
    blocks = list(conversation.blocks(drafter=drafter, in_flight=in_flight, sampling=SAMPLINGS[how]))
    assert [token for block in blocks for token in block.tokens] == truth[how][:COUNT]
    assert sum(block.record.accepted for block in blocks) == COUNT
    assert all(block.tokens for block in blocks)  # a step whose result is used adds to the text
    ahead = sum(block.record.ahead for block in blocks)
    if name in ("oracle", "half right"):
        assert (ahead > 0) == (in_flight > 1)
    if name in ("adversary", "lookahead", "jacobi"):
        assert ahead == 0
    if in_flight == 1 or name in ("lookahead", "jacobi"):
        assert conversation.session.stale_steps == 0


def in_process(folder: Path, cut: Cut | None = None, limits: ServerLimits | None = None) -> SplitTarget:
    parts = DeviceParts(Blueprint.open(folder, FLOAT32), cut or Cut())
    return SplitTarget(parts, InProcessLink(engine_of(folder, cut or Cut(), limits), "float32"), "float32")


@functools.cache
def engine_of(folder: Path, cut: Cut, limits: ServerLimits | None = None) -> Engine:
    return load_engine(Blueprint.open(folder, FLOAT32), cut, "tiny", limits)


def check_caches(target: SplitTarget) -> None:
    for cache in (target._front_cache, target._back_cache):
        cache.check_integrity()


def test_every_family_is_exact(tiny_folder: Path) -> None:
    """Sliding windows included."""
    truth = Conversation(LocalTarget(Blueprint.open(tiny_folder, FLOAT32))).tokens()
    target = in_process(tiny_folder, Cut(1, 3))
    for drafter in (HalfRight([*PROMPT, *truth], block=3), Branches([*PROMPT, *truth], seed=3)):
        target.reset()
        assert Conversation(target).tokens(drafter=drafter, in_flight=3) == truth
        check_caches(target)


class Branches:
    """Random trees whose tokens are often the true ones of their place."""

    runs_ahead = True

    def __init__(self, text: Sequence[int], seed: int) -> None:
        self._text = list(text)
        self._random = random.Random(seed)

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        parents, tokens, depths = [], [], []
        for node in range(self._random.randint(0, budget)):
            parents.append(self._random.choice([node - 1, self._random.randint(-1, node - 1)]))
            depths.append(1 if parents[-1] < 0 else depths[parents[-1]] + 1)
            truth = self._text[len(context) + depths[-1] - 1 :][:1]
            tokens.append(truth[0] if truth and self._random.random() < 0.8 else self._random.randrange(250))
        return DraftTree(tuple(tokens), tuple(parents), tuple(self._random.random() for _ in tokens))

    def observe(self, outcome: Outcome) -> None:
        assert outcome.accepted == accept(outcome.tree, outcome.choices)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), in_flight=st.integers(2, 5), max_nodes=st.integers(1, 12))
def test_random_trees_and_early_stops_never_change_the_text(
    llama_folder: Path, truth: dict[str, list[int]], data: st.DataObject, in_flight: int, max_nodes: int
) -> None:
    """One conversation in several answers, each stopped where the consumer likes."""
    target = in_process(llama_folder)
    conversation, text, known = Conversation(target), [*PROMPT, *truth["greedy"]], 0
    while known < COUNT:
        loop = conversation.blocks(
            text[: len(PROMPT) + known],
            Branches(text, seed=data.draw(st.integers(0, 999))),
            in_flight=in_flight,
            count=data.draw(st.integers(1, COUNT - known)),
            max_nodes=max_nodes,
        )
        for block, _ in zip(loop, range(data.draw(st.integers(1, 8))), strict=False):
            assert list(block.tokens) == text[len(PROMPT) + known :][: len(block.tokens)]
            known += len(block.tokens)
            assert block.tokens
        loop.close()  # type: ignore[attr-defined]
        check_caches(target)


class Tempted(Oracle):
    """Believes in a wrong token, and hangs the true ones beside it, in later slots."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        true = super().propose(context, budget - 1).tokens
        if not true:
            return DraftTree()
        parents = (-1, -1, *range(1, len(true)))
        return DraftTree(((true[0] + 1) % 250, *true), parents, (0.9, *(0.5 for _ in true)))


def test_what_is_sent_ahead_overwrites_nothing_that_may_be_accepted(
    conversation: Conversation, truth: dict[str, list[int]]
) -> None:
    tempted = Tempted([*PROMPT, *truth["greedy"]], block=3)
    blocks = list(conversation.blocks(drafter=tempted, in_flight=3))
    assert [token for block in blocks for token in block.tokens] == truth["greedy"][:COUNT]
    assert len(blocks) == COUNT / 4
    assert conversation.session.stale_steps > len(blocks)


# -- Steps that proved wrong -----------------------------------------------------------------------


def test_a_conversation_goes_on_exactly_after_an_early_stop(
    conversation: Conversation, truth: dict[str, list[int]]
) -> None:
    text = [*PROMPT, *truth["greedy"]]
    first = conversation.blocks(drafter=Oracle(text, block=4), in_flight=4, max_nodes=4)
    written = [token for _ in range(3) for token in next(first).tokens]  # type: ignore[call-overload]
    first.close()  # type: ignore[attr-defined]
    assert conversation.session.stale_steps > 0
    rest = list(conversation.blocks([*PROMPT, *written], count=12))
    assert rest[0].record.nodes == 1  # the cloud kept what was committed
    assert [*written, *(token for block in rest for token in block.tokens)] == text[len(PROMPT) :][
        : len(written) + 12
    ]


def test_an_end_token_abandons_what_is_under_way(llama_folder: Path, truth: dict[str, list[int]]) -> None:
    answer = truth["greedy"]
    place = next(i for i in range(8, 60) if answer[i] not in answer[:i])
    conversation = Conversation(in_process(llama_folder))
    job = Job(PROMPT, GREEDY, 100, frozenset([answer[place]]), max_nodes=4, in_flight=4)
    loop = decode(conversation.target, conversation.session, Oracle([*PROMPT, *answer], block=3), job)
    blocks = list(loop)
    assert [token for block in blocks for token in block.tokens] == answer[: place + 1]
    assert blocks[-1].finish == "stop"
    assert sum(block.record.stale for block in blocks) == conversation.session.stale_steps > 0
    assert conversation.tokens() == answer[:COUNT]


class SlowStage(Stage):
    """Takes its time, so that steps have to queue."""

    def __init__(self, stage: Stage) -> None:
        self.__dict__ = stage.__dict__

    def forward(self, cache: SlotCache, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return super().forward(cache, step, hidden)


def test_a_slow_cloud_drops_stale_steps_unread_and_counts_them(
    llama_folder: Path, parts: DeviceParts, truth: dict[str, list[int]]
) -> None:
    with running_server(llama_folder) as (server, url):
        server.engine._stage = SlowStage(server.engine._stage)
        target = SplitTarget(parts, open_link(llama_folder, url), "float32")
        conversation = Conversation(target)
        adversary = Adversary([*PROMPT, *truth["greedy"]], block=2)
        blocks = list(conversation.blocks(drafter=adversary, in_flight=4, count=16))
        assert [token for block in blocks for token in block.tokens] == truth["greedy"][:16]
        assert sum(block.record.stale for block in blocks) == conversation.session.stale_steps
        # Nine steps had three behind them, of which the first was under way on the cloud.
        assert conversation.session.stale_steps >= 27
        assert 5 <= server.counters.stale_steps < conversation.session.stale_steps
        # Nothing is lost: what was sent was computed or dropped.
        sent = len(blocks) + conversation.session.stale_steps
        wait_until(lambda: server.counters.steps + server.counters.stale_steps == sent)
        # The session is exact after all that, for whoever comes next.
        assert conversation.tokens(count=20) == truth["greedy"][:20]
        target.close()


# -- Order, limits, and what drafters are told -------------------------------------------------------


class Logged:
    """A link that notes in which order messages were sent and received."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.events = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, message: bytes) -> None:
        self.events += "s"
        self._link.send(message)

    def receive(self) -> tuple[Frame, int]:
        self.events += "r"
        result: tuple[Frame, int] = self._link.receive()
        return result


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_steps_overlap_on_a_long_link(
    llama_folder: Path,
    parts: DeviceParts,
    shared: tuple[MiddleServer, str],
    truth: dict[str, list[int]],
    in_flight: int,
) -> None:
    port = int(shared[1].rpartition(":")[2])
    with WanRelay(("127.0.0.1", 0), ("127.0.0.1", port), WanProfile(rtt_ms=20)) as relay:
        link = Logged(open_link(llama_folder, f"ws://127.0.0.1:{relay.port}"))
        conversation = Conversation(SplitTarget(parts, link, "float32"))
        oracle = Oracle([*PROMPT, *truth["greedy"]], block=4)
        assert (
            conversation.tokens(drafter=oracle, in_flight=in_flight, max_nodes=4) == truth["greedy"][:COUNT]
        )
        conversation.target.close()
    waiting = [
        link.events[:end].count("s") - link.events[:end].count("r") for end in range(len(link.events) + 1)
    ]
    assert max(waiting) == in_flight
    assert "r" + "s" * in_flight + "r" in link.events
    # Once it is full, every result makes room for one step.
    assert in_flight == 1 or link.events.count("rs" * 4) >= 1


def test_the_limits_hold_for_guesses_on_guesses(tmp_path: Path) -> None:
    """Of the context, of one step's nodes, and of what hangs below the tip."""
    folder = save_tiny("llama", tmp_path / "short", max_position_embeddings=64)
    plain = Conversation(LocalTarget(Blueprint.open(folder, FLOAT32)))
    prompt = PROMPT[:30]
    truth = plain.tokens(prompt, count=1000)
    assert len(truth) == 34
    limits = ServerLimits(max_nodes_per_step=9, max_pending_nodes=9)
    oracle = Oracle([*prompt, *truth, *range(1, 10)], block=3)
    for in_flight in (2, 4):
        target = in_process(folder, limits=limits)
        steps = watched(target)
        conversation = Conversation(target)
        assert conversation.tokens(prompt, oracle, in_flight=in_flight, count=1000, prefill_chunk=4) == truth
        tree = SlotTree()
        for step in steps:
            assert max(tree.apply(step).positions) < 64
            assert len(step) <= 9
            assert step.slots.stop - (step.commit + 1) <= 9
        assert any(
            later.base > earlier.base and later.commit == earlier.commit for earlier, later in pairwise(steps)
        )


def watched(target: SplitTarget) -> list[Step]:
    """The steps that ``target`` is given, as they come."""
    steps: list[Step] = []
    submit = target.submit

    def note(step: Step, tokens: Sequence[int], ask: Ask) -> None:
        assert len(step) == len(tokens)
        steps.append(step)
        submit(step, tokens, ask)

    target.submit = note  # type: ignore[method-assign]
    return steps


def test_a_drafter_is_told_of_what_proved_right_in_order(
    llama_folder: Path, truth: dict[str, list[int]]
) -> None:
    text = [*PROMPT, *truth["greedy"]]
    outcomes: list[Outcome] = []

    class Listener(HalfRight):
        def observe(self, outcome: Outcome) -> None:
            outcomes.append(outcome)

    conversation = Conversation(in_process(llama_folder))
    blocks = list(conversation.blocks(drafter=Listener(text, block=4), in_flight=3))
    assert len(outcomes) == len(blocks)
    length = len(PROMPT)
    for outcome, block in zip(outcomes, blocks, strict=True):
        assert outcome.known == block.record.ahead
        assert list(outcome.context) == text[: length - outcome.known]
        assert len(outcome.choices) == 1 + len(outcome.tree) == len(outcome.logits)
        assert outcome.logits.argmax(dim=-1).tolist() == list(outcome.choices)
        assert outcome.accepted == accept(outcome.tree, outcome.choices)
        length = len(outcome.context) + len(outcome.accepted.tokens)


def test_the_totals_count_what_was_sent_for_nothing(llama_folder: Path, truth: dict[str, list[int]]) -> None:
    writer = Writer(in_process(llama_folder), Codec(llama_folder), "2,2")
    writer.codec.eos = frozenset()
    answers = []
    for in_flight in (1, 4):
        writer.forget()
        answer, pieces = writer.write(
            PROMPT,
            Adversary([*PROMPT, *truth["greedy"]], block=4),
            sampling=GREEDY,
            decoding=Decoding("sequential", max_nodes=4, in_flight=in_flight),
            stopping=Stopping(12),
        )
        list(pieces)
        answers.append(answer)
    plain, piped = (answer.to_json() for answer in answers)
    assert piped["token_ids"] == plain["token_ids"] == truth["greedy"][:12]
    assert piped["round_trips"] == plain["round_trips"]
    assert piped["mat"] == plain["mat"]
    assert plain["stale_steps"] == plain["stale_nodes"] == plain["ahead_steps"] == 0
    assert piped["stale_steps"] == sum(step["stale"] for step in piped["steps"]) > 0
    assert piped["stale_nodes"] >= piped["stale_steps"]
    own = sum(step["bytes_up"] for step in piped["steps"])
    assert piped["bytes_up"] > own + piped["stale_nodes"] * 32 * 4
    assert plain["bytes_up"] == sum(step["bytes_up"] for step in plain["steps"])


def test_the_likeliest_leaf_is_the_end_of_the_best_path() -> None:
    tree = DraftTree((1, 2, 3, 4), (-1, 0, -1, 2), (0.8, 0.3, 0.5, 0.4))
    assert likeliest_leaf(tree) == 3
    assert path_tokens(tree, 3) == [3, 4]
    assert likeliest_leaf(DraftTree()) is None
    assert likeliest_leaf(DraftTree((1, 2), (-1, -1), (0.0, 0.0))) == 1
