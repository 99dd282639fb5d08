"""Attention across layers of SmolLM2 on 4,096 tokens: one row of the rollout, and the last 128.

The rollout is the product of all layers' maps, each averaged over heads and half of it the residual stream. It is never
held: a row is one pass over every layer. As a dense float32 matrix one layer would take 67 MB, its nine heads 604 MB.
First 256 tokens, where the dense product of float64 matrices is at hand: the largest difference of any weight. Time
beside the model's own forward pass over the same tokens (PyTorch's fused attention, no cache, last logits alone);
memory is the peak of a fresh process above what the recording holds. Tokens are random: times do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _report import COLUMNS, Report, row

from clearhead import Recording, bench, record, zoo
from clearhead._measuring import alternate, peak_of_child
from clearhead.heads import rollout

MODEL, SHORT, TOKENS, FORWARD = "smollm2", 256, 4096, "the model, forward"


def recorded(tokens: int) -> tuple[Any, Recording, torch.Tensor]:
    model = zoo.load(MODEL)[0]
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    with record(model) as recording:
        model(ids, use_cache=False, logits_to_keep=1)
    return model, recording, ids


def ways(tokens: int) -> bench.Ways:
    model, recording, ids = recorded(tokens)
    layers = list(recording)
    return {
        FORWARD: lambda: model(ids, use_cache=False, logits_to_keep=1),
        "one row": lambda: rollout(layers)[0, -1],
        "128 rows": lambda: rollout(layers)[0, -128:].to_dense(),
    }


def prepare(tokens: int, name: str) -> Callable[[], object]:
    """In a fresh process."""
    torch.set_grad_enabled(False)
    found = ways(tokens)
    bench.load_loops()
    return found[name]


def largest_difference() -> float:
    """Of any weight of the rollout, from the product of the float64 matrices of the same maps."""
    recording = recorded(SHORT)[1]
    product = torch.eye(SHORT, dtype=torch.float64)
    for attn in recording:
        product = (attn.to_dense()[0].double().mean(0) + torch.eye(SHORT)) / 2 @ product
    return float((rollout(recording).to_dense()[0] - product).abs().max())


def main() -> None:
    with Report(__file__, "Attention across layers") as report:
        difference = largest_difference()
        report.say(f"{SHORT} tokens: no weight differs from the dense product by more than {difference:.1e}.")
        times = alternate(ways(TOKENS), rounds=3, seconds=60, warm=False)
        peaks = {name: peak_of_child(prepare, TOKENS, name) for name in times if name != FORWARD}
        rows = [row(name, timing, peaks.get(name)) for name, timing in times.items()]
        report.say(f"{TOKENS:,} tokens:")
        report.table(COLUMNS, rows)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
