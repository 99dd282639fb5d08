"""Lesson 8: inside a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import judging

__all__ = ["EXERCISES", "induction_score", "previous_score", "without_sink"]


def previous_score(weights: Tensor) -> Tensor:
    """Of every head, how much a word gives to the word before it: the mean over all words that have one before.

    weights: (H, T, T). Return (H,).
    """
    return weights.diagonal(offset=-1, dim1=1, dim2=2).mean(dim=-1)


def induction_score(weights: Tensor, ids: Tensor) -> Tensor:
    """Of every head, how much a word gives to what came after an earlier copy of it: the mean over words with such.

    weights: (H, T, T), causal. ids: (T,), equal numbers for equal words. Key s is expected of query t if s < t and the
    word before s is the word t. A word may have several such keys, whose weights add up. Return (H,).
    """
    expected = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    expected[:, 1:] = ids[:, None] == ids[:-1]
    expected = expected.tril(diagonal=-1)
    has_any = expected.any(dim=1)
    return (weights * expected).sum(dim=-1)[:, has_any].mean(dim=-1)


def without_sink(weights: Tensor) -> Tensor:
    """What is left without the first word: its column 0, and the rest of each row adds up to 1 again.

    weights: (H, T, T), causal. Return (H, T, T). The first row, which saw nothing else, is 0 throughout.
    """
    rest = weights.clone()
    rest[:, :, 0] = 0
    rest[:, 1:] = rest[:, 1:] / rest[:, 1:].sum(dim=-1, keepdim=True)
    return rest


# --- checks --------------------------------------------------------------------------------------------------------

Q_AND_K = "Row t holds what word t gives: the word before it is in column t - 1, below the diagonal (offset=-1)."
ITSELF = "This is what each word gives to itself. The word before is one to the left: diagonal(offset=-1)."
FIRST_COUNTED = "The sum is divided by T, but the first word has none before it: T - 1 words count."
LAST_BEFORE_FIRST = "The first word has none before it, but roll brings the last word round to it: T - 1 words count."
HEADS_TOGETHER = "One number for all heads. Heads differ, which is the point: keep the first dimension, (H,)."
FIRST_COLUMN = "This is what words give to the first word of all, not to the word before."

COPIES = "This is the weight on the copies themselves. Induction looks one further: at what came after the copy."
BEFORE_COPIES = "This is the weight on what came before the copy. Induction asks what came after it: s - 1 is the copy."
ALL_COUNT = (
    "All words count here, those without an earlier copy too. Nothing is expected of them: leave them out of the mean."
    " (And a key that comes after the query is none, s < t.)"
)
PER_PAIR = "The mean is over pairs. A word with two such keys counts once: add its weights up, then take the mean."
AVERAGED = "The weights on a word's keys are averaged. All of them go to what came after a copy: add them up."
WRAPPED = (
    "Key 0 counts as what came after a copy, but no word stands before it: roll(1) brings the last word round. Nothing"
    " is expected in column 0."
)
LATER_COPIES = "Words with a copy only after them are counted, too. Expected keys lie before the query: s < t."
NEAREST = "Only one earlier copy counts here. A word may have several such keys; add up the weights on all of them."
SUMMED = "This is the sum over words. Divide by how many words have such a key."

NOT_SHARED = "The column is gone, but rows no longer add up to 1: divide each row by what is left of it."
FIRST_ROW = "The first row is 0 / 0, which is NaN. It saw nothing else: leave it 0, and divide the others."
CUT = "Row and column are cut off. Keep the shape (H, T, T): the first column is 0, and so is the first row."
FIRST_KEEPS = "The first row still gives to the first word. It saw nothing else: all of it is 0."
OWN_LOST = "The diagonal is gone, too: a word may look at itself. Only the first column is taken away."
SOFTMAX_AGAIN = (
    "This is a softmax of the weights. They are shares already, and exp makes them nearly alike. To keep their"
    " proportions, divide each row by what is left of it."
)
COLUMNS = "Each column adds up to 1 now. A row is what one word gives: divide rows by their sum, dim=-1."


def check_previous_score(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is the mean of the diagonal below the main one."""
    maps = [(weights,) for (weights,) in _maps(generator, causal=False)]
    judging.judge(answer, maps, previous_score, _previous_mistakes, "a score a head, (H,)")


