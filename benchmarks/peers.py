"""Other ways to write with the same model in the same session: Hugging Face's speculation beside ours.

    .venv/bin/python benchmarks/peers.py          # a table
    .venv/bin/python benchmarks/peers.py --json   # for benchmarks/suite.py

All in one process: the same prompts, tokens, threads, weights and precision, with no link in between. The
ways take turns on every prompt, in an order that rotates. llama.cpp's RPC backend runs beside them if its
binaries ``rpc-server`` and ``llama-cli`` are on the PATH and ``--gguf`` names the model's file; else the
result says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from links import PROMPTS

from aparte.answer import Writer
from aparte.config import DEFAULT_MODEL, Compute, Cut, Sampling, Stopping
from aparte.device import open_local_writer, open_writer
from aparte.drafting import DraftPlan
from aparte.drafts import DraftShelf
from aparte.measure.prompts import digest
from aparte.measure.verify import load_unsplit
from aparte.model.parts import Blueprint
from aparte.model.registry import resolve
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding, Drafting
from aparte.text.tokenizer import Codec

LOOKUP_TOKENS = 10  # what the library's documentation uses
BINARIES = ("rpc-server", "llama-cli")


@dataclass(frozen=True)
class Written:
    """One answer: its tokens, seconds with the prompt, and passes of the whole model."""

    tokens: list[int]
    seconds: float
    passes: int


Way = Callable[[list[int]], Written]


class Passes:
    """Counts forward passes of the whole model by its last layer."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.base_model.layers[-1].register_forward_hook(self._one_more)

    def _one_more(self, *_: Any) -> None:
        self.count += 1


def library_ways(blueprint: Blueprint, eos: frozenset[int], layers: int, new_tokens: int) -> dict[str, Way]:
    """``transformers``: plain, prompt lookup, and assisted by the model's own first layers."""
    transformers.logging.set_verbosity_error()  # it reports the layers that the assistant leaves out
    model, assistant = load_unsplit(blueprint), load_unsplit(blueprint, layers)
    passes = Passes(model)

    def way(**settings: Any) -> Way:
        @torch.inference_mode()
        def write(prompt: list[int]) -> Written:
            tokens, before = torch.tensor([prompt]), passes.count
            started = time.perf_counter()
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=sorted(eos) or None,
                pad_token_id=min(eos, default=0),
                **settings,
            )
            seconds = time.perf_counter() - started
            return Written(output[0, len(prompt) :].tolist(), seconds, passes.count - before)

        return write

    return {
        "transformers, generate": way(),
        "transformers, prompt lookup": way(prompt_lookup_num_tokens=LOOKUP_TOKENS),
        f"transformers, assisted by the first {layers} layers": way(assistant_model=assistant),
    }


def own_ways(blueprint: Blueprint, name: str, codec: Codec, new_tokens: int) -> dict[str, Way]:
    """This project: the whole model here, and both sides of the split in this process."""

    def way(writer: Writer, target: str, decode: str) -> Way:
        decoding = Decoding(decode)
        plan = DraftPlan(decoding, Drafting())
        shelf = DraftShelf(plan, blueprint, name, Cut(), target, codec, Compute())
        models = shelf.models(writer.target, writer.session) if decode == "auto" else {}

        def write(prompt: list[int]) -> Written:
            writer.forget()
            answer = writer.complete(
                prompt,
                make_drafter(decoding, models=models),
                sampling=Sampling(),
                decoding=decoding,
                stopping=Stopping(max_new_tokens=new_tokens),
            )
            return Written(answer.token_ids, answer.elapsed_s, answer.round_trips)

        return write

    local, split = open_local_writer(blueprint), open_writer(blueprint, name, Cut())
    return {
        "aparte, whole model here, sequential": way(local, "local", "sequential"),
        "aparte, whole model here, auto": way(local, "local", "auto"),
        "aparte, split in one process, sequential": way(split, "split", "sequential"),
        "aparte, split in one process, auto": way(split, "split", "auto"),
    }


