"""Make the table of the *common* source from conversations that the default model wrote with itself.

    aparte bridge train smollm2-135m --seed 1 --work DIR --keep
    .venv/bin/python benchmarks/common_table.py DIR/conversations

Writes ``src/aparte/speculate/common.safetensors``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from aparte.bridge.corpus import Shard
from aparte.bridge.teacher import Teacher
from aparte.config import DEFAULT_MODEL, Cut
from aparte.model.registry import resolve
from aparte.speculate.common import SHIPPED, make_table, pair_key

NAMED = 8
MOST_PAIRS = 60_000
ROWS = 512


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("conversations", type=Path)
    options = parser.parse_args()
    head = Teacher(resolve(DEFAULT_MODEL), Cut(), torch.device("cpu")).head
    ones, twos, tokens, shares = [], [], [], []
    for path in sorted(options.conversations.glob("shard-*.safetensors")):
        print(path.name)
        shard = Shard.load(path)
        for row in range(len(shard.tokens)):
            ids = shard.tokens[row].tolist()
            # Places after which an answer goes on.
            places = [at for at in range(1, len(ids) - 1) if shard.answer[row, at + 1]]
            for start in range(0, len(places), ROWS):
                some = places[start : start + ROWS]
                logits = (shard.final[row][some].to(head.dtype) @ head.T).float()
                best = logits.topk(NAMED, dim=-1)
                shares.append((best.values - logits.logsumexp(dim=-1, keepdim=True)).exp().numpy())
                tokens.append(best.indices.numpy())
                ones.extend(ids[at] for at in some)
                twos.extend(pair_key(ids[at - 1], ids[at]) for at in some)
    table = make_table(
        np.array(ones, dtype=np.int64),
        np.array(twos, dtype=np.int64),
        np.concatenate(tokens),
        np.concatenate(shares),
        MOST_PAIRS,
    )
    table.save(SHIPPED)
    print(f"{len(table.one_keys)} tokens, {len(table.two_keys)} pairs, {SHIPPED.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
