"""What the audit of a recording found, as sentences and as a file. Neither holds recovered text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aparte.errors import UserError

FILE = "recorded.json"


def sentences(results: dict[str, Any]) -> Iterator[str]:
    """One per session, and what traffic tells."""
    for number, row in enumerate(results["sessions"], start=1):
        traffic, positions = row["traffic"], row["positions"]
        if row["found_share"] is None:
            yield (
                f"Session {number}: {positions} tokens reached the cloud; distances alone do not decide "
                "there, so that nothing proves which of the tokens that were read are right."
            )
        else:
            yield (
                f"Session {number}: of {positions} tokens that reached the cloud as hidden states, "
                f"vocabulary matching found {row['found_share']:.1%} ({row['seconds']:.1f} s)."
            )
        yield (
            f"  Sizes alone: {traffic['messages_up']} messages of {traffic['distinct_sizes_up']} sizes, the "
            f"prompt in the first {traffic['prompt_steps']}; {row['rejected_nodes']} rejected guesses were "
            "sent too."
        )


def write_results(results: dict[str, Any], folder: Path) -> Path:
    """``recorded.json`` in ``folder``. Raises :class:`UserError` if it cannot be written."""
    file = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror or error}). Give another --out."
        ) from None
    return file
