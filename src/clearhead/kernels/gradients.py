"""Gradients of what is said about a map, in O(n) memory: forward keeps no tile, backward computes each again.

Whatever f(A) is, with G = ∂f/∂A, the scores S of A = softmax(S) get

    dS = A (G - rowsum(A G))

so whole rows are needed at once, and no more than a block of them: the weights of the block are computed again from
slices of q and k, PyTorch differentiates what was said about them, and the slices' gradients are added up. This costs
the scores a second time, as in the backward pass of FlashAttention, and saves every T×S tensor.

The tiles are kept after all where they are few, where gradients are differentiated again (`create_graph=True`), and
where PyTorch traces a graph or transforms a function (`torch.export`, `torch.func`). Source: Dao et al. 2022,
algorithm 4.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead._checks import has_numbers
from clearhead._watch import HoldsTensors
from clearhead.kernels.grouped import no_autocast

FEW = 1 << 16  # weights: up to here, keeping them is cheaper than computing them again
Found = tuple[int, Any, Tensor]  # which result, where in it, and what a block of rows adds there


class Recipe(Protocol):
    """Results computed from a map, and how a block of rows is computed again."""

    attn: Any

    def compute(self) -> tuple[Tensor, ...]:
        """The results, the fastest way there is."""

    def fixed(self) -> Sequence[bool]:
        """Which of them have no gradient."""

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Blocks of rows, each with all keys that it may see."""

    def again(self, rows: slice, keys: list[slice], grads: Sequence[Tensor | None]) -> Iterator[Found]:
        """What a block adds to each result of which a gradient is given."""


def computed(recipe: Recipe) -> tuple[Tensor, ...]:
    """The results; on the graph if a gradient may be asked of them, and then without a tile being kept."""
    if torch.compiler.is_dynamo_compiling():  # a compiled function breaks here, and keeps no tile either
        return torch.compiler.disable(_computed)(recipe)  # type: ignore[no-any-return, no-untyped-call]
    return _computed(recipe)


