"""Lesson 7: what attention costs, and ways around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import judging, slips

__all__ = ["EXERCISES", "linear_attention", "merge_parts", "window_weights"]


def window_weights(scores: Tensor, window: int) -> Tensor:
    """Sparse: each word sees itself and the window - 1 words before it, and nothing else.

    scores: (T, T), scaled already. Return (T, T); each row adds up to 1, and has at most `window` weights above 0.
    """
    t = torch.arange(len(scores), device=scores.device)
    back = t[:, None] - t[None, :]  # how far back key s lies from query t
    return torch.softmax(scores.masked_fill((back < 0) | (back >= window), -math.inf), dim=-1)


def merge_parts(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Flash: attention over all keys, from attention over the first half of them and over the second.

    out_a, out_b: (T, d), each what the softmax over its half of the keys has mixed; lse_a, lse_b: (T,), the logarithm
    of the sum of exp(score) over that half. Return (T, d). The lse may be 1000, and exp(1000) is infinite.
    """
    share = torch.sigmoid(lse_a - lse_b)[:, None]  # e^a / (e^a + e^b)
    return share * out_a + (1 - share) * out_b


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear: no softmax, and no T × T numbers; each word sees itself and what came before it.

    With φ(x) = F.elu(x) + 1, word t becomes φ(q_t) Σ_s φ(k_s)ᵀ v_s / φ(q_t) · Σ_s φ(k_s), where s runs to t.
    q, k: (T, d), v: (T, d_v). Return (T, d_v). A loop over the words that adds to two sums is one way.
    """
    q, k = F.elu(q) + 1, F.elu(k) + 1
    mixed = torch.cumsum(k[:, :, None] * v[:, None, :], dim=0)  # (T, d, d_v)
    total = torch.cumsum(k, dim=0)  # (T, d)
    return (q[:, :, None] * mixed).sum(dim=1) / (q * total).sum(dim=-1, keepdim=True)


# --- checks --------------------------------------------------------------------------------------------------------

ONE_MORE = (
    "A word sees one more than it may: the window counts the word itself. Hide keys that lie `window` or more back."
)
ONE_LESS = "A word sees one less than it may: itself and the window - 1 before it, that is less than `window` back."
NO_WINDOW = "All that came before is seen. Keys that lie `window` or more back are hidden too."
BOTH_SIDES = "The window reaches ahead. A word sees itself and what came before it: hide the keys after it."
NOT_ITSELF = "The window leaves out the word itself. It counts: from t - window + 1 to t."
LOST = (
    "What lies outside is set to 0 after the softmax, and its share is lost: rows no longer add up to 1. Hide scores"
    " before the softmax, with -inf."
)
CHUNKS = "Words are cut into chunks that see only themselves. The window moves on with every word."

ADDED = "The halves are added up. Each is an average by itself: weigh them, by how much of exp(score) lies in each."
HALVES = "Each half counts the same. The one with the larger sum of exp(score) has the larger share."
BY_LSE = "The halves are weighed by lse itself. It is a logarithm: the sums are exp(lse_a) and exp(lse_b)."
NOT_DIVIDED = "The halves are multiplied by their sums, and not divided by the sum of both."
EXCHANGED = "The shares are exchanged: the first half got the second's."
OVERFLOW = (
    "Large lse give NaN or infinity: exp(1000) is infinite. Only their difference matters: take the larger one off both"
    " before exp, or use a sigmoid or a softmax."
)

AHEAD = "Words see what comes after them: the sums run over all words. That of word t ends at t: a running sum, cumsum."
NO_TOTAL = "The denominator is missing: the weights of a word do not add up to 1. Divide by φ(q_t) · Σ φ(k_s)."
NO_FEATURES = "φ is missing. q and k themselves give negative weights: F.elu(…) + 1 of both first."
NO_ONE = "φ lacks its + 1: elu alone is negative for negative numbers, and so would weights be."
ONE_SIDE = "φ is of queries and of keys: one of them is used as it came."
WITH_SOFTMAX = "This is softmax attention. Here there is no softmax: φ(q)·φ(k), divided by its sum, is the weight."
EXCEPT_ITSELF = "The sums end before the word itself. It sees itself too: add first, then read."


def check_window_weights(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless each word sees itself and the window - 1 before it."""
    inputs = []
    for window in judging.distinct(generator, 3, 3, 6):
        inputs.append((judging.normal(generator, window + 4, window + 4), window))
    explain = partial(judging.explain_weights, causal=True)
    what = "a row of shares for each word, (T, T)"
    judging.judge(answer, inputs, window_weights, _window_mistakes, what, explain=lambda got, *_: explain(got))


