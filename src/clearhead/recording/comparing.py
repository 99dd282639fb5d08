"""Whether a call, as it was read, gives what the model computed: compared on one query, a middle one.

A middle one, so that a causal mask shows. Left out are batch entries in which that query attends to nothing, and
values that are not finite. Cost: O(S·D) a head, one T-th of the call itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from clearhead.kernels.grouped import grouped_matmul
from clearhead.recording.calls import Call

__all__ = ["gives_output", "gives_weights"]

# How many roundings a value may be off, relative to the largest value. Rounding a score of size x moves its
# weight by x roundings, so large scores allow more; a wrong mask or scale is off by far more than that.
_ROUNDINGS, _PER_SCORE = 20, 4


def gives_output(call: Call, output: Tensor) -> bool:
    """Whether weights[t] @ v is the output of query t; output (B, T, H, Dv)."""
    t = call.shape[2] // 2
    with torch.no_grad():
        weights = _row(call, t)
        ours = grouped_matmul(weights, call.v.to(weights.dtype))[:, :, 0]  # (B, H, Dv)
        if output.ndim != 4 or output.shape[0] != ours.shape[0] or output.shape[2:] != ours.shape[1:]:
            return False
        values = call.v.float().abs().nan_to_num(0).amax()
        return _close(call, t, weights, output[:, t].to(ours.dtype) - ours, [output.dtype], values)


def gives_weights(call: Call, weights: Tensor, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether the weights of query t are these; weights (B, H, T, S), rounded to each of `dtypes` on the way."""
    if weights.numel() == 0:
        return True
    t = call.shape[2] // 2
    with torch.no_grad(), torch.autocast(weights.device.type, enabled=False):
        ours = _row(call, t)
        theirs = weights[:, :, t : t + 1].to(ours.dtype)
        return _close(call, t, ours, (theirs - ours)[:, :, 0], dtypes, ours.new_ones(()))


def _row(call: Call, t: int) -> Tensor:
    """The weights of query t, (B, H, 1, S)."""
    return call.to_map().tile(slice(t, t + 1), slice(0, call.shape[3]))


def _close(
    call: Call, t: int, weights: Tensor, difference: Tensor, dtypes: Iterable[torch.dtype], values: Tensor
) -> bool:
    off = difference.abs().amax(-1)  # (B, H)
    attends = weights.sum((-1, -2)) > 0  # a query without keys is 0 here, and uniform where finfo.min hides
    allowed = _allowed(call, t) * values.clamp(min=1e-6) * max(_eps(dtype) for dtype in dtypes)
    return bool((off <= allowed)[attends & off.isfinite()].all())


def _eps(dtype: torch.dtype) -> float:
    """One rounding: of the dtype, but no finer than float32, in which eager functions compute the
    softmax whatever the dtype, and no finer than what products of float32 matrices are allowed to be.
    """
    products = {"high": 2.0**-10, "medium": 2.0**-7}.get(torch.get_float32_matmul_precision(), 0.0)
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps, products)


def _allowed(call: Call, t: int) -> Tensor:
    """By how many eps a value of size 1 may be off at query t, (B, H): from the sizes of the scores."""
    sizes = [x.float().norm(dim=-1).nan_to_num(0).amax(-1) for x in (call.q[:, :, t : t + 1], call.k)]  # (B, H), (B, G)
    per_group = call.q.shape[1] // call.k.shape[1]
    largest = sizes[0] * sizes[1].repeat_interleave(per_group, 1) * abs(call.scale)
    allowed: Tensor = _ROUNDINGS + _PER_SCORE * largest
    return allowed
