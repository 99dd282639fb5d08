"""One head of 131,072 tokens: all statistics and a picture of 512 × 512, beside one fused attention call.

Random q, k and v of width 64, causal, float32. Its weights would take 68.7 GB. The overview is both in one pass, with
nothing known before; the fused call gives the output alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _report import COLUMNS, Report, row
from torch.nn import functional as F

from clearhead import SoftmaxMap, bench, masks
from clearhead._measuring import alternate, peak_of_child

TOKENS, PICTURE = 131_072, (512, 512)


def ways() -> bench.Ways:
    q, k, v = bench.draw_tensors(TOKENS, heads=1)

    def attn() -> SoftmaxMap:
        return SoftmaxMap(q, k, mask=masks.causal())

    return {
        bench.FUSED: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "statistics and picture": lambda: attn().overview(PICTURE),
        "statistics": lambda: attn().statistics(),
        "picture": lambda: attn().pool_max(PICTURE),
        "one row": lambda: attn()[0, 0, TOKENS // 2],
    }


def prepare(name: str) -> Callable[[], object]:
    bench.load_loops()
    return ways()[name]


def main() -> None:
    with Report(__file__, "One head at 131,072 tokens") as report:
        times = alternate(ways(), rounds=3, warm=False)
        rows = [row(name, timing, peak_of_child(prepare, name)) for name, timing in times.items()]
        report.table(COLUMNS, rows)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
