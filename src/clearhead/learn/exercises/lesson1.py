"""Lesson 1: one vector for a sentence, and what Bahdanau put in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import judging, slips

__all__ = ["EXERCISES", "AdditiveAttention", "additive_scores", "sentence_vector"]


def sentence_vector(states: Tensor) -> Tensor:
    """One vector for a sentence: what each of two readers knows when it has read all of it.

    states: (S, 2·d), a row a word: the first d numbers are of the reader from left to right, the other d of the reader
    from right to left. Return (2·d,), the left-to-right reader's first.
    """
    d = states.shape[-1] // 2
    return torch.cat([states[-1, :d], states[0, d:]])


def additive_scores(s: Tensor, h: Tensor, W: Tensor, U: Tensor, v: Tensor) -> Tensor:
    """How well each word answers the decoder's state: v · tanh(s W + h_j U).

    s: (d_s,), h: (S, d_h), W: (d_s, d_a), U: (d_h, d_a), v: (d_a,). Return (S,), a score for each word, no shares yet.
    """
    return torch.tanh(s @ W + h @ U) @ v


class AdditiveAttention(nn.Module):
    """Bahdanau's attention for T states at once: score every word, softmax over the words, mix the words' states."""

    def __init__(self, d_query: int, d_key: int, d_attn: int) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_query, d_attn, bias=False)
        self.W_key = nn.Linear(d_key, d_attn, bias=False)
        self.score = nn.Linear(d_attn, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """query: (T, d_query), the decoder's states; keys: (S, d_key), the encoder's. Return (T, d_key)."""
        both = self.W_query(query)[:, None, :] + self.W_key(keys)[None, :, :]  # (T, S, d_attn)
        scores = self.score(torch.tanh(both))[..., 0]  # (T, S)
        return torch.softmax(scores, dim=-1) @ keys


# --- checks --------------------------------------------------------------------------------------------------------

ONE_ROW_LAST = (
    "This is the last row whole. There the reader from right to left has seen one word only: it begins at the end, and"
    " knows the whole sentence at the first word."
)
ONE_ROW_FIRST = (
    "This is the first row whole. There the reader from left to right has seen one word only: it knows the whole"
    " sentence at the last word."
)
READERS_SWAPPED = (
    "Each half is taken where its reader begins, having seen one word. The left-to-right half belongs to the last row,"
    " the other to the first."
)
HALVES_SWAPPED = "The halves are in the wrong order: first the left-to-right reader's, then the other's."
AVERAGE = "This is the average of all rows. Asked for is what the readers know in the end, not on the way."

NO_TANH = (
    "The tanh is missing. Without it the decoder's state adds the same number to every word's score, and the softmax"
    " would not notice it: all states would get the same shares."
)
TANH_LAST = "The tanh came last, around the whole score. It belongs before the product with v: v · tanh(…)."
NO_V = "The numbers of tanh are only added up. Each counts as much as v says: take the dot product with v."
MULTIPLIED = "s W and h U are multiplied. This score adds them: hence its name."
NO_STATE = "The decoder's state is missing: every state would ask for the same words. Add s W."
NO_WORDS = "The words are missing: every word gets the same score. Add h U, which is another one for each word."
SHARES_ALREADY = "These are shares already. Return the scores, before any softmax."
OTHER_FUNCTION = "Another function stands in place of tanh."

ONLY_WEIGHTS = (
    "The output holds the weights. They say how much to take of each word's state; now take it: weights @ keys."
)
PROJECTED_MIXED = "The projected keys are mixed. What is mixed are the states themselves: weights @ keys."
OVER_STATES = (
    "Each column adds up to 1, not each row. A row is one state of the decoder, sharing out its attention over the"
    " words: the softmax runs over the last dimension, dim=-1."
)
LOUDEST = (
    "Only the best word is taken. A share of every word, by the softmax, can be learned; a choice has no gradient."
)
PLAIN_MEAN = "Every word got the same share. The shares come from the scores."


def check_sentence_vector(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is [→h_S; ←h_1]."""
    sizes = [judging.distinct(generator, 2, 3, 8) for _ in range(3)]
    inputs = [(judging.normal(generator, S, 2 * d),) for S, d in sizes]
    judging.judge(answer, inputs, sentence_vector, _vector_mistakes, "both readers' last states, (2·d,)")