def check_merge_parts(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless the halves are weighed by the sums of exp(score), for large ones too."""
    what = "attention over all keys, (T, d)"
    judging.judge(answer, [_halves(generator, 0) for _ in range(3)], merge_parts, _merge_mistakes, what)
    judging.judge(answer, [_halves(generator, 1000)], merge_parts, lambda *_: [], what, nan=OVERFLOW)


def check_linear_attention(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is causal linear attention with φ = elu + 1."""
    inputs = []
    for _ in range(3):
        T, d, d_v = judging.distinct(generator, 3, 3, 8)
        inputs.append(tuple(judging.normal(generator, T, width) for width in (d, d, d_v)))
    judging.judge(answer, inputs, linear_attention, _linear_mistakes, "one mix a word, (T, d_v)")


def _halves(generator: torch.Generator, large: float) -> tuple[Tensor, ...]:
    T, S, d = judging.distinct(generator, 3, 3, 8)
    scores, v = judging.normal(generator, T, 2 * S) * 2 + large, judging.normal(generator, 2 * S, d)
    parts = [
        (s.softmax(-1) @ values, s.logsumexp(-1)) for s, values in ((scores[:, :S], v[:S]), (scores[:, S:], v[S:]))
    ]
    return *parts[0], *parts[1]


def _window_mistakes(scores: Tensor, window: int) -> judging.Mistakes:
    t = torch.arange(len(scores))
    back = t[:, None] - t
    outside = (back < 0) | (back >= window)
    hidden = {
        ONE_MORE: (back < 0) | (back > window),
        ONE_LESS: (back < 0) | (back >= window - 1),
        NO_WINDOW: back < 0,
        BOTH_SIDES: back >= window,
        NOT_ITSELF: (back < 1) | (back >= window),
        CHUNKS: (back < 0) | (t[:, None] // window != t // window),
    }
    return [
        *((message, judging.hide(scores, where).softmax(-1)) for message, where in hidden.items()),
        (BOTH_SIDES, judging.hide(scores, back.abs() >= window).softmax(-1)),
        (BOTH_SIDES, judging.hide(scores, back.abs() > window // 2).softmax(-1)),
        (NOT_ITSELF, judging.hide(scores, (back < 1) | (back > window)).softmax(-1)),
        (LOST, scores.softmax(-1).masked_fill(outside, 0.0)),
        (LOST, judging.hide(scores, back < 0).softmax(-1).masked_fill(outside, 0.0)),
        (judging.ZERO_SCORE, scores.masked_fill(outside, 0.0).softmax(-1)),
        *judging.softmax_mistakes(scores, outside),
    ]


def _merge_mistakes(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> judging.Mistakes:
    a, b = lse_a[:, None], lse_b[:, None]
    both = a.exp() + b.exp()
    return [
        (ADDED, out_a + out_b),
        (HALVES, (out_a + out_b) / 2),
        (BY_LSE, (a * out_a + b * out_b) / (a + b)),
        (BY_LSE, a * out_a + b * out_b),
        (NOT_DIVIDED, a.exp() * out_a + b.exp() * out_b),
        (EXCHANGED, (b.exp() * out_a + a.exp() * out_b) / both),
    ]


def _linear_mistakes(q: Tensor, k: Tensor, v: Tensor) -> judging.Mistakes:
    elu, identity = F.elu, torch.Tensor.double

    def phi(x: Tensor) -> Tensor:
        return elu(x) + 1

    def mix(fq: Callable[..., Tensor], fk: Callable[..., Tensor], diagonal: int = 0, divided: bool = True) -> Tensor:
        weights = (fq(q) @ fk(k).T).tril(diagonal)
        return (weights / weights.sum(-1, keepdim=True) if divided else weights) @ v

    scores = q @ k.T
    return [
        (AHEAD, mix(phi, phi, len(q))),
        (NO_TOTAL, mix(phi, phi, divided=False)),
        (NO_TOTAL, mix(phi, phi, len(q), divided=False)),
        (NO_FEATURES, mix(identity, identity)),
        (NO_FEATURES, mix(identity, identity, divided=False)),
        (NO_ONE, mix(elu, elu)),
        (ONE_SIDE, mix(phi, identity)),
        (ONE_SIDE, mix(identity, phi)),
        (EXCEPT_ITSELF, mix(phi, phi, -1)),
        *(
            (WITH_SOFTMAX, judging.hide(scores * factor, hidden).softmax(-1) @ v)
            for factor in (1.0, 1 / math.sqrt(q.shape[-1]))
            for hidden in (None, judging.later(scores))
        ),
    ]


EXERCISES = (
    Exercise(
        window_weights,
        check_window_weights,
        hints=(
            "How far back does key s lie from query t? Which distances may be seen?",
            "Distances 0 to window - 1: torch.arange(T)[:, None] - torch.arange(T) has them all.",
            "Hide with masked_fill(…, -math.inf), then the softmax.",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        merge_parts,
        check_merge_parts,
        hints=(
            "The whole softmax divides by the sum over both halves; each half has divided by its own.",
            "So half a counts for exp(lse_a) / (exp(lse_a) + exp(lse_b)) of the whole.",
            "That is torch.sigmoid(lse_a - lse_b), which does not overflow; [:, None] lines it up with the rows.",
        ),
    ),
    Exercise(
        linear_attention,
        check_linear_attention,
        hints=(
            "Keep two sums as you go through the words: of φ(k_s)ᵀ v_s, (d, d_v), and of φ(k_s), (d,).",
            "At word t add to both first; then φ(q_t) @ the first, divided by φ(q_t) @ the second.",
            "torch.outer(k[t], v[t]) is φ(k_t)ᵀ v_t; torch.stack puts the rows together.",
        ),
    ),
)
