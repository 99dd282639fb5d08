"""Seam 4, the last resort: attention that a program computes by hand, as softmax(q @ k.mT) @ v.

A softmax over the last of at least three dimensions is a layer if what becomes of it (cast, dropout, other leading
dimensions, entries set to 0 or changed) is an operand of a product that sums over that dimension; over the last but one
too, if the scores were a product. Its scores are followed
back: a product, times numbers, plus masks and biases, hidden where a mask says so. What is understood, and gives the
weights of one query, is reported as q, k and rules; of everything else the weights themselves are, as they were
made.

Not attention: a router of experts, whose weights are no such operand, or multiply a table of parameters; a softmax
from which something is drawn; the same weights in a second product; linear attention, a softmax of features that
multiplies a product of keys and values. Weights of two dimensions, where routers live
too, are a layer only where they are read back as self-attention: square, of queries and keys that were both computed.

Notes are kept about recent results, by weak reference, and only while the model runs. Changes in place are noticed
by the tensors' versions (inference tensors have none: there the comparison on one query has to show them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead._checks import has_numbers
from clearhead._watch import Watched
from clearhead.recording.einsum import Contraction
from clearhead.recording.formula import HIDES, Part, Scores, number
from clearhead.recording.trail import (
    Attention,
    Folded,
    How,
    Made,
    Softmax,
    Step,
    Turned,
    Weights,
    is_parameter,
    is_plain,
)

__all__ = ["STEPS"]

_ONE, _TWO = ("input",), ("input", "other")

# --- one reader per kind of function ------------------------------------------------------------------------


def _matmul(step: Step) -> Made | None:
    return _product(step, "input", "other")


def _baddbmm(step: Step) -> Made | None:
    made = _product(step, "batch1", "batch2")
    if isinstance(made, Attention):
        return replace(made, order=None)  # something is added to it
    if not isinstance(made, Scores):
        return made
    scaled, beta = made.scaled(number(step.given.get("alpha", 1))), step.given.get("beta", 1)
    if scaled is None or beta == 0:
        return scaled
    return scaled.plus(step.given["input"], beta) if isinstance(beta, (int, float)) else None


def _product(step: Step, left: str, right: str) -> Made | None:
    a, b, known = step.given.get(left), step.given.get(right), step.known.get(left)
    if not (is_plain(a) and is_plain(b)) or min(a.ndim, b.ndim) < 2:
        return None
    other = step.known.get(right)
    if isinstance(known, Weights):
        table = b.ndim == 2 < a.ndim  # the same for all batch entries: not the values of these keys
        order = tuple(range(len(step.shape))) if step.shape[:-1] == a.shape[:-1] else None
        return _attention(known, a, None if table else b, other, order)
    if isinstance(other, Turned):  # v.mT @ weights.mT
        *lead, width, t = range(len(step.shape))
        order = (*lead, t, width) if step.shape[:-2] == b.shape[:-2] else None
        return _attention(other.weights, b.mT, None if a.ndim == 2 < b.ndim else a.mT, known, order)
    return _scores(step, a, b.mT, known, other)


def _einsum(step: Step) -> Made | None:
    a, b = step.given.get("input"), step.given.get("other")
    if not (is_plain(a) and is_plain(b)):
        return None
    product = Contraction.of(step.given.get("equation"), a, b)
    if product is None:
        return None
    one, two = step.known.get("input"), step.known.get("other")
    if isinstance(one, Weights):
        return _attention(one, a, product.values(b), two, product.order()) or _altered(step)
    if isinstance(two, Weights):
        swapped = product.swapped()
        return _attention(two, b, swapped.values(a), one, swapped.order()) or _altered(step)
    if isinstance(one, Turned):
        turned = product.turned()
        return _attention(one.weights, a.mT, turned.values(b), two, turned.order())
    if isinstance(two, Turned):
        turned = product.swapped().turned()
        return _attention(two.weights, b.mT, turned.values(a), one, turned.order())
    found = product.scores(a, b) or product.swapped().scores(b, a)
    return None if found is None else _scores(step, *found, one, two)


def _attention(
    weights: Weights, left: Tensor, v: Tensor | None, known: Made | None, order: tuple[int, ...] | None = None
) -> Attention | None:
    if isinstance(known, Scores) and not weights.softmax.compares:
        return None  # linear attention: a softmax of features, times a product of keys and values
    heads = known.heads if isinstance(known, Folded) and known.at == 0 else ()
    return None if v is None or is_parameter(v) else Attention(weights, left, v, heads, order)


def _scores(step: Step, q: Tensor, k: Tensor, *known: Made | None) -> Scores:
    heads = next((made.heads for made in known if isinstance(made, Folded) and made.at == 0), ())
    lead = step.shape[:-2]
    heads = lead if len(lead) == 2 else heads
    learned = any(is_parameter(x) for x in step.given.values() if isinstance(x, Tensor))
    q_k, watched = (Part(q, lead), Part(k, lead)), (Watched([q, k]),)
    return Scores(*q_k, step.shape, step.result.dtype, heads, watched=watched, computed=not learned)


def _softmax(step: Step) -> Made | None:
    x, dim, scores = step.given.get("input"), step.given.get("dim"), step.known.get("input")
    if not isinstance(x, Tensor) or x.ndim < 2:
        return None
    dim = int(x.ndim not in (1, 3)) if dim is None else dim  # as F.softmax guesses, and warns
    if dim in (-1, x.ndim - 1):
        return Weights(Softmax(scores, compares=True) if isinstance(scores, Scores) else Softmax(None))
    if dim in (-2, x.ndim - 2) and isinstance(scores, Scores):  # keys first; the softmax of features is none
        return Turned(Weights(Softmax(scores.turned(), compares=True)))
    return None


def _of(step: Step, name: str) -> Scores | None:
    """The scores that are this argument, if the result is as large."""
    made = step.known.get(name)
    return made if isinstance(made, Scores) and made.shape == step.shape else None


def _mul(step: Step) -> Made | None:
    for name, other in (("input", "other"), ("other", "input")):
        factor, scores = step.given.get(other), _of(step, name)
        if isinstance(step.known.get(name), Folded) and number(factor) is not None:
            return step.known[name]
        if scores is not None:
            return scores.scaled(number(factor))
    return _altered(step)


def _altered(step: Step) -> Weights | None:
    """Weights that were multiplied, divided or moved before they are used: what is used counts, but for dropout."""
    for name in _TWO:
        made, x = step.known.get(name), step.given.get(name)
        if isinstance(made, Weights) and isinstance(x, Tensor) and x.shape == step.shape:
            return made.set_to_zero(())
    return None


def _part(step: Step) -> Weights | None:
    """Some of the weights: without a column that was there to be left alone, say."""
    made, x = step.known.get("input"), step.given["input"]
    if not isinstance(made, Weights) or step.result.ndim != x.ndim:
        return None
    return replace(made.set_to_zero(()), made=made.of(x)[step.given["index"]] if made.dropped else None)


def _div(step: Step) -> Made | None:
    divisor = number(step.given.get("other")) if step.given.get("rounding_mode") is None else None
    made, scores = step.known.get("input"), _of(step, "input")
    if isinstance(made, Folded) and divisor:
        return made
    return scores.scaled(1 / divisor) if scores is not None and divisor else _altered(step)


def _add(step: Step) -> Made | None:
    alpha, left, right = step.given.get("alpha", 1), _of(step, "input"), _of(step, "other")
    if left is not None:
        return left.plus(step.given.get("other"), alpha)
    return right.plus(step.given.get("input")) if right is not None and alpha == 1 else _altered(step)


def _sub(step: Step) -> Made | None:
    scores = _of(step, "input")
    return _altered(step) if scores is None else scores.plus(step.given.get("other"), -step.given.get("alpha", 1))


def _tanh(step: Step) -> Made | None:
    scores = _of(step, "input")
    return None if scores is None else scores.squashed()


def _at_least(step: Step) -> Made | None:
    """Scores kept above a number that hides; max and maximum call it `other`."""
    scores, least = _of(step, "input"), number(step.given.get("min", step.given.get("other")))
    return scores if least is not None and least <= HIDES and step.given.get("max") is None else None


def _masked_fill(step: Step) -> Made | None:
    return _filled(step, "input", step.given.get("mask"), step.given.get("value"))


def _where(step: Step) -> Made | None:
    condition = step.given.get("condition")
    if not isinstance(condition, Tensor) or condition.dtype != torch.bool:
        return None
    if "input" in step.known:
        return _filled(step, "input", ~condition, step.given.get("other"))
    return _filled(step, "other", condition, step.given.get("input"))


def _setitem(step: Step) -> Made | None:
    mask = step.given.get("mask")
    fits = isinstance(mask, Tensor) and mask.shape == step.shape
    return _filled(step, "input", mask, step.given.get("value")) if fits else None


def _filled(step: Step, name: str, mask: object, value: object) -> Made | None:
    made, scores = step.known.get(name), _of(step, name)
    if isinstance(made, Weights) and isinstance(mask, Tensor) and mask.dtype == torch.bool and _filling(value) == 0:
        return made.set_to_zero((Part(mask, step.shape[:-2]),))
    return None if scores is None else scores.without(mask, _filling(value))


def _filling(value: object) -> float | None:
    """The number that a value stands for, also as a tensor full of it, or of such as all hide."""
    if not is_plain(value) or value.numel() <= 1 or not has_numbers(value):
        return number(value)
    low, high = (float(end) for end in value.detach().aminmax())
    return high if low == high or high <= HIDES else None


def _nan_to_num(step: Step) -> Made | None:
    made = step.known.get("input")
    return made.set_to_zero(()) if isinstance(made, Weights) and not step.given.get("nan") else None


def _dropout(step: Step) -> Made | None:
    made, x = step.known.get("input"), step.given["input"]
    if not isinstance(made, Weights) or step.result is x:  # nothing was done, or it was done in place
        return None
    return replace(made, made=made.of(x), dropped=True)


def _cast(step: Step) -> Made | None:
    made, x = step.known.get("input"), step.given["input"]
    if isinstance(made, Turned) and step.result is not x:
        return Turned(replace(made.weights, made=made.weights.of(x.mT)))
    return replace(made, made=made.of(x)) if isinstance(made, Weights) and step.result is not x else made


def _view(step: Step) -> Made | None:
    made, x = step.known.get("input"), step.given.get("input")
    if not isinstance(x, Tensor) or x.numel() != step.result.numel():
        return None
    if x.shape[-2:] != step.shape[-2:]:
        return _split(tuple(x.shape), step.shape)
    if isinstance(made, Scores):
        return made.reshaped(step.shape)
    if isinstance(made, Weights):
        return _cast(step)
    return Folded(tuple(x.shape[:2])) if x.ndim == 4 and len(step.shape) == 3 else None


def _split(before: tuple[int, ...], after: tuple[int, ...]) -> Folded | None:
    """(T, B, E) as (T, B·H, D): batch and heads are one dimension, which is to be transposed to the front."""
    if not len(before) == len(after) == 3 or before[0] != after[0] or not before[1] or after[1] % before[1]:
        return None
    return Folded((before[1], after[1] // before[1]), at=1)


def _transpose(step: Step) -> Made | None:
    made, dims = step.known.get("input"), {step.given.get("dim0"), step.given.get("dim1")}
    if isinstance(made, (Weights, Turned)):
        return _turn(made, step.given["input"], step.result)
    return replace(made, at=0) if isinstance(made, Folded) and made.at == 1 and dims == {0, 1} else None


def _turn(made: Weights | Turned, x: Tensor, result: Tensor) -> Weights | Turned | None:
    """What a view of x is, of which made is known, if its last two dimensions are x's, or x's in the other order."""
    layout = result.shape, result.stride()
    if layout == (x.mT.shape, x.mT.stride()):
        return made.weights if isinstance(made, Turned) else Turned(made)
    return made if layout == (x.shape, x.stride()) else None


def _unsqueeze(step: Step) -> Made | None:
    dim = step.given.get("dim")
    before_queries = isinstance(dim, int) and dim % len(step.shape) < len(step.shape) - 2
    return _view(step) if before_queries else None


# --- which functions those are ------------------------------------------------------------------------------


def _always(args: tuple[Any, ...]) -> bool:
    return True


def _never(args: tuple[Any, ...]) -> bool:
    return False


def _may_fold(args: tuple[Any, ...]) -> bool:
    """Whether this may make (B, H, T, D) three-dimensional (not if it says another last dimension), or split it."""
    if not args or not isinstance(args[0], Tensor) or args[0].ndim not in (3, 4):
        return False
    if args[0].ndim == 3:
        return len(args) == 4 or (len(args) == 2 and isinstance(args[1], (tuple, list)) and len(args[1]) == 3)
    return len(args) < 4 or not isinstance(args[-1], int) or args[-1] in (-1, args[0].shape[-1])


def _everywhere(
    read: Callable[[Step], Made | None],
    names: tuple[str, ...],
    *functions: str,
    begins: Callable[[tuple[Any, ...]], bool] = _never,
) -> dict[Callable[..., Any], How]:
    """These functions of PyTorch, and the methods of these names."""
    owners = (torch, Tensor, F, torch.special, torch.linalg)
    found = (getattr(owner, name, None) for owner in owners for name in functions)
    return {function: How(read, names, begins) for function in found if callable(function)}


STEPS: dict[Callable[..., Any], How] = {
    **_everywhere(_matmul, _TWO, "matmul", "__matmul__", "bmm", "mm", begins=_always),
    **_everywhere(_baddbmm, ("input", "batch1", "batch2"), "baddbmm", "baddbmm_", begins=_always),
    **_everywhere(_einsum, ("equation", *_TWO), "einsum", begins=_always),
    **_everywhere(_softmax, ("input", "dim"), "softmax", begins=_always),
    **_everywhere(_mul, _TWO, "mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__"),
    **_everywhere(_div, _TWO, "div", "div_", "divide", "divide_", "true_divide", "true_divide_"),
    **_everywhere(_div, _TWO, "__truediv__", "__itruediv__", "__div__", "__idiv__"),
    **_everywhere(_add, _TWO, "add", "add_", "__add__", "__radd__", "__iadd__"),
    **_everywhere(_sub, _TWO, "sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__"),
    **_everywhere(_tanh, _ONE, "tanh", "tanh_"),
    **_everywhere(_at_least, ("input", "min"), "clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "max", "maximum"),
    **_everywhere(_masked_fill, ("input", "mask", "value"), "masked_fill", "masked_fill_"),
    torch.where: How(_where, ("condition", *_TWO), _never),
    Tensor.where: How(_where, ("input", "condition", "other"), _never),
    Tensor.__getitem__: How(_part, ("input", "index"), _never),
    Tensor.__setitem__: How(_setitem, ("input", "mask", "value"), _never),
    **_everywhere(_nan_to_num, ("input", "nan"), "nan_to_num", "nan_to_num_"),
    **_everywhere(_dropout, _ONE, "dropout", "dropout_"),
    **_everywhere(_cast, _ONE, "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone"),
    **_everywhere(_view, _ONE, "view", "reshape", "flatten", "unflatten", "squeeze", "view_as", begins=_may_fold),
    **_everywhere(_unsqueeze, ("input", "dim"), "unsqueeze"),
    **_everywhere(
        _transpose, ("input", "dim0", "dim1"), "transpose", "swapaxes", "swapdims", "permute", "t", "adjoint"
    ),
    **dict.fromkeys((Tensor.mT.__get__, Tensor.T.__get__), How(_transpose, _ONE, _never)),  # type: ignore[attr-defined]
    **_everywhere(_altered, _ONE, "tril", "tril_", "triu", "triu_", "pow", "pow_", "__pow__", "square", "square_"),
    **_everywhere(_altered, _ONE, "normalize", "conv2d"),
}
