"""Reports: the same blocks as a page that needs nothing else, and as Markdown with its pictures beside it."""

from __future__ import annotations

import re
from pathlib import Path

from aparte.report import Block, Picture, html_page, markdown_page, minutes, percent, write_pictures

SVG = '<svg viewBox="0 0 10 10"></svg>'
BLOCKS: list[Block] = [
    ("h2", "Speed & size"),
    ("p", "With `auto` it is *faster*; <b> and 2 * 3 stay."),
    ("table", [["what", "n"], ["a|b", "1"], ["`c`", "2"]]),
    ("list", ["one", "two"]),
    ("figure", Picture("speed.svg", "Speed", SVG)),
]


def test_the_page_needs_no_other_file() -> None:
    page = html_page("A <title>", BLOCKS)
    assert "<title>A &lt;title&gt;</title>" in page
    assert "<h2>Speed &amp; size</h2>" in page
    assert "<p>With <code>auto</code> it is <em>faster</em>; &lt;b&gt; and 2 * 3 stay.</p>" in page
    assert "<tr><th>what</th><th>n</th></tr><tr><td>a|b</td><td>1</td></tr>" in page
    assert "<td><code>c</code></td>" in page
    assert "<li>two</li>" in page
    assert set(re.findall(r'src="([^:"]+):', page)) == {"data"}


def test_markdown_names_the_pictures_that_are_written(tmp_path: Path) -> None:
    text = markdown_page(BLOCKS)
    assert "## Speed & size\n" in text
    assert "| what | n |\n| --- | ---: |\n| a\\|b | 1 |\n" in text
    assert "- one\n- two\n" in text
    write_pictures(BLOCKS, tmp_path)
    for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text):
        assert (tmp_path / name).read_text(encoding="utf-8") == SVG


def test_shares() -> None:
    assert (percent(0.1234), percent(None)) == ("12.3 %", "")


def test_minutes_in_words() -> None:
    assert [minutes(seconds) for seconds in (12, 45, 89, 91, 600)] == [
        "under a minute",
        "1 minute",
        "1 minute",
        "2 minutes",
        "10 minutes",
    ]
