"""Heads whose attention somebody changes: what they bring to the queries then, and the call that says so.

A change is asked for where a seam makes its call (`Observer.change`), once a call, so that it meets the call that a
recording shows: what is recorded inside the block is what was computed, the changed weights. A head that is set to
"zero", or to its mean, attends to nothing there: its output is no mixture of values, and its weights are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.maps.replaced import Previous, replace_heads
from clearhead.recording.buffers import Buffer, filled
from clearhead.recording.calls import AnyCall, Call
from clearhead.recording.sides import is_cross

__all__ = ["KINDS", "Change", "How", "weights_written", "written"]

KINDS = ("zero", "mean", "uniform", "previous")
How: TypeAlias = "str | Tensor"  # "zero", "uniform", "previous"; or the output itself, (Dv,)
_SHOWN = {"zero": "nothing", "uniform": "uniform", "previous": "previous"}


@dataclass(frozen=True, eq=False)
class Change:
    """What is changed of one attention call, by head."""

    heads: Mapping[int, How]
    number: int  # of the layer
    path: str
    buffers: list[Buffer]

    def joined(self, inner: Change) -> Change:
        """Both; of a head that both change, the inner block's word counts."""
        return replace(inner, heads={**self.heads, **inner.heads})

    @property
    def said(self) -> str:
        """For an error message."""
        return f"knockout of layer {self.number} ({self.path!r})"

    def of(self, call: AnyCall) -> tuple[AnyCall, dict[int, Tensor]]:
        """The call as it is changed, and what each changed head brings to the queries, (B, T, Dv)."""
        call = filled(call, self.buffers)
        self._check(call)
        shown = {h: how if isinstance(how, str) else "zero" for h, how in self.heads.items()}
        kinds = {h: _SHOWN[how] for h, how in shown.items()}
        brought = {h: self._brought(call, h, how) for h, how in self.heads.items()}
        if isinstance(call, Call):
            return replace(call, changed=kinds), brought
        return replace(call, weights=replace_heads(call.to_map(), kinds).to_dense().to(call.weights.dtype)), brought

    def _brought(self, call: AnyCall, head: int, how: How) -> Tensor:
        B, H, T, _ = call.shape
        if call.v is None:
            raise RecordingError(f"{self.said}: the values that its weights are multiplied by are not understood.")
        v = call.v[:, head // (H // call.v.shape[1])]  # (B, S, Dv)
        if isinstance(how, Tensor):
            if how.shape != v.shape[-1:]:
                raise RecordingError(
                    f"{self.said}: the mean of head {head} has shape {tuple(how.shape)}, its output {v.shape[-1]}"
                    " numbers. Take the means of this model: clearhead.heads.head_means(model, corpus)."
                )
            return how.to(v).expand(B, T, -1)
        if how == "zero":
            return v.new_zeros(B, T, v.shape[-1])
        attn = call.to_map()[:, head]
        return Previous(attn).take(v) if how == "previous" else attn.uniform() @ v

    def _check(self, call: AnyCall) -> None:
        H, (T, S) = call.shape[1], call.shape[2:]
        unknown = sorted(head for head in self.heads if head >= H)
        if unknown:
            raise RecordingError(f"{self.said}: there is no head {unknown[0]}; its heads are 0 to {H - 1}.")
        if "previous" in self.heads.values() and (is_cross(self.path) or T > S):
            raise RecordingError(
                f"{self.said}: 'previous' of cross-attention means nothing, its keys ({S}) are of another sequence than"
                f" its queries ({T})."
            )


def written(output: Tensor, brought: Mapping[int, Tensor]) -> Tensor:
    """A copy of what the heads brought, (B, H, T, Dv), with some of them changed."""
    made = output.clone()
    for head, x in brought.items():
        made[:, head] = x.to(made.dtype)
    return made


def weights_written(weights: Tensor, call: AnyCall, change: Change) -> Tensor:
    """A copy of weights (B, H, T, S) that a program hands out beside its output, with those of the changed call."""
    made, attn = weights.clone(), call.to_map()
    for head in change.heads:
        dense = attn[:, head].to_dense().to(made.dtype)
        made[:, head] = F.pad(dense, (0, made.shape[-1] - dense.shape[-1]))  # slots that are not filled yet
    return made
