"""``--target draft`` and ``serve --whole``: the same text, and a plain word about who sees it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from aparte.address import parse_address
from aparte.errors import UserError
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.speculate.settings import Drafting
from cli.command import Command, start
from running import running_server
from tiny import save_tiny

EXACT = ("--dtype", "float32", "--wire", "float32", "--json", "--max-new-tokens", 20)
SAMPLED = ("--temperature", 0.8, "--top-p", 0.9, "--seed", 7)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of the same tokens."""
    return save_tiny("llama", tmp_path_factory.mktemp("small") / "small", layers=2)


@pytest.mark.parametrize("sampling", [(), SAMPLED], ids=["greedy", "sampled"])
def test_every_target_writes_the_same_tokens(
    aparte: Command, llama_folder: Path, small: Path, sampling: tuple[object, ...]
) -> None:
    base = ("generate", llama_folder, "the cat sat on the cat", *EXACT, *sampling)
    expected = aparte(*base).json
    local = aparte(*base, "--target", "local").json
    assert local["token_ids"] == expected["token_ids"]
    assert (local["target"], local["cut"], local["bytes_up"]) == ("local", "whole", 0)
    for options in (
        [],
        ["--decode", "sequential"],
        ["--draft", "context", "--draft-length", "3"],
        ["--draft", "shallow:2"],
        ["--draft", small, "--draft-length", "4"],
        ["--draft", f"{small}+context+shallow:3", "--in-flight", "2"],
    ):
        data = aparte(*base, "--target", "draft", *options).json
        assert data["token_ids"] == expected["token_ids"], options
        assert (data["target"], data["cut"]) == ("draft", "whole")
    assert (expected["target"], expected["cut"]) == ("split", "2,2")


def test_what_drafts_by_default_is_what_there_is(aparte: Command, llama_folder: Path, small: Path) -> None:
    base = ("generate", llama_folder, "hi", "--target", "draft", *EXACT)
    assert aparte(*base).json["decode"] == "context+recycling"
    assert aparte(*base, "--draft", f"shallow:1+{small}").json["decode"] == "shallow+model"
    assert aparte(*base, "--decode", "sequential").json["mat"] == 1.0


def test_drafting_for_the_clouds_time_changes_no_text(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat sat on the cat", *EXACT, "--target", "draft")
    expected = aparte(*base, "--decode", "sequential").json
    for more in ((), SAMPLED):
        expected = aparte(*base, *more, "--decode", "sequential").json
        data = aparte(*base, *more, "--draft", "shallow:3+context", "--draft-for", "cloud").json
        assert data["token_ids"] == expected["token_ids"]
        assert data["ahead_steps"] == data["stale_steps"] == 0
        assert sum(step["drafted"] for step in data["steps"]) > 0
        assert data["round_trips"] <= expected["round_trips"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "draft", "--draft-for", "money"), "goal of drafting"),
        (("--target", "draft", "--draft-for", "cloud", "--draft-length", "4"), "the number is given"),
        (("--target", "draft", "--draft-for", "cloud", "--max-nodes", "4"), "the number is given"),
        (("--draft-for", "cloud"), "belongs to draft mode"),
    ],
)
def test_what_drafting_for_the_clouds_time_does_not_go_with(
    aparte: Command, llama_folder: Path, words: tuple[str, ...], message: str
) -> None:
    result = aparte("generate", llama_folder, "hi", *words)
    assert result.code == 2
    assert message in result.err


def test_trees_are_drawn_for_rejection_sampling(aparte: Command, llama_folder: Path) -> None:
    words = ("generate", llama_folder, "the cat sat on the cat", *EXACT, *SAMPLED, "--target", "draft")
    words += ("--accept", "rejection")
    for draft in ("shallow:3+context+recycling", "context"):
        data = aparte(*words, "--draft", draft).json
        assert data["new_tokens"] == 20
        # How much of it pays is a matter of times; the first steps draft in any case.
        assert sum(step["drafted"] for step in data["steps"]) > 0
    far = aparte(*words, "--draft", "shallow:5", "--rtt", 40).json  # where drafting pays
    assert far["new_tokens"] == 20
    assert far["round_trips"] < 20


