"""FlexAttention that a model calls by itself, in Python: what its mask_mod hides and its score_mod adds.

PyTorch traces both functions; then its operator is called, with them as graphs and the tensors they read as buffers. A
score_mod that adds to the score is a bias. Of any other (a soft-cap, say) the weights are computed: so did PyTorch,
which takes a T×S tensor of scores for such a call. (A compiled call takes none, and makes no call that can be seen.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from clearhead._watch import HoldsTensors
from clearhead.kernels.grouped import grouped_matmul
from clearhead.masks import MaskRule, block_indices
from clearhead.recording.blockmask import of_each
from clearhead.recording.calls import AnyCall, Call, DenseCall, as_heads
from clearhead.scores import Bias

__all__ = ["OPERATOR", "read_flex"]

OPERATOR: Any = torch.ops.higher_order.flex_attention
_WHOLE = 1 << 30  # tokens a block: of the mask that PyTorch makes where none was given


@dataclass(frozen=True, eq=False)
class _Mod(HoldsTensors):
    """A score_mod or mask_mod, with the tensors and numbers that it reads."""

    function: Callable[..., Tensor]
    buffers: tuple[Any, ...]

    def of(self, *given: Tensor) -> Tensor:
        """What it says for each of the numbers given, which broadcast together."""
        return of_each(lambda *numbers: self.function(*numbers, *self.buffers), *given)

    def tensors(self) -> Iterator[Tensor]:
        """Those that it reads."""
        yield from (one for one in self.buffers if isinstance(one, Tensor))

    def made_of(self, tensors: Iterator[Tensor]) -> _Mod:
        """The same on other tensors."""
        return _Mod(self.function, tuple(next(tensors) if isinstance(one, Tensor) else one for one in self.buffers))

    @property
    def changes_nothing(self) -> bool:
        """Whether it returns its first argument, the score, as it is."""
        nodes = list(self.function.graph.nodes) if isinstance(self.function, fx.GraphModule) else []
        return bool(nodes) and nodes[-1].args[0] is nodes[0]


@dataclass(frozen=True, eq=False)
class _Visible(MaskRule):
    """The pairs that a mask_mod lets through."""

    mod: _Mod
    made_for: tuple[int, int]  # batch entries and heads; 1 serves any number

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        """What the mask_mod says of each pair."""
        b, h = (
            index if n > 1 else index.new_zeros((1,) * index.ndim)
            for index, n in zip((b, h), self.made_for, strict=True)
        )
        return self.mod.of(b, h, q, k)

    @property
    def leads(self) -> tuple[int | None, int | None]:
        """As the table of blocks has it."""
        B, H = (None if n == 1 else n for n in self.made_for)
        return B, H

    def __repr__(self) -> str:
        return "mask_mod()"


@dataclass(frozen=True, eq=False)
class _Added(Bias):
    """What a score_mod adds to each score."""

    mod: _Mod

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        """What it makes of a score of 0."""
        zero = torch.zeros((1,) * q.ndim, device=k.device)
        return self.mod.of(zero, b, h, q, k)

    def __repr__(self) -> str:
        return "score_mod()"


def read_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> AnyCall:
    """What PyTorch's operator computes for these arguments."""
    q, k, v = as_heads(query, key, value)
    table, size, mask_mod = block_mask[2], block_mask[-2], block_mask[-1]  # (B or 1, H or 1, blocks), …
    visible = _Visible(_Mod(mask_mod, mask_mod_other_buffers), tuple(table.shape[:2]))
    call = Call(q, k, v, float(scale), masks=() if size >= _WHOLE else (visible,))
    mod = _Mod(score_mod, score_mod_other_buffers)
    if mod.changes_nothing:
        return call
    return replace(call, biases=(_Added(mod),)) if _only_adds(call, mod) else DenseCall(_weights(call, mod), v)


def _only_adds(call: Call, mod: _Mod) -> bool:
    """Whether a score_mod makes s + c of every score s: looked at for one query, a middle one."""
    t = call.shape[2] // 2
    at = _indices(call, slice(t, t + 1))
    scores = _scores(call, slice(t, t + 1))
    made, added = mod.of(scores, *at), mod.of(torch.zeros_like(scores), *at)
    expected = scores + added
    close = (made - expected).abs() <= 1e-5 * (1 + scores.abs() + added.abs())
    return bool((close | (made == expected))[~expected.isnan()].all())  # -inf hides, whatever the score


def _weights(call: Call, mod: _Mod) -> Tensor:
    """The weights of all queries, (B, H, T, S); 0 where a query sees nothing."""
    everything = slice(0, call.shape[2])
    at = _indices(call, everything)
    scores = mod.of(_scores(call, everything), *at)
    rule = call.rule()
    hidden = scores.new_zeros(()).bool() if rule is None else ~rule.allows(*at, *call.shape[2:])
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)


def _scores(call: Call, rows: slice) -> Tensor:
    wide = torch.promote_types(call.q.dtype, torch.float32)
    return grouped_matmul(call.q[:, :, rows].to(wide), call.k.to(wide).mT) * call.scale


def _indices(call: Call, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batches, heads = (torch.arange(n, device=call.q.device) for n in call.shape[:2])
    return block_indices(rows, slice(0, call.shape[3]), batches, heads)
