"""What looking costs: all statistics of all heads against one fused attention call on the same tensors, as ratios.

9 heads, 4,096 tokens, width 64, causal: entropy, distance, weight on the first key and on itself, peak, and received
attention with its peak. First every field is compared with the dense formula in float64 (1,024 tokens). Rounds take
turns, each contestant beside a fused call of its own, so that whatever else the machine does meets both alike: the
ratio is the median over rounds, and beside it that of the two shortest times. Memory is the most bytes of tensors that
were alive at once, results included. At the end: how near the pass comes to the fastest matrix product, and how long
the compiled loops take to load, and to compile where nothing is kept on disk.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import SoftmaxMap, masks
from clearhead.testing import Allocations

HEADS, TOKENS, WIDTH, ROUNDS = 9, 4096, 64, 15
Contestants = dict[str, Callable[[], object]]


def dense(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """The same from all weights, (B, H, T, T), in q's dtype."""
    T = q.shape[2]
    at = torch.arange(T, device=q.device)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill_(at > at[:, None], -torch.inf), -1)
    return {
        "entropy": torch.special.entr(weights).sum(-1),
        "distance": (weights * (at[:, None] - at).abs()).sum(-1),
        "to_first": weights[..., 0],
        "to_self": weights.diagonal(dim1=-2, dim2=-1),
        "peak": weights.amax(-1),
        "received": weights.sum(-2),
        "received_peak": weights.amax(-2),
    }


def contestants(q: Tensor, k: Tensor) -> Contestants:
    """Each a way to look at the same map, but for the second with nothing known of it."""
    known = SoftmaxMap(q, k, mask=masks.causal())
    known.entropy()

    def fresh() -> SoftmaxMap:
        return SoftmaxMap(q, k, mask=masks.causal())

    return {
        "statistics()": lambda: fresh().statistics(),
        "statistics(), lse known": known.statistics,
        "entropy()": lambda: fresh().entropy(),
        "received()": lambda: fresh().received(),
        "topk(8)": lambda: fresh().topk(8),
        "pool_max((512, 512))": lambda: fresh().pool_max((512, 512)),
    }


def tensors(dtype: torch.dtype, groups: int, tokens: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = ((HEADS, tokens), (groups, tokens), (groups, tokens))
    return [torch.randn(1, *size, WIDTH, generator=g).to(dtype) for size in sizes]


def check(dtype: torch.dtype, groups: int) -> float:
    """The largest error of a field beside the field's largest entry; the run ends where it is above 1e-5."""
    q, k, _ = tensors(dtype, groups, 1024)
    exact, got = dense(q.double(), k.double()), SoftmaxMap(q, k, mask=masks.causal()).statistics()
    errors = {name: float((getattr(got, name) - x).abs().max() / x.abs().max()) for name, x in exact.items()}
    if max(errors.values()) > 1e-5:
        raise SystemExit(f"off from float64: {errors}")
    return max(errors.values())


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Every contestant beside a fused call, and the products that the pass consists of beside the machine's fastest."""

    def fused() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    square = torch.randn(2048, 2048)
    ways = contestants(q, k)
    peaks = {name: peak(run) for name, run in ways.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    products = []
    for _ in range(ROUNDS):
        products.append(timed(lambda: square @ square))
        for name, run in ways.items():
            times[name].append((timed(fused), timed(run)))
    if q.dtype == torch.float32:
        ways["dense()"] = lambda: dense(q, k)
        peaks["dense()"] = peak(ways["dense()"])
        times["dense()"] = [(timed(fused), timed(ways["dense()"])) for _ in range(2)]
    best = min(one for pairs in times.values() for one, _ in pairs)
    print(f"{'':26}{'ms':>9}{'median ×':>10}{'least ×':>9}{'MB':>8}")
    print(f"{'one fused call':26}{best * 1e3:9.1f}{1:10.2f}{1:9.2f}{peak(fused) / 1e6:8.0f}")
    for name, pairs in times.items():
        least = min(own for _, own in pairs)
        ratio = statistics.median(own / one for one, own in pairs)
        print(f"{name:26}{least * 1e3:9.1f}{ratio:10.2f}{least / best:9.2f}{peaks[name] / 1e6:8.0f}")
    visible = masks.causal().bind(TOKENS, TOKENS).count()
    needed, fastest = 2 * WIDTH * HEADS * visible, 2 * 2048**3 / min(products)
    achieved = needed / min(own for _, own in times["statistics()"])
    print(f"products of statistics(): {achieved / 1e9:.0f} GFLOP/s, {achieved / fastest:.2f} of a 2,048² product's")


def peak(run: Callable[[], object]) -> int:
    with Allocations() as allocations:
        run()
    return allocations.peak


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


def start_up() -> None:
    """A new process that has to compile, and one that finds the loops on disk."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = [
            float(subprocess.check_output([sys.executable, "-c", START], env=os.environ | {"NUMBA_CACHE_DIR": folder}))
            for _ in range(2)
        ]
    print(f"\nfirst call of a process: {seconds[0]:.1f} s where it must compile, {seconds[1]:.1f} s where it need not")


def main() -> None:
    torch.set_grad_enabled(False)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype, groups in ((torch.float32, 3), (torch.float32, 9), (torch.bfloat16, 3)):
        error = check(dtype, groups)
        print(f"\n{str(dtype)[6:]}, {HEADS} heads, {groups} key heads; largest error of a field {error:.1e} of it")
        compare(*tensors(dtype, groups, TOKENS))
    start_up()


if __name__ == "__main__":
    main()
