"""A defence at work: the noise of a node belongs to its text, and the answer does not depend on the mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aparte.answer import Writer
from aparte.config import Compute, Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.errors import MismatchError, UserError
from aparte.model.parts import Blueprint
from aparte.privacy.defences import Noise, Quantised
from aparte.privacy.guard import Guard, check_draws, draw_cut, open_guard, protect
from aparte.privacy.paths import gaussian
from aparte.privacy.protection import Protection
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.step import ROOT, Step
from aparte.target.split import SplitTarget
from aparte.wire.frames import StepFrame, decode
from aparte.wire.tensors import TensorCodec
from dialogue import open_link, unsplit_tokens
from relay import relay_to
from running import FLOAT32, running_server

SECRET = bytes(range(32))
WIDTH = 32
ROWS = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0))


def noise(epsilon: float = 1000.0) -> Noise:
    defence = Noise(epsilon)
    defence.calibrate(ROWS, 10 * ROWS[:2])
    return defence


def chain(tokens: Sequence[int], base: int = 0, tip: int = ROOT) -> Step:
    return Step(1, 0, tip, base, (tip, *range(base, base + len(tokens) - 1)))


class TestNoise:
    def test_a_node_that_is_sent_again_has_the_same_noise_wherever_it_is(self) -> None:
        guard = Guard(noise(), SECRET)
        first = guard(chain([5, 6, 7, 8]), [5, 6, 7, 8], ROWS[:4])
        again = guard(Step(2, 0, 1, 2, (1, 1, 3)), [9, 7, 8], ROWS[[4, 2, 3]])  # in slots 3 and 4 now
        assert torch.equal(again[1:], first[2:])

    def test_a_session_that_is_sent_anew_in_other_pieces_is_sent_the_same(self) -> None:
        tokens = [3, 1, 4, 1, 5]
        guard = Guard(noise(), SECRET)
        first = guard(chain(tokens), tokens, ROWS[:5])
        guard(chain(tokens[:2]), tokens[:2], ROWS[:2])
        assert torch.equal(guard(chain(tokens[2:], 2, 1), tokens[2:], ROWS[2:5]), first[2:])

    def test_two_guesses_for_one_place_have_noise_of_their_own(self) -> None:
        guard = Guard(noise(), SECRET)
        sent = guard(Step(1, 0, ROOT, 0, (ROOT, 0, 0)), [5, 6, 7], ROWS[[0, 1, 1]])
        assert float((sent[1] - sent[2]).abs().min()) > 0

    def test_the_same_token_after_another_text_has_noise_of_its_own(self) -> None:
        guard = Guard(noise(), SECRET)
        one = guard(chain([5, 6]), [5, 6], ROWS[:2])
        two = guard(chain([9, 6]), [9, 6], ROWS[:2])
        assert not torch.equal(one[1], two[1])

    def test_a_session_has_a_secret_of_its_own(self) -> None:
        sent = [Guard(noise())(chain([5]), [5], ROWS[:1]) for _ in range(2)]
        assert not torch.equal(*sent)

    def test_it_is_the_noise_that_was_audited(self) -> None:
        """The same mean and deviation as the defence's own, which is what attacks were measured on."""
        defence = noise(10.0)
        tokens = list(range(300))
        rows = ROWS[:1].expand(300, WIDTH)
        sent = Guard(defence, SECRET)(chain(tokens), tokens, rows)
        expected = defence.expected(rows, torch.arange(300))
        off = (sent - expected)[1:]
        assert float(off.std()) == pytest.approx(defence.sigma(1), rel=0.03)
        assert float(off.mean()) == pytest.approx(0, abs=4 * defence.sigma(1) / off.numel() ** 0.5)
        first = torch.cat([Guard(defence)(chain([5]), [5], ROWS[:1]) - expected[:1] for _ in range(40)])
        assert float(first.std()) == pytest.approx(defence.sigma(0), rel=0.1)

    def test_its_numbers_are_normal(self) -> None:
        numbers = torch.cat([gaussian(bytes([key]), 1000) for key in range(200)]).sort().values
        levels = (torch.arange(len(numbers), dtype=torch.float64) + 0.5) / len(numbers)
        distance = float((torch.special.ndtr(numbers) - levels).abs().max())
        assert distance < 1.95 / len(numbers) ** 0.5, "Kolmogorov-Smirnov, 0.1 %"
        assert bool(torch.isfinite(numbers).all())


def test_rounding_is_that_of_the_defence() -> None:
    sent = Guard(Quantised(bits=4))(chain([1, 2]), [1, 2], ROWS[:2])
    assert torch.equal(sent, Quantised(bits=4).expected(ROWS[:2], torch.arange(2)))


def test_what_can_be_set() -> None:
    assert draw_cut("int4", Cut(2, 2)) == Cut(2, 2)
    with pytest.raises(UserError, match="Known: none"):
        draw_cut("magic", Cut(2, 2))