def check_additive_scores(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is v · tanh(s W + h U)."""
    inputs = []
    for _ in range(3):
        S, s, h, a = judging.distinct(generator, 4, 3, 8)
        inputs.append(tuple(judging.normal(generator, *size) for size in ((s,), (S, h), (s, a), (h, a), (a,))))
    judging.judge(answer, inputs, additive_scores, _score_mistakes, "a score for each word, (S,)")


def check_additive_attention(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless forward(query, keys) is softmax(v · tanh(W s + U h)) h."""
    for _ in range(3):
        T, S, d_query, d_key, d_attn = judging.distinct(generator, 5, 3, 9)
        linears = {"W_query": (d_query, d_attn), "W_key": (d_key, d_attn), "score": (d_attn, 1)}
        sizes = {"d_query": d_query, "d_key": d_key, "d_attn": d_attn}
        layer, found = judging.build(answer, sizes, linears, generator)
        judging.judge(
            layer,
            [(judging.normal(generator, T, d_query), judging.normal(generator, S, d_key))],
            lambda query, keys, found=found: _scores(query, keys, found).softmax(-1) @ keys,
            lambda query, keys, found=found: _layer_mistakes(query, keys, found),
            "one mix of the words' states for each state of the decoder, (T, d_key)",
        )


def _vector_mistakes(states: Tensor) -> judging.Mistakes:
    d = states.shape[-1] // 2
    left, right = states[:, :d], states[:, d:]
    return [
        (ONE_ROW_LAST, states[-1]),
        (ONE_ROW_FIRST, states[0]),
        (READERS_SWAPPED, torch.cat([left[0], right[-1]])),
        (HALVES_SWAPPED, torch.cat([right[0], left[-1]])),
        (AVERAGE, states.mean(0)),
    ]


def _score_mistakes(s: Tensor, h: Tensor, W: Tensor, U: Tensor, v: Tensor) -> judging.Mistakes:
    state, words = s @ W, h @ U
    both = state + words
    return [
        (NO_TANH, both @ v),
        (TANH_LAST, torch.tanh(both @ v)),
        (NO_V, torch.tanh(both).sum(-1)),
        (MULTIPLIED, torch.tanh(state * words) @ v),
        (NO_STATE, torch.tanh(words) @ v),
        (NO_WORDS, (torch.tanh(state) @ v).expand(len(h))),
        (NO_WORDS, torch.tanh(state) @ v),
        (SHARES_ALREADY, (torch.tanh(both) @ v).softmax(-1)),
        *((OTHER_FUNCTION, function(both) @ v) for function in (torch.sigmoid, torch.relu, torch.sin)),
    ]


def _scores(query: Tensor, keys: Tensor, W: dict[str, Tensor]) -> Tensor:
    return torch.stack([additive_scores(s, keys, W["W_query"], W["W_key"], W["score"][:, 0]) for s in query])


def _layer_mistakes(query: Tensor, keys: Tensor, W: dict[str, Tensor]) -> judging.Mistakes:
    scores = _scores(query, keys, W)
    weights, both = scores.softmax(-1), (query @ W["W_query"])[:, None] + keys @ W["W_key"]
    return [
        (ONLY_WEIGHTS, weights),
        (PROJECTED_MIXED, weights @ (keys @ W["W_key"])),
        (OVER_STATES, scores.softmax(0) @ keys),
        (judging.ALL_TOGETHER, scores.flatten().softmax(0).view_as(scores) @ keys),
        (judging.NO_SOFTMAX, scores @ keys),
        (NO_TANH, (both @ W["score"])[..., 0].softmax(-1) @ keys),
        (NO_V, torch.tanh(both).sum(-1).softmax(-1) @ keys),
        (LOUDEST, keys[scores.argmax(-1)]),
        (PLAIN_MEAN, keys.mean(0).expand(len(query), -1)),
    ]


EXERCISES = (
    Exercise(
        sentence_vector,
        check_sentence_vector,
        hints=(
            "Which row does each reader come to last?",
            "The left-to-right reader ends at states[-1], the other at states[0].",
            "With d = states.shape[-1] // 2 the halves are [:d] and [d:]; torch.cat puts them together.",
        ),
    ),
    Exercise(
        additive_scores,
        check_additive_scores,
        hints=(
            "From the inside out: add, tanh, and the dot product with v.",
            "s @ W has d_a numbers, h @ U has S rows of them; + adds the former to every row.",
            "A matrix @ v is the dot product of every row with v.",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        AdditiveAttention,
        check_additive_attention,
        hints=(
            "Every state meets every word: (T, 1, d_attn) + (1, S, d_attn) is (T, S, d_attn).",
            "self.score gives one number for each, (T, S, 1): [..., 0] leaves the last dimension out.",
            "Then a softmax over the words, dim=-1, and the mix: weights @ keys.",
        ),
        slips=slips.LAYERS,
    ),
)
