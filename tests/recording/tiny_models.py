"""What tiny models read, and those of them that are no models of transformers.

Three sequences make a batch: all whole, or the second padded on the left and the third on the right.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .measuring import Expected, Inputs, arguments_of, weights_of

B, T = 3, 10

# --- inputs -------------------------------------------------------------------------------------------------


def seeded(seed: int = 2) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def real_tokens(padded: bool) -> Tensor:
    """(B, T): 1 where a token is real."""
    mask = torch.ones(B, T, dtype=torch.long)
    if padded:
        mask[1, :3] = mask[2, -3:] = 0
    return mask


def text(padded: bool) -> Inputs:
    return {"input_ids": torch.randint(3, 55, (B, T), generator=seeded()), "attention_mask": real_tokens(padded)}


def target(padded: bool) -> Inputs:
    """What the decoder reads; other sequences are padded, by the same number, than in the source."""
    ids = torch.randint(3, 55, (B, T), generator=seeded(3))
    return {"decoder_input_ids": ids, "decoder_attention_mask": real_tokens(padded).roll(1, 0)}


def two_texts(padded: bool) -> Inputs:
    return text(padded) | target(padded)


def image(padded: bool, size: int = 16) -> Inputs:
    return {"pixel_values": torch.randn(B, 3, size, size, generator=seeded())}


def speech(padded: bool) -> Inputs:
    return {"input_features": torch.randn(B, 8, 20, generator=seeded())} | target(padded)


def text_and_image(padded: bool) -> Inputs:
    given = text(padded)
    given["input_ids"][:, 5] = 2  # the end of the text, which CLIP looks for
    return given | image(padded)


def image_in_text(padded: bool, tokens: int) -> Inputs:
    """Text in which `tokens` tokens stand for the image."""
    given = text(padded)
    for name, value in (("input_ids", 59), ("attention_mask", 1)):
        x = given[name]
        given[name] = torch.cat([x[:, :4], x.new_full((B, tokens), value), x[:, 4:]], 1)
    return given | image(padded)


def patches_in_text(padded: bool) -> Inputs:
    """Images as Qwen2-VL takes them: the patches of all of them in one row."""
    given = image_in_text(padded, 4)
    given["pixel_values"] = torch.randn(B * 16, 3 * 2 * 4 * 4, generator=seeded())
    grid, types = torch.tensor([[1, 4, 4]] * B), (given["input_ids"] == 59).long()
    return given | {"image_grid_thw": grid, "mm_token_type_ids": types}


# --- PyTorch's own, and as timm writes it -------------------------------------------------------------------


class TimmAttention(nn.Module):
    """Heads of one projection, normalised; PyTorch's function or the softmax written out."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.LayerNorm(width // heads), nn.LayerNorm(width // heads)
        self.heads, self.fused, self.drop = heads, fused, nn.Dropout(0.1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p if self.training else 0.0)
        else:
            weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
            y = self.drop(weights) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class TimmModel(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.patches = nn.Linear(48, 32)
        self.blocks = nn.ModuleList(TimmAttention(32, 4, fused) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def patches(padded: bool) -> Inputs:
    return {"x": torch.randn(B, 16, 48, generator=seeded())}


def of_patches(model: nn.Module, inputs: Inputs) -> list[Expected]:
    calls = arguments_of(model, TimmAttention, inputs)
    return [(weights_of(*deepcopy(module).double().split(x.double())[:2]), None) for _, module, (x,) in calls]


class Translator(nn.Transformer):
    """On the fast path as far as PyTorch takes it, or with gradients, where it takes none."""

    def __init__(self, fast: bool) -> None:
        super().__init__(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)
        self.fast = fast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(not self.fast):
            return super().forward(*args, **kwargs)


def two_sequences(padded: bool) -> Inputs:
    """The target is padded on the right alone: PyTorch's kernels make NaN of a query that sees nothing."""
    src, tgt = (torch.randn(B, n, 32, generator=seeded(n)) for n in (T + 2, T))
    hidden = real_tokens(padded) == 0  # True = hidden here
    source = torch.cat([hidden[:, :1]] * 2 + [hidden], 1)
    masks = {"src": source, "memory": source, "tgt": hidden & (torch.arange(T) > T // 2)}
    padding = {f"{name}_key_padding_mask": mask for name, mask in masks.items()} if padded else {}
    return {"src": src, "tgt": tgt, "tgt_mask": torch.ones(T, T).triu(1).bool(), "tgt_is_causal": True, **padding}


def of_two_sequences(model: nn.Module, inputs: Inputs) -> list[Expected]:
    """Encoder, decoder, cross."""
    src, tgt = (inputs.get(f"{name}_key_padding_mask") for name in ("src", "tgt"))
    padded = {"encoder": (src, src), "self_attn": (tgt, tgt), "multihead_attn": (tgt, src)}  # queries, keys
    found: dict[str, list[Expected]] = {side: [] for side in padded}
    for path, mha, (q, k, *_) in arguments_of(model, nn.MultiheadAttention, inputs):
        side = next(side for side in padded if side in path)
        queries, keys = padded[side]
        hidden = inputs["tgt_mask"] if side == "self_attn" else torch.zeros(1, 1, dtype=torch.bool)
        hidden = hidden if keys is None else hidden | keys[:, None, None]
        projections = zip((q, k), mha.in_proj_weight.chunk(3)[:2], mha.in_proj_bias.chunk(3)[:2], strict=True)
        heads = [F.linear(*(x.double() for x in each)).unflatten(-1, (4, -1)).transpose(1, 2) for each in projections]
        found[side].append((weights_of(*heads, hidden), None if queries is None else ~queries))
    return [one for side in found.values() for one in side]
