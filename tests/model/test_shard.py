"""Cloud shards: only the middle, each tensor as listed, and nothing is served that is not so."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aparte.cloud.load import load_engine
from aparte.config import Compute, Cut, LinkSettings
from aparte.device import open_writer
from aparte.errors import CheckpointError, CutError, MismatchError, UserError
from aparte.fingerprint import Fingerprint
from aparte.model import shard as shard_module
from aparte.model.checkpoint import Checkpoint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.gguf import convert
from aparte.model.linear import packed_available
from aparte.model.needed import layer_index
from aparte.model.parts import Blueprint
from aparte.model.shard import Manifest, check_shard, digest_of_middle, read_manifest
from aparte.model.shard_writer import write_shard
from dialogue import Device, open_link, unsplit_tokens
from running import FLOAT32, running_server
from tiny import VARIANTS, save_tiny, tiny_model
from tiny_gguf import save_tiny_gguf

#: What the middle has no use for, and what says something of whoever made the model.
NOT_IN_A_SHARD = (
    "vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "architectures",
    "logit_scale", "logits_scaling", "embedding_multiplier", "final_logit_softcapping", "_name_or_path",
    "transformers_version", "dtype", "initializer_range",
)  # fmt: skip


def make(folder: Path, out: Path, cut: Cut | None = None, *, file_bytes: int = 10**9) -> Manifest:
    blueprint = Blueprint.open(folder, FLOAT32)
    return write_shard(blueprint, cut or Cut(), "tiny", out, file_bytes=file_bytes)


def load(folder: Path, cut: Cut | None = None, compute: Compute = FLOAT32) -> Fingerprint:
    """What ``aparte serve`` does with the folder; the fingerprint that it serves under."""
    return load_engine(Blueprint.open(folder, compute), cut or Cut(), "given").fingerprint


@pytest.fixture(scope="module")
def original(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard in several files."""
    out = tmp_path_factory.mktemp("shards") / "middle"
    make(llama_folder, out, file_bytes=20_000)
    return out


@pytest.fixture
def shard(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "middle"))


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


# -- Writing ---------------------------------------------------------------------------------------


def test_it_holds_the_middle_and_nothing_else(llama_folder: Path, original: Path) -> None:
    whole = load_file(llama_folder / "model.safetensors")
    files = sorted(original.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 30_000 for file in files)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == {name for name in whole if layer_index(name) in (2, 3)}
    assert all(tensor.equal(whole[name]) for name, tensor in found.items())
    others = {file.name for file in original.iterdir()} - {file.name for file in files}
    assert others == {"config.json", "manifest.json", "model.safetensors.index.json"}


def test_the_manifest_lists_what_is_there(original: Path) -> None:
    manifest = check_shard(original)
    listed = json.loads((original / "manifest.json").read_text())
    assert listed == json.loads(json.dumps(manifest.to_json()))
    assert (listed["cut"], listed["layers"], listed["model"]) == ("2,2", 6, "tiny")
    tensor = listed["tensors"]["model.layers.2.mlp.down_proj.weight"]
    assert (tensor["dtype"], tensor["shape"]) == ("F32", [32, 64])
    assert len(tensor["sha256"]) == 64
    assert listed["config"] == json.loads((original / "config.json").read_text())