def check_induction_score(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is the mean weight on what follows earlier copies."""
    maps = [(weights, _ids(weights.shape[-1], generator)) for (weights,) in _maps(generator)]
    judging.judge(answer, maps, induction_score, _induction_mistakes, "a score a head, (H,)")


def check_without_sink(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless the first column is 0 and other rows add up to 1."""
    what = "weights without the first word, (H, T, T)"
    judging.judge(answer, _maps(generator), without_sink, _sink_mistakes, what)


def _maps(generator: torch.Generator, *, causal: bool = True) -> list[tuple[Tensor]]:
    """Weights (H, T, T)."""
    sizes = [judging.distinct(generator, 2, 2, 5) for _ in range(3)]
    scores = [judging.normal(generator, H, 3 * T + 2, 3 * T + 2) for H, T in sizes]
    return [(judging.hide(s, judging.later(s) if causal else None).softmax(-1),) for s in scores]


def _ids(T: int, generator: torch.Generator) -> Tensor:
    """Words of which some come once and some often; pairs are not as many as words, which would hide a mistake."""
    few = torch.randint(T // 3, (T,), generator=generator)
    few[T // 2] = T  # comes once
    few[0] = few[T // 2 + 1] = few[-1] = T + 1
    return few if _expected(few).sum() != T else _ids(T, generator)


def _previous_mistakes(weights: Tensor) -> judging.Mistakes:
    T, below = weights.shape[-1], weights.diagonal(-1, 1, 2)
    return [
        (Q_AND_K, weights.diagonal(1, 1, 2).mean(-1)),
        (ITSELF, weights.diagonal(0, 1, 2).mean(-1)),
        (FIRST_COUNTED, below.sum(-1) / T),
        (LAST_BEFORE_FIRST, (below.sum(-1) + weights[:, 0, -1]) / T),
        (SUMMED, below.sum(-1)),
        (HEADS_TOGETHER, below.mean()),
        (FIRST_COLUMN, weights[:, 1:, 0].mean(-1)),
        (FIRST_COLUMN, weights[:, :, 0].mean(-1)),
    ]


def _induction_mistakes(weights: Tensor, ids: Tensor) -> judging.Mistakes:
    same = ids[:, None] == ids
    copies, expected, others = same.tril(-1), _expected(ids), same.tril(-1) | same.triu(1)
    wrapped, back = (ids[:, None] == ids.roll(by) for by in (1, -1))
    behind, ahead, after = (torch.zeros_like(same) for _ in range(3))
    behind[:, :-1], ahead[:, 1:], after[:, 1:] = copies[:, 1:], others[:, :-1], same[:, :-1]
    total, count = (weights * expected).sum(-1), expected.any(-1)
    last = expected & (expected.cumsum(-1) == expected.sum(-1, keepdim=True))
    first = expected & (expected.cumsum(-1) == 1)
    return [
        (COPIES, _mean(weights, copies)),
        (BEFORE_COPIES, _mean(weights, behind)),
        (ALL_COUNT, total.mean(-1)),
        (SUMMED, total.sum(-1)),
        (PER_PAIR, (weights * expected).sum((-1, -2)) / expected.sum()),
        (LATER_COPIES, _mean(weights, ahead)),
        (LATER_COPIES, _mean(weights, after)),
        *((WRAPPED, _mean(weights, wrapped.tril(most))) for most in (-1, 0, len(ids))),
        (BEFORE_COPIES, _mean(weights, back.tril(-1))),
        (AVERAGED, (total / expected.sum(-1))[:, count].mean(-1)),
        (AVERAGED, total[:, count].mean(-1) / len(ids)),
        (NEAREST, _mean(weights, last)),
        (NEAREST, _mean(weights, first)),
        (HEADS_TOGETHER, total[:, count].mean()),
    ]


def _expected(ids: Tensor) -> Tensor:
    """(T, T) True where the word before the key is an earlier copy of the query."""
    after = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    after[:, 1:] = ids[:, None] == ids[:-1]
    return after.tril(-1)


def _mean(weights: Tensor, pairs: Tensor) -> Tensor:
    return (weights * pairs).sum(-1)[:, pairs.any(-1)].mean(-1)


def _sink_mistakes(weights: Tensor) -> judging.Mistakes:
    gone = weights.clone()
    gone[..., 0] = 0
    shared = gone / gone.sum(-1, keepdim=True)
    right = shared.nan_to_num(0)
    keeps, own = right.clone(), gone - torch.diag_embed(gone.diagonal(0, 1, 2))
    keeps[:, 0, 0] = 1
    return [
        (NOT_SHARED, gone),
        (FIRST_ROW, shared),
        (CUT, right[:, 1:, 1:]),
        (FIRST_KEEPS, keeps),
        (OWN_LOST, (own / own.sum(-1, keepdim=True)).nan_to_num(0)),
        (COLUMNS, (gone / gone.sum(-2, keepdim=True)).nan_to_num(0)),
        *((SOFTMAX_AGAIN, again) for again in _softmaxes(weights, gone)),
    ]


def _softmaxes(weights: Tensor, gone: Tensor) -> Iterator[Tensor]:
    """Of what is left, hidden or not; with the first row as it comes, and 0."""
    first = torch.zeros_like(weights, dtype=torch.bool)
    first[..., 0] = True
    for scores in (gone, judging.hide(weights, first), judging.hide(gone, gone == 0)):
        for again in (scores.softmax(-1), scores.softmax(-1).masked_fill(first, 0)):
            yield again
            yield torch.cat([torch.zeros_like(again[:, :1]), again[:, 1:]], dim=1)


EXERCISES = (
    Exercise(
        previous_score,
        check_previous_score,
        hints=(
            "Row t, column t - 1: these weights lie on a line below the diagonal.",
            "weights.diagonal(offset=-1, dim1=1, dim2=2) is that line of every head, (H, T - 1).",
        ),
    ),
    Exercise(
        induction_score,
        check_induction_score,
        hints=(
            "Make a table (T, T) of True and False first: which keys are expected of which query?",
            "ids[:, None] == ids says where copies are. Moved one column to the right it says what came after them.",
            "Keep what lies below the diagonal, add up the weights there, and take the mean over rows with any True.",
        ),
    ),
    Exercise(
        without_sink,
        check_without_sink,
        hints=(
            "Three steps: a copy, 0 in the first column, and each row by its sum.",
            "The first row has nothing left, and 0 / 0 is NaN: divide the other rows, rest[:, 1:].",
        ),
    ),
)
