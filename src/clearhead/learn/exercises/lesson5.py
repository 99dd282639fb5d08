"""Lesson 5: many heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import judging, slips

__all__ = ["EXERCISES", "MultiHeadAttention", "merge_heads", "split_heads"]


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut every word's vector into num_heads pieces, one a head.

    x: (B, T, H·D). Return (B, H, T, D): head 0 has the first D numbers of every word, head 1 the next D, and so on.
    """
    B, T, width = x.shape
    return x.view(B, T, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Put the heads' pieces side by side again: what split_heads did, undone.

    x: (B, H, T, D). Return (B, T, H·D).
    """
    B, H, T, D = x.shape
    return x.transpose(1, 2).reshape(B, T, H * D)


class MultiHeadAttention(nn.Module):
    """Causal attention of several heads: one projection for all, split; attention in each; merged, and mixed by W_O."""

    def __init__(self, d_in: int, d_out: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=False)
        self.W_key = nn.Linear(d_in, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=False)
        self.out_proj = nn.Linear(d_out, d_out)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, d_in). Return (B, T, d_out). No dropout here."""
        B, T, _ = x.shape
        q, k, v = (
            W(x).view(B, T, self.num_heads, -1).transpose(1, 2) for W in (self.W_query, self.W_key, self.W_value)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(diagonal=1)
        weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
        merged = (weights @ v).transpose(1, 2).reshape(B, T, -1)
        out: Tensor = self.out_proj(merged)
        return out


# --- checks --------------------------------------------------------------------------------------------------------

HEADS_MIXED = (
    "The heads are mixed: a head got pieces of several words as if they were one. Numbers lie in memory word by word:"
    " first view(B, T, H, D), which cuts each word, then transpose(1, 2)."
)
NOT_TURNED = "The cut is right, but heads come after words here. Heads first, (B, H, T, D): transpose(1, 2)."
EVERY_HTH = (
    "A head got every H-th number of a word. Head 0 has the first D numbers, head 1 the next D: view(B, T, H, D), heads"
    " before D."
)
MERGED_UNTURNED = (
    "The pieces are merged in the wrong order: a word's row now holds one head's pieces of several words. Turn back"
    " first, transpose(1, 2) to (B, T, H, D), then reshape."
)
PIECES_MIXED = "Numbers of the heads alternate within a word. Keep each head's D numbers together: (B, T, H, D)."
NO_OUT_PROJ = (
    "W_O is missing. Side by side, no head's result has met another's: out_proj, applied to the merged heads, mixes"
    " them."
)
NO_OUT_BIAS = "out_proj has a bias as well: apply the layer, self.out_proj(merged), not its weight alone."
ONE_HEAD = "There is one wide head, not several. Split q, k and v into num_heads pieces before they meet."
OVER_HEADS = "The softmax runs over dimension 1, the heads. Heads do not compete with each other, keys do: dim=-1."
OVER_TEXTS = "The softmax runs over dimension 0, the texts. Texts know nothing of each other; keys compete: dim=-1."


def check_split_heads(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless head h gets numbers h·D … (h+1)·D of every word."""
    sizes = [judging.distinct(generator, 4, 2, 6) for _ in range(3)]
    inputs = [(judging.normal(generator, B, T, H * D), H) for B, T, H, D in sizes]
    judging.judge(answer, inputs, split_heads, _split_mistakes, "a (T, D) matrix a head, (B, H, T, D)")


def check_merge_heads(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this undoes split_heads."""
    sizes = [judging.distinct(generator, 4, 2, 6) for _ in range(3)]
    inputs = [(judging.normal(generator, B, H, T, D),) for B, T, H, D in sizes]
    judging.judge(answer, inputs, merge_heads, _merge_mistakes, "the heads side by side, (B, T, H·D)")


def check_multi_head_attention(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless forward(x) is Concat(causal heads) W_O."""
    for _ in range(3):
        B, T, H, D = judging.distinct(generator, 4, 2, 6)
        d_in, d_out = H * D + 3, H * D
        linears = dict.fromkeys(("W_query", "W_key", "W_value"), (d_in, d_out)) | {"out_proj": (d_out, d_out)}
        sizes = {"d_in": d_in, "d_out": d_out, "num_heads": H}
        layer, found = judging.build(answer, sizes, linears, generator)
        bias = _random_bias(layer, generator)
        judging.judge(
            layer.eval(),
            [(judging.normal(generator, B, T, d_in),)],
            lambda x, H=H, found=found, bias=bias: _mixed(x, H, found, bias),
            lambda x, H=H, found=found, bias=bias: _layer_mistakes(x, H, found, bias),
            "one vector a word, (B, T, d_out)",
        )


def _random_bias(layer: nn.Module, generator: torch.Generator) -> Tensor:
    bias = getattr(layer.out_proj, "bias", None)
    if not isinstance(bias, Tensor):
        return torch.zeros(())
    with torch.no_grad():
        bias.copy_(judging.normal(generator, *bias.shape))
    return bias.detach().double()


def _split_mistakes(x: Tensor, num_heads: int) -> judging.Mistakes:
    B, T, width = x.shape
    H, D = num_heads, width // num_heads
    return [
        (HEADS_MIXED, x.reshape(B, H, T, D)),
        (HEADS_MIXED, x.reshape(B, H, D, T).transpose(2, 3)),
        (HEADS_MIXED, x.reshape(B, D, T, H).permute(0, 3, 2, 1)),
        (NOT_TURNED, x.reshape(B, T, H, D)),
        (EVERY_HTH, x.reshape(B, T, D, H).permute(0, 3, 1, 2)),
    ]


def _merge_mistakes(x: Tensor) -> judging.Mistakes:
    B, H, T, D = x.shape
    return [
        (MERGED_UNTURNED, x.reshape(B, T, H * D)),
        (MERGED_UNTURNED, x.transpose(2, 3).reshape(B, T, H * D)),
        (PIECES_MIXED, x.permute(0, 2, 3, 1).reshape(B, T, H * D)),
        (NOT_TURNED, x.transpose(1, 2)),
    ]


def _seen(q: Tensor, k: Tensor) -> Tensor:
    """The scores, those of later words hidden."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return judging.hide(scores, judging.later(scores))


def _heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, T, D) → (B, H, T, D)."""
    return _seen(q, k).softmax(-1) @ v


def _projected(x: Tensor, W: dict[str, Tensor]) -> list[Tensor]:
    return [x @ W[name] for name in ("W_query", "W_key", "W_value")]


def _mixed(x: Tensor, H: int, W: dict[str, Tensor], bias: Tensor) -> Tensor:
    q, k, v = (split_heads(whole, H) for whole in _projected(x, W))
    return merge_heads(_heads(q, k, v)) @ W["out_proj"] + bias


def _layer_mistakes(x: Tensor, H: int, W: dict[str, Tensor], bias: Tensor) -> judging.Mistakes:
    whole = _projected(x, W)
    q, k, v = (split_heads(t, H) for t in whole)
    right = merge_heads(_heads(q, k, v))
    merged = [*((message, merge_heads(out)) for message, out in _ways(q, k, v, H)), *_head_mistakes(whole, H)]
    return [
        (NO_OUT_PROJ, right),
        *((message, wrong @ W["out_proj"] + bias) for message, wrong in merged),
        (NO_OUT_BIAS, right @ W["out_proj"]),
        *((NO_OUT_PROJ, wrong) for _, wrong in merged),
    ]


def _ways(q: Tensor, k: Tensor, v: Tensor, H: int) -> judging.Mistakes:
    """The heads' outputs (B, H, T, D) with typical mistakes inside the heads."""
    weights = judging.attention_mistakes(q, k, other_width=H * q.shape[-1], causal=True)
    over = [(OVER_TEXTS, _seen(q, k).softmax(0)), (OVER_HEADS, _seen(q, k).softmax(1))]  # NaN where all is hidden
    found = [*weights, *over, *((message, wrong.nan_to_num(0.0)) for message, wrong in over)]
    return [(message, wrong @ v) for message, wrong in [*found, (judging.EXCHANGED, _seen(k, q).softmax(-1))]]


def _head_mistakes(whole: list[Tensor], H: int) -> judging.Mistakes:
    """Of q, k and v (B, T, H·D) each: what wrong ways to split and merge give, whatever happens inside the heads."""
    B, T, _ = whole[0].shape
    splits = {
        "": [split_heads(t, H) for t in whole],
        HEADS_MIXED: [t.reshape(B, H, T, -1) for t in whole],
        EVERY_HTH: [t.reshape(B, T, -1, H).permute(0, 3, 1, 2) for t in whole],
    }
    found = [(ONE_HEAD, _heads(*whole))]
    for message, (q, k, v) in splits.items():
        for out in (_heads(q, k, v), *(wrong for _, wrong in _ways(q, k, v, H))):
            found += [(message, merge_heads(out))] if message else []
            found += [(message or MERGED_UNTURNED, out.reshape(B, T, -1))]
            found += [(message or PIECES_MIXED, out.permute(0, 2, 3, 1).reshape(B, T, -1))]
    return found


EXERCISES = (
    Exercise(
        split_heads,
        check_split_heads,
        hints=(
            "view cuts dimensions without moving a number. Which dimension has to be cut, and into what?",
            "The last one, H·D, into H and D: x.view(B, T, H, D). Now each word has its pieces, but words come first.",
            "transpose(1, 2) exchanges words and heads.",
        ),
        slips=slips.HEADS,
    ),
    Exercise(
        merge_heads,
        check_merge_heads,
        hints=(
            "Undo the two steps of split_heads, the last one first.",
            "After transpose the numbers lie in another order than they are read: view refuses, reshape copies them.",
        ),
        slips=slips.HEADS,
    ),
    Exercise(
        MultiHeadAttention,
        check_multi_head_attention,
        hints=(
            "Project, split, attend, merge, project: you have written split and merge already, and may call them.",
            "The attention is lesson 4's, with two dimensions in front: scores (B, H, T, T), softmax over the last.",
            "d_k is the width of one head, q.shape[-1] after the split. At the end: self.out_proj(merged).",
        ),
        slips=slips.HEADS + slips.BATCHES,
    ),
)
