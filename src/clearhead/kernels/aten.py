"""PyTorch's fused attention kernels, called so that they also return each row's log-sum-exp.

`F.scaled_dot_product_attention` chooses between them and keeps the log-sum-exp to itself, so they are called by name.
A kernel is taken only where it is as exact as the textbook in float32: on the CPU the tests say so, on a GPU each
kernel is tried once against float64. In half precision the output is rounded, so at most its log-sum-exp is of use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.kernels.grouped import no_autocast

Call = Callable[..., tuple[Tensor, Tensor]]
HALF = (torch.bfloat16, torch.float16)
WIDEST = 256  # numbers a query, for the half-precision kernels of GPUs
WIDTHS = 8  # on a GPU, rows begin where a multiple of so many numbers would


def attend(
    q: Tensor,  # (B, H, T, D), or (B, G, T, D)
    k: Tensor,  # (B, G, S, D), or (B, H, S, D)
    x: Tensor,  # (B or 1, H or G or 1, S, Dx)
    *,
    scale: float,
    is_causal: bool = False,
    added: Tensor | None = None,  # (B or 1, H or 1, T, S)
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:  # (B, H, T, Dx), (B, H, T)
    """softmax(scale · Q Kᵀ + added) X and its log-sum-exp, by the kernel that `exact` names, or another.

    `is_causal` means s <= t. No size may be 0. What is said of a row whose added numbers are all -inf means nothing.
    Grouped heads are never expanded: the query heads that share a key head become the heads of a batch entry.
    """
    name = kernel or exact(q.device, q.dtype)
    if name is None:
        raise ValueError(f"no fused kernel on {q.device} is exact in {q.dtype}")
    B, H, G = q.shape[0], max(q.shape[1], k.shape[1]), min(q.shape[1], k.shape[1])
    T, width = q.shape[2], x.shape[-1]
    wide = max(q.shape[-1], width) if q.device.type == "cpu" else 1  # the CPU's kernel wants all of one width
    q, k, x = (_groups(_padded(part, wide), B, G, H // G) for part in (q, k, x))
    with no_autocast(q.device):
        added = None if added is None else _groups(_aligned(added), B, G, H // G)
        out, lse = KERNELS[name](q, k, x, added, is_causal, scale)
    return out[..., :width].reshape(B, H, T, width), lse.reshape(B * G, H // G, -1)[..., :T].reshape(B, H, T)


def _padded(x: Tensor, width: int) -> Tensor:
    """Rows of at least that many numbers, filled up with 0, and each row in one piece: kernels do not check that."""
    width = max(width, x.shape[-1])
    width += 0 if x.device.type == "cpu" else -width % WIDTHS
    if width > x.shape[-1]:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(added: Tensor) -> Tensor:
    """The same, each row in one piece; on a GPU in memory in which rows begin where it can read them."""
    spare = 0 if added.device.type == "cpu" else -added.shape[-1] % WIDTHS
    if spare:
        return F.pad(added, (0, spare))[..., : added.shape[-1]]
    return added if added.stride(-1) == 1 else added.contiguous()


def _groups(x: Tensor, B: int, G: int, heads: int) -> Tensor:
    """(B or 1, 1 or G or G · heads, n, m) as (B · G, heads, n, m), without a copy a head."""
    n, m = x.shape[2:]
    if x.shape[1] in (1, G):
        return x.expand(B, G, n, m).reshape(B * G, 1, n, m).expand(-1, heads, -1, -1)
    return x.repeat_interleave(G * heads // x.shape[1], 1).expand(B, -1, -1, -1).reshape(B * G, heads, n, m)


# --- the kernels ---------------------------------------------------------------------------------------------------

_aten = torch.ops.aten
KERNELS: dict[str, Call] = {
    "cpu": lambda q, k, x, added, causal, scale: _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, x, 0.0, causal, attn_mask=added, scale=scale
    ),
    "flash": lambda q, k, x, added, causal, scale: _aten._scaled_dot_product_flash_attention(
        q, k, x, 0.0, causal, False, scale=scale
    )[:2],
    "cudnn": lambda q, k, x, added, causal, scale: _aten._scaled_dot_product_cudnn_attention(
        q, k, x, added, True, 0.0, causal, False, scale=scale
    )[:2],
    "efficient": lambda q, k, x, added, causal, scale: _aten._scaled_dot_product_efficient_attention(
        q, k, x, added, True, 0.0, causal, scale=scale
    )[:2],
}


def exact(device: torch.device, dtype: torch.dtype) -> str | None:
    """The kernel whose output and log-sum-exp are as exact as the textbook's in float32 or wider, if there is one."""
    if device.type == "cpu":
        return "cpu" if dtype in (torch.float32, torch.float64) else None
    if device.type == "cuda" and dtype is torch.float32 and max(errors("efficient", device, dtype)) <= 1:
        return "efficient"
    return None


def exact_sums(device: torch.device, dtype: torch.dtype) -> str | None:
    """The half-precision kernel whose log-sum-exp is; it takes no `added`."""
    names = ("flash", "cudnn") if device.type == "cuda" and dtype in HALF else ()
    return next((name for name in names if errors(name, device, dtype)[1] <= 1), None)


@cache
def errors(name: str, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """How far a kernel's output and log-sum-exp are off, as parts of what the textbook may be off in float32.

    Infinite where the kernel refuses. One small attention, once for each device and dtype.
    """
    generator, S, D = torch.Generator().manual_seed(0), 300, 64
    q, k, x = (torch.randn(1, 2, S, D, generator=generator).to(device, dtype) for _ in range(3))
    scores = q.double() @ k.double().mT * D**-0.5
    try:
        out, lse = attend(q, k, x, scale=D**-0.5, kernel=name)
    except RuntimeError:
        return math.inf, math.inf
    allowed = torch.finfo(torch.float32).eps * (math.sqrt(S + D) + float(scores.abs().max()))
    off = [out.double() - scores.softmax(-1) @ x.double(), lse.double() - scores.logsumexp(-1)]
    found = [float(part.abs().max().nan_to_num(math.inf)) / allowed for part in off]
    return found[0], found[1]
