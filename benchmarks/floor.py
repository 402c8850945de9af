"""A step of the middle of a 7B model against the least time that reading its weights takes.

    .venv/bin/python benchmarks/floor.py                                    # on a GPU
    .venv/bin/python benchmarks/floor.py --device cpu --layers 4 --width 64 --json

The model has the shape of Llama 7B and random weights, which are as fast as any. A step of few nodes has to
read every weight once, so memory that gives so many bytes per second sets a floor; how many it gives is
measured by copying. What a step takes beyond that is starting kernels, and what ``--graphs`` is there to
save: the steps are measured without recordings and, on a GPU, with them, in turns in one process. Beside it
stands the fixed overhead of paper A's steps: all but the network, and so with both sides' compute.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aparte.config import Compute, Cut
from aparte.measure.memory import tensor_bytes
from aparte.measure.origin import machine
from aparte.measure.step_cost import Run, in_turns, prefilled, tree
from aparte.model.parts import Blueprint
from aparte.model.stage import Stage
from aparte.model.windows import Windows
from aparte.step import Step

VOCABULARY = 32_000
#: Bytes of the tensor that is copied to learn how fast memory is, and how often.
COPIED, COPIES = 1 << 30, 8
#: Round trips that tokens per second are projected for, ms.
RTT_MS = (20, 80, 150)
#: Of a step of its 7B model, what is not network.
PAPER_A_OVERHEAD_MS = 42.9


def write_model(folder: Path, options: argparse.Namespace, device: torch.device) -> None:
    """A checkpoint of that shape with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=math.ceil(options.width * 11_008 / 4096),
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // options.head_dim,
        num_key_value_heads=options.width // options.head_dim,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def bytes_per_s(device: torch.device, size: int) -> float:
    """How fast memory is, reading and writing together."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took_ms = in_turns({(0, "copy"): lambda: target.copy_(source)}, COPIES, device)[0, "copy"]
    return 2 * size / took_ms * 1e3


def steps(stage: Stage, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Medians by number of nodes, without recordings and with them where there can be any."""
    ways = {"step_ms": stage}
    if device.type == "cuda":
        ways["recorded_ms"] = stage.part(stage.layer_indices)
        ways["recorded_ms"].recordings = Windows()
    runs: dict[tuple[int, str], Run] = {}
    for name, way in ways.items():
        cache = prefilled(way, options.context, options.width)
        for nodes in options.nodes:
            last = options.context - 1
            step = Step(0, 0, last, last + 1, tree(nodes, last))
            runs[nodes, name] = bind(way, cache, step, torch.randn(nodes, options.width))
    medians = in_turns(runs, options.repeats, device)
    return [{"nodes": nodes, **{name: medians[nodes, name] for name in ways}} for nodes in options.nodes]


def bind(stage: Stage, cache: Any, step: Step, hidden: torch.Tensor) -> Run:
    # As when a cloud answers: states come from the host and go back there.
    return lambda: stage.forward(cache, step, hidden).cpu()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed."""
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(prefix="aparte-floor-") as folder:
        write_model(Path(folder), options, device)
        blueprint = Blueprint.open(Path(folder), Compute("bfloat16", options.device))
        cut = Cut(options.ends, options.ends)
        stage = blueprint.stage(cut.middle(blueprint.layers))
    speed = bytes_per_s(device, options.copied)
    weights = tensor_bytes(blueprint, cut, "middle")
    floor_ms = weights / speed * 1e3
    rows = steps(stage, options, device)
    for row in rows:
        best_ms = row.get("recorded_ms", row["step_ms"])
        row["over_floor"] = best_ms / floor_ms
        row["tok_s"] = {str(rtt): 1e3 / (rtt + best_ms) for rtt in RTT_MS}
    return {
        "machine": machine(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "layers": f"{len(stage.layer_indices)} of {options.layers}, width {options.width}",
        "context": options.context,
        "weights_gb": weights / 1e9,
        "memory_gb_per_s": speed / 1e9,
        "floor_ms": floor_ms,
        "paper_a_overhead_ms": PAPER_A_OVERHEAD_MS,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ends", type=int, default=2, help="layers at each end that the cloud has not")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context", type=int, default=500, help="tokens in the cache")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--copied", type=int, default=COPIED, help="bytes copied to time the memory")
    parser.add_argument("--json", action="store_true")
    report = measure(options := parser.parse_args())
    if options.json:
        print(json.dumps(report))
        return
    print(f"{report['layers']}, {report['device']}: {report['weights_gb']:.1f} GB of weights")
    print(
        f"memory {report['memory_gb_per_s']:.0f} GB/s, so no step takes less than {report['floor_ms']:.2f} ms"
    )
    for row in report["rows"]:
        recorded = f", recorded {row['recorded_ms']:.2f}" if "recorded_ms" in row else ""
        speeds = ", ".join(f"{speed:.1f} tok/s at {rtt} ms" for rtt, speed in row["tok_s"].items())
        print(
            f"{row['nodes']:3} nodes: {row['step_ms']:.2f} ms{recorded}, {row['over_floor']:.2f}x; {speeds}"
        )
    print(f"Paper A's step without the network, both sides' compute included: {PAPER_A_OVERHEAD_MS} ms")


if __name__ == "__main__":
    main()
