"""The textbook: attention as dense formulas, slow and plain, in any float type.

This is the oracle that every fast path is held to (in float64), so it shares no code with them: T×S tensors, one line
a formula, no tiles, no rules, no caching. Axes (B, H, T, D) as in notation.md; mask True = may attend.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# --- masks as dense tensors, (T, S) bool --------------------------------------------------------------------------


def pairs(T: int, S: int, seen: Callable[[int, int], bool]) -> Tensor:
    """Each pair on its own, by the positions of query and key; query t is token t + S - T."""
    return torch.tensor([[seen(t + S - T, s) for s in range(S)] for t in range(T)], dtype=torch.bool).reshape(T, S)


def causal(T: int, S: int) -> Tensor:
    """s <= t + S - T."""
    return pairs(T, S, lambda t, s: s <= t)


def causal_upper_left(T: int, S: int) -> Tensor:
    """s <= t."""
    return pairs(T, S, lambda t, s: s <= t - S + T)


def sliding_window(T: int, S: int, width: int) -> Tensor:
    """0 <= t + S - T - s < width: a window counts the query itself."""
    return pairs(T, S, lambda t, s: 0 <= t - s < width)


def documents(T: int, S: int, ids: list[int]) -> Tensor:
    """Query and key in one document."""
    return pairs(T, S, lambda t, s: ids[t] == ids[s])


def strided(T: int, S: int, stride: int) -> Tensor:
    """Keys a multiple of the stride away."""
    return pairs(T, S, lambda t, s: abs(t - s) % stride == 0)


def block_sparse(T: int, S: int, layout: list[list[bool]], block: int) -> Tensor:
    """What the layout says of the blocks in which query and key stand."""
    return pairs(T, S, lambda t, s: layout[t // block][s // block])


def global_tokens(T: int, S: int, indices: list[int]) -> Tensor:
    """Query or key is one of them."""
    return pairs(T, S, lambda t, s: t in indices or s in indices)


# --- attention -----------------------------------------------------------------------------------------------------


def scores(
    q: Tensor,  # (…, H, T, D)
    k: Tensor,  # (…, G, S, D)
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # (…, H, T, S)
    """softcap(scale · q_t·k_s) + bias, before the mask. Vaswani et al. 2017, equation 1."""
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    s = torch.einsum("...td,...sd->...ts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    return s if bias is None else s + bias


def weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,  # (H,)
) -> Tensor:  # (…, H, T, S)
    """softmax over the visible keys; a row without any is 0."""
    return softmax(scores(q, k, scale=scale, softcap=softcap, bias=bias), mask, sinks)


def softmax(s: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """e^s over its sum along the keys, masked pairs and rows without any 0."""
    if mask is not None:
        s = torch.where(mask, s, -math.inf)
    m = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    m = torch.where(torch.isneginf(m), 0.0, m)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(s.dtype)[:, None, None] - m)
    return torch.where(total > 0, e / total.clamp(min=torch.finfo(e.dtype).tiny), 0.0)


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """softmax(Q Kᵀ / √d_k) V."""
    a = weights(q, k, mask=mask, scale=scale)
    if q.ndim > 2 and q.shape[-3] != v.shape[-3]:
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)
    return torch.einsum("...ts,...sd->...td", a, v)


def additive_scores(q: Tensor, k: Tensor, W: Tensor, U: Tensor, v: Tensor) -> Tensor:  # (…, T, S)
    """vᵀ tanh(W q_t + U k_s), W (d_q, A), U (d_k, A), v (A,). Bahdanau et al. 2015, section 3.1 and appendix A.1.2."""
    return torch.tanh((q @ W)[..., :, None, :] + (k @ U)[..., None, :, :]) @ v


def phi(x: Tensor) -> Tensor:
    """elu(x) + 1. Katharopoulos et al. 2020, equation 7."""
    return torch.nn.functional.elu(x) + 1


def linear_weights(q: Tensor, k: Tensor, *, mask: Tensor | None = None) -> Tensor:  # (…, T, S)
    """φ(q_t)·φ(k_s), divided by its sum over the visible keys; a row without any is 0. Equation 4 of the same."""
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    a = torch.einsum("...td,...sd->...ts", phi(q), phi(k))
    a = a if mask is None else torch.where(mask, a, 0.0)
    total = a.sum(-1, keepdim=True)
    return torch.where(total > 0, a / torch.where(total > 0, total, 1.0), 0.0)


# --- what is said about weights A (…, T, S) --------------------------------------------------------------------------


def entropy(a: Tensor) -> Tensor:
    """-Σ A ln A in nats, 0 ln 0 = 0."""
    return -torch.where(a > 0, a * torch.log(torch.where(a > 0, a, 1.0)), 0.0).sum(-1)


def distance(a: Tensor) -> Tensor:
    """Σ_s A |t + S - T - s|."""
    T, S = a.shape[-2:]
    apart = torch.tensor([[abs(t + S - T - s) for s in range(S)] for t in range(T)], dtype=a.dtype).reshape(T, S)
    return (a * apart).sum(-1)


def received(a: Tensor) -> Tensor:
    """Σ_t A."""
    return a.sum(-2)


def pool(a: Tensor, size: tuple[int, int], *, maximum: bool) -> Tensor:
    """The picture whose pixel (i, j) collects the weights with ⌊t·R/T⌋ = i and ⌊s·C/S⌋ = j."""
    (T, S), (R, C) = a.shape[-2:], size
    picture = a.new_zeros(*a.shape[:-2], R, C)
    for t in range(T):
        for s in range(S):
            i, j = t * R // T, s * C // S
            here = picture[..., i, j]
            picture[..., i, j] = torch.maximum(here, a[..., t, s]) if maximum else here + a[..., t, s]
    return picture


def alibi(slopes: Tensor, T: int, S: int) -> Tensor:
    """slope_h · (s - t - (S - T)), (H, T, S). Press, Smith, Lewis 2022."""
    back = torch.tensor([[s - t - (S - T) for s in range(S)] for t in range(T)], dtype=slopes.dtype).reshape(T, S)
    return slopes[:, None, None] * back


def rotary(x: Tensor, *, dim: int, base: float = 10000.0, interleaved: bool = False) -> Tensor:
    """Pair i of x (…, T, D), turned by t · base^(-2i / dim); pairs are (2i, 2i + 1) or (i, i + dim / 2). Su 2021."""
    turned = x.clone()
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = torch.tensor([t * base ** (-2 * i / dim) for t in range(x.shape[-2])], dtype=x.dtype)
        turned[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        turned[..., b] = x[..., a] * angle.sin() + x[..., b] * angle.cos()
    return turned
