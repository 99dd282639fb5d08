"""All statistics of all heads against one fused attention call on the same tensors, and what the pass consists of.

9 heads, 4,096 tokens, width 64, causal: entropy, distance, weight on the first key and on itself, peak, and attention
received with its peak, with nothing known before; then with each row's log-sum-exp known, as it is of a map that was
read once; then one question alone. Grouped heads: 9 over 3 key heads. In the end how near the matrix products of the
pass, and all of it, come to the fastest product of this machine (2,048²), and how long the compiled loops take to load,
and to compile where nothing is kept on disk.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

import torch
from _report import COLUMNS, Report, row
from torch.nn import functional as F

from clearhead import SoftmaxMap, bench, masks
from clearhead._measuring import Timing, alternate

TOKENS, ROUNDS, SIDE = 4096, 15, 2048
KINDS = {
    "float32": (torch.float32, 9),
    "float32, grouped heads": (torch.float32, 3),
    "bfloat16": (torch.bfloat16, 9),
}
START = """
import time, torch
from clearhead import SoftmaxMap
from clearhead.kernels.path import force
x = torch.randn(1, 2, 64, 8)
start = time.perf_counter()
with force("cpu"):
    SoftmaxMap(x, x).statistics()
print(time.perf_counter() - start)
"""


def ways(dtype: torch.dtype, groups: int) -> bench.Ways:
    q, k, v = bench.draw_tensors(TOKENS, groups=groups, dtype=dtype)
    known = SoftmaxMap(q, k, mask=masks.causal())
    known.entropy()

    def attn() -> SoftmaxMap:
        return SoftmaxMap(q, k, mask=masks.causal())

    return {
        bench.FUSED: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups != 9),
        "all statistics": lambda: attn().statistics(),
        "all statistics, lse known": known.statistics,
        "entropy": lambda: attn().entropy(),
        "received": lambda: attn().received(),
        "the 8 largest of each row": lambda: attn().topk(8),
        "a picture, 512 x 512": lambda: attn().pool_max((512, 512)),
    }


def products() -> bench.Ways:
    """The products of the pass alone, in its blocks, by the threads of PyTorch; and the largest of the machine."""
    q, k, _ = bench.draw_tensors(TOKENS)
    square, room = torch.randn(SIDE, SIDE), torch.empty(128 * TOKENS)

    def blocks() -> None:
        for head, keys in zip(q[0], k[0].mT.contiguous(), strict=True):
            for start in range(0, TOKENS, 128):
                seen = min(TOKENS, start + 128)
                torch.mm(head[start:seen], keys[:, :seen], out=room[: (seen - start) * seen].view(-1, seen))

    return {"square": lambda: square @ square, "blocks": blocks}


def rates(found: Timing) -> list[list[str]]:
    """GFLOP/s of the products that the causal map needs, in all of the pass, and of the fastest product."""
    needed = 2 * bench.WIDTH * bench.HEADS * masks.causal().bind(TOKENS, TOKENS).count()
    alone = alternate(products(), rounds=ROUNDS)
    fastest = 2 * SIDE**3 / alone["square"].best
    speeds = {
        f"a product of {SIDE:,} x {SIDE:,}": fastest,
        "the products of the pass alone": needed / alone["blocks"].best,
        "all statistics, these products within": needed / found.best,
    }
    return [[name, f"{speed / 1e9:,.0f}", f"{speed / fastest:.2f}"] for name, speed in speeds.items()]


def start_up() -> str:
    """A new process that has to compile, and some that find the loops on disk."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        runs = [subprocess.check_output([sys.executable, "-c", START], env=environment) for _ in range(4)]
    compiled, *cached = map(float, runs)
    return (
        f"First call of a process: {compiled:.1f} s where the loops must be compiled, "
        f"{statistics.median(cached):.2f} s where they are on disk (numba is loaded within)."
    )


def main() -> None:
    with Report(__file__, "All statistics beside one attention call") as report:
        for kind, (dtype, groups) in KINDS.items():
            times = alternate(ways(dtype, groups), rounds=ROUNDS)
            report.say(f"{kind}:")
            report.table(COLUMNS[:-1], [row(name, timing, None)[:-1] for name, timing in times.items()])
            if kind == "float32":
                found = times["all statistics"]
        report.table(["float32", "GFLOP/s", "of the fastest"], rates(found))
        report.say(start_up())


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
