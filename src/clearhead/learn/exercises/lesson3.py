"""Lesson 3: queries, keys, values, and why the scores are divided by √d_k."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.learn.exercise import Exercise, Wrong
from clearhead.learn.exercises import judging, slips

__all__ = ["EXERCISES", "SelfAttention", "attention", "scaled_weights"]


def scaled_weights(q: Tensor, k: Tensor) -> Tensor:
    """How much each query takes from each key: the softmax of the scaled scores.

    q: (T, d_k), k: (S, d_k). Return (T, S); each row adds up to 1.
    """
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Mix the values in the shares that queries and keys make; give back the mix and the shares.

    q: (T, d_k), k: (S, d_k), v: (S, d_v). Return (output (T, d_v), weights (T, S)).
    """
    scores = q @ k.T / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores, dim=-1)
    return weights @ v, weights


class SelfAttention(nn.Module):
    """A layer: three projections of the same x, which training can change, then attention."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=False)
        self.W_key = nn.Linear(d_in, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, d_in). Return (T, d_out)."""
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        scores = q @ k.T / math.sqrt(k.shape[-1])
        out: Tensor = torch.softmax(scores, dim=-1) @ v
        return out


# --- checks --------------------------------------------------------------------------------------------------------

ROLES_SWAPPED = (
    "The roles are swapped: each key shares itself out over the queries. Rows belong to queries: q @ k.T, not k @ q.T."
)
KEYS_MIXED = "The keys are mixed. A key says what a word is found by; what it gives is its value: weights @ v."
QUERIES_MIXED = "The queries are mixed. What a word gives is its value: weights @ v."
INPUT_MIXED = "The words themselves are mixed. What a word gives is its value, W_value(x): weights @ v."
TRANSPOSED = "The weights are applied the wrong way round. Row t of the weights makes row t of the output: weights @ v."
NO_MIX = "The output holds the weights. They say how much to take of each value; now take it: weights @ v."
NOT_A_PAIR = "Give back two things, the output and the weights: return weights @ v, weights."
PAIR_REVERSED = "Output and weights are in the wrong order: first the mix (T, d_v), then the weights (T, S)."
ONE_PROJECTION = (
    "Queries and keys are the same here, both from one projection. A word may look for something else than what it is"
    " found by: W_query makes q, W_key makes k."
)
NO_GRADIENT = (
    "No gradient reaches {}: training could never change it. Use the layer, self.{}(x), without .data, .detach() or"
    " no_grad."
)
PLAIN_MEAN = "Every query took the same share of every value. The shares come from q and k."


