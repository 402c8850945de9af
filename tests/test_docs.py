"""README and docs say what is true: commands and options exist, documented runs work, fields are complete.

Lines of ``console`` blocks that begin with ``$ aparte`` are parsed by the real command line;
``test_docs_commands.py`` runs them.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from aparte import Aparte, Options
from aparte.answer import Answer
from aparte.cli.app import app
from aparte.decode import StepRecord
from aparte.measure.verify import Report
from aparte.model.registry import ModelEntry
from aparte.step import ROOT, Step
from aparte.target.base import Timing
from aparte.wire.frames import ERROR_CODES, ErrorFrame, Frame, Hello, ResultFrame, StepFrame, Welcome, encode

ROOT_DIR = Path(__file__).parents[1]
DOCS = ROOT_DIR / "docs"
PAGES = {
    str(path.relative_to(ROOT_DIR)): path.read_text(encoding="utf-8")
    for path in (
        *(ROOT_DIR / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
        *sorted(DOCS.glob("*.md")),
    )
}
FEW_TOKENS = "6"
START_S = 120


@dataclass(frozen=True)
class Documented:
    """A command line of a page; ``words`` without the prompt and without ``aparte``."""

    page: str
    line: int
    program: str
    words: tuple[str, ...]
    text: str
    #: What the comment above its block says of running it: "slow: …" or "not run: …", else nothing.
    mark: str = ""

    @property
    def name(self) -> str:
        return self.words[0] if self.words else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def documented(page: str) -> Iterator[Documented]:
    fence = mark = ""
    for number, whole_line in enumerate(PAGES[page].splitlines(), start=1):
        line = whole_line.strip()  # a block may belong to a list
        if line.startswith("```"):
            fence = "" if fence else line.removeprefix("```").strip() or "text"
            mark = mark if fence else ""
        elif fence == "console" and line.startswith("$ "):
            words = shlex.split(line.removeprefix("$ "))
            yield Documented(page, number, words[0], tuple(words[1:]), line.removeprefix("$ "), mark)
        elif not fence and line:
            said = re.fullmatch(r"<!-- ((?:slow|not run): .+) -->", line)
            mark = said[1] if said else ""


def commands(program: str = "aparte") -> list[Documented]:
    return [command for page in PAGES for command in documented(page) if command.program == program]


def resolve(words: tuple[str, ...]) -> tuple[str, Any, list[str]]:
    """Name, Click command and remaining words of a command line, following subcommands."""
    command, name, rest = typer.main.get_command(app), "aparte", list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        name = rest.pop(0)
        command = command.commands[name]  # type: ignore[attr-defined]
    return name, command, rest


def all_commands() -> Iterator[tuple[str, Any]]:
    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if name != "aparte":
            yield name, command
        for child, inner in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {child}", inner)

    return walk("aparte", typer.main.get_command(app))


def options(command: Any) -> dict[str, Any]:
    return {
        parameter.opts[0]: parameter
        for parameter in command.params
        if parameter.opts[0].startswith("--") and not parameter.hidden
    }


def run(words: list[str], **settings: Any) -> str:
    """Run a command in this process; its standard output."""
    result = CliRunner().invoke(app, words, **settings)
    assert result.exit_code == 0, (words, result.exception, result.output)
    return result.stdout


class TestCommands:
    @pytest.mark.parametrize("command", commands(), ids=str)
    def test_it_exists_with_these_options(self, command: Documented) -> None:
        name, click_command, rest = resolve(command.words)
        try:
            click_command.make_context(name, rest)
        except typer.Exit:
            assert {"--help", "--version"} & set(command.words)

    @pytest.mark.parametrize(
        "words", [["--version"], ["--help"], ["models"], ["models", "--json"]], ids=" ".join
    )
    def test_cheap_ones_run(self, words: list[str]) -> None:
        assert tuple(words) in {command.words for command in commands()}
        assert run(words)

    @pytest.mark.parametrize("page", PAGES)
    def test_shell_blocks_are_console_blocks(self, page: str) -> None:
        assert not re.search(r"^```(sh|bash|shell)$", PAGES[page], re.MULTILINE)

    def test_make_targets_and_scripts_exist(self) -> None:
        makefile = (ROOT_DIR / "Makefile").read_text(encoding="utf-8")
        targets = [target for command in commands("make") for target in command.words]
        assert {"setup", "demo", "test"} <= set(targets)
        for target in targets:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for command in commands("python"):
            assert command.words[0] == "-c" or (ROOT_DIR / command.words[0]).exists()

    def test_pages_show_commands(self) -> None:
        """The extraction finds what it is meant to find."""
        assert {command.page for command in commands()} >= {"README.md", "docs/index.md", "docs/cli.md"}
        shown = [" ".join(command.words) for command in commands()]
        for name, _ in all_commands():
            assert any(line.startswith(name.removeprefix("aparte ")) for line in shown), name


def section(page: str, heading: str) -> str:
    """The text below ``heading`` up to the next one of its level or above, without code blocks."""
    text = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    level = len(heading) - len(heading.lstrip("#"))
    start = text.index(f"\n{heading}\n")
    rest = text[start + len(heading) + 2 :]
    end = re.search(rf"^#{{1,{level}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(text: str) -> list[list[str]]:
    """The cells of the rows of every table in ``text``, without head and rule."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [
        row for number, row in enumerate(rows) if not (set("".join(row)) <= {"-"} or _is_head(rows, number))
    ]


