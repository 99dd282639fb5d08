"""Lesson 2: weights from dot products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import judging, slips

__all__ = ["EXERCISES", "context_vectors", "dot_scores", "softmax"]


def dot_scores(x: Tensor) -> Tensor:
    """Score every word against every word, without a loop.

    x: (T, d), one row a word. Return (T, T): at [t, s] stands the dot product of row t and row s.
    """
    return x @ x.T


def softmax(scores: Tensor) -> Tensor:
    """Turn every row of scores into shares: none negative, adding up to 1.

    scores: (T, S). Return (T, S). Write it out with torch.exp and a sum. A score may be 1000, and exp(1000) is
    infinite: take the largest score of the row off first, which changes no share.
    """
    e = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return e / e.sum(dim=-1, keepdim=True)


def context_vectors(x: Tensor) -> Tensor:
    """Give every word its new vector: all words mixed, in the shares that its dot products make.

    x: (T, d). Return (T, d). Nothing is learned here, and nothing is scaled.
    """
    weights = torch.softmax(x @ x.T, dim=-1)
    return weights @ x


# --- checks --------------------------------------------------------------------------------------------------------

COLUMNS_COMPARED = (
    "This compares the columns of x with each other. A word is a row: multiply x by its transpose, not the other way"
    " round."
)
WEIGHTS_ALREADY = "These are weights already. Return the scores: plain dot products, before any softmax."
SCALED = "The scores are scaled. Not yet: here a score is the plain dot product; lesson 3 says what to divide by."
COSINE = (
    "Every vector was brought to length 1 first: that is the cosine. The dot product leaves the lengths in, and long"
    " vectors score higher with everybody."
)
DISTANCES = "These are distances, small where vectors match. The dot product is large there: multiply, and add up."
NOT_WITH_ITSELF = "A word is scored against itself as well: the diagonal is not 0."
HALF = "Only one triangle is filled. Every word is scored against every word, in both orders."

NO_EXP = "The scores are divided by their sum. With a negative score that gives negative shares: apply exp first."
NO_SUM = "These are the exponentials. Divide each row by its sum, so that it adds up to 1."
LOGARITHMS = "These are the logarithms of the shares: you took log_softmax."
KEEPDIM = (
    "Each number was divided by the sum of another row: e.sum(dim=-1) has lost a dimension, and PyTorch lines it up"
    " with the columns. Keep it: keepdim=True."
)
OVERFLOW = (
    "Large scores give NaN or infinity: exp(1000) is infinite, and exp(-1000) is 0, which leaves 0/0. Take the largest"
    " score of each row (not of the whole tensor) off before exp."
)

ONLY_WEIGHTS = "These are the weights. They say how much of each word to take; now take it: weights @ x."
WEIGHTS_TRANSPOSED = (
    "The weights are used the wrong way round. Row t holds the shares of word t: weights @ x, without transposing."
)
PLAIN_MEAN = "Every word took the same share of all. The shares come from the dot products: use your scores."


def check_dot_scores(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is X Xᵀ."""
    judging.judge(
        answer,
        _sentences(generator),
        dot_scores,
        lambda x: [
            (COLUMNS_COMPARED, x.T @ x),
            (WEIGHTS_ALREADY, (x @ x.T).softmax(-1)),
            (WEIGHTS_ALREADY, (x @ x.T).softmax(0)),
            (SCALED, x @ x.T / math.sqrt(x.shape[-1])),
            (COSINE, torch.cosine_similarity(x[:, None], x[None], dim=-1)),
            (DISTANCES, torch.cdist(x, x)),
            (NOT_WITH_ITSELF, (x @ x.T).fill_diagonal_(0)),
            (HALF, (x @ x.T).tril()),
            (HALF, (x @ x.T).triu()),
        ],
        "row t against row s, (T, T)",
    )


def check_softmax(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is the softmax of each row, of large scores too."""
    T, S = judging.distinct(generator, 2, 3, 8)
    shapes = [(T, S), (S, T), (T, T)]
    scores = [(judging.normal(generator, *shape),) for shape in shapes]
    what = "shares of each row, (T, S)"
    judging.judge(answer, scores, softmax, _softmax_mistakes, what, explain=judging.explain_weights)
    apart = torch.linspace(-1000, 1000, T)[:, None]  # rows that share no largest score
    large = [(judging.normal(generator, T, S) + apart,), (judging.normal(generator, T, S) * 300,)]
    judging.judge(answer, large, softmax, lambda scores: [], what, nan=OVERFLOW)


def check_context_vectors(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is softmax(X Xᵀ) X."""
    judging.judge(answer, _sentences(generator), context_vectors, _context_mistakes, "one mixed vector a word, (T, d)")


def _sentences(generator: torch.Generator) -> list[tuple[Tensor]]:
    sizes = [judging.distinct(generator, 2, 3, 9) for _ in range(3)]
    return [(judging.normal(generator, T, d),) for T, d in sizes]


def _softmax_mistakes(scores: Tensor) -> judging.Mistakes:
    e = scores.exp()
    found = [
        (judging.COLUMNS, scores.softmax(0)),
        (judging.ALL_TOGETHER, scores.flatten().softmax(0).reshape(scores.shape)),
        (NO_EXP, scores / scores.sum(-1, keepdim=True)),
        (NO_SUM, e),
        (NO_SUM, (scores - scores.amax(-1, keepdim=True)).exp()),
        (LOGARITHMS, scores.log_softmax(-1)),
    ]
    if scores.shape[0] == scores.shape[1]:
        top = (scores - scores.amax(-1)).exp()
        found += [(KEEPDIM, e / e.sum(-1)), (KEEPDIM, top / top.sum(-1))]
    return found


def _context_mistakes(x: Tensor) -> judging.Mistakes:
    scores = x @ x.T
    weights = scores.softmax(-1)
    return [
        (ONLY_WEIGHTS, weights),
        (WEIGHTS_TRANSPOSED, weights.T @ x),
        (SCALED, (scores / math.sqrt(x.shape[-1])).softmax(-1) @ x),
        (judging.COLUMNS, scores.softmax(0) @ x),
        (judging.NO_SOFTMAX, scores @ x),
        (judging.ALL_TOGETHER, scores.flatten().softmax(0).reshape(scores.shape) @ x),
        (PLAIN_MEAN, x.mean(0).expand_as(x)),
    ]


EXERCISES = (
    Exercise(
        dot_scores,
        check_dot_scores,
        hints=(
            "All dot products of the rows of one matrix with the rows of another are one matrix product.",
            "x @ y multiplies rows of x with columns of y. How do rows of x become columns?",
            "x.T has them: (T, d) times (d, T) gives (T, T).",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        softmax,
        check_softmax,
        hints=(
            "Three steps: take off the row's largest score, exp, divide by the row's sum.",
            "Along a row means dim=-1. keepdim=True keeps (T, 1), which lines up with (T, S) row by row.",
            "scores.max(dim=-1, keepdim=True).values is the largest of each row.",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        context_vectors,
        check_context_vectors,
        hints=(
            "Scores, then weights, then the mix: three lines, of which you have written two already.",
            "The mix of word t is Σ_s weights[t, s] · x[s]: a matrix product again.",
        ),
        slips=slips.PRODUCTS,
    ),
)
