"""Random token trees: a model of the rules of :mod:`aparte.step`, and steps drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from aparte.step import ROOT, Step


class Model:
    """The rules of aparte.step, the slow and obvious way: a path of tokens for every slot."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.token: dict[int, int] = {}

    def path(self, slot: int) -> list[int]:
        slots: list[int] = []
        while slot != ROOT:
            slots.append(slot)
            slot = self.parent[slot]
        return slots[::-1]

    def prune(self, commit: int, base: int) -> None:
        self.parent = {slot: parent for slot, parent in self.parent.items() if slot < base}
        ancestors = set(self.path(commit))
        below = [slot for slot in self.parent if commit == ROOT or commit in self.path(slot)]
        self.parent = {slot: self.parent[slot] for slot in sorted(ancestors | set(below))}

    def below(self, commit: int) -> list[int]:
        return [slot for slot in self.parent if slot not in self.path(commit)]


def draw_step(data: st.DataObject, model: Model, number: int, most: int = 12) -> tuple[Step, list[int]]:
    """A step of 1 to ``most`` nodes that fits ``model``, which follows it; and a token for each node."""
    commit = data.draw(st.sampled_from([ROOT, *model.parent]), label="commit")
    high = max([commit, *model.parent], default=ROOT)
    base = data.draw(st.integers(commit + 1, high + 3), label="base")
    model.prune(commit, base)
    parents: list[int] = []
    tokens = data.draw(st.lists(st.integers(0, 250), min_size=1, max_size=most), label="tokens")
    for offset, token in enumerate(tokens):
        choices = [commit, *model.below(commit)]
        # Mostly long chains, so that positions get past the sliding window.
        parent = data.draw(st.sampled_from([*choices[-2:], *choices[-1:], *choices]), label="parent")
        parents.append(parent)
        model.parent[base + offset] = parent
        model.token[base + offset] = token
    return Step(number, 0, commit, base, tuple(parents)), tokens
