"""How many heads keep their role when the text grows: one text, cut at several lengths.

    python benchmarks/role_stability.py TEXT.txt [--model smollm2] [--lengths 128,512,2048,7658]

Measured on SmolLM2 and "Hamlet" (270 heads): 183 keep theirs at all four lengths, one of them as "other"; with a fixed
threshold for sinks, 50 % of the attention at any length, 138 did, 19 of them as "other".
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch

from clearhead import record, zoo
from clearhead.heads import score_recording


def main() -> None:
    """Print how many heads have each role at each length, and how many keep theirs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="128,512,2048,7658")
    given = parser.parse_args()
    lengths = [int(n) for n in given.lengths.split(",")]
    model, tokenizer = zoo.load(given.model)
    ids = tokenizer(given.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"]
    roles: list[list[str]] = []
    for n in lengths:
        with record(model) as recording, torch.no_grad():
            model(input_ids=ids[:, :n], use_cache=False, logits_to_keep=1)
        layers = score_recording(recording, ids[0, :n])
        roles.append([head.role for number, scores in enumerate(layers) for head in scores.heads(number)])
        print(f"{n:6,} tokens: " + ", ".join(f"{count} {role}" for role, count in Counter(roles[-1]).most_common()))
    kept = [each[0] for each in zip(*roles, strict=True) if len(set(each)) == 1]
    print(f"{len(kept)} of {len(roles[0])} heads keep their role, {kept.count('other')} of them as other")


if __name__ == "__main__":
    main()
