"""What headers tell of acceptance: decoding, prompts in chunks, steps ahead, rollbacks, rubbish."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aparte.cloud.acceptance import LONGEST, Acceptance
from aparte.session import Session
from aparte.speculate.tree import BELOW_ROOT, DraftTree
from aparte.step import ROOT, Step, chain_parents
from random_steps import Model, draw_step


def tree(*parents: int) -> DraftTree:
    return DraftTree(tuple(range(len(parents))), parents, (0.5,) * len(parents))


class Device:
    """A device's session, whose steps are told to an :class:`Acceptance` as they come."""

    def __init__(self) -> None:
        self.session = Session()
        self.acceptance = Acceptance()

    def prompt(self, tokens: int, chunk: int = 128) -> tuple[int, list[int]]:
        """A prompt in chunks, all under way at the same time, without drafts."""
        told = (0, list[int]())
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            step = self.session.chain(count)
            committed, decided = self.acceptance.arrived(step, unanswered=start > 0)
            told = (told[0] + committed, told[1] + decided)
            self.session.commit([0] * count, list(step.slots))
        return told

    def decode(self, draft: DraftTree, accepted: list[int]) -> tuple[int, list[int]]:
        """A step of the pending token and a draft, of which the nodes ``accepted`` turn out right."""
        step = self.session.grow(1, draft)
        told = self.acceptance.arrived(step, unanswered=False)
        self.session.commit([0] * (1 + len(accepted)), [step.base, *(step.base + 1 + n for n in accepted)])
        return told


def test_a_step_is_decided_by_the_one_after_it() -> None:
    device = Device()
    assert device.prompt(5) == (0, [])
    chain = tree(BELOW_ROOT, 0, 1)
    assert device.decode(chain, [0, 1]) == (5, [])  # the prompt is no draft
    assert device.decode(chain, []) == (3, [3])
    assert device.decode(tree(), []) == (1, [1])
    assert device.decode(chain, [0, 1, 2]) == (1, [1])
    assert device.decode(tree(), []) == (4, [4])


def test_a_branch_counts_by_its_depth() -> None:
    device = Device()
    device.prompt(3)
    device.decode(tree(BELOW_ROOT, BELOW_ROOT, 1, 2), [1, 2])
    assert device.decode(tree(), []) == (3, [3])


def test_a_prompt_in_chunks_is_no_success_of_drafts() -> None:
    device = Device()
    assert device.prompt(300, chunk=40) == (280, [])
    assert device.decode(tree(), []) == (20, [])
    assert device.decode(tree(), []) == (1, [1])


def test_chunks_that_were_answered_one_by_one_are_recognised_by_their_length() -> None:
    device = Device()
    step = device.session.chain(LONGEST + 1)
    device.acceptance.arrived(device.session.chain(1), unanswered=False)
    device.acceptance.arrived(step, unanswered=False)
    device.session.commit([0] * len(step), list(step.slots))
    assert device.acceptance.arrived(device.session.chain(1), unanswered=False) == (LONGEST + 1, [])


def test_steps_sent_ahead_are_decided_one_by_one() -> None:
    acceptance = Acceptance()
    acceptance.arrived(Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, 3)), unanswered=False)
    first = Step(2, 0, 2, 3, (2, 3, 4))
    ahead = Step(3, 0, 2, 6, (5, 6))
    assert acceptance.arrived(first, unanswered=False) == (3, [])
    assert acceptance.arrived(ahead, unanswered=True) == (0, [])
    assert acceptance.arrived(Step(4, 0, 6, 8, (6,)), unanswered=False) == (4, [3, 1])


def test_a_rollback_begins_a_prompt() -> None:
    device = Device()
    device.prompt(5)
    device.decode(tree(BELOW_ROOT), [0])
    device.decode(tree(), [])
    device.session.rewind_to([0, 0])
    step = device.session.chain(4)
    assert device.acceptance.arrived(step, unanswered=False) == (0, [])
    device.session.commit([0] * 4, list(step.slots))
    assert device.decode(tree(), []) == (4, [])
    assert device.decode(tree(), []) == (1, [1])


def test_a_step_that_comes_again_says_nothing_new() -> None:
    device = Device()
    device.prompt(5)
    device.decode(tree(BELOW_ROOT), [0])
    step = device.session.chain(1)
    assert device.acceptance.arrived(step, unanswered=False) == (2, [2])
    assert device.acceptance.arrived(step, unanswered=False) == (0, [])


@given(st.data())
def test_whatever_comes_memory_follows_what_is_pending(data: st.DataObject) -> None:
    acceptance, model = Acceptance(), Model()
    for number in range(1, data.draw(st.integers(1, 15), label="steps")):
        step, _ = draw_step(data, model, number)
        committed, decided = acceptance.arrived(step, unanswered=data.draw(st.booleans()))
        assert sum(decided) <= committed
        assert all(count > 0 for count in decided)
        assert len(acceptance._nodes) <= step.slots.stop - step.commit
        assert len(acceptance._prompts) <= 40