def test_a_fixed_length_is_kept(aparte: Command, llama_folder: Path, small: Path) -> None:
    base = ("generate", llama_folder, "the cat", "--target", "draft", "--draft", small, *EXACT)
    data = aparte(*base, "--draft-length", 3, "--in-flight", 1).json
    drafted = [step["drafted"] for step in data["steps"]]
    assert set(drafted[:-3]) == {3}


@pytest.mark.parametrize("draft", ["context", "shallow:2", "SMALL"])
def test_rejection_sampling_writes_answers(
    aparte: Command, llama_folder: Path, small: Path, draft: str
) -> None:
    given = str(small) if draft == "SMALL" else draft
    base = ("generate", llama_folder, "the cat", "--target", "draft", "--draft", given, *EXACT)
    data = aparte(*base, "--accept", "rejection", *SAMPLED, "--draft-length", 2).json
    assert 0 < data["new_tokens"] <= 20
    greedy = aparte(*base, "--accept", "rejection").json
    assert greedy["token_ids"] == aparte(*base).json["token_ids"]


def test_it_says_who_sees_the_text(aparte: Command, llama_folder: Path) -> None:
    with running_server(llama_folder, whole=True) as (_, url):
        for options in (["--target", "draft"], ["--target", "draft", "--cloud", url]):
            result = aparte("generate", llama_folder, "the cat", "--max-new-tokens", 3, *options)
            assert result.code == 0
            assert "the cloud sees the text" in result.err
            assert "never text" not in result.err


def test_a_whole_server_says_so_and_serves_drafting_devices_only(aparte: Command, llama_folder: Path) -> None:
    child = start("serve", llama_folder, "--whole", "--port", 0, "--json", "--dtype", "float32")
    assert child.stdout is not None
    ready = json.loads(child.stdout.readline())
    assert ready["cut"] == ready["model"]["cut"] == "whole"
    base = ("generate", llama_folder, "the cat", *EXACT, "--cloud", ready["listening"])
    here = aparte("generate", llama_folder, "the cat", *EXACT).json
    assert aparte(*base, "--target", "draft").json["token_ids"] == here["token_ids"]
    split = aparte(*base)
    assert split.code == 2
    assert "aparte serve MODEL --cut 2,2" in split.err
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 0
    assert "This server sees text" in err


def test_a_split_server_refuses_drafting_devices(aparte: Command, llama_folder: Path) -> None:
    with running_server(llama_folder) as (server, url):
        result = aparte("generate", llama_folder, "hi", "--target", "draft", "--cloud", url)
        assert result.code == 2
        assert "aparte serve MODEL --whole" in result.err
        assert server.counters.steps == 0