def _is_head(rows: list[list[str]], number: int) -> bool:
    return number + 1 < len(rows) and set("".join(rows[number + 1])) <= {"-"}


def codes(text: str) -> set[str]:
    """What stands in code spans."""
    return set(re.findall(r"`([^`]+)`", text))


def shown_default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.is_flag:
        return "on" if parameter.default else "off"
    return "" if parameter.default is None else f"`{parameter.default}`"


class TestReference:
    """docs/cli.md is complete, and docs/architecture.md has the formats right."""

    @pytest.mark.parametrize(("name", "command"), list(all_commands()), ids=lambda value: str(value)[:20])
    def test_every_option_and_default_is_listed(self, name: str, command: Any) -> None:
        rows = table(section("docs/cli.md", f"## `{name}`").split("| field |")[0])
        listed = {row[0].strip("`").split()[0]: row[1] for row in rows}
        actual = options(command)
        assert set(listed) == set(actual)
        for option, parameter in actual.items():
            if len(str(parameter.default)) < 40:  # a long default is described instead
                assert listed[option] == shown_default(parameter), option

    def test_fields_of_an_answer(self) -> None:
        text = section("docs/cli.md", "## The JSON of an answer").split("### ")[0]
        listed = set().union(*(codes(row[0]) for row in table(text)))
        assert listed == {*Answer("lookahead", "2,2", 1).to_json(), "error"}

    def test_fields_of_the_parts(self) -> None:
        text = section("docs/cli.md", "### Fields of `parts` { #fields-of-parts }")
        listed = set().union(*(codes(row[0]) for row in table(text)))
        assert listed == set(Answer("lookahead", "2,2", 1).parts())

    def test_fields_of_a_step(self) -> None:
        listed = set().union(
            *(
                codes(row[0])
                for row in table(section("docs/cli.md", "### Fields of `steps[]` { #fields-of-steps }"))
            )
        )
        assert listed == set(StepRecord(1, 0, 1, 0.0, 0.0, Timing()).to_json())

    def test_settings_of_the_library(self) -> None:
        """Those of ``aparte generate``, and each of them is listed."""
        rows = table(section("docs/api.md", "### Settings of `Aparte.connect` { #settings-of-connect }"))
        listed = set().union(*(codes(row[0]) for row in rows))
        assert listed == set(inspect.signature(Aparte.connect).parameters)
        generate = dict(all_commands())["aparte generate"]
        renamed = {
            "token_file": "token", "tls_ca": "ca_file", "pin": "pins", "rtt": "rtt_ms",
            **{name: f"{name}_s" for name in ("connect_timeout", "step_timeout", "answer_timeout")},
        }  # fmt: skip
        of_an_answer = {*vars(Options()), "prompt", "raw", "system", "marks", "json"}
        given = {renamed.get(parameter.name, parameter.name) for parameter in generate.params}
        assert given - of_an_answer == listed - {"sessions", "progress", "notice"}
        settings = inspect.signature(Aparte.connect).parameters
        for parameter in generate.params:
            if parameter.name in settings and not parameter.required and parameter.name != "draft_length":
                default = settings[parameter.name].default
                assert str(default) == str(parameter.default) or (default, parameter.default) == ((), None)

    def test_fields_of_verify(self) -> None:
        text = section("docs/cli.md", "## `aparte verify`").split("| field |")[1]
        listed = set().union(*(codes(row[0]) for row in table("| field |" + text)))
        assert listed == set(Report("float32", "float32", "2,2", "lookahead").to_json())

    def test_fields_of_models(self) -> None:
        listed = codes(section("docs/cli.md", "## `aparte models`"))
        assert {field.name for field in fields(ModelEntry)} <= listed

    def test_frames(self) -> None:
        frames: list[Frame] = [
            Hello({"name": "", "cut": "", "config": "", "tensors": ""}, "float16", resume=""),
            Welcome({"name": "", "cut": "", "config": "", "tensors": ""}, 1, 1, resume="x", resumed=True),
            StepFrame(Step(1, 0, ROOT, 0, (ROOT,)), b""),
            StepFrame(Step(1, 0, ROOT, 0, (ROOT, ROOT)), b""),
            ResultFrame(1, 1.0, 1.0, b""),
            ErrorFrame("frame", "", 5.0),
        ]
        text = section("docs/architecture.md", "## Frames")
        rows = {row[0].strip("`"): codes(row[2]) for row in table(text)}
        sent: dict[str, set[str]] = {}
        for frame in frames:
            header = json.loads(encode(frame)[4:])
            sent.setdefault(header["k"], set()).update(header)
        assert sent == rows
        assert set(ERROR_CODES) | {"name", "cut", "config", "tensors", "revision", "manifest"} <= codes(text)

    def test_times(self) -> None:
        rows = table(section("docs/architecture.md", "## Where the time goes"))
        record = StepRecord(1, 0, 1, 0.0, 0.0, Timing()).to_json()
        assert {row[0].strip("`") for row in rows} == {name for name in record if name.endswith("_ms")}

    def test_every_dependency_has_a_reason(self) -> None:
        """Read without a TOML library, which Python 3.10 does not have."""
        project = (ROOT_DIR / "pyproject.toml").read_text(encoding="utf-8")
        wanted = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
        assert wanted is not None
        names = set(re.findall(r'"([A-Za-z0-9_-]+)[^"]*"', wanted[1]))
        rows = table(section("docs/architecture.md", "## Dependencies"))
        assert set().union(*(codes(row[0]) for row in rows)) == names


