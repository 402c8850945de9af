"""Draft mode: the verifier's choices make the very text that the whole model writes alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aparte.address import parse_address
from aparte.answer import Answer, Writer
from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.verifier import Verifier, load_verifier
from aparte.config import Cut, LinkSettings, Sampling, ServerLimits, Stopping
from aparte.decode import Committed, Job, decode
from aparte.device import open_draft_writer, open_writer
from aparte.distribution import Distribution
from aparte.drafts import open_draft_model
from aparte.errors import FrameError, LinkError, MismatchError, UserError
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint
from aparte.session import Session
from aparte.speculate.chain import Chain
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.recycling import Recycling
from aparte.speculate.settings import Decoding
from aparte.speculate.tree import DraftTree
from aparte.speculate.voice import ModelVoice
from aparte.step import Step
from aparte.target.base import Ask, Target
from aparte.target.draft import DraftTarget
from aparte.target.local import LocalTarget
from aparte.wire.blocks import Verdict, write_verdict
from aparte.wire.frames import ResultFrame
from dialogue import PROMPT
from drafters import Adversary, Oracle, all_drafters
from running import FLOAT32, running_server, tokens_of_target
from tiny import save_tiny

COUNT = 40
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=5)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.fixture(scope="module")
def blueprint(llama_folder: Path) -> Blueprint:
    return Blueprint.open(llama_folder, FLOAT32)


@pytest.fixture(scope="module")
def verifier(blueprint: Blueprint) -> Verifier:
    return load_verifier(blueprint, "tiny")


def target_of(blueprint: Blueprint, verifier: Verifier, **more: Any) -> DraftTarget:
    return DraftTarget(blueprint, InProcessLink(verifier, "float32"), "float32", **more)


def blocks_of(
    target: Target,
    drafter: Drafter | None = None,
    *,
    session: Session | None = None,
    prompt: Sequence[int] = PROMPT,
    sampling: Sampling = GREEDY,
    count: int = COUNT,
    eos: frozenset[int] = frozenset(),
    max_nodes: int = 8,
    **more: Any,
) -> list[Committed]:
    job = Job(tuple(prompt), sampling, count, eos, max_nodes, **more)
    return list(decode(target, session or Session(), drafter or Nothing(), job))


def tokens_of(*args: Any, **settings: Any) -> list[int]:
    return [token for block in blocks_of(*args, **settings) for token in block.tokens]


@pytest.fixture(scope="module")
def truth(blueprint: Blueprint) -> dict[str, list[int]]:
    """What the unsplit model writes after :data:`PROMPT`, one token at a time."""
    return {
        name: tokens_of(LocalTarget(blueprint), sampling=sampling, count=120)
        for name, sampling in SAMPLINGS.items()
    }


# -- Exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("name", ["oracle", "adversary", "random", "broken", "auto", "lookahead", "jacobi"])
def test_the_text_is_the_unsplit_models_whatever_is_drafted(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]], name: str, in_flight: int, how: str
) -> None:
    known = all_drafters([*PROMPT, *truth[how]])
    drafter = known[name] if name in known else make_drafter(Decoding(name))
    target = target_of(blueprint, verifier)
    blocks = blocks_of(target, drafter, in_flight=in_flight, sampling=SAMPLINGS[how], prefill_chunk=16)
    assert [token for block in blocks for token in block.tokens] == truth[how][:COUNT]
    if name == "oracle":
        assert any(block.record.ahead for block in blocks) == (in_flight > 1)


def test_a_family_with_untied_ends_and_windows_is_exact_too(tiny_folder: Path) -> None:
    blueprint = Blueprint.open(tiny_folder, FLOAT32)
    expected = tokens_of(LocalTarget(blueprint), sampling=SAMPLED)
    target = target_of(blueprint, load_verifier(blueprint, "tiny"))
    drafter = all_drafters([*PROMPT, *expected])["random"]
    assert tokens_of(target, drafter, sampling=SAMPLED, in_flight=2) == expected


@pytest.mark.parametrize("how", SAMPLINGS)
def test_the_same_seed_gives_the_same_text_in_split_mode(
    llama_folder: Path, blueprint: Blueprint, truth: dict[str, list[int]], how: str
) -> None:
    split = open_writer(blueprint, "tiny", Cut(), wire="float32").target
    assert tokens_of(split, sampling=SAMPLINGS[how]) == truth[how][:COUNT]


def test_an_oracle_saves_round_trips_and_an_adversary_costs_none(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]]
) -> None:
    text = [*PROMPT, *truth["greedy"]]
    assert len(blocks_of(target_of(blueprint, verifier), Oracle(text, block=4))) == COUNT // 5
    assert len(blocks_of(target_of(blueprint, verifier), Adversary(text, block=4))) == COUNT


# -- Several answers, and what crosses the wire ----------------------------------------------------


def test_a_follow_up_sends_only_what_is_new(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]]
) -> None:
    target, session = target_of(blueprint, verifier), Session()
    first = tokens_of(target, session=session)
    sent = target.bytes_up
    (block, *_) = blocks_of(target, session=session, prompt=[*PROMPT, *first, 9, 10], count=1)
    assert block.reused == len(PROMPT) + COUNT - 1
    assert target.bytes_up - sent < 120
    whole = tokens_of(LocalTarget(blueprint), prompt=[*PROMPT, *first, 9, 10], count=1)
    assert list(block.tokens) == whole


def test_a_step_costs_four_bytes_per_node_and_no_vector_over_the_vocabulary(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]]
) -> None:
    target = target_of(blueprint, verifier)
    for block in blocks_of(target, Oracle([*PROMPT, *truth["sampled"]]), sampling=SAMPLED)[1:]:
        nodes = block.record.nodes
        assert block.record.timing.bytes_up <= 120 + 8 * nodes  # parents in the header included
        assert block.record.timing.bytes_down <= 60 + 4 * nodes


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("how", SAMPLINGS)
def test_recycling_learns_what_it_learns_in_split_mode(
    blueprint: Blueprint, verifier: Verifier, how: str, in_flight: int
) -> None:
    """From the tokens that the verifier names, as from the logits that a device has itself."""
    tables = []
    for target in (target_of(blueprint, verifier), LocalTarget(blueprint)):
        drafter = make_drafter(Decoding("recycling+context", max_nodes=6), table := Recycling())
        blocks = blocks_of(target, drafter, sampling=SAMPLINGS[how], in_flight=in_flight)
        tables.append((table, [token for block in blocks for token in block.tokens]))
    (named, text), (known, same) = tables
    assert text == same
    assert len(named) > COUNT
    assert named.after_two.keys() == known.after_two.keys()
    for pair, row in named.after_two.items():
        assert [token for token, _ in row] == [token for token, _ in known.after_two[pair]]
        assert [share for _, share in row] == pytest.approx(
            [share for _, share in known.after_two[pair]], rel=2e-3, abs=1e-6
        )


def test_states_of_every_committed_token_come_back_and_are_counted(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]]
) -> None:
    target, session = target_of(blueprint, verifier), Session()
    store = target.keep_states(4)
    drafter = all_drafters([*PROMPT, *truth["greedy"]])["random"]
    assert (
        tokens_of(target, drafter, session=session, in_flight=3, prefill_chunk=16) == truth["greedy"][:COUNT]
    )
    assert store.returned(session.slots) == len(session.slots)
    assert target.bytes_down > target.bytes_states >= len(session.slots) * 32 * 4
    split = open_writer(blueprint, "tiny", Cut(2, 2), wire="float32")
    kept = split.target.keep_states()  # type: ignore[attr-defined]
    blocks_of(split.target, session=split.session)
    expected = kept.middle(split.session.slots)
    assert store.middle(session.slots).allclose(expected[: len(session.slots)], atol=1e-4)


def test_without_them_there_are_none(blueprint: Blueprint, verifier: Verifier) -> None:
    target = target_of(blueprint, verifier)
    blocks_of(target)
    assert target.bytes_states == 0


# -- Rejection -------------------------------------------------------------------------------------


class Drawn(Oracle):
    """Chains whose tokens are said to be drawn from a distribution of two, of which one is the truth."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        other = [(token + 1) % 250 for token in tree.tokens]
        pairs = zip(tree.tokens, other, strict=True)
        drawn = tuple(Distribution(pair, (0.5, 0.5)) for pair in pairs)
        return DraftTree(tree.tokens, tree.parents, tree.probabilities, drawn)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_rejection_writes_whole_answers(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]], in_flight: int
) -> None:
    target = target_of(blueprint, verifier, rejection=True)
    nearly_sure = Sampling(temperature=0.1, seed=5)
    blocks = blocks_of(target, Drawn([*PROMPT, *truth["greedy"]]), sampling=nearly_sure, in_flight=in_flight)
    assert sum(len(block.tokens) for block in blocks) == COUNT
    assert all(0 <= token < blueprint.vocab_size for block in blocks for token in block.tokens)
    assert max(block.record.accepted for block in blocks) > 1