class TestRandomCut:
    def test_sessions_draw_from_all_of_the_range_and_keep_the_back(self) -> None:
        drawn = {draw_cut("random-cut:2-4", Cut(2, 1)) for _ in range(200)}
        assert drawn == {Cut(2, 1), Cut(3, 1), Cut(4, 1)}

    def test_layers_that_the_cloud_does_not_host_are_not_drawn(self) -> None:
        with pytest.raises(UserError, match="Draw from 3 on"):
            draw_cut("random-cut:2-4", Cut(3, 1))

    def test_a_range_that_the_model_does_not_have_is_refused_whatever_is_drawn(self) -> None:
        check_draws("random-cut:2-4", Cut(2, 1), 6)
        with pytest.raises(UserError, match="leaves nothing for the cloud"):
            check_draws("random-cut:2-5", Cut(2, 1), 6)

    def test_a_cut_that_nobody_drew_is_no_defence(self, writer: Writer) -> None:
        protect(writer.target, Protection("random-cut:2-3"), writer.codec)
        with pytest.raises(UserError, match="did not draw"):
            protect(writer.target, Protection("random-cut:3-4"), writer.codec)

    def test_one_server_serves_every_cut_that_is_drawn(self, llama_folder: Path) -> None:
        """The text is the unsplit model's at each, also where sessions of several cuts are there at once."""
        blueprint = Blueprint.open(llama_folder, FLOAT32)
        cuts = (Cut(2, 1), Cut(3, 1), Cut(4, 1), Cut(2, 2))
        with running_server(llama_folder, Cut(2, 1), inner=True) as (_, url):
            writers = [open_writer(blueprint, "tiny", cut, cloud=url, wire="float32") for cut in cuts]
            texts = [tokens(writer, "auto") for writer in writers]
            for writer in writers:
                writer.target.close()
            with pytest.raises(MismatchError, match="cuts tiny at 2,1, the other side at 1,1"):
                open_writer(blueprint, "tiny", Cut(1, 1), cloud=url, wire="float32")
        assert texts == [unsplit_tokens(llama_folder, tuple(range(20, 50)), 16)] * len(cuts)

    def test_a_server_that_allows_no_part_says_how_it_would(self, llama_folder: Path) -> None:
        with (
            running_server(llama_folder, Cut(2, 1)) as (_, url),
            pytest.raises(MismatchError, match="--inner-cuts"),
        ):
            open_writer(Blueprint.open(llama_folder, FLOAT32), "tiny", Cut(3, 1), cloud=url, wire="float32")


@pytest.fixture
def writer(llama_folder: Path) -> Writer:
    blueprint = Blueprint.open(llama_folder, Compute("float32", "cpu"))
    return open_writer(blueprint, "tiny", Cut(), wire="float32")


def tokens(writer: Writer, decode: str, temperature: float = 0.0) -> list[int]:
    writer.forget()
    decoding = Decoding(decode, max_nodes=8)
    return writer.complete(
        range(20, 50),
        make_drafter(decoding),
        sampling=Sampling(temperature, seed=3),
        decoding=decoding,
        stopping=Stopping(16),
    ).token_ids


@pytest.mark.parametrize(
    ("setting", "temperature"), [("int8", 1.0), ("int3", 0.0), ("noise:100000", 0.0), ("noise:2000", 1.0)]
)
def test_the_text_is_the_same_in_every_mode(writer: Writer, setting: str, temperature: float) -> None:
    assert isinstance(writer.target, SplitTarget)
    plain = tokens(writer, "sequential", temperature)
    writer.target.protect(open_guard(setting, writer.target.parts, writer.codec))
    sequential = tokens(writer, "sequential", temperature)
    assert tokens(writer, "auto", temperature) == sequential
    assert tokens(writer, "jacobi", temperature) == sequential
    if setting in ("int3", "noise:2000"):
        assert sequential != plain, "a defence that changes nothing protects nothing"
    writer.target.protect()
    assert tokens(writer, "sequential", temperature) == plain


def test_what_is_sent_is_what_the_guard_made(writer: Writer, llama_folder: Path) -> None:
    """Every row that arrives in a real server's process has no more values than three bits allow."""
    with running_server(llama_folder) as (_, url), relay_to(url) as relay:
        link = open_link(llama_folder, relay.url)
        assert isinstance(writer.target, SplitTarget)
        target = SplitTarget(writer.target.parts, link, "float32")
        target.protect(open_guard("int3", target.parts, writer.codec))
        tokens(Writer(target, writer.codec, "2,2"), "auto")
        target.close()
    frames = [frame for frame in map(decode, relay.recording.messages_up) if isinstance(frame, StepFrame)]
    rows = torch.cat(
        [TensorCodec("float32", WIDTH).decode(frame.payload, len(frame.step)) for frame in frames]
    )
    assert len(rows) > 50
    assert all(len(row.unique()) <= 7 for row in rows)