def units(text: str) -> Iterator[str]:
    """Paragraphs, list items, table rows and headings; no code blocks."""
    unit: list[str] = []
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
            continue
        if fenced:
            continue
        if not line.strip() or re.match(r"\s*([-*|#]|\d+\.)", line):
            if unit:
                yield "\n".join(unit)
            unit = []
        if line.strip():
            unit.append(line)
    if unit:
        yield "\n".join(unit)


PROMISES = re.compile(r"\b(secur\w+|privacy|private(?! key)|privately)\b", re.IGNORECASE)


class TestWords:
    @pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/privacy.md"])
    def test_promising_words_send_the_reader_to_the_limits(self, page: str) -> None:
        for unit in units(PAGES[page]):
            prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", unit)
            if PROMISES.search(prose):
                assert "privacy.md" in unit, unit

    def test_the_page_about_limits_promises_nothing(self) -> None:
        # A feature's name is no promise; what it is worth stands beside it.
        page = re.sub(r"private[- ]ends", "", PAGES["docs/privacy.md"], flags=re.IGNORECASE)
        assert not re.search(r"\b(guarantee\w*|unbreakable|secure|private)\b", page, re.IGNORECASE)
        assert "100 %" in page

    def test_the_lint_sees_what_it_should(self) -> None:
        assert list(units("A b\nc.\n\n- one\n  more\n- two\n```sh\nx\n```\n")) == [
            "A b\nc.",
            "- one\n  more",
            "- two",
        ]
        assert PROMISES.search("fully secure")
        assert PROMISES.search("Private by design")
        assert not PROMISES.search("its private key")

    @pytest.mark.parametrize("page", PAGES)
    def test_no_paths_of_somebodys_machine(self, page: str) -> None:
        assert not re.search(r"(?<![\w.])/(work|root|tmp|home|Users|mnt)/", PAGES[page])

    @pytest.mark.parametrize("page", PAGES)
    def test_links_lead_somewhere(self, page: str) -> None:
        folder = (ROOT_DIR / page).parent
        for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
            if not target.startswith(("https://", "#")):
                assert (folder / target.split("#")[0]).exists(), target
        if page.startswith("docs/"):  # the site has no other pages
            assert "](../" not in PAGES[page]

    def test_pictures_bring_their_own_background(self) -> None:
        for picture in (DOCS / "img").glob("*.svg"):
            text = picture.read_text(encoding="utf-8")
            assert '<rect x="1" y="1"' in text
            assert "<title" in text
            assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
