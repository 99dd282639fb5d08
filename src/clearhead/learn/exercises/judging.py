"""What the checks share: fresh inputs, one comparison, and the wrong formulas that people write, each with its message.

A check computes the right answer and the answers of typical mistakes from the same random input. Whichever of them the
learner's answer equals tells what to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.learn.exercise import Wrong, unchanged

__all__ = [
    "EXCHANGED",
    "HOLDS_NAN",
    "NO_PROJECTION",
    "Mistakes",
    "attention_mistakes",
    "build",
    "call",
    "compare",
    "distinct",
    "explain_weights",
    "hide",
    "judge",
    "later",
    "normal",
    "refuse_constant",
    "tensor",
]

Mistakes = list[tuple[str, Tensor]]  # (what to say, the answer that this mistake gives)

CONSTANT = (
    "Two different inputs gave the same answer. It has to follow from the arguments: numbers copied from the lesson fit"
    " one sentence only."
)
HOLDS_NAN = "The answer holds NaN or infinity: somewhere 0 was divided by 0, or exp of a large number overflowed."

NO_SCALE = (
    "The scores are not scaled. A dot product of d_k products spreads like √d_k, and the softmax turns that into one"
    " weight near 1. Divide the scores by √d_k before the softmax."
)
INVERTED = "The scores are multiplied by √d_k. They are too spread out already: divide by √d_k."
BY_D = "The scores are divided by d_k. Their spread grows with √d_k only, so this makes them too alike: divide by √d_k."
BY_MODEL = (
    "The scores are divided by the root of another width. d_k is the width of one query, since that is how many"
    " products the dot product adds up: q.shape[-1] after the projection, and of one head where there are several."
)
SCALED_AFTER = (
    "The weights are divided by √d_k after the softmax, so a row does not add up to 1. Divide the scores before it."
)
COLUMNS = (
    "Each column adds up to 1, not each row. A row is one query sharing out its attention over the keys: the softmax"
    " runs over the last dimension, dim=-1."
)
ALL_TOGETHER = (
    "All weights together add up to 1. Every query has a whole attention to share: apply the softmax to each row,"
    " dim=-1."
)
NO_SOFTMAX = "These are still scores: they do not add up to 1. A softmax over each row turns scores into weights."
UNMASKED = "Words see what comes after them. Scores of later keys must be -inf before the softmax, so that exp gives 0."
BACKWARDS = (
    "The mask is the wrong way round: it hides the past and shows the future. Query t may see keys s ≤ t: keep the"
    " lower triangle, and hide triu(diagonal=1)."
)
NOT_ITSELF = (
    "No word sees itself, and the first word sees nothing at all, which makes it NaN. A word may see itself: the"
    " diagonal stays, hide only what lies above it (triu with diagonal=1)."
)
ONE_AHEAD = "Each word sees the next one too, which is just the word to be guessed. Hide all above the diagonal."
LOST_SHARE = (
    "The future was set to 0 after the softmax, and its share is lost: rows no longer add up to 1. Hide the scores"
    " before the softmax (-inf), or divide each row by its sum again."
)
ZERO_SCORE = (
    "Hidden scores were set to 0, and 0 is an ordinary score: exp(0) = 1, so the future still gets weight. exp gives 0"
    " only for -inf."
)

EXCHANGED = (
    "The roles are swapped: each key shares itself out over the queries. W_query makes q, W_key makes k, and rows"
    " belong to queries: q @ k.T, not k @ q.T."
)
NO_PROJECTION = (
    "The projections are missing: x is compared with itself, as in lesson 2. Project first: q = W_query(x), k ="
    " W_key(x), v = W_value(x)."
)

# --- inputs --------------------------------------------------------------------------------------------------------


def distinct(generator: torch.Generator, count: int, low: int, high: int) -> list[int]:
    """`count` different sizes from low … high: a mistake in the shape cannot hide behind two equal ones."""
    order = torch.randperm(high - low + 1, generator=generator)
    return [low + int(n) for n in order[:count]]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Independent numbers of mean 0 and variance 1, float32."""
    return torch.randn(*shape, generator=generator)


