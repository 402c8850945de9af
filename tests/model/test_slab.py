"""Buffers that are handed on: counted to the byte, within the budget, and never with another's numbers."""

from __future__ import annotations

import gc
import random
import sys
import threading
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aparte.model.slab
from aparte.config import Compute, KvName
from aparte.errors import SlotError
from aparte.model.cache import SlotCache
from aparte.model.parts import Blueprint
from aparte.model.slab import FIRST_ROWS, MOST_KEPT, Slab, SlabFullError, allocate, size_class
from aparte.model.stage import Item, Stage
from aparte.step import ROOT, Step, chain_parents
from random_steps import Model, draw_step

CPU = torch.device("cpu")
KINDS: tuple[KvName, ...] = get_args(KvName)
WIDTH = 32


def take(slab: Slab, rows: int, heads: int = 1) -> torch.Tensor:
    """A buffer of ``rows * heads`` times 4 bytes."""
    return slab.take((1, heads, rows, 1), torch.float32, CPU)


def links(tip: int, count: int) -> Step:
    return Step(1, 0, tip, tip + 1, chain_parents(tip, tip + 1, count))


def states(nodes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(seed))


# -- Sizes -----------------------------------------------------------------------------------------


def test_sizes_are_few_and_long_texts_do_not_get_twice_what_they_need() -> None:
    sizes = [size_class(rows, 10**6) for rows in range(1, 20_000)]
    assert sorted(set(sizes))[:9] == [256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
    assert len(set(sizes)) == 13
    assert all(rows <= size for rows, size in enumerate(sizes, 1))
    assert all(size <= 1.5 * rows for rows, size in enumerate(sizes, 1) if rows > 512)


def test_nobody_gets_more_rows_than_a_session_may_have() -> None:
    assert [size_class(rows, 300) for rows in (1, 256, 257, 300)] == [256, 256, 300, 300]
    assert size_class(5, 7) == 7


# -- Buffers ---------------------------------------------------------------------------------------


def test_a_buffer_is_handed_on_and_holds_nothing() -> None:
    slab = Slab()
    others = take(slab, 100)
    first = take(slab, 8)
    place = first.data_ptr()
    first.fill_(7.0)
    assert (slab.used, slab.idle) == (432, 0)
    slab.give(first)
    assert (slab.used, slab.idle) == (400, 32)
    del first
    other = take(slab, 9)  # of another size
    assert other.data_ptr() != place
    again = take(slab, 8)
    assert again.data_ptr() == place
    assert not again.any()
    assert (slab.used, slab.idle, slab.peak) == (468, 0, 468)
    slab.give(others)


def test_kinds_do_not_mix() -> None:
    slab = Slab()
    others = take(slab, 1000)
    slab.give(slab.take((1, 2, 4, 1), torch.float32, CPU))
    for shape, dtype in (((1, 4, 2, 1), torch.float32), ((1, 2, 4, 2), torch.float16)):
        assert slab.take(shape, dtype, CPU).dtype == dtype
        assert slab.idle == 32, "of as many bytes, but another kind"
    slab.give(others)


def test_what_is_kept_is_little_more_than_what_was_needed_at_a_time() -> None:
    """Sizes that were wanted once, one after the other, do not add up."""
    slab = Slab()
    for rows in range(50, 100):
        slab.give(take(slab, rows))
        assert slab.used + slab.idle <= MOST_KEPT * 4 * rows
    assert slab.peak <= MOST_KEPT * 4 * 99


def test_the_longest_idle_goes_when_room_is_needed() -> None:
    slab = Slab(budget=100)
    buffers = {rows: take(slab, rows) for rows in (4, 8, 10)}  # 88 bytes
    for rows in (8, 4, 10):
        slab.give(buffers.pop(rows))
    take(slab, 9)
    assert slab.idle == 16 + 40, "the one of 8 rows had to go"
    take(slab, 15)
    assert (slab.used, slab.idle) == (96, 0)
    with pytest.raises(SlabFullError, match="Try again later"):
        take(slab, 2)
    assert (slab.used, slab.idle, slab.peak) == (96, 0, 96)


def test_a_kind_of_which_none_is_idle_any_more_is_no_hindrance() -> None:
    slab = Slab(budget=100)
    slab.give(take(slab, 4))
    slab.give(take(slab, 8))
    again = take(slab, 4)
    take(slab, 20)
    assert (slab.used, slab.idle) == (96, 0)
    slab.give(again)
    assert slab.trim() == 16


def test_what_is_full_is_found_before_anything_is_allocated_or_dropped() -> None:
    slab = Slab(budget=10**6)
    slab.give(take(slab, 100))
    with pytest.raises(SlabFullError):
        take(slab, 10**12)
    assert (slab.used, slab.idle) == (0, 400)


def test_without_keeping_nothing_stays() -> None:
    slab = Slab(keep=False)
    slab.give(take(slab, 100))
    assert (slab.used, slab.idle, slab.peak) == (0, 0, 400)


def test_what_lies_idle_for_long_is_freed() -> None:
    now = 0.0
    slab = Slab(clock=lambda: now)
    old, young = take(slab, 4), take(slab, 4)
    slab.give(old)
    now = 50.0
    slab.give(young)
    now = 60.0
    assert slab.trim(60) == 16
    assert slab.trim(60) == 0
    assert slab.idle == 16
    assert slab.trim() == 16
    assert slab.idle == 0


def test_when_the_machine_is_out_of_memory_idle_buffers_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab()
    others = take(slab, 100)
    slab.give(take(slab, 4))
    failures: list[Exception] = [OSError("out of memory")]

    def failing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return allocate(shape, dtype, device)

    monkeypatch.setattr(aparte.model.slab, "allocate", failing)
    take(slab, 8)
    assert (slab.used, slab.idle) == (432, 0)
    failures.append(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError):
        take(slab, 8)
    assert slab.used == others.nbytes + 32


@pytest.mark.skipif(sys.platform != "linux", reason="only there buffers are mapped")
def test_what_is_freed_goes_back_to_the_system_at_once() -> None:
    """Also what is too small for the C library to give back, and lies between what is kept."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    slab, rows = Slab(), 12_500  # 50 KB each
    buffers = [take(slab, rows).fill_(1.0) for _ in range(800)]
    before = resident_bytes()
    for buffer in buffers[::2]:
        slab.give(buffer)
    del buffer, buffers[::2]
    slab.trim()
    assert before - resident_bytes() > 0.8 * 400 * 4 * rows


def test_the_garbage_collector_may_give_back_at_any_moment() -> None:
    """Even while this thread counts: then it is counted next time."""
    slab = Slab()
    buffer = take(slab, 4)
    with slab._lock:
        slab.give(buffer)
    assert (slab.used, slab.idle) == (0, 16)


def test_several_threads_count_right() -> None:
    slab = Slab(budget=4096)
    errors: list[BaseException] = []

    def play(seed: int) -> None:
        chance, held = random.Random(seed), []
        try:
            for _ in range(300):
                if held and chance.random() < 0.5:
                    slab.give(held.pop(chance.randrange(len(held))))
                elif len(held) < 8:  # 4 threads with 8 of 128 bytes at most
                    held.append(take(slab, chance.choice((8, 16, 32))))
                    assert not held[-1].any()
                    held[-1].fill_(1.0)
            for buffer in held:
                slab.give(buffer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert slab.used == 0
    assert 0 < slab.idle <= slab.peak <= 4096


# -- Caches ----------------------------------------------------------------------------------------


class Dirty(Slab):
    """Hands out buffers full of what must not be read."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return super().take(shape, dtype, device).fill_(float("nan") if dtype.is_floating_point else 127)


@pytest.fixture(scope="module")
def stages(llama_folder: Path) -> dict[KvName, Stage]:
    found: dict[KvName, Stage] = {}
    for kind in KINDS:
        blueprint = Blueprint.open(llama_folder, Compute("float32", "cpu", kv=kind))
        found[kind] = blueprint.stage(range(2, 4))
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_rows_that_a_session_did_not_write_are_never_attended_to(
    stages: dict[KvName, Stage], kind: KvName, data: st.DataObject
) -> None:
    """Whatever the trees, and though every buffer is full of what would spoil all numbers."""
    stage, model = stages[kind], Model()
    clean, dirty = stage.new_cache(), stage.new_cache(4096, Dirty())
    for number in range(data.draw(st.integers(2, 8), label="steps")):
        most = 200 if data.draw(st.booleans(), label="long") else 12  # past the first buffer now and then
        step, _ = draw_step(data, model, number, most)
        hidden = states(len(step), number)
        expected = stage.forward(clean, step, hidden)
        assert torch.equal(stage.forward(dirty, step, hidden), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_on_anothers_buffers_computes_the_same(stages: dict[KvName, Stage], kind: KvName) -> None:
    stage, slab = stages[kind], Slab()
    before = stage.new_cache(4096, slab)
    stage.forward(before, links(ROOT, 400), 100 * states(400, 1))
    before.close()
    assert (slab.used, before.nbytes) == (0, 0)
    held = slab.idle
    after, fresh = stage.new_cache(4096, slab), stage.new_cache()
    for step in (links(ROOT, 300), links(299, 1), links(250, 40)):
        hidden = states(len(step), len(step))
        assert torch.equal(stage.forward(after, step, hidden), stage.forward(fresh, step, hidden))
    assert (slab.used, slab.idle, after.nbytes) == (held, 0, held), "the very same buffers"


def test_old_buffers_go_back_while_a_cache_grows(stages: dict[KvName, Stage]) -> None:
    stage, slab = stages["model"], Slab()
    cache = stage.new_cache(4096, slab)
    stage.forward(cache, links(ROOT, 1), states(1))
    first = slab.used
    grows, twice = cache.growth(links(0, 300), 0), cache.largest_buffer
    assert (grows, twice) == (first, first // 4)
    slab.budget = first + grows + twice
    stage.forward(cache, links(0, 300), states(300))
    assert slab.used == cache.nbytes == 2 * first
    assert slab.peak == slab.budget, "one old buffer beside all new ones, and no more"
    slab.budget = slab.used + twice
    with pytest.raises(SlabFullError):
        stage.forward(cache, links(300, 300), states(300))


def test_a_long_prompt_in_pieces_grows_once(stages: dict[KvName, Stage]) -> None:
    stage, slab = stages["model"], Slab()
    cache = stage.new_cache(4096, slab)
    cache.expect(700)
    for start in range(0, 700, 100):
        stage.forward(cache, links(start - 1, 100), states(100))
    assert slab.peak == slab.used == cache.row_bytes * size_class(700, 10**6)


def test_a_cache_that_is_closed_in_a_pass_keeps_its_buffers_to_the_end(stages: dict[KvName, Stage]) -> None:
    """Otherwise another session of the same pass could get them, and both would write."""
    stage, slab = stages["model"], Slab()
    cache = stage.new_cache(4096, slab)
    stage.forward(cache, links(ROOT, 1), states(1))
    held = slab.used
    cache.begin(links(0, 1))
    assert cache.in_pass
    cache.close()
    assert slab.used == held
    cache.end()
    assert (slab.used, slab.idle) == (0, held)
    with pytest.raises(SlotError, match="closed"):
        stage.forward(cache, links(1, 1), states(1))
    assert not cache.in_pass
    cache.close()
    assert slab.used == 0


def test_a_pass_ends_for_everybody_however_it_goes(stages: dict[KvName, Stage]) -> None:
    stage = stages["model"]
    bad, good = stage.new_cache(), stage.new_cache()
    outputs = stage.forward_many([Item(bad, links(7, 1), states(1)), Item(good, links(ROOT, 2), states(2))])
    assert isinstance(outputs[0], SlotError)
    assert not bad.in_pass
    assert not good.in_pass
    with pytest.raises(RuntimeError):
        stage.forward_many([Item(good, links(1, 1), torch.zeros(1, WIDTH + 1))])
    assert not good.in_pass


def test_a_cache_that_nobody_closed_gives_its_buffers_back_all_the_same(
    stages: dict[KvName, Stage],
) -> None:
    stage, slab = stages["model"], Slab()
    cache = stage.new_cache(4096, slab)
    stage.forward(cache, links(ROOT, 1), states(1))
    held = slab.used
    del cache
    gc.collect()
    assert (slab.used, slab.idle) == (0, held)


def test_many_short_sessions_use_the_same_memory(stages: dict[KvName, Stage]) -> None:
    stage, slab = stages["model"], Slab()
    chance = random.Random(3)
    most = settled = 0
    for number in range(60):
        cache = stage.new_cache(4096, slab)
        nodes = chance.choice((3, 200, 300, 600))
        stage.forward(cache, links(ROOT, nodes), states(nodes))
        cache.close()
        most = max(most, slab.used + slab.idle)
        if number == 20:
            settled = most
    assert most == settled, "after each size was there once nothing is allocated any more"


def test_a_cache_of_its_own_frees_at_once() -> None:
    """On a device: no slab is shared, and nothing is kept."""
    cache = SlotCache(0, 1, 1000)
    cache.begin(links(ROOT, 3))
    cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
    assert cache.nbytes == 2 * FIRST_ROWS * 4 * 4
    cache.end()
    cache.close()
    assert cache.nbytes == 0
