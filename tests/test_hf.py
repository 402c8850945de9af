"""``generate`` as of Hugging Face, beside the real one on the unsplit model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from aparte.errors import UserError
from aparte.hf import AparteForCausalLM
from running import running_server

NUMBERS = {"dtype": "float32", "device": "cpu", "wire": "float32", "sessions": 1}
PROMPTS = ["Why is the sky over the sea of another colour?", "One", "the the the the the the"]
COUNT = 16


@pytest.fixture(scope="module")
def theirs(llama_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(llama_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(llama_folder, padding_side="left")


@pytest.fixture(scope="module")
def ours(llama_folder: Path) -> Iterator[AparteForCausalLM]:
    with (
        running_server(llama_folder) as (_, url),
        AparteForCausalLM.from_pretrained(str(llama_folder), cloud=url, **NUMBERS) as model,
    ):
        yield model


class Seen(TextStreamer):
    """Keeps what a streamer is given."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.put_ids: list[list[int]] = []
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        self.put_ids.append(value.flatten().tolist())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


class TestGreedy:
    @pytest.mark.parametrize(
        "settings", [{}, {"do_sample": False}, {"max_new_tokens": COUNT}, {"max_length": 60}]
    )
    def test_one_row(self, ours: Any, theirs: Any, tokenizer: Any, settings: dict[str, Any]) -> None:
        inputs = tokenizer(PROMPTS[0], return_tensors="pt")
        inputs.pop("token_type_ids", None)
        expected = theirs.generate(**inputs, **settings)
        assert torch.equal(ours.generate(**inputs, **settings), expected)
        assert torch.equal(ours.generate(inputs["input_ids"], **settings), expected)

    def test_padded_rows(self, ours: Any, theirs: Any, tokenizer: Any) -> None:
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        expected = theirs.generate(**inputs, max_new_tokens=COUNT, do_sample=False)
        assert torch.equal(ours.generate(**inputs, max_new_tokens=COUNT, do_sample=False), expected)

    def test_ends_of_rows(self, ours: Any, theirs: Any, tokenizer: Any) -> None:
        """Tokens of our own that end a row, each at another place, and padding behind them."""
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        free = theirs.generate(**inputs, max_new_tokens=COUNT, eos_token_id=None)
        assert torch.equal(ours.generate(**inputs, max_new_tokens=COUNT, eos_token_id=None), free)
        ends = sorted({int(free[0, -5]), int(free[1, -11])})
        settings = {"max_new_tokens": COUNT, "eos_token_id": ends, "pad_token_id": 7}
        expected = theirs.generate(**inputs, **settings)
        assert expected.shape[1] < free.shape[1] or (expected == 7).any(), "some row ends early"
        assert torch.equal(ours.generate(**inputs, **settings), expected)

    def test_a_configuration_object(self, ours: Any, theirs: Any, tokenizer: Any) -> None:
        ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
        config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(ours.generate(ids, config), theirs.generate(ids, config))

    def test_a_streamer_gets_the_same(self, ours: Any, theirs: Any, tokenizer: Any) -> None:
        ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
        seen = Seen(tokenizer), Seen(tokenizer)
        for model, streamer in zip((ours, theirs), seen, strict=True):
            model.generate(ids, max_new_tokens=COUNT, do_sample=False, streamer=streamer)
        assert seen[0].put_ids == seen[1].put_ids
        assert seen[0].text == seen[1].text != ""

    def test_an_output_object(self, ours: Any, theirs: Any, tokenizer: Any) -> None:
        ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
        output = ours.generate(ids, max_new_tokens=COUNT, return_dict_in_generate=True)
        assert isinstance(output, GenerateDecoderOnlyOutput)
        assert torch.equal(output.sequences, theirs.generate(ids, max_new_tokens=COUNT))
        assert output.answers[0].round_trips > 0
        assert output.answers[0].token_ids == output.sequences[0, ids.shape[1] :].tolist()


SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "max_new_tokens": 12}


class TestSampling:
    def test_the_global_generator_makes_it_repeatable(self, ours: Any, tokenizer: Any) -> None:
        ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]

        def draw(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return ours.generate(ids, num_return_sequences=3, **SAMPLED)

        first, again, other = draw(1), draw(1), draw(2)
        assert first.shape[0] == 3
        assert torch.equal(first, again)
        assert not torch.equal(first[0], first[1]) or not torch.equal(first[1], first[2])
        assert first.shape != other.shape or not torch.equal(first, other)

    def test_top_k_of_one_is_greedy(self, ours: Any, theirs: Any, tokenizer: Any) -> None:
        ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
        sampled = ours.generate(ids, do_sample=True, top_k=1, max_new_tokens=COUNT)
        assert torch.equal(sampled, theirs.generate(ids, do_sample=False, max_new_tokens=COUNT))


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "name"),
        [
            ({"num_beams": 4}, "num_beams=4"),
            ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
            ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
            ({"output_scores": True}, "output_scores=True"),
            ({"min_new_tokens": 3}, "min_new_tokens=3"),
            ({"stop_strings": "x"}, "stop_strings"),
            ({"logits_processor": [print]}, "logits_processor"),
            ({"assistant_model": object()}, "assistant_model"),
            ({"past_key_values": object()}, "past_key_values"),
            ({"max_newtokens": 3}, "max_newtokens=3"),
            ({"temperature": -1.0, "do_sample": True}, "temperature is -1"),
            ({"num_return_sequences": 2}, "num_return_sequences"),
            ({"max_length": 3}, "max_length is 3, prompt included"),
        ],
    )
    def test_what_cannot_be_followed_is_named(self, ours: Any, settings: dict[str, Any], name: str) -> None:
        with pytest.raises(UserError, match=name):
            ours.generate(torch.ones(1, 5, dtype=torch.long), **settings)

    def test_what_is_off_is_no_reason_to_refuse(self, ours: Any) -> None:
        ids = torch.ones(1, 5, dtype=torch.long)
        off = {"num_beams": 1, "repetition_penalty": 1.0, "output_scores": False, "use_cache": True}
        assert ours.generate(ids, max_new_tokens=1, **off).shape == (1, 6)

    def test_inputs(self, ours: Any, tokenizer: Any) -> None:
        ids = torch.ones(2, 5, dtype=torch.long)
        for wrong in (None, ids[0], ids[:, :0], ids.float()):
            with pytest.raises(UserError, match="needs input_ids"):
                ours.generate(wrong)
        with pytest.raises(UserError, match="same thing"):
            ours.generate(ids, input_ids=ids)
        with pytest.raises(UserError, match="must agree"):
            ours.generate(ids, attention_mask=ids[:1])
        holes = ids.clone()
        holes[0, 2] = 0
        for mask in (holes, ids * 0, ids.flip(1) * torch.tensor([1, 1, 1, 1, 0])):
            with pytest.raises(UserError, match="on the left only"):
                ours.generate(ids, attention_mask=mask)
        with pytest.raises(UserError, match="shows one row"):
            ours.generate(ids, streamer=Seen(tokenizer))

    def test_there_are_no_logits(self, ours: Any) -> None:
        with pytest.raises(UserError, match="only generates"):
            ours(torch.ones(1, 5, dtype=torch.long))


def test_what_scripts_ask_of_a_model(ours: Any, theirs: Any) -> None:
    assert ours.config.to_dict()["hidden_size"] == theirs.config.hidden_size
    assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id
    assert ours.device == theirs.device
    assert ours.dtype == theirs.dtype
    assert ours.eval() is ours
    assert ours.can_generate()
    assert ours.main_input_name == theirs.main_input_name