def test_rejection_with_a_model_that_draws_and_one_seed_is_repeatable(llama_folder: Path) -> None:
    blueprint = Blueprint.open(llama_folder, FLOAT32)

    def once() -> list[int]:
        writer = open_draft_writer(blueprint, "tiny", rejection=True, wire="float32")
        model = open_draft_model(llama_folder, "tiny", FLOAT32, *tokens_of_target(writer))
        drafter = Chain([ModelVoice("model", model)], SAMPLED, rejection=True, length=3)
        return tokens_of(writer.target, drafter, sampling=SAMPLED, session=writer.session)

    assert once() == once()


def test_greedy_is_greedy_under_rejection_too(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]]
) -> None:
    target = target_of(blueprint, verifier, rejection=True)
    assert tokens_of(target, Drawn([*PROMPT, *truth["greedy"]])) == truth["greedy"][:COUNT]


def test_what_was_drawn_is_never_cut_by_the_budget(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]]
) -> None:
    """Cutting by what a token turned out to be would bias the text."""
    from aparte.speculate.budget import NodeBudget

    class Thrifty(NodeBudget):
        def trim(self, tree: DraftTree, pending: int = 1) -> DraftTree:
            return tree.head(0)

    text = [*PROMPT, *truth["sampled"]]
    target = target_of(blueprint, verifier, rejection=True)
    blocks = blocks_of(target, Drawn(text, block=4), sampling=SAMPLED, budget=Thrifty())
    assert {block.record.drafted for block in blocks[:-4]} == {4}
    plain = blocks_of(target, Oracle(text, block=4), sampling=SAMPLED, budget=Thrifty())
    assert {block.record.drafted for block in plain} == {0}