def check_scaled_weights(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is softmax(Q Kᵀ / √d_k)."""
    pairs = [(q, k) for q, k, _ in _queries_keys_values(generator)]
    what = "one row of shares a query, (T, S)"
    judging.judge(answer, pairs, scaled_weights, _weight_mistakes, what, explain=_explain_scale)


def check_attention(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is (softmax(Q Kᵀ / √d_k) V, the softmax)."""
    for q, k, v in _queries_keys_values(generator):
        got = judging.call(answer, q, k, v)
        if not isinstance(got, tuple) or len(got) != 2:
            raise Wrong("It returned None. " + NOT_A_PAIR if got is None else NOT_A_PAIR)
        judging.refuse_constant(got, judging.call(answer, q.roll(1, 0), k.flip(0), v / 2))
        wide = [t.double() for t in (q, k, v)]
        out, weights = (
            judging.tensor(part, f"the {name}") for part, name in zip(got, ("output", "weights"), strict=True)
        )
        want, shares = attention(*wide)
        mistakes = [(PAIR_REVERSED, want), *_weight_mistakes(*wide[:2])]
        judging.compare(weights, shares, mistakes, "the weights, (T, S)", explain=_explain_scale, inputs=wide[:2])
        judging.compare(out, want, _mix_mistakes(shares, *wide), "the output, (T, d_v)")


def check_self_attention(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless forward(x) is softmax(Q Kᵀ / √d_out) V of the three projections, and can be trained."""
    for _ in range(3):
        T, d_in, d_out = judging.distinct(generator, 3, 3, 8)
        projections = dict.fromkeys(("W_query", "W_key", "W_value"), (d_in, d_out))
        layer, weights = judging.build(answer, {"d_in": d_in, "d_out": d_out}, projections, generator)
        judging.judge(
            layer,
            [(judging.normal(generator, T, d_in),)],
            lambda x, weights=weights: attention(*(x @ W for W in weights.values()))[0],
            lambda x, weights=weights: _layer_mistakes(x, *weights.values()),
            "one vector a word, (T, d_out)",
        )
        _check_trains(layer, judging.normal(generator, T, d_in), list(projections))


def _queries_keys_values(generator: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor]]:
    sizes = [judging.distinct(generator, 4, 3, 8) for _ in range(3)]
    T, _, D, Dv = sizes[0]
    sizes[0] = [T, T, D, Dv]  # as many keys as queries first: there a transposed matrix still fits
    return [tuple(judging.normal(generator, *s) for s in ((T, D), (S, D), (S, Dv))) for T, S, D, Dv in sizes]  # type: ignore[misc]


def _weight_mistakes(q: Tensor, k: Tensor) -> judging.Mistakes:
    turned = (k @ q.T / math.sqrt(q.shape[-1])).softmax(-1)
    found = judging.attention_mistakes(q, k, other_width=len(k))
    return [*found, (ROLES_SWAPPED, turned), (judging.BY_MODEL, (q @ k.T / math.sqrt(len(q))).softmax(-1))]


def _explain_scale(got: Tensor, q: Tensor, k: Tensor) -> None:
    """Softmax turns a factor of the scores into a slope of ln(weights): if they are a line, name the factor."""
    judging.explain_weights(got)
    raw, logs = q @ k.T, got.clamp(min=1e-30).log()
    raw, logs = raw - raw.mean(-1, keepdim=True), logs - logs.mean(-1, keepdim=True)
    factor = float((raw * logs).sum() / (raw * raw).sum())
    if torch.allclose(logs, factor * raw, atol=1e-3):
        right = 1 / math.sqrt(q.shape[-1])
        raise Wrong(
            f"The scores are multiplied by {factor:.3f}; with d_k = {q.shape[-1]} it must be 1/√d_k = {right:.3f}. Take"
            " d_k from the input, q.shape[-1]."
        )


def _mix_mistakes(weights: Tensor, q: Tensor, k: Tensor, v: Tensor) -> judging.Mistakes:
    found = [(KEYS_MIXED, weights @ k), (NO_MIX, weights), (PLAIN_MEAN, v.mean(0).expand(len(q), -1))]
    return found + ([(TRANSPOSED, weights.T @ v)] if len(q) == len(v) else [])


def _layer_mistakes(x: Tensor, W_query: Tensor, W_key: Tensor, W_value: Tensor) -> judging.Mistakes:
    q, k, v = x @ W_query, x @ W_key, x @ W_value
    weights, plain = scaled_weights(q, k), (x @ x.T).softmax(-1)
    return [
        *((message, wrong @ v) for message, wrong in judging.attention_mistakes(q, k, other_width=x.shape[-1])),
        *((message, wrong) for message, wrong in _mix_mistakes(weights, q, k, v)),
        (QUERIES_MIXED, weights @ q),
        (INPUT_MIXED, weights @ x),
        (judging.EXCHANGED, scaled_weights(k, q) @ v),
        (ONE_PROJECTION, scaled_weights(q, q) @ v),
        (ONE_PROJECTION, scaled_weights(k, k) @ v),
        *((judging.NO_PROJECTION, wrong @ mixed) for wrong in (scaled_weights(x, x), plain) for mixed in (v, x)),
    ]


def _check_trains(layer: nn.Module, x: Tensor, names: list[str]) -> None:
    out = layer(x)
    if out.requires_grad:
        out.square().sum().backward()
    for name in names:
        gradient = getattr(layer, name).weight.grad
        if gradient is None or not bool(gradient.any()):
            raise Wrong(NO_GRADIENT.format(name, name))


EXERCISES = (
    Exercise(
        scaled_weights,
        check_scaled_weights,
        hints=(
            "First all scores, one matrix product; then divide; then the softmax.",
            "Which way round? Row t belongs to query t, so q comes first, and k is turned: q @ k.T.",
            "d_k is q.shape[-1]; its root is math.sqrt(q.shape[-1]).",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        attention,
        check_attention,
        hints=(
            "The weights are those of the exercise before.",
            "The output is a mix of values: row t is Σ_s weights[t, s] · v[s].",
            "return weights @ v, weights",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        SelfAttention,
        check_self_attention,
        hints=(
            "forward makes q, k and v from the same x, each with its own projection: self.W_query(x) and so on.",
            "Then it is the attention you have written: you may call it, attention(q, k, v)[0].",
            "The scores are divided by the root of the width of q, which is d_out, not d_in.",
        ),
        slips=slips.LAYERS,
    ),
)