def test_files_can_be_read_by_the_library_that_the_format_comes_from(tmp_path: Path) -> None:
    """Numbers of several widths, none of which may begin off its own width."""
    folder = save_tiny("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    mixed = {
        name: tensor.bfloat16() if "norm" in name else tensor.half() if "mlp" in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    make(folder, tmp_path / "shard")
    found = load_file(tmp_path / "shard" / "model.safetensors")
    assert all(
        tensor.equal(mixed[name]) and tensor.dtype == mixed[name].dtype for name, tensor in found.items()
    )
    with (tmp_path / "shard" / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    assert length % 8 == 0
    widths = {"F32": 4, "F16": 2, "BF16": 2}
    for entry in (value for name, value in header.items() if name != "__metadata__"):
        assert entry["data_offsets"][0] % widths[entry["dtype"]] == 0


#: One of each kind of oddity; the others are looked at with the slow tests.
ODD = ("llama-3.1", "qwen3-moe", "gemma3", "gpt-neox", "cohere2")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[] if name in ODD else pytest.mark.slow) for name in sorted(VARIANTS)],
)
def test_every_family_can_be_served_from_a_shard(variant: str, tmp_path: Path) -> None:
    """Under the very fingerprint of the whole model, from a configuration without the ends' fields."""
    folder = save_tiny(variant, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "trained_on": "letters", "my_vocab": ["a"]}))
    make(folder, tmp_path / "shard")
    kept = json.loads((tmp_path / "shard" / "config.json").read_text())
    assert not set(NOT_IN_A_SHARD) & set(kept)
    assert not {"trained_on", "my_vocab"} & set(kept)
    ours = take_fingerprint(Blueprint.open(folder, FLOAT32), Cut(), "ours")
    theirs = load(tmp_path / "shard")
    assert (theirs.config, theirs.tensors, theirs.cut) == (ours.config, ours.tensors, ours.cut)
    assert theirs.manifest == digest_of_middle(Blueprint.open(folder, FLOAT32), Cut())


def test_a_family_that_nobody_listed_passes_its_check_without_the_ends_too(tmp_path: Path) -> None:
    tiny_model("stablelm", layer_norm_eps=1e-5).save_pretrained(tmp_path / "model")
    make(tmp_path / "model", tmp_path / "shard")
    assert load(tmp_path / "shard").manifest.startswith("sha256:")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_text_is_that_of_the_model(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "model")
    make(folder, tmp_path / "shard")
    with running_server(tmp_path / "shard") as (server, url):
        assert server.engine.fingerprint.name == "tiny"
        device = Device(folder, open_link(folder, url))
        assert device.tokens() == unsplit_tokens(folder)
        device.target.close()


def test_numbers_are_packed_as_those_of_the_model(llama_folder: Path, original: Path) -> None:
    if not packed_available():
        pytest.skip("packed16 needs an x86 CPU with AVX2")
    packed = Compute("packed16", "cpu")
    with (
        running_server(original, compute=packed) as (_, url),
        running_server(llama_folder, compute=packed) as (_, whole),
    ):
        texts = []
        for cloud in (url, whole):
            device = Device(llama_folder, open_link(llama_folder, cloud))
            texts.append(device.tokens())
            device.target.close()
    assert texts[0] == texts[1]


def test_a_gguf_file_becomes_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))
    folder = convert(save_tiny_gguf("llama", tmp_path / "tiny.gguf", kind="Q8_0"))
    make(folder, tmp_path / "shard")
    with running_server(tmp_path / "shard") as (_, url):
        device = Device(folder, open_link(folder, url))
        assert device.tokens() == unsplit_tokens(folder)
        device.target.close()


