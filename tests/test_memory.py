"""Peak memory: no T×S tensor, no expanded keys, wherever a map is read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from clearhead import SoftmaxMap, average_heads, masks, scaled_dot_product_attention
from clearhead.maps import AttentionMap
from clearhead.testing import Allocations

T = S = 4096
H, G, D = 8, 2, 16
ONE_HEAD = T * S  # the smallest T×S tensor: one head, one byte an entry
TILE = 4 * (1 << 21)  # kernels.tiles.TILE_ELEMENTS in float32

READS: dict[str, Callable[[AttentionMap], object]] = {
    "statistics": lambda a: a.statistics(),
    "@": lambda a: a @ torch.ones(S, 16),
    "mT @": lambda a: a.mT @ torch.ones(T, 16),
    "topk": lambda a: a.topk(8),
    "pool_max": lambda a: a.pool_max((512, 512)),
    "pool_sum": lambda a: a.pool_sum((24, 24)),
    "entropy": lambda a: a.entropy(),
    "received": lambda a: a.received(),
    "mass of one": lambda a: a.mass(0),
    "mass of 64": lambda a: a.mass(torch.arange(64)),
    "diagonal": lambda a: a.diagonal(-1),
    "row": lambda a: a[0, 3, 17],
    "column": lambda a: a[0, 3, :, 17],
    "head": lambda a: a[0, 3].entropy(),
    "average": lambda a: average_heads(a).received(),
}


def test_the_tool_sees_a_dense_tensor() -> None:
    with Allocations() as allocations:
        torch.ones(500, 4).relu() @ torch.ones(4, 500)
    assert allocations.largest == 4 * 500 * 500
    assert allocations.peak >= 4 * 500 * 500 + 4 * 500 * 4


@pytest.mark.parametrize("name", READS)
def test_trap_10_no_quadratic_memory(name: str) -> None:
    attn = SoftmaxMap(torch.randn(1, H, T, D), torch.randn(1, G, S, D), mask=masks.sliding_window(512))
    with Allocations() as allocations:
        READS[name](attn)
    assert allocations.largest <= TILE < ONE_HEAD
    assert allocations.peak <= 8 * TILE  # a few tiles; the dense map would be 64


def test_trap_10_a_full_pass_without_mask() -> None:
    attn = SoftmaxMap(torch.randn(1, 2, T, D), torch.randn(1, 1, S, D))
    with Allocations() as allocations:
        attn.statistics()
    assert allocations.largest <= TILE
    assert allocations.peak <= 8 * TILE


def test_trap_10_a_rule_is_never_a_dense_mask() -> None:
    q, k = torch.randn(1, H, T, D), torch.randn(1, G, S, D)
    with torch.no_grad(), Allocations() as allocations:
        scaled_dot_product_attention(q, k, k, masks.sliding_window(256), enable_gqa=True)
        scaled_dot_product_attention(q, k, k, masks.causal() & masks.first_tokens(4000), enable_gqa=True)
    assert allocations.largest <= TILE


def test_trap_15_keys_are_never_expanded() -> None:
    """One key head for 64 query heads: a copy per query head would be 64 times its size."""
    q, k = torch.randn(1, 64, 16, 64), torch.randn(1, 1, 8192, 64)
    attn = SoftmaxMap(q, k)
    assert attn.k.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    held = k.numel() * 4
    with Allocations() as allocations:
        for read in (attn.entropy, lambda: attn @ k, lambda: attn.topk(2), lambda: attn[0, 5:9].entropy()):
            read()
    assert allocations.largest < 64 * held // 2
    assert attn[:, 5].k.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def test_nbytes_counts_what_is_held_and_not_what_it_stands_for() -> None:
    q, k = torch.randn(1, 8, 1000, 16), torch.randn(1, 2, 1000, 16)
    attn = SoftmaxMap(q, k)
    assert attn.dense_nbytes == 8 * 1000 * 1000 * 4
    assert q.nbytes + k.nbytes <= attn.nbytes <= q.nbytes + k.nbytes + 8 * 1000 * 4


CHILD = """
import resource, torch
from clearhead import SoftmaxMap, masks, scaled_dot_product_attention
torch.set_num_threads(1)
def everything(n):
    q, k = torch.randn(1, 8, n, 16), torch.randn(1, 2, n, 16)
    with torch.no_grad():
        out, attn = scaled_dot_product_attention(q, k, k, masks.sliding_window(256), enable_gqa=True)
        attn.statistics(), attn @ k, attn.topk(4), attn.pool_max((64, 64))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
everything(256)
before = peak()
everything(8192)
print(peak() - before)
"""


def test_trap_10_peak_of_the_whole_process() -> None:
    """8,192 tokens, 8 heads: a dense map is 2.1 GB, a dense mask 67 MB; fused kernels are counted too."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=240, check=True)
    assert int(done.stdout) * 1024 < 67e6