# -- Ends inside a block ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writer(llama_folder: Path) -> Iterator[Writer]:
    writer = open_draft_writer(Blueprint.open(llama_folder, FLOAT32), "tiny", wire="float32")
    yield writer
    writer.target.close()


def write(writer: Writer, drafter: Drafter, *, count: int = COUNT, stop: tuple[str, ...] = ()) -> Answer:
    writer.forget()
    decoding, stopping = Decoding("context", max_nodes=8, in_flight=2), Stopping(count, stop)
    return writer.complete(PROMPT, drafter, sampling=GREEDY, decoding=decoding, stopping=stopping)


@pytest.mark.parametrize("place", [1, 2, 4, 5, 7])
def test_an_end_of_sequence_inside_a_block_ends_the_answer_there(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]], place: int
) -> None:
    text = truth["sampled"]
    eos = next(token for token in text[place:] if token not in text[:place])
    end = text.index(eos) + 1
    target = target_of(blueprint, verifier)
    drafter = Oracle([*PROMPT, *text], block=5)
    blocks = blocks_of(target, drafter, sampling=SAMPLED, count=100, eos=frozenset({eos}), in_flight=2)
    assert [token for block in blocks for token in block.tokens] == text[:end]
    assert blocks[-1].finish == "stop"


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 13])
def test_the_limit_holds_inside_a_block(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]], limit: int
) -> None:
    drafter = Oracle([*PROMPT, *truth["greedy"]], block=5)
    blocks = blocks_of(target_of(blueprint, verifier), drafter, count=limit)
    assert [token for block in blocks for token in block.tokens] == truth["greedy"][:limit]
    assert blocks[-1].finish == "length"


def test_a_stop_string_inside_a_block_ends_the_answer_there(
    writer: Writer, truth: dict[str, list[int]]
) -> None:
    writer.codec.eos = frozenset()
    whole = write(writer, Nothing())
    assert whole.token_ids == truth["greedy"][:COUNT]
    assert (whole.target, whole.cut) == ("draft", "whole")
    stop = whole.text[9:12]
    answer = write(writer, Oracle([*PROMPT, *truth["greedy"]], block=6), stop=(stop,))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.token_ids == truth["greedy"][: len(answer.token_ids)]
    again = write(writer, Nothing())  # what was in flight leaves no trace
    assert again.token_ids == whole.token_ids


def test_a_block_longer_than_the_context_left_is_cut(tmp_path: Path) -> None:
    blueprint = Blueprint.open(save_tiny("llama", tmp_path / "short", max_position_embeddings=64), FLOAT32)
    expected = tokens_of(LocalTarget(blueprint), count=100)
    assert len(PROMPT) + len(expected) == 64
    for in_flight in (1, 3):
        target = target_of(blueprint, load_verifier(blueprint, "short"))
        drafter = Oracle([*PROMPT, *expected, *range(50)], block=16)
        assert tokens_of(target, drafter, count=100, max_nodes=16, in_flight=in_flight) == expected


