"""Trust, but verify: an attention function that clearhead does not know is checked on one query of each call.

weights[t] @ v must be the output that the function returned for query t = T // 2 (a middle one, so that a
causal mask shows). Not checked: a call with dropout, whose output is random; a batch entry in which that query
attends to nothing; an output that is not finite. Cost: O(S·D) a head, one T-th of the call itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.errors import RecordingError
from clearhead.kernels.grouped import grouped_matmul
from clearhead.recording.calls import Call
from clearhead.recording.interfaces import Arguments

__all__ = ["confirmed"]

# How many roundings an output may be off, relative to the largest value. Rounding a score of size x moves its
# weight by x roundings, so large scores allow more; a wrong mask or scale is off by far more than that.
_ROUNDINGS, _PER_SCORE = 20, 4


def confirmed(calls: list[Call], output: Tensor, arguments: Arguments) -> Call:
    """The first reading of the call that reproduces its output (B, T, H, Dv); RecordingError where none does.

    Dropout makes the output random, so then the first reading is taken at its word.
    """
    if arguments.dropout > 0 or output.numel() == 0:
        return calls[0]
    for call in calls:
        if _reproduces(call.detached(), output.detach()):
            return call
    raise RecordingError(
        f"{arguments.arrived()}, and its output is not softmax(scale · q·k + mask) @ v: this implementation"
        f" ({_implementation(arguments)!r}) does something that clearhead does not know."
        " Use attn_implementation='sdpa', or report the model."
    )


def _reproduces(call: Call, output: Tensor) -> bool:
    t = call.q.shape[2] // 2
    with torch.no_grad():
        weights = call.to_map().tile(slice(t, t + 1), slice(0, call.k.shape[2]))  # (B, H, 1, S)
        ours = grouped_matmul(weights, call.v.to(weights.dtype))[:, :, 0]  # (B, H, Dv)
        if output.ndim != 4 or output.shape[0] != ours.shape[0] or output.shape[2:] != ours.shape[1:]:
            return False
        off = (output[:, t].to(ours.dtype) - ours).abs().amax(-1)
        attends = weights.sum((-1, -2)) > 0  # a query without keys is 0 here, and uniform where finfo.min hides
        return bool((off <= _allowed(call, t) * _eps(output.dtype))[attends & off.isfinite()].all())


def _eps(dtype: torch.dtype) -> float:
    """One rounding: of the dtype, but no finer than float32, in which eager functions compute the
    softmax whatever the dtype, and no finer than what products of float32 matrices are allowed to be.
    """
    products = {"high": 2.0**-10, "medium": 2.0**-7}.get(torch.get_float32_matmul_precision(), 0.0)
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps, products)


def _allowed(call: Call, t: int) -> Tensor:
    """By how many eps the output of query t may be off, (B, H): from the sizes of scores and values."""
    sizes = [x.float().norm(dim=-1).nan_to_num(0).amax(-1) for x in (call.q[:, :, t : t + 1], call.k)]  # (B, H), (B, G)
    per_group = call.q.shape[1] // call.k.shape[1]
    largest = sizes[0] * sizes[1].repeat_interleave(per_group, 1) * abs(call.scale)
    values = call.v.float().abs().nan_to_num(0).amax()
    allowed: Tensor = (_ROUNDINGS + _PER_SCORE * largest) * values.clamp(min=1e-6)
    return allowed


def _implementation(arguments: Arguments) -> object:
    return getattr(getattr(arguments.module, "config", None), "_attn_implementation", "unknown")