def _computed(recipe: Recipe) -> tuple[Tensor, ...]:
    tensors = list(leaves(recipe))
    asked = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
    if not asked or prod(recipe.attn.shape) <= FEW or _transformed(tensors) or _depends_on_more(recipe, tensors):
        return tuple(x.detach() if fixed else x for x, fixed in zip(recipe.compute(), recipe.fixed(), strict=True))
    return Recomputed.apply(recipe, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _transformed(tensors: list[Tensor]) -> bool:
    """Whether a graph is traced or a function transformed: what is done must then be seen."""
    return torch._C._are_functorch_transforms_active() or not all(map(has_numbers, tensors))


def _depends_on_more(recipe: Recipe, tensors: list[Tensor]) -> bool:
    """Whether a weight has a gradient for anything but these: a class of somebody else's may not say what it holds."""
    attn = made_of(recipe, iter([x.detach() for x in tensors])).attn
    return bool(attn.tile(slice(0, 1), slice(0, 1)).requires_grad)


class Recomputed(torch.autograd.Function):
    """The results of a recipe; only the tensors that it starts from are kept."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *tensors: Tensor) -> tuple[Tensor, ...]:
        """As without gradients."""
        ctx.recipe = recipe
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        results = recipe.compute()
        ctx.mark_non_differentiable(*(x for x, fixed in zip(results, recipe.fixed(), strict=True) if fixed))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Block by block; where these gradients are to be differentiated in turn, PyTorch keeps the tiles after all."""
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        with no_autocast(tensors[0].device):
            if torch.is_grad_enabled():
                return (None, *_on_the_graph(ctx.recipe, tensors, grads, wanted))
            return (None, *_summed(ctx.recipe, tensors, grads, wanted))


def _on_the_graph(
    recipe: Recipe, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients as functions of the tensors."""
    again = [x.view_as(x) for x in tensors]
    found = [one for block in recipe.blocks() for one in made_of(recipe, iter(again)).again(*block, grads)]
    start = [x for x, want in zip(again, wanted, strict=True) if want]
    got = iter(_gradient(found, start, grads, create_graph=True))
    return [next(got) if want else None for want in wanted]


def _gradient(
    found: list[Found], start: Sequence[Tensor], grads: Sequence[Tensor | None], *, create_graph: bool = False
) -> Sequence[Tensor | None]:
    """What the parts of results give to what they start from."""
    found = [one for one in found if one[2].requires_grad]
    if not found or not start:
        return [None] * len(start)
    of = [grads[n][at].to(x.dtype) for n, at, x in found]  # type: ignore[index]
    return torch.autograd.grad([x for *_, x in found], start, of, create_graph=create_graph, allow_unused=True)


def _summed(
    recipe: Recipe, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients, added up block by block in float32 or wider."""
    sums = [torch.zeros_like(x, dtype=_wide(x)) if want else None for x, want in zip(tensors, wanted, strict=True)]
    for rows, keys in recipe.blocks():
        _add(sums, recipe, tensors, grads, rows, keys)
    return [None if total is None else total.to(x.dtype) for x, total in zip(tensors, sums, strict=True)]


def _add(
    sums: Sequence[Tensor | None],
    recipe: Recipe,
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    rows: slice,
    keys: list[slice],
) -> None:
    """What a block of rows adds to the gradients."""
    parts = [Parts(x, wanted=total is not None) for x, total in zip(tensors, sums, strict=True)]
    with torch.enable_grad():
        found = list(made_of(recipe, iter(parts)).again(rows, keys, grads))
    read = [(total, at, x) for total, part in zip(sums, parts, strict=True) for at, x in part.read if x.requires_grad]
    for (total, at, _), gradient in zip(read, _gradient(found, [x for *_, x in read], grads), strict=True):
        if total is not None and gradient is not None:
            total[at] += gradient


class Parts:
    """A tensor that is read part by part, each part a leaf: so no gradient of a block is as large as the whole."""

    def __init__(self, tensor: Tensor, *, wanted: bool) -> None:
        self._tensor, self._wanted = tensor, wanted
        self.read: list[tuple[Any, Tensor]] = []
        self.shape, self.dtype, self.device, self.nbytes = tensor.shape, tensor.dtype, tensor.device, tensor.nbytes

    def __getitem__(self, at: Any) -> Tensor:
        """A part in float32 or wider: half precision would round what each block adds."""
        if all(isinstance(i, (slice, type(...))) for i in (at if isinstance(at, tuple) else (at,))):
            return self._leaf(at, _wide(self._tensor))
        whole: Tensor = self._leaf(..., _wide(self._tensor))[at]
        return whole

    def whole(self) -> Tensor:
        """All of it, as it is."""
        return self._leaf(..., self._tensor.dtype)

    def _leaf(self, at: Any, dtype: torch.dtype) -> Tensor:
        leaf = self._tensor[at].detach().to(dtype).requires_grad_(self._wanted)
        self.read.append((at, leaf))
        return leaf


# --- what things are made of ---------------------------------------------------------------------------------------
#
# A map, a reducer or a recipe names in `_leaves` the attributes that hold what its numbers are computed from.


def leaves(thing: Any) -> Iterator[Tensor]:
    """The tensors that something's numbers are computed from, always in the same order."""
    if isinstance(thing, (Tensor, Parts)):
        yield thing  # type: ignore[misc]
    elif isinstance(thing, HoldsTensors):
        yield from thing.tensors()
    elif isinstance(thing, list):
        for one in thing:
            yield from leaves(one)
    else:
        for name in getattr(thing, "_leaves", ()):
            yield from leaves(getattr(thing, name))


def made_of(thing: Any, tensors: Iterator[Any]) -> Any:
    """The same, made of other tensors, or of parts of them."""
    made = thing
    if isinstance(thing, (Tensor, Parts)):
        made = next(tensors)
    elif isinstance(thing, HoldsTensors):
        made = thing.made_of(x.whole() if isinstance(x, Parts) else x for x in tensors)
    elif isinstance(thing, list):
        made = [made_of(one, tensors) for one in thing]
    elif names := getattr(thing, "_leaves", ()):
        made = copy.copy(thing)
        for name in names:
            object.__setattr__(made, name, made_of(getattr(thing, name), tensors))  # it may be frozen
    return made


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
