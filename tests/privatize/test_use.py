"""Private ends at work: a text of their own, the same in every mode, and nothing of them on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aparte.answer import Writer
from aparte.api import Aparte
from aparte.bridge.teacher import Teacher
from aparte.config import Sampling, Stopping
from aparte.device import open_writer
from aparte.model.parts import Blueprint
from aparte.privacy.verdict import keep
from aparte.privatize.ends import Mask, PrivateEnds
from aparte.privatize.file import save_ends
from aparte.privatize.use import adopt, hide
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.step import ROOT, Step
from aparte.target.split import SplitTarget
from aparte.wire.frames import StepFrame, decode
from aparte.wire.tensors import TensorCodec
from cli.command import Command
from dialogue import open_link
from privatize.conftest import CUT, KEY, NOTHING, WIDTH, drawn_veil, new_net
from relay import relay_to
from running import FLOAT32, running_server

EXACT = ("--dtype", "float32", "--wire", "float32", "--max-new-tokens", 16)


def writer_with(folder: Path, file: Path | None) -> Writer:
    blueprint = Blueprint.open(folder, FLOAT32)
    ends = None if file is None else adopt(blueprint, CUT, file)
    writer = open_writer(blueprint, "tiny", CUT, wire="float32")
    if ends is not None:
        hide(writer.target, ends)
    return writer


def tokens(writer: Writer, decode: str = "sequential", temperature: float = 0.0) -> list[int]:
    writer.forget()
    decoding = Decoding(decode, max_nodes=8)
    return writer.complete(
        range(20, 50),
        make_drafter(decoding),
        sampling=Sampling(temperature, seed=3),
        decoding=decoding,
        stopping=Stopping(16),
    ).token_ids


def chain(tokens: Sequence[int], base: int = 0, tip: int = ROOT) -> Step:
    return Step(1, 0, tip, base, (tip, *range(base, base + len(tokens) - 1)))


class TestMask:
    VEIL = drawn_veil(torch.Generator().manual_seed(2))
    ROWS = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(3))

    def test_it_belongs_to_the_text_whatever_the_step(self) -> None:
        mask = Mask(KEY, self.VEIL)
        first = mask(chain([5, 6, 7, 8]), [5, 6, 7, 8], self.ROWS[:4])
        again = mask(Step(2, 0, 1, 2, (1, 1, 3)), [9, 7, 8], self.ROWS[[2, 2, 3]])  # in slots 3 and 4 now
        assert torch.equal(again[1:], first[2:])
        assert not torch.equal(again[0], first[2])

    def test_another_key_is_another_mask(self) -> None:
        one, two = (Mask(key, self.VEIL)(chain([5, 6]), [5, 6], self.ROWS[:2]) for key in (KEY, bytes(32)))
        assert not torch.equal(one[1], two[1])

    def test_the_first_token_has_none(self) -> None:
        mask = Mask(KEY, self.VEIL)(chain([5, 6]), [5, 6], self.ROWS[:2])
        assert not mask[0].any()
        assert mask[1].any()

    def test_decoys_come_as_often_as_they_should(self) -> None:
        flat = dataclasses.replace(self.VEIL, spread=torch.zeros_like(self.VEIL.spread))
        tokens = list(range(300))
        sent = self.ROWS + Mask(KEY, flat)(chain(tokens), tokens, self.ROWS)
        found = torch.cdist((sent @ flat.right.T)[1:], flat.table)
        assert float(found.amin(1).max()) < 1e-2, "always one of the table"
        counts = torch.bincount(found.argmin(1), minlength=10) / 299
        assert float((counts - flat.shares).abs().max()) < 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_their_own_and_the_same_in_every_mode(
    llama_folder: Path, ends_file: Path, temperature: float
) -> None:
    plain = tokens(writer_with(llama_folder, None), temperature=temperature)
    writer = writer_with(llama_folder, ends_file)
    sequential = tokens(writer, temperature=temperature)
    assert sequential != plain
    assert tokens(writer, "auto", temperature) == sequential
    assert tokens(writer, "jacobi", temperature) == sequential
    assert tokens(writer_with(llama_folder, ends_file), "auto", temperature) == sequential


def test_of_no_training_and_no_mask_nothing_shows(
    teacher: Teacher, llama_folder: Path, tmp_path: Path
) -> None:
    idle = PrivateEnds(KEY, NOTHING, new_net(teacher, llama_folder).changes())
    file = tmp_path / "idle.safetensors"
    save_ends(file, idle, Blueprint.open(llama_folder, FLOAT32), CUT)
    assert tokens(writer_with(llama_folder, file)) == tokens(writer_with(llama_folder, None))


def test_no_part_of_them_is_ever_sent(llama_folder: Path, ends_file: Path) -> None:
    """In what crossed the wire there are no eight bytes in a row of any tensor of the file, in any format."""
    with running_server(llama_folder) as (_, url), relay_to(url) as relay:
        writer = writer_with(llama_folder, ends_file)
        assert isinstance(writer.target, SplitTarget)
        target = SplitTarget(writer.target.parts, open_link(llama_folder, relay.url), "float32")
        ends = adopt(Blueprint.open(llama_folder, FLOAT32), CUT, ends_file)
        hide(target, ends)
        written = tokens(Writer(target, writer.codec, "2,2"), "auto")
        target.close()
    assert written == tokens(writer, "sequential")
    captured = bytes(relay.recording.up) + b"".join(relay.recording.messages_up)
    blob = b"".join(relay.recording.messages_up)
    frames = [frame for frame in map(decode, relay.recording.messages_up) if isinstance(frame, StepFrame)]
    rows = torch.cat([TensorCodec("float32", WIDTH).decode(f.payload, len(f.step)) for f in frames])
    assert len(rows) > 40
    secrets = [ends.key]
    for name, tensor in load_file(ends_file).items():
        if name != "key" and tensor.any():
            weight = tensor.flatten()
            secrets += [weight.to(kind).view(torch.uint8).numpy().tobytes() for kind in FORMATS]
    for name, change in ends.changes.items():
        changed = ends.change(name, torch.zeros_like(change.delta()))
        secrets += [changed.flatten().to(kind).view(torch.uint8).numpy().tobytes() for kind in FORMATS]
    windows = {captured[start : start + 8] for start in range(len(captured) - 7)}
    assert rows[0].numpy().tobytes()[:8] in windows, "what was sent would be found"
    for secret in secrets:
        pieces = {secret[start : start + 8] for start in range(0, len(secret) - 7, 4)} - {bytes(8)}
        assert not pieces & windows
    assert ends.digest.encode() not in blob
    assert str(ends_file).encode() not in blob


FORMATS = (torch.float32, torch.float16, torch.bfloat16)


def test_the_states_on_the_wire_are_masked(llama_folder: Path, ends_file: Path) -> None:
    """What arrives is the private front's output plus the mask, and neither of them alone."""
    with running_server(llama_folder) as (_, url), relay_to(url) as relay:
        writer = writer_with(llama_folder, ends_file)
        assert isinstance(writer.target, SplitTarget)
        parts = writer.target.parts
        target = SplitTarget(parts, open_link(llama_folder, relay.url), "float32")
        ends = adopt(Blueprint.open(llama_folder, FLOAT32), CUT, ends_file)
        hide(target, ends)
        tokens(Writer(target, writer.codec, "2,2"))
        target.close()
    frames = [frame for frame in map(decode, relay.recording.messages_up) if isinstance(frame, StepFrame)]
    sent = TensorCodec("float32", WIDTH).decode(frames[0].payload, len(frames[0].step))
    prompt = list(range(20, 20 + len(sent)))
    step = chain(prompt)
    front = parts.front.forward(parts.front.new_cache(), step, parts.embed(torch.tensor(prompt)))
    assert torch.allclose(sent, front + ends.new_mask()(step, prompt, front), atol=1e-4)
    assert float((sent - front).norm() / front.norm()) > 0.1