def test_a_prompt_longer_than_the_context_is_refused(blueprint: Blueprint, verifier: Verifier) -> None:
    with pytest.raises(UserError, match="context 512"):
        blocks_of(target_of(blueprint, verifier), prompt=[5] * 512)


# -- Bad sides -------------------------------------------------------------------------------------


def test_an_id_that_the_verifier_does_not_have_is_a_sentence(
    blueprint: Blueprint, verifier: Verifier
) -> None:
    with pytest.raises(FrameError, match="it has 300 tokens"):
        blocks_of(target_of(blueprint, verifier), prompt=[20, 299_999])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        write_verdict(Verdict((300,))),
        write_verdict(Verdict((-1,))),
        write_verdict(Verdict((5,), states=b"x")),
        write_verdict(Verdict((5,), (((300, 0.5),),))),
    ],
)
def test_an_answer_that_lies_is_an_error(blueprint: Blueprint, verifier: Verifier, payload: bytes) -> None:
    class Liar(InProcessLink):
        def receive(self) -> tuple[ResultFrame, int]:
            return ResultFrame(1, 1.0, 0.0, payload), len(payload)

    target = DraftTarget(blueprint, Liar(verifier, "float32"), "float32")
    with pytest.raises(FrameError):
        blocks_of(target, count=1)


def test_a_draft_model_with_other_tokens_is_refused(writer: Writer, tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path / "other")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    file.write_text(json.dumps(content))
    with pytest.raises(MismatchError, match="ids differ"):
        open_draft_model(folder, "other", FLOAT32, *tokens_of_target(writer))


@pytest.mark.parametrize("sizes", [(300, 320), (320, 300)])
def test_vocabularies_that_differ_by_padding_only_work(tmp_path: Path, sizes: tuple[int, int]) -> None:
    theirs, ours = sizes
    blueprint = Blueprint.open(save_tiny("llama", tmp_path / "target", vocab_size=theirs), FLOAT32)
    small = save_tiny("llama", tmp_path / "draft", layers=2, vocab_size=ours)
    for sampling in SAMPLINGS.values():
        expected = tokens_of(LocalTarget(blueprint), sampling=sampling)
        writer = open_draft_writer(blueprint, "target", wire="float32")
        model = open_draft_model(small, "draft", FLOAT32, *tokens_of_target(writer))
        drafter = Chain([ModelVoice("model", model)], sampling, length=4)
        assert tokens_of(writer.target, drafter, sampling=sampling, session=writer.session) == expected


# -- Over a real link ------------------------------------------------------------------------------


def open_remote(folder: Path, url: str, **more: Any) -> Writer:
    blueprint = Blueprint.open(folder, FLOAT32, weightless=True)
    return open_draft_writer(blueprint, "tiny", cloud=url, wire="float32", **more)


def test_over_a_server_it_is_the_same_text(llama_folder: Path, truth: dict[str, list[int]]) -> None:
    with running_server(llama_folder, whole=True) as (server, url):
        for how, sampling in SAMPLINGS.items():
            writer = open_remote(llama_folder, url)
            drafter = all_drafters([*PROMPT, *truth[how]])["random"]
            assert tokens_of(writer.target, drafter, sampling=sampling, in_flight=3) == truth[how][:COUNT]
            writer.target.close()
        assert server.counters.errors == 0


def test_several_devices_at_once_each_get_their_own_text(
    llama_folder: Path, blueprint: Blueprint, truth: dict[str, list[int]]
) -> None:
    """Their verification passes may share forward passes (cloud/scheduler.py)."""
    prompts = [PROMPT, PROMPT[5:], (*PROMPT, 7, 8, 9), PROMPT[::-1]]
    local = LocalTarget(blueprint)
    expected = []
    for prompt in prompts:
        expected.append(tokens_of(local, prompt=prompt, sampling=SAMPLED))
        local.reset()
    with running_server(llama_folder, whole=True) as (server, url):

        def device(number: int) -> list[int]:
            writer = open_remote(llama_folder, url)
            drafter = all_drafters([*prompts[number], *expected[number]])["random"]
            options: dict[str, Any] = {"prompt": prompts[number], "sampling": SAMPLED, "in_flight": 2}
            written = tokens_of(writer.target, drafter, **options)
            writer.target.close()
            return written

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(device, range(4))) == expected
        assert server.counters.sessions_opened == 4


def test_a_device_without_weights_can_draft(
    llama_folder: Path, tmp_path: Path, truth: dict[str, list[int]]
) -> None:
    for file in llama_folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with running_server(llama_folder, whole=True) as (_, url):
        writer = open_remote(tmp_path, url)
        assert tokens_of(writer.target) == truth["greedy"][:COUNT]
        writer.target.close()


