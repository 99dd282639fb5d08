"""Weights and statistics are float32 or wider always: what is read under autocast is what is read outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from clearhead import AttentionMap
from clearhead.functional import additive_attention, flash_attention, linear_attention
from clearhead.maps import AdditiveMap, LinearMap, SoftmaxMap
from clearhead.nn import AdditiveAttention
from clearhead.testing import SUBJECTS, build_case

NAMES = {"mask": "causal", "size": "33x127", "bias": "softcap", "layout": "contiguous", "dtype": "float32"}


def numbers(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def readings(attn: AttentionMap) -> dict[str, tuple[Tensor, ...]]:
    """Everything that can be asked of a map."""
    T, S = attn.shape[-2:]
    x, y = numbers(S, 5), numbers(T, 5)
    keys = torch.arange(0, S, 3)
    first: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "entropy": lambda: (attn.entropy(),),
        "distance": lambda: (attn.distance(),),
        "received": lambda: (attn.received(),),
        "statistics": lambda: astuple(attn.statistics()),
        "tile": lambda: (attn.tile(slice(3, T), slice(1, S // 2)),),
        "row": lambda: (attn[..., T // 2, :], attn[..., S // 2]),
        "columns": lambda: (attn.columns(keys),),
        "pick": lambda: (attn.pick(torch.arange(T), torch.arange(T) % S), attn.diagonal(-1)),
        "mass": lambda: (attn.mass(keys), attn.mass(torch.arange(S) > 1)),
        "@": lambda: (attn @ x, attn @ x.bfloat16()),
        "mT @": lambda: (attn.mT @ y,),
        "topk": lambda: attn.topk(3),
        "pool": lambda: (attn.pool_max((5, 4)), attn.pool_sum((5, 4))),
        "uniform": lambda: (attn.uniform().to_dense(),),
        "to_dense": lambda: (attn.to_dense(),),
    }
    return {name: read() for name, read in first.items()}


def differing(one: dict[str, tuple[Tensor, ...]], two: dict[str, tuple[Tensor, ...]]) -> list[str]:
    return [name for name in one if not all(map(torch.equal, one[name], two[name]))]


@pytest.mark.parametrize("size", ["33x127", "33x33"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_reading_under_autocast_is_the_one_outside_and_nothing_wrong_is_kept(name: str, size: str) -> None:
    case = build_case({**NAMES, "size": size, "heads": "4/2", "tile": "default"})
    make = SUBJECTS[name](case).make
    want, attn = readings(make()), make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert differing(readings(attn), want) == []
    assert differing(readings(attn), want) == []


@pytest.mark.parametrize("kind", ["softmax", "additive", "linear"])
def test_gradients_of_what_was_read_under_autocast_are_those_outside(kind: str) -> None:
    q, k, x, score = numbers(2, 9, 8), numbers(2, 7, 8), numbers(2, 7, 3), numbers(8)
    inputs = [q.requires_grad_(), k.requires_grad_()]

    def loss() -> Tensor:
        attn = {"softmax": SoftmaxMap, "linear": LinearMap}.get(kind, lambda q, k: AdditiveMap(q, k, score))(q, k)
        return (attn @ x).square().sum() + attn.entropy().sum()

    want = torch.autograd.grad(loss(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = loss()
    assert all(map(torch.equal, torch.autograd.grad(got, inputs), want))


@pytest.mark.parametrize("attend", [flash_attention, linear_attention, additive_attention])
def test_our_own_kernels_round_nothing(attend: Callable[..., tuple[Tensor, AttentionMap]]) -> None:
    inputs = [numbers(2, 9, 8), numbers(2, 7, 8), numbers(2, 7, 3)]
    inputs += [numbers(8)] if attend is additive_attention else []
    want, outside = attend(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, attn = attend(*inputs)
        assert torch.equal(out, want)
        assert torch.equal(attn.to_dense(), outside.to_dense())


def test_rows_of_a_layers_map_sum_to_1_under_autocast() -> None:
    layer = AdditiveAttention(4, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, attn = layer.attend(3 * numbers(2, 9, 4), numbers(2, 7, 6))
        torch.testing.assert_close(attn.to_dense().sum(-1), torch.ones(2, 9))
    torch.testing.assert_close(attn.to_dense().sum(-1), torch.ones(2, 9))