def measure(name: str, layers: int, repeats: int, new_tokens: int) -> list[dict[str, Any]]:
    """A row per way and prompt."""
    blueprint = Blueprint.open(resolve(name), Compute())
    codec = Codec(blueprint.checkpoint.folder)
    ways = {
        **library_ways(blueprint, codec.eos, layers, new_tokens),
        **own_ways(blueprint, name, codec, new_tokens),
    }
    rows = []
    for index, (label, text) in enumerate(PROMPTS.items()):
        prompt = codec.encode_chat([{"role": "user", "content": text}])
        found: dict[str, list[Written]] = {way: [] for way in ways}
        names = list(ways)
        for repeat in range(repeats + 1):  # the first one warms up
            start = (index + repeat) % len(names)
            for way in (*names[start:], *names[:start]):
                written = ways[way](prompt)
                if repeat:
                    found[way].append(written)
        plain = found[names[0]][0].tokens
        for way, answers in found.items():
            seconds = statistics.median(answer.seconds for answer in answers)
            one = answers[0]
            rows.append(
                {
                    "way": way,
                    "prompt": label,
                    "prompt_tokens": len(prompt),
                    "new_tokens": len(one.tokens),
                    "tok_s": round(len(one.tokens) / seconds, 3),
                    "passes": one.passes,
                    "tokens_per_pass": round(len(one.tokens) / max(1, one.passes), 4),
                    "identical": one.tokens == plain,
                }
            )
    return rows


# -- llama.cpp -------------------------------------------------------------------------------------


def llama_cpp(gguf: Path | None, new_tokens: int) -> dict[str, Any]:
    """All layers on an RPC server on loopback, or why not."""
    missing = [name for name in BINARIES if shutil.which(name) is None]
    if missing:
        return {"run": False, "reason": f"{' and '.join(missing)} not on the PATH"}
    if gguf is None:
        return {"run": False, "reason": "no --gguf given"}
    rows = []
    with rpc_server() as address:
        for label, text in PROMPTS.items():
            run = subprocess.run(
                [
                    *("llama-cli", "-m", str(gguf), "--rpc", address, "-ngl", "99", "-p", text),
                    *("-n", str(new_tokens), "--temp", "0", "-no-cnv", "-t", str(torch.get_num_threads())),
                ],
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            # "eval time = 1234.5 ms / 95 runs (…, 76.95 tokens per second)": without the prompt.
            speeds = re.findall(r"\beval time\s*=.*?([\d.]+) tokens per second", run.stderr)
            if run.returncode or not speeds:
                return {"run": False, "reason": f"llama-cli ended with {run.returncode} and no timings"}
            rows.append({"prompt": label, "tok_s": float(speeds[-1])})
    return {"run": True, "model": gguf.name, "rows": rows}


@contextlib.contextmanager
def rpc_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        ["rpc-server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as child:
        try:
            time.sleep(2)
            yield f"127.0.0.1:{port}"
        finally:
            child.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--layers", type=int, default=8, help="of the model, that assist the library")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--gguf", type=Path, help="the same model's file, for llama.cpp")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = {
        "model": options.model,
        "rows": measure(options.model, options.layers, options.repeats, options.max_new_tokens),
        "llama_cpp": llama_cpp(options.gguf, options.max_new_tokens),
        "threads": torch.get_num_threads(),
        "new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "prompts": digest(PROMPTS),
        "seed": "greedy, none drawn",
        "link": "none",
    }
    if options.json:
        print(json.dumps(report))
        return
    for row in report["rows"]:
        print(
            f"{row['prompt']:8} {row['way']:48} {row['tok_s']:7.1f} tok/s  {row['tokens_per_pass']:.2f} per "
            f"pass  {'same' if row['identical'] else 'OTHER'} tokens"
        )
    print(f"llama.cpp RPC: {report['llama_cpp']}")


if __name__ == "__main__":
    main()
