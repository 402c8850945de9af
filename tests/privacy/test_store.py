"""Finished parts are kept, unfinished ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from aparte.errors import UserError
from aparte.privacy.store import FILE, Store

SETTINGS = {"seed": 1, "cuts": ["2,2"]}


def never() -> int:
    raise AssertionError("this part was finished before")


def test_a_part_is_made_once(tmp_path: Path) -> None:
    assert Store(tmp_path / "new", SETTINGS).part("a", lambda: {"x": 1}) == {"x": 1}
    assert Store(tmp_path / "new", SETTINGS).part("a", never) == {"x": 1}


def test_a_line_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS)
    store.part("a", lambda: 1)
    with (tmp_path / FILE).open("a", encoding="utf-8") as file:
        file.write('{"key": "b", "val')
    again = Store(tmp_path, SETTINGS)
    assert again.part("a", never) == 1
    assert again.part("b", lambda: 2) == 2
    assert Store(tmp_path, SETTINGS).part("b", never) == 2


def test_a_part_that_fails_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Store(tmp_path, SETTINGS).part("a", never)
    assert Store(tmp_path, SETTINGS).part("a", lambda: 3) == 3


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS)
    with pytest.raises(UserError, match="other settings"):
        Store(tmp_path, {**SETTINGS, "seed": 2})


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be used"):
        Store(tmp_path / "file", SETTINGS)
