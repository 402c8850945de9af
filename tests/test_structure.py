"""Who may import whom, and what nobody may call: read from the source, and tried in fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aparte

ROOT = Path(aparte.__file__).parent
MODULES = {
    ".".join(("aparte", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports_of(module: str) -> set[str]:
    """Every module that ``module`` imports, anywhere in its source; ``from a import b`` counts as both."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def modules_under(package: str) -> list[str]:
    return [name for name in MODULES if name == package or name.startswith(f"{package}.")]


def offences(package: str, *forbidden: str) -> list[str]:
    """``module -> import`` for everything under ``package`` that imports something forbidden."""
    return [
        f"{module} -> {name}"
        for module in modules_under(package)
        for name in sorted(imports_of(module))
        if any(name == other or name.startswith(f"{other}.") for other in forbidden)
    ]


def loaded_by(module: str) -> set[str]:
    """Modules in memory after a fresh interpreter has imported ``module``."""
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.split())


TEXT = (
    "aparte.speculate",
    "aparte.text",
    "aparte.decode",
    "aparte.sampling",
    "aparte.rejection",
    "aparte.answer",
    "aparte.session",
)


def test_the_packages_are_those_that_the_rules_are_about() -> None:
    for package in ("cloud", "wire", "model", "speculate", "target", "text", "cli"):
        assert modules_under(f"aparte.{package}"), package


#: Draft mode's side of the cloud, which is given text (as tokens).
VERIFIER = "aparte.cloud.verifier"


def test_the_cloud_knows_nothing_of_text() -> None:
    found = offences("aparte.cloud", *TEXT, "aparte.device", "aparte.target", "transformers", "tokenizers")
    assert [line for line in found if not line.startswith(f"{VERIFIER} ")] == []


def test_the_verifier_chooses_tokens_and_knows_no_tokenizer() -> None:
    rest = ("aparte.speculate", "aparte.text", "aparte.decode", "aparte.answer", "aparte.session")
    assert offences(VERIFIER, *rest, "aparte.device", "aparte.target", "tokenizers") == []


def test_only_draft_mode_loads_the_verifier() -> None:
    importers = {line.split()[0] for line in offences("aparte", VERIFIER)}
    assert {name for name in importers if not name.startswith("aparte.measure")} == {
        "aparte.cloud.serving",
        "aparte.device",
    }
    assert VERIFIER not in loaded_by("aparte.device")  # it does so when a verifier is asked for


def test_serving_loads_nothing_that_handles_text() -> None:
    """Not by way of another module either."""
    loaded = loaded_by("aparte.cloud.server")
    assert not [name for name in loaded if name.startswith((*TEXT, "tokenizers", "transformers"))]


def test_frames_need_neither_sockets_nor_tensors() -> None:
    loaded = loaded_by("aparte.wire.frames")
    assert not loaded & {"torch", "numpy", "websockets", "asyncio", "socket", "ssl"}


def test_model_and_wire_know_nothing_of_each_other() -> None:
    assert offences("aparte.model", "aparte.wire") == []
    assert offences("aparte.wire", "aparte.model") == []


def test_model_and_wire_know_nothing_of_those_above_them() -> None:
    above = ("aparte.cloud", "aparte.target", "aparte.cli", "aparte.measure", "aparte.device", *TEXT)
    assert offences("aparte.model", *above) == []
    assert offences("aparte.wire", *above) == []


def test_the_loop_knows_targets_and_drafters_by_their_protocols() -> None:
    concrete = ("aparte.target.split", "aparte.target.local", "aparte.wire", "aparte.cloud", "aparte.model")
    drafters = ("aparte.speculate.jacobi", "aparte.speculate.lookahead")
    assert offences("aparte.decode", *concrete, *drafters) == []


def test_only_the_commands_know_the_commands() -> None:
    offending = [
        line for line in offences("aparte", "aparte.cli", "typer", "rich") if "aparte.cli" not in line[:10]
    ]
    assert offending == ["aparte.__main__ -> aparte.cli.app", "aparte.__main__ -> aparte.cli.app.main"]


@pytest.mark.parametrize("module", ["aparte", "aparte.cli.app"])
def test_the_command_line_starts_without_torch(module: str) -> None:
    assert not loaded_by(module) & {"torch", "transformers", "numpy", "websockets"}


# -- What nobody may call --------------------------------------------------------------------------

FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "torch.package"}


def calls_in(path: Path) -> Iterator[tuple[int, str, ast.Call]]:
    """Line, dotted name and node of every call."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            parts: list[str] = []
            function: ast.expr = node.func
            while isinstance(function, ast.Attribute):
                parts.append(function.attr)
                function = function.value
            if isinstance(function, ast.Name):
                parts.append(function.id)
                yield node.lineno, ".".join(reversed(parts)), node


def test_nothing_unpickles() -> None:
    assert offences("aparte", *FORBIDDEN_MODULES) == []


def test_nothing_runs_code_that_it_reads() -> None:
    found = [
        f"{module}:{line} {name}"
        for module, path in MODULES.items()
        for line, name, _ in calls_in(path)
        if name in FORBIDDEN_CALLS
    ]
    assert found == []


def test_no_remote_code_is_trusted_and_no_shell_started() -> None:
    found = [
        f"{module}:{line} {keyword.arg}"
        for module, path in MODULES.items()
        for line, _, call in calls_in(path)
        for keyword in call.keywords
        if keyword.arg in {"trust_remote_code", "shell"}
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    ]
    assert found == []


def test_what_decides_by_itself_which_class_to_load_is_local_and_runs_no_code_it_reads() -> None:
    for module, path in MODULES.items():
        for line, name, call in calls_in(path):
            if name.startswith("Auto") and name.endswith(".from_pretrained"):
                given = {keyword.arg for keyword in call.keywords}
                assert {"trust_remote_code", "local_files_only"} <= given, f"{module}:{line}"


def test_the_search_finds_what_is_there() -> None:
    assert "torch.nn" in imports_of("aparte.model.stage")
    assert "aparte.step.Step" in imports_of("aparte.model.stage")
    assert "json.loads" in {name for _, name, _ in calls_in(MODULES["aparte.measure.cloud_process"])}
