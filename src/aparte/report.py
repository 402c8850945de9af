"""Reports as a list of blocks, written as one HTML page that needs nothing else, and as Markdown.

A block is a kind and its content: ``h1`` to ``h3`` and ``p`` are text; ``list`` and ``verdict`` a list of
sentences; ``table`` a list of rows, the head first, ``words`` one whose cells are sentences;
``img`` a title and a picture's address, for HTML alone;
``figure`` a :class:`Picture`, which stands in the page and as a file beside the Markdown. Texts may have
Markdown's code spans and emphasis.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

Block = tuple[str, Any]

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1f2933}
body{max-width:62rem;margin:2rem auto;padding:0 1rem}
h1,h2,h3{line-height:1.2}
h2{margin-top:2.5rem}
table{border-collapse:collapse;margin:1rem 0;font-size:.9rem;display:block;overflow-x:auto}
th,td{border-bottom:1px solid #dde3ea;padding:.3rem .6rem;text-align:right}
th:first-child,td:first-child{text-align:left}
td{white-space:nowrap}
.words td{white-space:normal;text-align:left}
img{max-width:100%}
code{font-size:.92em;background:#f0f3f6;padding:.1em .3em;border-radius:3px}
.verdict{border-left:4px solid #d55e00;padding:.2rem 2rem}
"""


@dataclass(frozen=True)
class Picture:
    """A plot: the ``svg`` itself, and the file's name beside the Markdown."""

    name: str
    title: str
    svg: str

    @property
    def source(self) -> str:
        """An address that needs no file and no network."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


def minutes(seconds: float) -> str:
    """How long something took, in words."""
    rounded = round(seconds / 60)
    return "under a minute" if rounded == 0 else "1 minute" if rounded == 1 else f"{rounded} minutes"


def html_page(title: str, blocks: Sequence[Block]) -> str:
    """The whole page."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style>\n'
        + "\n".join(map(_html, blocks))
        + "\n</html>\n"
    )


def markdown_page(blocks: Sequence[Block]) -> str:
    """The same as Markdown; figures are files of their names, in the same folder."""
    return "\n".join(map(_markdown, blocks))


def write_pictures(blocks: Sequence[Block], folder: Path) -> None:
    """The files that :func:`markdown_page` refers to."""
    for kind, content in blocks:
        if kind == "figure":
            (folder / content.name).write_text(content.svg, encoding="utf-8")


def percent(value: float | None) -> str:
    """A share for a table; nothing for None."""
    return "" if value is None else f"{100 * value:.1f} %"


def _markdown(block: Block) -> str:
    kind, content = block
    if kind in ("h1", "h2", "h3"):
        return f"{'#' * int(kind[1])} {content}\n"
    if kind in ("table", "words"):
        head, *rows = content
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        return "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in lines) + "\n"
    if kind in ("verdict", "list"):
        return "\n".join(f"- {line}" for line in content) + "\n"
    if kind == "img":
        return f"({content[0]}: plot in report.html)\n"
    if kind == "figure":
        return f"![{content.title}]({content.name})\n"
    return f"{content}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _html(block: Block) -> str:
    kind, content = block
    if kind in ("table", "words"):
        head, *rows = content
        cells = "".join(f"<th>{_inline(cell)}</th>" for cell in head)
        lines = ["<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        return f'<table class="{kind}"><tr>{cells}</tr>{"".join(lines)}</table>'
    if kind in ("verdict", "list"):
        items = "".join(f"<li>{_inline(line)}</li>" for line in content)
        return f'<ul class="{kind}">{items}</ul>'
    if kind == "img":
        title, source = content
        return f'<h3>{escape(title)}</h3><img alt="{escape(title)}" src="{source}">'
    if kind == "figure":
        return f'<img alt="{escape(content.title)}" src="{content.source}">'
    return f"<{kind}>{_inline(content)}</{kind}>"


def _inline(text: str) -> str:
    """Escaped, with the two marks that our texts use: code and emphasis."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*(\w[^*]*)\*", r"<em>\1</em>", text)
