"""Lesson 6: cross-attention, and alignments one can read off."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import judging, slips

__all__ = ["EXERCISES", "alignment_share", "cross_attention", "padded_weights"]


def cross_attention(x: Tensor, context: Tensor, W_query: Tensor, W_key: Tensor, W_value: Tensor) -> Tensor:
    """One text asks, another answers.

    x: (T, d), the text that is written; context: (S, d_c), the text that is read; W_query: (d, d_k), W_key: (d_c, d_k),
    W_value: (d_c, d_v). Return (T, d_v): a mix of the context's values for each word of x. No mask.
    """
    q, k, v = x @ W_query, context @ W_key, context @ W_value
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v


def padded_weights(scores: Tensor, real: Tensor) -> Tensor:
    """The weights of a batch of sentences that were padded to one length: padding gets none.

    scores: (B, T, S); real: (B, S), True where a word of the read text is one, False where it is padding (each text
    has at least one real word). Return (B, T, S); each row adds up to 1.
    """
    return torch.softmax(scores.masked_fill(~real[:, None, :], -math.inf), dim=-1)


def alignment_share(weights: Tensor, gold: Tensor) -> Tensor:
    """How much of the attention lies where a person would draw a line between the words: 1 is all of it.

    weights: (T, S); gold: (T, S), True where written word t translates read word s. For each written word that has a
    line at all, add up its weights on its lines. Return the average of these sums, a tensor without dimensions.
    """
    on_lines = (weights * gold).sum(dim=-1)
    return on_lines[gold.any(dim=-1)].mean()


# --- checks --------------------------------------------------------------------------------------------------------

KEYS_FROM_X = (
    "The keys come from x: that is self-attention. The text that is read is found by its keys: context @ W_key."
)
VALUES_FROM_X = "The values come from x. What is taken comes from the text that is read: context @ W_value."
CONTEXT_ASKS = (
    "The roles are swapped: the text that is read asks here. Rows belong to the words that are written: q from x, k"
    " from the context, q @ k.T."
)
HIDDEN = "Something is hidden. The whole text is there before the first word is written: no mask."
KEYS_MIXED = "The keys are mixed. What a word gives is its value: weights @ v."
NO_MIX = "The output holds the weights. They say how much to take of each value; now take it: weights @ v."

PADDING_SEEN = "Padding gets weight. Scores of keys where real is False must be -inf before the softmax."
PADDING_ONLY = "The mask is the wrong way round: only padding is seen. Hide where real is False: ~real."
PADDING_ROWS = (
    "Whole rows are hidden: real was lined up with the queries. It says which keys are words: real[:, None, :], so that"
    " it stands along the last dimension."
)
LOST_TO_PADDING = (
    "Padding is set to 0 after the softmax, and its share is lost: rows no longer add up to 1. Hide the scores before"
    " the softmax, with -inf."
)
OTHER_TEXTS = (
    "A key is hidden in every text if it is padding in one. Each text has padding of its own: real[:, None, :]."
)

OVER_ALL_ROWS = (
    "The sums are averaged over all written words. A word without a line has nothing to agree with: leave it out,"
    " gold.any(dim=-1)."
)
OVER_LINES = (
    "This is the average weight on a line. A word may have two lines, and its attention is shared out: add them up."
)
NOT_AVERAGED = "These are the sums added up. Average them over the words that have a line."
EVERY_ROW = "This is a number for each word. Return their average, one number: .mean()."
HITS = "This counts words whose largest weight is on a line. Asked for is how much of the weight is."
BY_READ = "The sums run over the written words. A row belongs to a written word: add up along it, dim=-1."


def check_cross_attention(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless q comes from x, k and v from the context."""
    inputs = []
    for same in (False, True, False):  # once all widths are alike: there a slip in what is projected still fits
        T, S, d, other, d_k, d_v = judging.distinct(generator, 6, 3, 9)
        d_c, d_v, S = (d, d_k, T) if same else (other, d_v, S)
        sizes = ((T, d), (S, d_c), (d, d_k), (d_c, d_k), (d_c, d_v))
        inputs.append(tuple(judging.normal(generator, *size) for size in sizes))
    judging.judge(answer, inputs, cross_attention, _cross_mistakes, "one mix for each word of x, (T, d_v)")


