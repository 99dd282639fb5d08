"""Whether heads matter: how much worse a language model predicts without them, beside heads drawn at random."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from clearhead._checks import check_count
from clearhead._progress import Progress, silent
from clearhead._tables import Labelled, Rows
from clearhead.errors import ShapeError
from clearhead.heads.knocking import HeadMeans
from clearhead.heads.losses import Heads, Losses, Measured, Texts

__all__ = ["Effect", "HeadLoss", "Importance", "effect", "effect_of", "every_head", "importance"]


@dataclass(frozen=True)
class HeadLoss(Labelled):
    """One head: what the model loses without it, in nats a token.

    loss; change: what that is above the whole model's; error: the standard error of the change over windows of text,
    None of a single one; icl: the score of in-context learning without the head, None where no window is long enough.
    """

    loss: float
    change: float
    error: float | None
    icl: float | None


class Importance(Rows[HeadLoss]):
    """What a language model loses without each of its heads: all of them, layer by layer.

    Attributes: whole (the whole model's loss and score), how (what became of the heads), tokens and windows (how many
    were predicted, in how many pieces of text). Any one head, drawn at random, changes the loss by `mean` ± `std`.
    """

    def __init__(self, heads: Sequence[HeadLoss], whole: Measured, how: str, tokens: int, windows: int) -> None:
        super().__init__(heads)
        self.whole, self.how, self.tokens, self.windows = whole, how, tokens, windows

    @property
    def mean(self) -> float:
        """The mean change of the loss over all heads."""
        return fmean(head.change for head in self)

    @property
    def std(self) -> float:
        """The standard deviation of the change over all heads."""
        return _std([head.change for head in self])

    def strongest(self, n: int = 8) -> list[HeadLoss]:
        """The heads without which the loss rises most, those first."""
        return sorted(self, key=lambda head: -head.change)[:n]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, as JSON holds them."""
        about = {"how": self.how, "tokens": self.tokens, "windows": self.windows, "mean": self.mean, "std": self.std}
        return {"loss": self.whole.loss, "icl": self.whole.icl, **about, "heads": [asdict(head) for head in self]}

    def __repr__(self) -> str:
        first = self.strongest(1)[0]
        return (
            f"Importance({len(self)} heads, {self.how}; loss {self.whole.loss:.4f}; most by {first.label},"
            f" {first.change:+.4f}; any head {self.mean:+.4f} ± {self.std:.4f})"
        )


@dataclass(frozen=True)
class Effect:
    """What a language model loses without some heads together, and without as many drawn at random, in nats a token.

    whole, without: its loss, and the score of in-context learning. random: the same of each draw.
    """

    heads: tuple[tuple[int, int], ...]
    how: str
    whole: Measured
    without: Measured
    random: tuple[Measured, ...]

    @property
    def change(self) -> float:
        """By how much the loss rises."""
        return self.without.change

    @property
    def random_mean(self) -> float:
        """By how much it rises without as many heads drawn at random, mean over draws; NaN of none."""
        return fmean(one.change for one in self.random) if self.random else math.nan

    @property
    def random_std(self) -> float:
        """The standard deviation over draws; NaN of fewer than two."""
        return _std([one.change for one in self.random])

    def as_dict(self) -> dict[str, Any]:
        """All numbers, as JSON holds them."""
        random = {"mean": self.random_mean, "std": self.random_std} if len(self.random) > 1 else {}
        return {
            "heads": list(map(list, self.heads)),
            "how": self.how,
            "whole": asdict(self.whole),
            "without": asdict(self.without),
            "random": {"draws": [asdict(one) for one in self.random], **random},
        }

    def __repr__(self) -> str:
        return (
            f"Effect({len(self.heads)} heads, {self.how}; loss {self.whole.loss:.4f}, {self.change:+.4f} without them,"
            f" {self.random_mean:+.4f} ± {self.random_std:.4f} without as many at random)"
        )


def importance(
    model: nn.Module,
    tokenizer: Any,
    texts: Texts,
    *,
    how: str = "zero",
    means: HeadMeans | None = None,
    length: int = 512,
    batch: int = 4,
    skip: int = 0,
    progress: str | os.PathLike[str] | None = None,
    on_progress: Progress = silent,
) -> Importance:
    """How much a causal language model's loss rises when a head is knocked out, for every head on its own.

    change = loss without the head - loss,    loss = mean over tokens of -log p(token | those before it)

    Args:
        model: in eval mode; called with token ids (B, n), it gives logits, or an object that has them.
        tokenizer: makes the ids of texts; None where all are ids.
        texts: one or more, each a str or token ids, (n,) or (B, n).
        how: what a head becomes, as in `knockout`; "mean" needs `means`.
        length: of the windows that texts are read in, side by side, in tokens; at most what the model reads.
        batch: how many windows of one length are read together; none is ever padded.
        skip: how many of a window's first predictions are left out of the loss.
        progress: a file that each head's result is written to. Run again after an interruption, the same call takes
            from it what is there, and gives the same numbers.
        on_progress: called as (stage, done, total), with stage "importance".

    Raises:
        ModelError: for a model that is not causal, gives no logits or is in training mode; a tokenizer of another
            model; a progress file of another run.
        ShapeError: where no text has a token to predict, or what is given is no text.

    Cost: a run of the model over the texts for each head, and one more.

    Source: Michel et al. 2019, section 3.
    """
    losses = Losses(
        model, tokenizer, texts, how=how, means=means, length=length, batch=batch, skip=skip, progress=progress
    )
    return every_head(losses, on_progress)


