"""Test the test: change one line of a kernel's source, and see that the textbook disagrees."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import SoftmaxMap, masks, reference
from clearhead.kernels import additive, flash, gradients, identities, linear, tiles
from clearhead.maps import reductions
from clearhead.scores import dense_bias

N = 11
SEEN = reference.causal(N, N) & (torch.arange(N) > 1)  # the first two queries see nothing


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def inputs() -> list[Tensor]:
    return [random(2, *size, seed=i).requires_grad_() for i, size in enumerate([(4, N, 3), (2, N, 3), (2, N, 2)])]


def same(ours: Tensor, want: Tensor, inputs: list[Tensor]) -> bool:
    """Output and gradients."""
    got, exact = ([out, *torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)] for out in (ours, want))
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(got, exact, strict=True))


def flash_is_right(module: Any) -> bool:
    q, k, v = inputs()
    bias, rule = random(N, N), masks.causal() & ~masks.first_tokens(2)
    for cap in (None, 1.5):
        how = {"scale": 2.0, "softcap": cap, "bias": bias}
        out, lse = module.attention(q, k, v, mask=rule, scale=2.0, softcap=cap, bias=dense_bias(bias), tile=(4, 3))
        want = reference.weights(q, k, mask=SEEN, **how) @ v.repeat_interleave(2, 1)
        exact = torch.logsumexp(reference.scores(q, k, **how).masked_fill(~SEEN, -torch.inf), -1)
        if not (same(out, want, [q, k, v]) and torch.allclose(lse, exact.detach())):
            return False
    return True


def linear_is_right(module: Any) -> bool:
    q, k, v = inputs()
    for causal, mask in ((True, reference.causal(N, N)), (False, None)):
        numerator, norm, sums = module.attention(module.phi(q), module.features(k), v, is_causal=causal, chunk=4)
        want = reference.linear_weights(q, k, mask=mask) @ v.repeat_interleave(2, 1)
        if not same(module.divide(numerator, norm), want, [q, k, v]):
            return False
        if not torch.allclose(sums[..., :-1], reference.phi(k).mT @ v):
            return False
    return True


def additive_is_right(module: Any) -> bool:
    (q, k, _), score, eye = inputs(), random(3).requires_grad_(), torch.eye(3, dtype=torch.float64)
    module.TILE_ELEMENTS = 100  # several parts
    want = reference.additive_scores(q, k.repeat_interleave(2, 1), eye, eye, score)
    return same(module.scores(q, k, score), want, [q, k, score])


def gradients_is_right(module: Any) -> bool:
    (q, k, x), table, module.FEW = inputs(), random(N, N).requires_grad_(), -1
    attn = SoftmaxMap(q, k, mask=masks.causal() & ~masks.first_tokens(2), bias=table)
    a = reference.weights(q, k, mask=SEEN, bias=table)
    with tiles.tile_size(4, 3):
        product = reductions.Product((2, 4), N, x, attn.like)
        shared = reductions.Reduction(attn, [reductions.PerKey((2, 4), N, attn.like), product])
        got = module.computed(shared)
        for ours, want in zip(got, (a.sum(-2), a @ x.repeat_interleave(2, 1)), strict=True):
            if not same(ours, want, [q, k, x, table] if want.ndim == 4 else [q, k, table]):
                return False
        once, same_once = (torch.autograd.grad(o.square().sum(), q, create_graph=True)[0] for o in (got[0], a.sum(-2)))
        return same(once, same_once, [q, k])


def identities_is_right(module: Any) -> bool:
    """Under a mask in blocks, and where kernels know it; with sinks; H != G."""
    n = 300  # rows that see some 128 keys all of them, and others in part
    q, k, x, y = random(2, 4, n, 3), random(2, 2, n, 3), random(2, 2, n, 2), random(2, 4, n, 3)
    positions, sinks, module.BLOCK = torch.arange(n), random(4), 90
    for first in (0, 2):
        seen = torch.ones(n, n).tril().bool() & (positions >= first)
        bound = (masks.causal() & ~masks.first_tokens(first)).bind(n, n)
        at = torch.zeros(1).long(), torch.zeros(1).long()

        def added(rows: slice, cols: slice, bound: Any = bound, at: Any = at) -> Tensor:
            return torch.zeros(1).double().masked_fill(~bound.tile(rows, cols, *at), -torch.inf)

        source = module.Source(q, k, 0.7, bound, added, is_whole=first == 0, is_causal=first == 0)
        a = reference.weights(q, k, mask=seen, scale=0.7, sinks=sinks)
        apart = (positions[:, None] - positions).abs().double()
        lse = module.entropy(source, sinks)[1]
        found = [
            (module.entropy(source, sinks)[0], reference.entropy(a)),
            (module.product(source, x, sinks)[0], a @ x.repeat_interleave(2, 1)),
            (module.distance(source, positions, sinks)[0], (a * apart).sum(-1)),
            (module.transposed_product(source, y, lse), a.mT @ y),
            (module.received(source, lse), a.sum(-2)),
        ]
        if not all(torch.allclose(got, want, rtol=1e-9, atol=1e-11) for got, want in found):
            return False
    return True


JUDGES: dict[ModuleType, Callable[[Any], bool]] = {
    flash: flash_is_right,
    linear: linear_is_right,
    additive: additive_is_right,
    gradients: gradients_is_right,
    identities: identities_is_right,
}
MUTANTS = [
    (flash, "ell = shrink * ell + p.sum", "ell = ell + p.sum"),
    (flash, "o = shrink * o + grouped", "o = o + grouped"),
    (flash, "torch.maximum(m, scores.amax(-1, keepdim=True))", "scores.amax(-1, keepdim=True)"),
    (flash, "(m + ell.log())", "(m + ell)"),
    (flash, ".sub_(through_sum)", ""),
    (flash, ".mul_(p).mul_(slope)", ".mul_(p)"),
    (flash, "1 - (capped / self.softcap).square()", "1 - capped.square()"),
    (flash, "grouped_matmul(d_scores, some_k) * self._scoring.scale", "grouped_matmul(d_scores, some_k)"),
    (flash, "fold(q, groups) * self._scoring.scale", "fold(q, groups)"),
    (flash, "fold(p, groups).mT @ fold(d_out, groups)", "fold(p, groups).mT @ fold(out, groups)"),
    (flash, "self.k[..., cols, :] +=", "self.k[..., cols, :] ="),
    (flash, "masked_fill(larger == -math.inf, 0)", "clone()"),
    (flash, "ell.masked_fill(ell == 0, 1)", "ell"),
    (flash, "scores.masked_fill(~mask(*at), -math.inf)", "scores"),
    (flash, "is not Coverage.EMPTY", "is Coverage.FULL"),
    (flash, "(scores + bias)", "scores"),
    (linear, ".tril()", ""),
    (linear, ".tril()", ".tril(-1)"),
    (linear, "grouped_matmul(inside, some_v) + grouped_matmul(some_q, sums)", "grouped_matmul(inside, some_v)"),
    (linear, "sums = sums + some_k.mT @ some_v", "sums = some_k.mT @ some_v"),
    (linear, "value=1.0", "value=0.0"),
    (linear, "torch.exp(x.clamp(max=0))", "x.clamp(max=0) + 1"),
    (additive, "torch.tanh(q[..., :, None, :] + k[..., None, :, :])", "(q[..., :, None, :] + k[..., None, :, :])"),
    (additive, "torch.cat(parts, 2)", "torch.cat(parts[::-1], 2)"),
    (gradients, "total[at] += gradient", "total[at] = gradient"),
    (gradients, "grads[n][at].to(x.dtype)", "torch.ones_like(x)"),
    (gradients, "return self._leaf(at, _wide(self._tensor))", "return self._tensor[at]"),
    (gradients, "return self._leaf(..., self._tensor.dtype)", "return self._tensor"),
    (gradients, "[x.view_as(x) for x in tensors]", "[x.detach().requires_grad_() for x in tensors]"),
    (identities, ".sum(-1) * source.scale", ".sum(-1)"),
    (identities, "(share * (lse", "(1 * (lse"),
    (identities, "out * share[..., None], lse", "out, lse"),
    (identities, "self.q * self.scale, -known", "self.q * self.scale, known"),
    (identities, "y.flip(2) if flip else y", "y"),
    (identities, "total.flip(2) if flip else total", "total"),
    (identities, "scale=1.0", "scale=self.scale"),
    (identities, "self.bounded.block(cols, rows)", "self.bounded.block(rows, cols)"),
    (identities, ".addcmul_(other[0], shares[1])", ".add_(other[0])"),
    (identities, "positions[rows] - positions[rows.start]", "positions[rows] - positions[rows]"),
    (identities, "lse.masked_fill(nothing, -math.inf)", "lse"),
    (identities, "start = part.stop", "start = part.start"),
    (additive, "fold(q, G)", "q.reshape(B, H // G, G, t, A).transpose(1, 2).reshape(B, G, -1, A)"),
]


def changed(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with one piece of its source replaced."""
    source = inspect.getsource(module)
    assert old in source, f"{module.__name__} has no {old!r} any more: mend the mutant"
    copy = ModuleType(f"{module.__name__}_changed")
    vars(copy)["__file__"] = module.__file__
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), str(module.__file__), "exec"), vars(copy))
    finally:
        del sys.modules[copy.__name__]
    return copy


@pytest.mark.parametrize("module", JUDGES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_kernel_as_it_is_passes(module: ModuleType) -> None:
    assert JUDGES[module](changed(module, "import torch\n", "import torch\n"))


@pytest.mark.parametrize(("module", "old", "new"), MUTANTS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_broken_line_is_seen(module: ModuleType, old: str, new: str) -> None:
    assert not JUDGES[module](changed(module, old, new))