def test_an_emulated_link_has_a_verifier_of_its_own(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat", "--target", "draft", *EXACT)
    data = aparte(*base, "--rtt", 20).json
    assert data["token_ids"] == aparte(*base).json["token_ids"]
    assert all(step["rtt_ms"] >= 19 for step in data["steps"] if not step["ahead"])


def test_a_verifier_that_goes_away_leaves_what_was_written(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat", "--target", "draft", "--decode", "sequential", *EXACT)
    whole = aparte(*base).json["token_ids"]
    with running_server(llama_folder, whole=True) as (_, url):
        address = parse_address(url.removeprefix("ws://"))
        with WanRelay(("127.0.0.1", 0), address, WanProfile(drop_after=2_000)) as relay:
            cloud = ("--cloud", f"ws://127.0.0.1:{relay.port}")
            result = aparte(*base, *cloud, "--retries", 0)
            survived = aparte(*base, *cloud)
    assert survived.json["token_ids"] == whole
    assert survived.json["reconnects"] >= 1
    assert result.code == 1
    data = result.json
    assert 0 < data["new_tokens"] < 20
    assert data["token_ids"] == whole[: data["new_tokens"]]
    assert "went away" in data["error"]


def test_chat_in_draft_mode_sends_only_what_is_new(aparte: Command, llama_folder: Path) -> None:
    lines = b"the cat\nthe dog and the cat\n"
    base = ("chat", llama_folder, "--dtype", "float32", "--wire", "float32", "--json", "--max-new-tokens", 12)
    split = aparte(*base, stdin=lines)
    draft = aparte(*base, "--target", "draft", stdin=lines)
    answers = [json.loads(line) for line in draft.out.splitlines()]
    assert [one["token_ids"] for one in answers] == [
        json.loads(line)["token_ids"] for line in split.out.splitlines()
    ]
    assert answers[1]["reused_tokens"] > 0
    assert "the cloud sees the text" in aparte(*base[:-3], "--target", "draft", stdin=b"/exit\n").err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--target", "cloud"], "Known: split, draft, local"),
        (["--target", "draft", "--decode", "lookahead"], "--draft says what drafts"),
        (["--target", "draft", "--decode", "sequential", "--draft", "context"], "drafts nothing"),
        (["--target", "draft", "--decode", "sequential", "--draft-length", "3"], "drafts nothing"),
        (["--target", "draft", "--draft-length", "0"], "between 1 and 64"),
        (["--target", "draft", "--draft-length", "many"], "auto, or between 1 and 64"),
        (["--target", "draft", "--draft-length", "3", "--max-nodes", "8"], "Leave one of them out"),
        (["--target", "draft", "--accept", "typical"], "Known: coupled, rejection"),
        (["--target", "draft", "--draft", "shallow:0"], "at least 1"),
        (["--target", "draft", "--draft", "shallow:x"], "shallow:6"),
        (["--target", "draft", "--draft", "shallow:6"], "K must be 1 to 5"),
        (["--target", "draft", "--draft", "context+context"], "twice"),
        (["--target", "draft", "--draft", "context+"], "none between"),
        (["--target", "draft", "--draft", "one+two"], "two models"),
        (["--target", "draft", "--draft", "no-such-model"], "Unknown model"),
        (["--target", "draft", "--draft", "bridge"], "aparte bridge train"),
        (["--target", "draft", "--remember"], "recycling table"),
        (["--draft-length", "3"], "belongs to draft mode"),
        (["--accept", "rejection"], "belongs to draft mode"),
        (["--no-return-states"], "belongs to draft mode"),
        (["--draft", "context"], "--decode context"),
        (["--draft", "shallow:2"], "for --target draft"),
        (["--decode", "shallow"], "--draft shallow:K"),
        (["--target", "local", "--cloud", "ws://127.0.0.1:9"], "there is no link"),
        (["--target", "local", "--rtt", "5"], "there is no link"),
        (["--target", "local", "--cut", "1,1"], "nothing is cut"),
    ],
)
def test_a_users_mistake_is_a_sentence_and_exit_code_2(
    aparte: Command, llama_folder: Path, options: list[str], sentence: str
) -> None:
    result = aparte("generate", llama_folder, "hi", *options)
    assert result.code == 2
    assert sentence in result.err
    assert result.out == ""


def test_serve_takes_a_cut_or_the_whole(aparte: Command, llama_folder: Path) -> None:
    result = aparte("serve", llama_folder, "--whole", "--cut", "1,1")
    assert result.code == 2
    assert "Leave one out" in result.err


def test_a_draft_model_with_other_tokens_is_refused(
    aparte: Command, llama_folder: Path, tmp_path: Path
) -> None:
    folder = save_tiny("qwen2", tmp_path / "other")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    file.write_text(json.dumps(content))
    result = aparte("generate", llama_folder, "hi", "--target", "draft", "--draft", folder)
    assert result.code == 2
    assert "2 of 300 ids differ" in result.err


def test_settings_of_draft_mode() -> None:
    drafting = Drafting("context+shallow:3+owner/name", length=5)
    assert drafting.names == ("context", "shallow", "model")
    assert (drafting.layers, drafting.model) == (3, "owner/name")
    assert Drafting().names == ()
    assert Drafting.parse_length("auto") is None
    with pytest.raises(UserError, match="twice"):
        Drafting("bridge+bridge")


def test_a_wider_draft_sends_more_of_its_distribution(
    aparte: Command, llama_folder: Path, small: Path
) -> None:
    base = (
        "generate",
        llama_folder,
        "hi",
        "--target",
        "draft",
        "--draft",
        small,
        "--draft-length",
        "3",
        *EXACT,
    )
    drawn = (*base, "--temperature", "0.8", "--accept", "rejection")
    narrow, wide = (aparte(*drawn, "--draft-top", str(top)).json for top in (2, 16))
    per_node = [data["bytes_up"] / sum(step["nodes"] for step in data["steps"]) for data in (narrow, wide)]
    assert per_node[1] > per_node[0] + 50
    assert aparte(*base, "--draft-top", "0").code == 2
    assert aparte("generate", llama_folder, "hi", "--draft-top", "9", *EXACT).code == 2