def every_head(losses: Losses, on_progress: Progress = silent) -> Importance:
    """Each head of a model knocked out on its own."""
    there = all_heads(losses)
    _measure(losses, "importance", [[one] for one in there], on_progress)
    found = [HeadLoss(*one, **asdict(losses.without([one]))) for one in there]
    return Importance(found, losses.whole, losses.how, losses.tokens, losses.windows)


def effect(
    model: nn.Module,
    tokenizer: Any,
    texts: Texts,
    heads: Heads,
    *,
    draws: int = 20,
    seed: int = 0,
    how: str = "zero",
    means: HeadMeans | None = None,
    length: int = 512,
    batch: int = 4,
    skip: int = 0,
    progress: str | os.PathLike[str] | None = None,
    on_progress: Progress = silent,
) -> Effect:
    """How much a causal language model's loss rises when some heads are knocked out together.

    Beside it stand as many heads drawn at random among all others, `draws` times; and the score of in-context learning
    before and after (`in_context_score`), where a window is long enough for it.

    Args: heads: (layer, head) each, from 0. The others are those of `importance`.

    Raises: ShapeError for heads that do not exist, or too many to draw as many others; what `importance` raises.

    Cost: 2 + `draws` runs of the model over the texts.
    """
    losses = Losses(
        model, tokenizer, texts, how=how, means=means, length=length, batch=batch, skip=skip, progress=progress
    )
    return effect_of(losses, heads, draws=draws, seed=seed, on_progress=on_progress)


def effect_of(losses: Losses, heads: Heads, *, draws: int, seed: int, on_progress: Progress = silent) -> Effect:
    """Some heads of a model knocked out together, and as many others at random."""
    check_count("effect", "draws", draws, at_least=0)
    there = all_heads(losses)
    chosen = _checked(heads, losses.sizes)
    others = [head for head in there if head not in chosen]
    if draws and len(others) < len(chosen):
        raise ShapeError(
            f"effect: {len(chosen)} heads of {len(there)}, so as many others cannot be drawn: give fewer, or draws=0."
        )
    generator = torch.Generator().manual_seed(seed)
    picked = [torch.randperm(len(others), generator=generator)[: len(chosen)].tolist() for _ in range(draws)]
    drawn = [[others[i] for i in one] for one in picked]
    _measure(losses, "random", [chosen, *drawn], on_progress)
    random = tuple(losses.without(one) for one in drawn)
    return Effect(tuple(chosen), losses.how, losses.whole, losses.without(chosen), random)


def _measure(losses: Losses, stage: str, sets: Sequence[Heads], on_progress: Progress) -> None:
    """Each of them; those that the progress file holds count as done at once."""
    left = [one for one in sets if not losses.holds(one)]
    for n, one in enumerate(left, len(sets) - len(left)):
        on_progress(stage, n, len(sets))
        losses.without(one)
    on_progress(stage, len(sets), len(sets))


def all_heads(losses: Losses) -> list[tuple[int, int]]:
    """(layer, head) of every head."""
    return [(layer, head) for layer, count in enumerate(losses.sizes) for head in range(count)]


def _checked(heads: Heads, sizes: Sequence[int]) -> list[tuple[int, int]]:
    try:
        chosen = sorted({(int(layer), int(head)) for layer, head in heads})
    except (TypeError, ValueError):
        raise ShapeError(f"effect(heads={heads!r}): expected (layer, head) pairs, as [(17, 5)] for L17H5.") from None
    if not chosen:
        raise ShapeError("effect(heads=[]): expected at least one (layer, head).")
    for layer, head in chosen:
        if not (0 <= layer < len(sizes) and 0 <= head < sizes[layer]):
            raise ShapeError(
                f"effect: there is no head L{layer}H{head}; the model has layers 0 to {len(sizes) - 1}, with heads 0 to"
                f" {(sizes[layer] if 0 <= layer < len(sizes) else sizes[0]) - 1}."
            )
    return chosen


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan
