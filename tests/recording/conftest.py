"""Small models with random weights, large enough that a wrong mask, scale or head order shows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.recording import observer, torch_modules


class CausalSelfAttention(nn.Module):
    """As nanoGPT writes it."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(x)


class NanoGPT(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return x


class Attend(nn.Module):
    """Nothing but PyTorch's function, with whatever arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


@pytest.fixture
def nano() -> NanoGPT:
    torch.manual_seed(0)
    return NanoGPT().eval()


@pytest.fixture
def make_nano() -> type[NanoGPT]:
    return NanoGPT


@pytest.fixture
def attend() -> Attend:
    return Attend()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def touched() -> Callable[[], list[Any]]:
    """What other libraries hold at the places that record() replaces: equal before and after a block."""
    ours = [*observer.replacements([NanoGPT(layers=0)], watching=True), *torch_modules.replacements([nn.Module()])]

    def look() -> list[Any]:
        held = [vars(each._owner).get(each._name) for each in ours]
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is not None:
            held.append(modeling.AttentionInterface.get_interface)
            held.append(getattr(modeling.PreTrainedModel, "get_compiled_call", None))
        settings = [torch._C._len_torch_function_stack(), torch.is_grad_enabled(), torch.get_default_dtype()]
        return [*held, *settings, torch.get_rng_state().tolist()]

    return look


def _wraps_another(x: Tensor) -> bool:
    """Whether it is what a transform of PyTorch's, such as torch.func.vmap, makes of a tensor: it has no storage."""
    return torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x)


@pytest.fixture
def alive() -> Callable[[], dict[int, int]]:
    """Bytes of every storage that a Python object holds, by address."""

    def look() -> dict[int, int]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and not x.is_nested]
        tensors = [x for x in tensors if x.device.type == "cpu" and not _wraps_another(x)]
        return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}

    return look