def test_bytes_are_copied_and_no_tensor_is_made(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the memory it takes is that of a piece, whatever the size of the model."""
    monkeypatch.setattr("aparte.model.checkpoint._PIECE_BYTES", 1000)
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    sizes: list[int] = []
    raw = Checkpoint.raw

    def watched(self: Checkpoint, name: str) -> Iterator[bytes]:
        for piece in raw(self, name):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(Checkpoint, "raw", watched)
    write_shard(blueprint, Cut(), "tiny", tmp_path / "shard")
    assert max(sizes) == 1000
    assert sum(sizes) == sum(
        tensor.nbytes for tensor in load_file(tmp_path / "shard" / "model.safetensors").values()
    )
    assert blueprint.checkpoint.bytes_read == 0


def test_it_is_the_same_middle_in_whatever_files(llama_folder: Path, original: Path, tmp_path: Path) -> None:
    one = make(llama_folder, tmp_path / "one")
    assert [file.name for file in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    assert one.digest == read_manifest(original).digest
    assert make(llama_folder, tmp_path / "other", Cut(1, 2)).digest != one.digest


def test_a_folder_in_the_way_is_left_alone(llama_folder: Path, original: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(UserError, match="is there already"):
            make(llama_folder, out)
    assert (tmp_path / "mine" / "notes").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    make(llama_folder, tmp_path / "empty")
    with pytest.raises(UserError, match="is a shard already"):
        make(original, tmp_path / "again")


def test_nothing_is_left_of_one_that_fails(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("aparte.model.shard_writer._write_json", fail)
    with pytest.raises(KeyboardInterrupt):
        make(llama_folder, tmp_path / "shards" / "middle")
    assert list((tmp_path / "shards").iterdir()) == []


def test_a_disk_without_room_is_a_sentence(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="Make room"):
        make(llama_folder, tmp_path / "shard")


# -- What is not served ----------------------------------------------------------------------------


def add_tensor(folder: Path, name: str, file: str | None = None) -> None:
    """Put a tensor into a file that there is, or into one of its own."""
    path = folder / (file or first_file(folder).name)
    tensors = load_file(path) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    some = next(iter(load_file(first_file(folder)).values()))
    save_file({**tensors, name: some.clone()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.5.self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("file", [None, "extra.safetensors", "deep/model.safetensors"])
def test_with_a_tensor_of_the_ends_nothing_is_served(shard: Path, name: str, file: str | None) -> None:
    add_tensor(shard, name, file)
    with pytest.raises(CheckpointError, match="must not hold the ends") as caught:
        load(shard)
    assert name in str(caught.value)


def test_a_manifest_that_lists_an_end_is_no_excuse(shard: Path) -> None:
    add_tensor(shard, "lm_head.weight")
    text = json.loads((shard / "manifest.json").read_text())
    entry = {**text["tensors"]["model.layers.2.input_layernorm.weight"]}
    tensors = {**read_manifest(shard).tensors, "lm_head.weight": shard_module.ShardTensor(**entry)}
    manifest = Manifest("tiny", "", Cut(), 6, text["config"], tensors)
    (shard / "manifest.json").write_text(json.dumps(manifest.to_json()))
    with pytest.raises(CheckpointError, match=r"manifest.json holds lm_head.weight.*must not hold the ends"):
        load(shard)


def flip(folder: Path) -> None:
    """One bit in the middle of the data."""
    path = first_file(folder)
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(bytes(data))


def reshape(folder: Path) -> None:
    path = next(
        file for file in folder.glob("*.safetensors") if any(t.ndim == 2 for t in load_file(file).values())
    )
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    save_file({**tensors, name: tensors[name].T.contiguous()}, path, metadata={"format": "pt"})


def drop(folder: Path) -> None:
    path = first_file(folder)
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path, metadata={"format": "pt"})


def other_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))


def other_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"sha256": "', '"sha256": "0', 1))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (flip, "its hash is another one"),
        (reshape, "and the manifest lists F32 of shape"),
        (drop, "does not hold the tensor"),
        (other_config, "config.json is not the one"),
        (other_manifest, "not a shard's manifest, or was changed"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "not a shard's manifest"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not a shard's manifest"),
        (lambda folder: (folder / "old.bin").write_bytes(b"\x80"), "old.bin does not belong"),
        (lambda folder: (folder / "all.gguf").write_bytes(b"GGUF"), "all.gguf does not belong"),
        (lambda folder: add_tensor(folder, "model.layers.2.extra.weight"), "its manifest does not list it"),
        (lambda folder: shutil.copy(first_file(folder), folder / "copy.safetensors"), "twice"),
        (lambda folder: first_file(folder).write_bytes(b""), "too short for a header"),
    ],
)
def test_what_is_not_as_listed_is_not_served(shard: Path, spoil: Callable[[Path], None], told: str) -> None:
    load(shard)
    spoil(shard)
    with pytest.raises(CheckpointError, match=told):
        load(shard)


JUNK = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_a_manifest_holds_is_read_or_refused(original: Path, data: st.DataObject) -> None:
    """Any one value of it is replaced by anything."""
    text = json.loads((original / "manifest.json").read_text())
    place: Any = text
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    place[key] = data.draw(JUNK)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "manifest.json").write_text(json.dumps(text))
        try:
            manifest = read_manifest(Path(folder))
        except CheckpointError:
            return
        with pytest.raises(UserError):  # nothing that it lists is there
            check_shard(Path(folder))
        assert manifest.digest == text["digest"]


def test_another_cut_is_refused_with_the_one_that_fits(original: Path) -> None:
    with pytest.raises(CutError, match="use --cut 2,2 on both sides"):
        load(original, Cut(1, 2))


def test_a_shard_is_no_model_for_a_device(original: Path) -> None:
    with pytest.raises(CheckpointError, match="is a cloud shard"):
        Blueprint.open(original, FLOAT32).ends()


# -- The handshake ---------------------------------------------------------------------------------


@pytest.fixture
def edited(shard: Path) -> Path:
    """A shard that is sound in itself, with one number changed that no sample looks at."""
    listed = read_manifest(shard)
    for path in shard.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.numel() * 4 > 8000:  # samples take every byte of smaller ones
                flat = tensor.flatten()
                flat[100] += 1
                save_file(tensors, path, metadata={"format": "pt"})
                checkpoint = Checkpoint.open(shard)
                hashes = {**listed.tensors}
                entry = checkpoint.entry(name)
                hashes[name] = shard_module.ShardTensor(
                    entry.dtype, entry.shape, shard_module.hash_of(checkpoint, name)
                )
                manifest = Manifest("tiny", "", Cut(), 6, listed.config, hashes)
                (shard / "manifest.json").write_text(json.dumps(manifest.to_json()))
                return shard
    raise AssertionError("every tensor is small")


def test_the_device_checks_every_byte_by_the_manifest(
    llama_folder: Path, original: Path, edited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What samples cannot see, the manifest's digest shows, before anything that depends on text is sent."""
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))
    blueprint = Blueprint.open(llama_folder, FLOAT32)

    def connect(url: str) -> None:
        once = LinkSettings(retries=0)
        open_writer(blueprint, "tiny", Cut(), cloud=url, wire="float32", settings=once).target.close()

    with running_server(original) as (_, url):
        connect(url)
    (kept,) = (tmp_path / "cache" / "manifests").iterdir()
    assert kept.read_text().strip() == read_manifest(original).digest
    with running_server(edited) as (server, url):
        assert server.engine.fingerprint.tensors == take_fingerprint(blueprint, Cut(), "tiny").tensors
        with pytest.raises(MismatchError, match=r"another manifest.*some weights differ"):
            connect(url)
        assert server.counters.steps == 0


def test_the_digest_is_worked_out_anew_when_the_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))
    folder = save_tiny("llama", tmp_path / "model")
    before = digest_of_middle(Blueprint.open(folder, FLOAT32), Cut())
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.mlp.up_proj.weight"][1, 1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert digest_of_middle(Blueprint.open(folder, FLOAT32), Cut()) != before


def test_without_the_middle_on_disk_there_is_no_digest(
    llama_folder: Path, original: Path, tmp_path: Path
) -> None:
    """Then the samples cannot be compared either; the greeting goes through on what is left."""
    folder = save_tiny("llama", tmp_path / "model", max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in {file for name, file in index.items() if layer_index(name) in (2, 3)}:
        (folder / file).unlink()
    assert digest_of_middle(Blueprint.open(folder, FLOAT32), Cut()) == ""
