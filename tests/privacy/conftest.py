"""A tiny model under audit, and cases of random text on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aparte.config import Compute, Cut
from aparte.model.parts import Blueprint
from aparte.privacy.attack import Case
from aparte.privacy.defence import Defence
from aparte.privacy.defences import Nothing
from aparte.privacy.observe import Observer
from aparte.privacy.specimen import Specimen
from tiny import FAMILIES, tiny_model, tiny_tokenizer

CUT = Cut(2, 2)
MakeCase = Callable[..., Case]


@pytest.fixture(scope="session")
def specimens(tiny_folders: dict[str, Path]) -> dict[str, Specimen]:
    """Six layers of every family, which may be cut anywhere."""
    return {
        family: Specimen(Blueprint.open(tiny_folders[family], Compute("float32", "cpu")), range(1, 6))
        for family in FAMILIES
    }


@pytest.fixture(scope="session")
def specimen(specimens: dict[str, Specimen]) -> Specimen:
    return specimens["llama"]


@pytest.fixture(scope="session")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    """A tiny model whose tokens outweigh their context, as in a trained model's first layers."""
    folder = tmp_path_factory.mktemp("clear")
    model = tiny_model("llama", tied=False)
    model.get_input_embeddings().weight.data *= 40
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Specimen(Blueprint.open(folder, Compute("float32", "cpu")), range(1, 6))


def random_texts(count: int, seed: int, longest: int = 24, vocabulary: int = 250) -> list[list[int]]:
    """Token texts of different lengths, every token as likely as any other."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture
def make_case(specimen: Specimen) -> MakeCase:
    def make(
        defence: Defence | None = None,
        *,
        cut: Cut = CUT,
        wire: str = "float16",
        answer: int = 0,
        victims: int = 3,
        tokens: int = 800,
        of: Specimen = specimen,
    ) -> Case:
        observer = Observer(of, cut, wire, Nothing() if defence is None else defence, seed=5)
        if defence is not None:
            plain = Observer(of, cut, "float32", Nothing()).watch(random_texts(4, seed=3))
            defence.calibrate(
                torch.cat([seen.up[1:] for seen in plain]), torch.cat([seen.up[:1] for seen in plain])
            )
        seen = observer.watch(random_texts(victims, seed=1), answer=answer)
        return Case(observer, seen, random_texts(200, seed=2), tokens, lambda *_: None)

    return make
