"""The command, end to end, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aparte.privacy import settings as settings_module
from aparte.privacy.report import verdict
from aparte.privacy.sample import PERSONAL_DOMAIN, SENTENCE_DOMAIN
from aparte.privacy.settings import ATTACK_NAMES, Scale
from aparte.privacy.store import FILE
from cli.command import Command

TINY = Scale(
    cuts=("2,2", "1,3"),
    defences=("none", "int8", "noise:10000", "random-cut:1-3"),
    attacker_tokens=1000,
    victims=6,
    length=10,
    conversations=2,
    answer=4,
    seconds=60.0,  # no limit to reach: the same training every time
    steps=20,
    descents=1,
    traffic_prompts=3,
    traffic_tokens=4,
    price_texts=3,
    thorough=False,
)
ATTACK_FIELDS = {
    "name", "cut", "defence", "top1", "top5", "exact", "rouge_l", "pii_recall", "attacker_tokens", "seconds",
}  # fmt: skip
DEFENCE_FIELDS = {"name", "setting", "perplexity_ratio", "agreement", "bytes_ratio", "speed_ratio"}


@pytest.fixture(autouse=True)
def _scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "QUICK", TINY)


def stable(results: dict[str, Any]) -> Any:
    """Results without times."""
    text = json.dumps(results)
    return json.loads(re.sub(r'"(seconds|speed_ratio)": [\d.]+', r'"\1": 0', text))


@pytest.mark.slow
def test_everything_is_in_the_report_and_it_goes_on(
    aparte: Command, llama_folder: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    rows = [{"turns": [f"What is {number}?"], "category": "qa"} for number in range(3)]
    questions.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = ("audit", llama_folder, "--quick", "--dtype", "float32", "--out", tmp_path, "--json",
             "--questions", questions)  # fmt: skip
    first = aparte(*words)
    assert first.code == 0, first.err
    results = first.json
    assert {row["name"] for row in results["attacks"]} == set(ATTACK_NAMES)
    assert all(row.keys() >= ATTACK_FIELDS for row in results["attacks"])
    assert all(row.keys() >= DEFENCE_FIELDS for row in results["defences"])
    assert results == json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))

    exact = [row for row in results["attacks"] if row["name"] in ("vocabulary", "completion")]
    assert all(row["top1"] == 1 for row in exact if row["defence"] in ("none", "int8"))
    plain = [row for row in results["defences"] if row["name"] == "depth"]
    assert all((row["perplexity_ratio"], row["agreement"]) == (1, 1) for row in plain)

    domains = {row["trained_on"] for row in results["attacks"] if row.get("trained_on", "all") != "all"}
    assert domains == {SENTENCE_DOMAIN, PERSONAL_DOMAIN}
    for domain in domains:
        tested = [row["tested_on"] for row in results["attacks"] if row.get("trained_on") == domain]
        assert sorted(tested) == sorted(domains), "each is tested on itself and on the other"
    watched = {row["defence"]: row for row in results["attacks"] if row["name"] == "traffic"}
    assert watched.keys() == {"none", "constant-shape:9"}
    assert all(row["questions"] == 3 and row["answers_same"] == 1 for row in plain)
    assert "parts, about" in first.err

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<img ") == page.count('src="data:image/svg+xml;base64,') == 2
    assert not re.search(r"(src|href)=\"(?!data:)", page), "the page needs nothing else"
    told = (tmp_path / "report.md").read_text(encoding="utf-8")
    for threat in ("without the device's weights", "downloaded the public model", "tampered", "outside the"):
        assert threat in told
        assert threat.replace("'", "&#x27;") in page
    for sentence in verdict(results):
        assert sentence in told
        assert sentence in first.err

    # Half of it is lost; the rest is not made again, and the result is the same.
    lines = (tmp_path / FILE).read_text(encoding="utf-8").splitlines()
    (tmp_path / FILE).write_text("\n".join(lines[: len(lines) // 2]) + "\n", encoding="utf-8")
    half = aparte(*words, "--finished-only").json
    assert 0 < half["unfinished"] < len(lines)
    assert len(half["attacks"]) < len(results["attacks"])
    again = aparte(*words)
    assert stable(again.json) == stable(results) | {"seconds": 0}
    kept = (tmp_path / FILE).read_text(encoding="utf-8").splitlines()
    assert kept[: len(lines) // 2] == lines[: len(lines) // 2]


def test_own_text_and_chosen_parts(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.json"
    items = [
        {
            "full_text": f"Letter {number} from Anna Adler to the town of Graz.",
            "spans": [{"entity_type": "PERSON", "entity_value": "Anna Adler"}],
        }
        for number in range(60)
    ]
    text.write_text(json.dumps(items), encoding="utf-8")
    result = aparte(
        "audit", llama_folder, "--quick", "--dtype", "float32", "--out", tmp_path / "out", "--json", "--text",
        text, "--cuts", "3,1", "--attacks", "vocabulary,frequency", "--defences", "none",
        "--attacker-tokens", 400,
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = {row["name"]: row for row in result.json["attacks"]}
    assert rows.keys() == {"vocabulary", "frequency"}
    assert {row["cut"] for row in rows.values()} == {"3,1"}
    assert rows["vocabulary"]["attacker_tokens"] <= 400
    assert rows["vocabulary"]["exact"] == 1
    assert "Adler" not in result.out
    assert "Adler" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--attacks", "telepathy"), "Unknown attack"),
        (("--defences", "hope"), "Unknown defence"),
        (("--cuts", "4,4"), "leaves nothing for the cloud"),
        (("--cuts", "4-4"), "not of the form"),
        (("--attacker-tokens", "3"), "needs 100"),
        (("--text", "missing.txt"), "cannot be read"),
        (("--questions", "missing.txt"), "cannot be read"),
        (("--finished-only",), "No part of this audit is finished"),
        (("--wire", "morse"), "Unknown wire format"),
        (("--defences", "random-cut:2-9"), "leaves nothing for the cloud"),
    ],
)
def test_mistakes(
    words: tuple[str, ...], message: str, aparte: Command, llama_folder: Path, tmp_path: Path
) -> None:
    result = aparte("audit", llama_folder, "--quick", "--out", tmp_path / "out", *words)
    assert result.code == 2
    assert message in result.err


def test_another_audit_in_the_same_folder_is_refused(
    aparte: Command, llama_folder: Path, tmp_path: Path
) -> None:
    words = (
        "audit",
        llama_folder,
        "--quick",
        "--attacks",
        "uniform",
        "--defences",
        "none",
        "--out",
        tmp_path,
    )
    assert aparte(*words).code == 0
    refused = aparte(*words, "--seed", 1)
    assert refused.code == 2
    assert "other settings" in refused.err
