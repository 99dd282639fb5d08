"""Lesson 9: does it matter?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import judging

__all__ = ["EXERCISES", "brought", "rollout", "without_head"]


def without_head(heads: Tensor, W_out: Tensor, h: int) -> Tensor:
    """What attention gives to the model if head h brings nothing: its numbers are 0, and all else stays.

    heads: (H, T, D), what each head brings. W_out: (H·D, d), whose first D rows meet head 0, the next D head 1, and so
    on. Return (T, d).
    """
    silenced = heads.clone()
    silenced[h] = 0
    return silenced.transpose(0, 1).flatten(start_dim=1) @ W_out


def brought(weights: Tensor, v: Tensor) -> Tensor:
    """How much each key brings to each query: its weight times the size of its value, b_ts = A_ts ‖v_s‖.

    weights: (H, T, S). v: (H, S, D). Return (H, T, S).
    """
    sizes: Tensor = v.norm(dim=-1)  # (H, S)
    return weights * sizes[:, None]


def rollout(weights: Tensor) -> Tensor:
    """Where attention leads over all layers: the product of ½ mean over heads + ½ identity, the first on the right.

    weights: (L, H, T, T), layer 0 first. Return (T, T), whose rows add up to 1.
    """
    T = weights.shape[-1]
    found = torch.eye(T, dtype=weights.dtype)
    for layer in weights:
        found = (layer.mean(dim=0) / 2 + torch.eye(T, dtype=weights.dtype) / 2) @ found
    return found


# --- checks --------------------------------------------------------------------------------------------------------

THAT_HEAD_ALONE = "This is what head h brings alone. The others stay, and h is taken out."
ALL_THERE = "All heads are still there. Head h brings nothing: its numbers are 0 before W_out."
ANOTHER_HEAD = "Another head is missing. Heads count from 0: h = 0 is the first."
TURNED = "Heads and words are mixed: turn first, so that a word's row holds its heads side by side, (T, H·D)."
OTHERS_RAISED = "The others are made up for it. Nothing is divided: a head that is taken out leaves a gap."

BY_SQUARES = "The sizes are squared. The size of a vector is the root of the sum of squares: v.norm(dim=-1)."
SUMS = "The numbers of a value are added up. Its size is the root of the sum of squares: v.norm(dim=-1)."
SHARED_AGAIN = "Rows add up to 1 again. How much is brought need not: leave it as it is."
OF_THE_MIX = "This is the size of the whole mix, one number a query. Each key has its own: weight times size."
SIZES_OF_QUERIES = "Row t is multiplied by the size of value t. The key's value counts: column s, times ‖v_s‖."

TURNED_ROUND = (
    "The product is the wrong way round. The last layer looks at what was mixed before: the first is on the right."
)
NO_RESIDUAL = "The word itself is missing: each layer adds to what was there. Take half of the identity."
NOT_HALVED = "Attention and identity are added but not halved, so rows do not add up to 1: ½ of each."
SUM_OF_HEADS = "Heads are added up, so rows do not add up to 1: take their mean."
LAST_ONLY = "This is one layer. All of them are multiplied."
AVERAGE = "Layers are averaged. Each mixes what the one before has mixed: multiply."
NOT_MATRICES = "Layers are multiplied number by number. It is the product of matrices, @."


def check_without_head(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless head h alone is missing."""
    inputs = []
    for _ in range(3):
        H, T, D, d = judging.distinct(generator, 4, 3, 7)
        heads, W_out = judging.normal(generator, H, T, D), judging.normal(generator, H * D, d)
        inputs.append((heads, W_out, int(torch.randint(1, H, (1,), generator=generator))))
    judging.judge(answer, inputs, without_head, _without_mistakes, "a vector a word, (T, d)")


def check_brought(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is the weights times the norms of the values."""
    inputs = []
    for n in range(3):
        H, T, D, S = judging.distinct(generator, 4, 2, 7)
        S = T if n == 2 else S
        inputs.append((judging.normal(generator, H, T, S).softmax(-1), judging.normal(generator, H, S, D)))
    judging.judge(answer, inputs, brought, _brought_mistakes, "how much each key brings, (H, T, S)")


def check_rollout(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is the product over layers of ½ mean + ½ identity."""
    sizes = [judging.distinct(generator, 3, 2, 6) for _ in range(3)]
    inputs = [(judging.normal(generator, L, H, T, T).mul(2).softmax(-1),) for L, H, T in sizes]
    judging.judge(answer, inputs, rollout, _rollout_mistakes, "where attention leads, (T, T)")


def _without_mistakes(heads: Tensor, W_out: Tensor, h: int) -> judging.Mistakes:
    H, T, D = heads.shape
    right = without_head(heads, W_out, h)
    silenced = heads.clone()
    silenced[h] = 0
    every = heads.transpose(0, 1).flatten(1) @ W_out
    return [
        (THAT_HEAD_ALONE, every - right),
        (ALL_THERE, every),
        (ANOTHER_HEAD, without_head(heads, W_out, h - 1)),
        (TURNED, silenced.reshape(T, H * D) @ W_out),
        (OTHERS_RAISED, right * H / (H - 1)),
    ]


def _brought_mistakes(weights: Tensor, v: Tensor) -> judging.Mistakes:
    right = brought(weights, v)
    found = [
        (BY_SQUARES, weights * v.square().sum(-1)[:, None]),
        (SUMS, weights * v.sum(-1)[:, None]),
        (SUMS, weights * v.abs().sum(-1)[:, None]),
        (SHARED_AGAIN, right / right.sum(-1, keepdim=True)),
        (OF_THE_MIX, (weights @ v).norm(dim=-1)),
    ]
    if weights.shape[1] == weights.shape[2]:
        found.append((SIZES_OF_QUERIES, weights * v.norm(dim=-1)[..., None]))
    return found


def _rollout_mistakes(weights: Tensor) -> judging.Mistakes:
    one = torch.eye(weights.shape[-1], dtype=weights.dtype)
    mean = weights.mean(1)
    return [
        (TURNED_ROUND, rollout(weights.flip(0))),
        (NO_RESIDUAL, _product(mean)),
        (NOT_HALVED, _product(mean + one)),
        (SUM_OF_HEADS, _product(weights.sum(1) / 2 + one / 2)),
        (SUM_OF_HEADS, _product(weights.sum(1) + one)),
        (LAST_ONLY, (mean / 2 + one / 2)[-1]),
        (AVERAGE, (mean / 2 + one / 2).mean(0)),
        (NOT_MATRICES, (mean / 2 + one / 2).prod(0)),
    ]


def _product(layers: Tensor) -> Tensor:
    found = torch.eye(layers.shape[-1], dtype=layers.dtype)
    for layer in layers:
        found = layer @ found
    return found


EXERCISES = (
    Exercise(
        without_head,
        check_without_head,
        hints=(
            "Lesson 5 laid the heads side by side and multiplied with W_out. Do the same, with zeros for head h.",
            "heads.clone() is a copy that you may change; copy[h] = 0.",
            "Heads side by side: transpose(0, 1) gives (T, H, D), reshape(T, H * D) lays them in a row.",
        ),
    ),
    Exercise(
        brought,
        check_brought,
        hints=(
            "v.norm(dim=-1) is the size of every value, (H, S).",
            "Column s is multiplied by size s: give the sizes a dimension for the queries, [:, None, :].",
        ),
    ),
    Exercise(
        rollout,
        check_rollout,
        hints=(
            "Start with the identity, torch.eye(T), and let one layer after the other multiply from the left.",
            "A layer's matrix: layer.mean(dim=0) / 2 + torch.eye(T) / 2.",
        ),
    ),
)
