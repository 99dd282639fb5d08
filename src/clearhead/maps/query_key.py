"""What maps of queries and keys share: sizes, a mask rule, selections, and tensors kept by reference and watched."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from clearhead._checks import check_qkv, four, has_numbers, span
from clearhead._watch import Watched
from clearhead.errors import RecordingError
from clearhead.kernels import tiles
from clearhead.maps.base import AttentionMap
from clearhead.masks import BoundMask, Coverage, MaskRule, as_rule

if TYPE_CHECKING:
    from typing_extensions import Self


class QueryKeyMap(AttentionMap):
    """A map of q (B, H, T, D) and k (B, G, S, D), or both (B, T, D) or (T, D). Subclasses say `_weights`."""

    # What is held, and along which letters of its dimensions an index selects; what is not there is None.
    _held: ClassVar[dict[str, str]] = {"_q": "BHT", "_k": "BG"}
    _leaves: ClassVar[tuple[str, ...]] = ("_q", "_k")
    _numbers: ClassVar[dict[str, str]] = {"_b": "B", "_h": "H", "_t": "T"}

    def __init__(self, q: Tensor, k: Tensor, mask: MaskRule | Tensor | None, **others: Iterable[Tensor]) -> None:
        check_qkv(type(self).__name__, q, k)
        self.mask = None if mask is None else as_rule(mask)
        self._q, self._k = four(q), four(k)
        self._axes = "BH"[: q.ndim - 2]  # the leading dimensions that the map shows; an integer index drops one
        # Which batches, heads and queries of the mask's own numbering these are: selections keep the numbering.
        self._b, self._h, self._t = (torch.arange(n, device=q.device) for n in self._q.shape[:3])
        self._all_queries, self._bound = True, (self._q.shape[2], self._k.shape[2])
        parts = {"q": [q], "k": [k], "mask": () if self.mask is None else self.mask.tensors(), **others}
        # Lists: dynamo cannot make an object again, on the other side of a graph break, that was given a generator.
        self._made_from = {name: Watched(list(tensors)) for name, tensors in parts.items()}
        if self.mask is not None:
            B, H = self._q.shape[:2]
            self.mask.check(B, H, *self._bound)

    @abstractmethod
    def _weights(self, rows: slice, cols: slice) -> Tensor:
        """The weights of a block, (B, H, t, s)."""

    def tile(self, rows: slice, cols: slice) -> Tensor:
        self._check_unchanged()
        T, S = self.shape[-2:]
        return self._shown(self._weights(span("tile: rows", rows, T), span("tile: cols", cols, S)))

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def q(self) -> Tensor:
        """(B, H, T, D), without the dimensions that an index has dropped."""
        return self._shown(self._q)

    @property
    def k(self) -> Tensor:
        """(B, G, S, D), without the dimensions that an index has dropped."""
        return self._shown(self._k)

    @property
    def shape(self) -> tuple[int, ...]:
        lead = (n for axis, n in zip("BH", self._q.shape, strict=False) if axis in self._axes)
        return (*lead, self._q.shape[2], self._k.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self._q.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self._q.device

    def _tensors(self) -> Iterator[Tensor]:
        held = (getattr(self, name) for name in self._held)
        return (tensor for tensor in held if tensor is not None)

    @property
    def positions(self) -> Tensor:
        T, S = self._bound
        return self._t + S - T

    @property
    def heads_alike(self) -> bool:
        return self.mask is None or not self.mask.per_head

    def _lead_names(self) -> tuple[str, ...]:
        return tuple(self._axes)

    def _notes(self) -> list[str]:
        return [] if self.mask is None else [repr(self.mask).removesuffix("()")]

    def _shown(self, tensor: Tensor) -> Tensor:
        """A tensor (B, H, …) without the dimensions that an index has dropped."""
        return tensor[tuple(slice(None) if axis in self._axes else 0 for axis in "BH")]

    def uniform(self) -> Self:
        """The head that spreads evenly over the keys it may see: the baseline of every score of a head."""
        even = copy.copy(self)  # which keeps the numbering of the mask
        even._q, even._k = torch.zeros_like(self._q[..., :1]), torch.zeros_like(self._k[..., :1])
        even._made_from = {"q": Watched([even._q]), "mask": self._made_from["mask"]}
        return even

    # --- a part of it ---------------------------------------------------------------------------------------------

    def _select(self, lead: tuple[int | Tensor, ...], rows: Tensor | None) -> AttentionMap:
        chosen, at = copy.copy(self), dict(zip(self._axes, lead, strict=True))
        chosen._axes = "".join(axis for axis in self._axes if isinstance(at[axis], Tensor))
        chosen._all_queries = self._all_queries and rows is None
        if "H" in at:
            at["G"] = _groups_of(at["H"], self._q.shape[1] // max(1, self._k.shape[1]))
        if rows is not None:
            at["T"] = rows
        for name, letters in (self._numbers | self._held).items():
            tensor = getattr(self, name)
            for dim, letter in enumerate(letters if tensor is not None else ""):
                tensor = _take(tensor, dim, at[letter]) if letter in at else tensor
            setattr(chosen, name, tensor)
        return chosen

    # --- mask and guard -------------------------------------------------------------------------------------------

    def block(self, rows: slice, cols: slice) -> Coverage:
        """What the mask leaves of a block, by its rule and without looking at q or k."""
        if rows.stop <= rows.start or cols.stop <= cols.start:
            return Coverage.EMPTY
        if self.mask is None:
            return Coverage.FULL
        if not self._all_queries:  # of scattered queries, the hull: its EMPTY and FULL hold for them
            t = self._t[rows]
            if not has_numbers(t):
                return Coverage.MIXED
            rows = slice(int(t.min()), int(t.max()) + 1)
        return BoundMask(self.mask, *self._bound).block(rows, cols)

    def _hide(self, block: Tensor, rows: slice, cols: slice | Tensor, value: float) -> Tensor:
        """The block (B, H, t, s) with `value` written where the mask hides; the keys are a range, or any."""
        if isinstance(cols, Tensor) or not self._has_numbers:
            return self._hide_pairs(block, *self._grid(rows, cols), value)
        for part in tiles.partial_runs(self, rows, cols):
            here = block[..., part.start - cols.start : part.stop - cols.start]
            self._hide_pairs(here, *self._grid(rows, part), value)
        return block

    def _hide_pairs(self, block: Tensor, t: Tensor, s: Tensor, value: float) -> Tensor:
        if self.mask is None:
            return block
        hidden = ~self.mask.allows(*self._indices(t, s))
        fill = block.masked_fill_ if self._has_numbers else block.masked_fill  # vmap may run over the mask alone
        return fill(hidden, value)

    def _grid(self, rows: slice, cols: slice | Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of a block's queries (1, 1, t, 1) and keys (1, 1, 1, s)."""
        s = torch.arange(cols.start, cols.stop, device=self.device) if isinstance(cols, slice) else cols
        return self._t[rows][None, None, :, None], s[None, None, None, :]

    def _indices(self, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
        """What a rule is asked about pairs: batch, head, query, key, and the sizes."""
        return self._b[:, None, None, None], self._h[None, :, None, None], t, s, *self._bound

    @property
    def like(self) -> Tensor:
        """An empty tensor with the dtype and device of weights; under vmap, with the dimension it runs over."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)  # written out: dynamo knows no super().like
        return sum((tensor.new_empty(0, dtype=self.dtype) for tensor in self._given()), empty)

    def _given(self) -> Iterator[Tensor]:
        """Every tensor that weights depend on."""
        return (tensor for watched in self._made_from.values() for tensor in watched.tensors)

    @property
    def _has_numbers(self) -> bool:
        """Not while torch traces, on the meta device and under vmap: then no value can be asked for."""
        return all(map(has_numbers, self._given()))

    def _needs_graph(self) -> bool:
        return torch.is_grad_enabled() and any(watched.differentiable for watched in self._made_from.values())

    def _check_unchanged(self) -> None:
        changed = " and ".join(name for name, watched in self._made_from.items() if watched.changed)
        if changed:
            raise RecordingError(
                f"{self!r}: its {changed} was overwritten in place after the map was made, so its weights are lost."
                f" Read the map before that, or make it of a clone of {changed}."
            )


def _take(tensor: Tensor, dim: int, at: int | Tensor) -> Tensor:
    """One index (the dimension stays, with size 1) or several; a run of consecutive ones is a view."""
    if isinstance(at, int):
        return tensor.narrow(dim, at, 1)
    n = at.numel()
    if n and has_numbers(at) and bool((at == torch.arange(n, device=at.device) + at[0]).all()):
        return tensor.narrow(dim, int(at[0]), n)
    return tensor.index_select(dim, at)


def _groups_of(heads: int | Tensor, per_group: int) -> int | Tensor:
    """The key heads that these query heads read: each once if they still share evenly, else one a query head."""
    if isinstance(heads, int):
        return heads // per_group
    if not has_numbers(heads):
        return heads // per_group
    groups, counts = torch.unique_consecutive(heads // per_group, return_counts=True)
    return groups if counts.unique().numel() <= 1 else heads // per_group