def check_padded_weights(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless padded keys, and nothing else, get no weight."""
    for square in (False, True, False):
        B, T, S = judging.distinct(generator, 3, 3, 7)
        T = S if square else T
        lengths = torch.randint(2, S, (B,), generator=generator)  # two: no row is the same whatever the scores
        lengths[0] = S
        real = torch.arange(S) < lengths[:, None]
        judging.judge(
            lambda scores, real=real: answer(scores, real.clone()),
            [(judging.normal(generator, B, T, S),)],
            partial(_padded, real),
            partial(_padding_mistakes, real),
            "a row of shares for each query, (B, T, S)",
            explain=judging.explain_weights,
        )


def check_alignment_share(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is the weight on lines, averaged over the words that have one."""
    inputs = [_lines(generator) for _ in range(3)]
    given = [judging.call(lambda w, gold=gold: answer(w, gold.clone()), weights) for weights, gold in inputs]
    answers = [judging.tensor(got, "one number") for got in given]
    judging.refuse_constant(tuple(answers[:2]), tuple(answers[1:]))
    for got, (weights, gold) in zip(answers, inputs, strict=True):
        wide = weights.double()
        want, mistakes = alignment_share(wide, gold), _share_mistakes(wide, gold)
        judging.compare(got, want, mistakes, "one number")


def _lines(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights, and lines of which there are more than words, and words without any: each count another number."""
    while True:
        T, S = judging.distinct(generator, 2, 4, 8)
        gold = torch.rand(T, S, generator=generator) < 0.3
        counts = {T, S, int(gold.sum()), int(gold.any(1).sum()), int(gold.any(0).sum())}
        if len(counts) == 5 and bool(gold.any()):
            return judging.normal(generator, T, S).softmax(-1), gold


def _cross_mistakes(x: Tensor, context: Tensor, W_query: Tensor, W_key: Tensor, W_value: Tensor) -> judging.Mistakes:
    q, k, v = x @ W_query, context @ W_key, context @ W_value
    found = judging.attention_mistakes(q, k, other_width=x.shape[-1])
    right = (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1)
    wrong = [*((message, weights @ v) for message, weights in found), (NO_MIX, right)]
    if x.shape == context.shape:
        scale = 1 / math.sqrt(q.shape[-1])
        of_x = (q @ (x @ W_key).T * scale).softmax(-1)
        asked = ((context @ W_query) @ (x @ W_key).T * scale).softmax(-1)
        causal = judging.hide(q @ k.T * scale, judging.later(right)).softmax(-1)
        wrong += [
            (KEYS_FROM_X, of_x @ v),
            (KEYS_FROM_X, of_x @ (x @ W_value)),
            (VALUES_FROM_X, right @ (x @ W_value)),
            (CONTEXT_ASKS, asked @ (x @ W_value)),
            (CONTEXT_ASKS, (k @ q.T * scale).softmax(-1) @ v),
            (HIDDEN, causal @ v),
            (KEYS_MIXED, right @ k),
        ]
    return wrong


def _padded(real: Tensor, scores: Tensor) -> Tensor:
    return padded_weights(scores, real)


def _padding_mistakes(real: Tensor, scores: Tensor) -> judging.Mistakes:
    keys = real[:, None, :].expand_as(scores)
    found = [
        (PADDING_SEEN, scores.softmax(-1)),
        (PADDING_SEEN, scores.masked_fill(~keys, 0.0).softmax(-1)),
        (PADDING_ONLY, judging.hide(scores, keys).softmax(-1)),
        (LOST_TO_PADDING, scores.softmax(-1) * keys),
        (OTHER_TEXTS, judging.hide(scores, ~keys.all(0)).softmax(-1)),
        *judging.softmax_mistakes(scores, ~keys),
    ]
    if scores.shape[1] == scores.shape[2]:
        queries = real[:, :, None].expand_as(scores)
        found += [
            (PADDING_ROWS, judging.hide(scores, ~queries).softmax(-1)),
            (PADDING_ROWS, scores.softmax(-1) * queries),
        ]
    return found


def _share_mistakes(weights: Tensor, gold: Tensor) -> judging.Mistakes:
    sums, lined = (weights * gold).sum(-1), gold.any(-1)
    best = gold[torch.arange(len(gold)), weights.argmax(-1)].double()
    return [
        (OVER_ALL_ROWS, sums.mean()),
        (OVER_LINES, weights[gold].mean()),
        (NOT_AVERAGED, sums.sum()),
        (EVERY_ROW, sums),
        (EVERY_ROW, sums[lined]),
        (HITS, best.mean()),
        (HITS, best[lined].mean()),
        (BY_READ, (weights * gold).sum(0).mean()),
        (BY_READ, (weights * gold).sum(0)[gold.any(0)].mean()),
    ]


EXERCISES = (
    Exercise(
        cross_attention,
        check_cross_attention,
        hints=(
            "It is lesson 3's attention. Only: what comes from which text?",
            "Who asks is who writes: q = x @ W_query. Keys and values are the other's.",
            "k = context @ W_key, v = context @ W_value; then as ever, softmax(q kᵀ / √d_k) v.",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        padded_weights,
        check_padded_weights,
        hints=(
            "As the future in lesson 4: -inf before the softmax.",
            "real is (B, S) and the scores are (B, T, S): real[:, None, :] has a dimension for the queries.",
            "scores.masked_fill(~real[:, None, :], -math.inf)",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        alignment_share,
        check_alignment_share,
        hints=(
            "weights * gold keeps the weights on lines; a sum along each row is one word's share.",
            "gold.any(dim=-1) is True for words that have a line: sums[…] picks them.",
        ),
    ),
)
