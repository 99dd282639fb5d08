"""All statistics of all heads of SmolLM2 (30 layers of 9 heads), from 512 to 8,192 tokens.

Entropy, distance, weight on the first key and on itself, peak, and attention received with its peak, of every head,
beside the model's own forward pass: PyTorch's fused attention, no cache, logits of the last token alone. Eager
attention returns every weight, from which nothing is computed here; where the weights of all layers would take more
than 6 GB it is left out. Tokens are random: times do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _report import COLUMNS, Report, row

from clearhead import bench, zoo
from clearhead._measuring import alternate, peak_of_child

MODEL, LENGTHS, LONG, MOST = "smollm2", (512, 1024, 2048, 4096, 8192), 4096, 6_000_000_000


def ways(model: Any, tokens: int) -> bench.Ways:
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    found = bench.model_ways(model, ids, most=MOST)
    return found if tokens <= LONG else {name: found[name] for name in (bench.FORWARD, bench.LOOKED)}


def prepare(tokens: int, name: str) -> Callable[[], object]:
    """In a fresh process."""
    torch.set_grad_enabled(False)
    model = zoo.load(MODEL)[0]
    bench.load_weights(model)
    bench.load_loops()
    return ways(model, tokens)[name]


def main() -> None:
    with Report(__file__, "All statistics of all heads of a model") as report:
        model = zoo.load(MODEL)[0]
        for tokens in LENGTHS:
            rounds = 7 if tokens < LONG else 3 if tokens == LONG else 2
            times = alternate(ways(model, tokens), rounds=rounds, seconds=30, warm=tokens < LONG)
            rows = [row(name, timing, peak_of_child(prepare, tokens, name)) for name, timing in times.items()]
            report.say(f"{tokens:,} tokens:")
            report.table(COLUMNS, rows)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