# --- what came back ------------------------------------------------------------------------------------------------


def call(answer: Callable[..., Any], *inputs: Any) -> Any:
    """What the answer returns for copies of the inputs; raises Wrong if it changed one."""
    copies = [given.clone() if isinstance(given, Tensor) else given for given in inputs]
    with unchanged(*(copy for copy in copies if isinstance(copy, Tensor))):
        return answer(*copies)


def tensor(got: Any, what: str) -> Tensor:
    """The result as float64, detached; raises Wrong if it is no float tensor."""
    if got is None:
        raise Wrong(f"It returned None; expected {what}. Does the last line begin with return?")
    if not isinstance(got, Tensor):
        raise Wrong(f"It returned a {type(got).__name__}; expected one tensor: {what}.")
    if not got.is_floating_point():
        raise Wrong(f"It returned a tensor of {str(got.dtype).removeprefix('torch.')}; expected floats: {what}.")
    return got.detach().double()


def refuse_constant(first: Any, second: Any) -> None:
    """Raise if answers to two different inputs are one and the same."""
    firsts, seconds = ((got if isinstance(got, tuple) else (got,)) for got in (first, second))
    pairs = [(a, b) for a, b in zip(firsts, seconds, strict=False) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if pairs and all(a.shape == b.shape and torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs):
        raise Wrong(CONSTANT)


def compare(
    got: Tensor,
    want: Tensor,
    mistakes: Mistakes,
    what: str,
    *,
    nan: str = HOLDS_NAN,
    explain: Callable[..., None] | None = None,
    inputs: Sequence[Any] = (),
) -> None:
    """Return if `got` is `want`; otherwise raise Wrong with the message of the mistake that it equals, or of its kind.

    float32 arithmetic in any order of summation passes: 1e-4 relative, 1e-5 absolute. `explain(got, *inputs)` may
    raise a better message than "the numbers differ", from properties of the answer.
    """
    if _close(got, want):
        return
    for message, wrong in mistakes:
        if _close(got, wrong) and bool(wrong.isfinite().any()):
            raise Wrong(message)
    if got.shape != want.shape:
        raise Wrong(f"The shape is {tuple(got.shape)}; for this input it must be {tuple(want.shape)}: {what}.")
    if not bool(got.isfinite().all()):
        raise Wrong(nan)
    if explain is not None:
        explain(got, *inputs)
    at = tuple(int(n) for n in torch.unravel_index((got - want).abs().argmax(), got.shape))
    raise Wrong(
        f"The shape is right, but the numbers are not: at [{', '.join(map(str, at))}] stands {float(got[at]):.4f},"
        f" expected {float(want[at]):.4f} ({what})."
    )


def _close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


def judge(
    answer: Callable[..., Any],
    inputs: Iterable[tuple[Any, ...]],
    right: Callable[..., Tensor],
    mistakes: Callable[..., Mistakes],
    what: str,
    *,
    nan: str = HOLDS_NAN,
    explain: Callable[..., None] | None = None,
) -> None:
    """Check a function of tensors on each of the inputs against `right`; the rest is as for `compare`."""
    for given in inputs:
        first = call(answer, *given)
        got = tensor(first, what)
        refuse_constant(first, call(answer, *(i.roll(1, 0) / 2 if isinstance(i, Tensor) else i for i in given)))
        wide = [i.double() if isinstance(i, Tensor) else i for i in given]
        want = right(*wide)
        if not _close(got, want):
            compare(got, want, mistakes(*wide), what, nan=nan, explain=explain, inputs=wide)


# --- attention weights ---------------------------------------------------------------------------------------------


def hide(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """The scores with -inf where `hidden` is True."""
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def later(scores: Tensor, first: int = 1) -> Tensor:
    """True where key s of scores (…, T, T) is at least `first` words after query t."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(first)


def attention_mistakes(q: Tensor, k: Tensor, *, other_width: int, causal: bool = False) -> Mistakes:
    """The weights (…, T, S) of typical mistakes, alone or with a wrong scale. `other_width`: one that is not d_k."""
    raw, d = q @ k.mT, q.shape[-1]
    hidden = later(raw) if causal else None
    factors = {NO_SCALE: 1.0, INVERTED: math.sqrt(d), BY_D: 1 / d, BY_MODEL: 1 / math.sqrt(other_width)}
    found = [(message, hide(raw * factor, hidden).softmax(-1)) for message, factor in factors.items()]
    found.append((SCALED_AFTER, hide(raw, hidden).softmax(-1) / math.sqrt(d)))
    for factor in (1 / math.sqrt(d), *factors.values()):
        found += softmax_mistakes(raw * factor, hidden)
        found += mask_mistakes(raw * factor) if causal else []
    return found


def softmax_mistakes(scores: Tensor, hidden: Tensor | None) -> Mistakes:
    """What wrong softmaxes make of scores (…, T, S), with some hidden or (COLUMNS) that forgotten."""
    seen = hide(scores, hidden)
    return [
        (COLUMNS, seen.softmax(-2)),
        (COLUMNS, scores.softmax(-2)),
        (ALL_TOGETHER, seen.flatten(-2).softmax(-1).reshape(scores.shape)),
        (NO_SOFTMAX, seen),
        (NO_SOFTMAX, scores if hidden is None else scores.masked_fill(hidden, 0.0)),
        (NO_SOFTMAX, scores),
    ]


def mask_mistakes(scores: Tensor) -> Mistakes:
    """What wrong masks make of scaled scores (…, T, T) in causal attention."""
    weights = scores.softmax(-1)
    return [
        (UNMASKED, weights),
        (BACKWARDS, hide(scores, ~later(scores, 0)).softmax(-1)),
        (NOT_ITSELF, hide(scores, later(scores, 0)).softmax(-1)),
        (ONE_AHEAD, hide(scores, later(scores, 2)).softmax(-1)),
        (LOST_SHARE, weights.tril()),
        (ZERO_SCORE, scores.tril().softmax(-1)),
    ]


def explain_weights(got: Tensor, *inputs: Tensor, causal: bool = False) -> None:
    """Raise Wrong if these (T, S) cannot be attention weights."""
    if bool((got < -1e-6).any()):
        raise Wrong("Some weights are negative, and a share cannot be: exp makes every score positive. " + NO_SOFTMAX)
    if causal and bool((got.triu(1) > 1e-6).any()):
        raise Wrong(UNMASKED)
    if not _all_one(got.sum(-1)):
        raise Wrong(COLUMNS if _all_one(got.sum(-2)) else ALL_TOGETHER if _all_one(got.sum()) else _off(got))


def _all_one(sums: Tensor) -> bool:
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def _off(got: Tensor) -> str:
    total = float(got.sum(-1).flatten()[0])
    return f"The first row of weights adds up to {total:.4f}; each row must add up to 1. Is the softmax the last step?"


# --- layers --------------------------------------------------------------------------------------------------------


def build(
    answer: Callable[..., Any], sizes: Mapping[str, Any], linears: Mapping[str, tuple[int, int]], g: torch.Generator
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The learner's layer in evaluation mode with known random weights, and these as (d_in, d_out) in float64."""
    layer = answer(**sizes)
    if not isinstance(layer, nn.Module):
        raise Wrong("The layer is no nn.Module: write class …(nn.Module), and call super().__init__() first.")
    weights = {}
    for name, (d_in, d_out) in linears.items():
        linear = getattr(layer, name, None)
        if not isinstance(linear, nn.Linear) or tuple(linear.weight.shape) != (d_out, d_in):
            raise Wrong(f"The layer needs {name} = nn.Linear({d_in}, {d_out}) for {dict(sizes)}, made in __init__.")
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            linear.weight.copy_(normal(g, d_out, d_in) / math.sqrt(d_in))
        weights[name] = linear.weight.detach().double().T
    return layer.eval(), weights