def test_the_library_takes_them(llama_folder: Path, ends_file: Path) -> None:
    with Aparte.connect(str(llama_folder), dtype="float32", wire="float32", private_ends=ends_file) as model:
        mine = model.generate(list(range(20, 50)), max_new_tokens=16).token_ids
    assert mine == tokens(writer_with(llama_folder, ends_file))


class TestCommands:
    @pytest.fixture(autouse=True)
    def _own_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))

    def test_the_line_at_the_start_is_the_audit_s(
        self, aparte: Command, llama_folder: Path, ends_file: Path
    ) -> None:
        with running_server(llama_folder) as (_, url):
            base = ("generate", llama_folder, "the cat", *EXACT, "--cloud", url)
            unknown = aparte(*base, "--private-ends", ends_file)
            assert unknown.code == 0, unknown.err
            assert "private ends: no audit" in unknown.err
            blueprint = Blueprint.open(llama_folder, FLOAT32)
            ends = adopt(blueprint, CUT, ends_file)
            row = {"cut": "2,2", "target": "prompt", "name": "adaptive", "defence": "private-ends=x"}
            keep(blueprint, {"attacks": [row | {"ends": ends.setting, "top1": 0.875}]})
            assert "private ends: the best attack of `aparte audit` recovered 87.5 % of the prompt" in (
                aparte(*base, "--private-ends", ends_file).err
            )
            assert "private ends" not in aparte(*base).err

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (["--target", "local"], "--target split"),
            (["--cut", "1,3"], "are for cut 2,2"),
            (["--defence", "int8"], "Choose one of them"),
        ],
    )
    @pytest.mark.parametrize("command", ["generate", "chat"])
    def test_mistakes(
        self,
        aparte: Command,
        llama_folder: Path,
        ends_file: Path,
        command: str,
        options: list[str],
        sentence: str,
    ) -> None:
        prompt = ["hi"] if command == "generate" else []
        result = aparte(command, llama_folder, *prompt, "--private-ends", ends_file, *options)
        assert result.code == 2
        assert sentence in result.err

    def test_a_defence_by_that_name_is_not_set_but_audited(self, aparte: Command, llama_folder: Path) -> None:
        result = aparte("generate", llama_folder, "hi", "--defence", "private-ends=x")
        assert result.code == 2
        assert "--private-ends FILE" in result.err
