"""Plain passages from WikiText-2, whose text is cut into words: what the bridge that ships was trained with.

    .venv/bin/python benchmarks/passages.py wikitext2_valid.txt passages.txt
    aparte bridge train smollm2-135m --seed 2 --text passages.txt --from FIRST …

Punctuation is put back to its words, and words that were left out get a name from a list: copying names is
what a bridge has to learn. One paragraph to a line.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

#: Shorter lines are headings more often than text.
LEAST_CHARACTERS = 200
NAMES = [
    "Marlow",
    "Ines",
    "Tarrant",
    "Okafor",
    "Lindqvist",
    "Bracken",
    "Sorrel",
    "Vega",
    "Haldane",
    "Mirov",
    "Castell",
    "Dunmore",
    "Ashby",
    "Pereira",
    "Kestrel",
    "Nakata",
    "Rowan",
    "Fenwick",
    "Alder",
    "Zamora",
    "Thorne",
    "Bellamy",
    "Quint",
    "Orsini",
    "Larkin",
    "Mbeki",
    "Sato",
    "Varga",
    "Winslow",
    "Cray",
]


def plain(line: str) -> str:
    """One paragraph as it was written, more or less."""
    start, count = line[:40], 0

    def name(_: re.Match[str]) -> str:
        nonlocal count
        count += 1
        digest = hashlib.sha256(f"{start}{count}".encode()).hexdigest()
        return NAMES[int(digest, 16) % len(NAMES)]

    text = re.sub("<unk>", name, line)
    text = re.sub(r" @(.)@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)\]])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r'" ([^"]*?) "', r'"\1"', text)
    return text.replace(" 's", "'s").replace(" n't", "n't").replace(" ' ", "' ")


def main() -> None:
    source, out = (Path(name) for name in sys.argv[1:])
    lines = (line.strip() for line in source.read_text(encoding="utf-8").splitlines())
    kept = [plain(line) for line in lines if len(line) >= LEAST_CHARACTERS and not line.startswith("=")]
    out.write_text("\n".join(kept), encoding="utf-8")
    print(f"{len(kept)} paragraphs in {out}")


if __name__ == "__main__":
    main()