def test_another_model_is_refused_before_anything_is_sent(llama_folder: Path, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", seed=1)
    padded = save_tiny("llama", tmp_path / "padded", vocab_size=320)
    with running_server(llama_folder, whole=True) as (server, url):
        with pytest.raises(MismatchError, match="different weights"):
            open_remote(other, url)
        with pytest.raises(MismatchError, match="different architectures"):
            open_remote(padded, url)
        assert server.counters.steps == 0


def test_the_two_modes_do_not_mix(llama_folder: Path) -> None:
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    with running_server(llama_folder) as (_, url), pytest.raises(MismatchError, match="--whole"):
        open_remote(llama_folder, url)
    with (
        running_server(llama_folder, whole=True) as (_, url),
        pytest.raises(MismatchError, match="--cut 2,2"),
    ):
        open_writer(blueprint, "tiny", Cut(), cloud=url, wire="float32")


def test_a_verifier_that_goes_away_leaves_what_was_written(
    llama_folder: Path, truth: dict[str, list[int]]
) -> None:
    with running_server(llama_folder, whole=True) as (_, url):
        address = parse_address(url.removeprefix("ws://"))
        with WanRelay(("127.0.0.1", 0), address, WanProfile(drop_after=2_500)) as relay:
            writer = open_remote(llama_folder, f"ws://127.0.0.1:{relay.port}")
            written: list[int] = []

            def write_on() -> None:
                job = Job(PROMPT, GREEDY, COUNT, frozenset(), 8)
                for block in decode(writer.target, writer.session, Nothing(), job):
                    written.extend(block.tokens)

            with pytest.raises(LinkError, match="went away"):
                write_on()
            assert 0 < len(written) < COUNT
            assert written == truth["greedy"][: len(written)]
        # With a new connection the answer is written anew.
        again = open_remote(llama_folder, url)
        assert tokens_of(again.target) == truth["greedy"][:COUNT]
        again.target.close()


def test_a_verifier_that_says_nothing_is_given_up_on(llama_folder: Path) -> None:
    with running_server(llama_folder, whole=True) as (_, url):
        address = parse_address(url.removeprefix("ws://"))
        with WanRelay(("127.0.0.1", 0), address, WanProfile(rtt_ms=600)) as relay:
            settings_ = LinkSettings(step_timeout_s=0.3)
            writer = open_remote(llama_folder, f"ws://127.0.0.1:{relay.port}", settings=settings_)
            with pytest.raises(LinkError, match=r"within 0\.3 s"):
                tokens_of(writer.target)


# -- Any tree --------------------------------------------------------------------------------------


class Given:
    """Proposes what it is told to."""

    runs_ahead = True

    def __init__(self, trees: list[DraftTree]) -> None:
        self._trees = trees

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        return self._trees.pop() if self._trees else DraftTree()

    def observe(self, outcome: object) -> None:
        pass


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_trees_give_the_same_text(
    blueprint: Blueprint, verifier: Verifier, truth: dict[str, list[int]], data: st.DataObject
) -> None:
    how = data.draw(st.sampled_from(sorted(SAMPLINGS)))
    likely = truth[how][:12]
    trees = []
    for _ in range(data.draw(st.integers(0, 12))):
        size = data.draw(st.integers(0, 6))
        parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(size))
        tokens = tuple(data.draw(st.sampled_from(likely)) for _ in range(size))
        trees.append(DraftTree(tokens, parents, (0.5,) * size))
    steps: list[Step] = []
    target = target_of(blueprint, verifier)
    submit = target.submit

    def watch(step: Step, tokens: Sequence[int], ask: Ask) -> None:
        steps.append(step)
        submit(step, tokens, ask)

    target.submit = watch  # type: ignore[method-assign]
    in_flight = data.draw(st.integers(1, 3))
    expected = truth[how][:12]
    written = tokens_of(target, Given(trees), sampling=SAMPLINGS[how], count=12, in_flight=in_flight)
    assert written == expected
    assert all(one.number < two.number for one, two in pairwise(steps))


def test_limits_of_the_server_hold(llama_folder: Path) -> None:
    limits = ServerLimits(max_nodes_per_step=4)
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    target = target_of(blueprint, load_verifier(blueprint, "tiny", limits))
    expected = tokens_of(LocalTarget(blueprint), count=20)
    blocks = blocks_of(target, Oracle([*PROMPT, *expected], block=9), count=20, max_nodes=9)
    assert [token for block in blocks for token in block.tokens] == expected
    assert max(block.record.nodes for block in blocks) <= 4
