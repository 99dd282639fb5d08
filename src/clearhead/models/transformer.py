"""The encoder and the decoder of a Transformer, pre-norm, made of `clearhead.nn.Attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.maps import AttentionMap
from clearhead.nn import Attention, KVCache

__all__ = ["TransformerDecoder", "TransformerEncoder"]


@dataclass
class Memory:
    """What the decoder keeps between its steps."""

    states: Tensor  # (B, S, width)
    real: Tensor  # (B, S)
    tokens: int = 0  # written so far
    caches: list[KVCache] | None = None  # of self-attention; made at the first step without gradients


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed(norm(x)): every token sees every other."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, width, num_heads=num_heads, is_causal=False)
        self.feed, self.drop = feed_forward(width, dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """(B, S, width) → (B, S, width)."""
        x = x + self.drop(self.attention(self.norm(x), padding=real))
        out: Tensor = x + self.drop(self.feed(self.feed_norm(x)))
        return out


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the encoder's states, and a feed-forward network."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.cross_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, width, num_heads=num_heads)
        self.cross_attention = Attention(width, width, num_heads=num_heads, d_context=width)
        self.feed, self.drop = feed_forward(width, dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Memory, cache: KVCache | None, maps: list[AttentionMap] | None) -> Tensor:
        """(B, T, width) → (B, T, width); where `maps` are wanted, the cross-attention's (B, H, T, S) is added."""
        x = x + self.drop(self.attention(self.norm(x), cache=cache))
        asked, states, real = self.cross_norm(x), memory.states, memory.real
        if maps is None:
            seen = self.cross_attention(asked, states, context_padding=real)
        else:
            seen, attn = self.cross_attention.attend(asked, states, context_padding=real)
            maps.append(attn)
        x = x + self.drop(seen)
        out: Tensor = x + self.drop(self.feed(self.feed_norm(x)))
        return out


class TransformerEncoder(nn.Module):
    """Embeddings and positions, then `layers` layers; a last normalisation."""

    def __init__(self, tokens: int, width: int, num_heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = embedding(tokens, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(EncoderLayer(width, num_heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:  # (B, S) -> (B, S, width)
        """The states of all tokens, those of padding too, which nobody reads."""
        x = self.drop(placed(self.embedding(ids)))
        for layer in self.layers:
            x = layer(x, real)
        states: Tensor = self.norm(x)
        return states


class TransformerDecoder(nn.Module):
    """Embeddings and positions, then `layers` layers with cross-attention; a last normalisation, and the logits."""

    def __init__(self, tokens: int, width: int, num_heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = embedding(tokens, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(DecoderLayer(width, num_heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, tokens)

    def begin(self, states: Tensor, real: Tensor, max_tokens: int | None) -> Memory:
        """Before the first token; `max_tokens` where it will write one by one, None where all are given at once."""
        if max_tokens is None:
            return Memory(states, real)
        attentions = (layer.attention for layer in self.layers if isinstance(layer, DecoderLayer))
        return Memory(states, real, caches=[attention.new_cache(len(states), max_tokens) for attention in attentions])

    def forward(self, ids: Tensor, memory: Memory, maps: list[AttentionMap] | None = None) -> Tensor:
        """The logits (B, T, tokens) of what follows each id; `memory` is then that after the last of them.

        Where `maps` are wanted, those of the cross-attention (B, H, T, S) are added to them, one a layer.
        """
        x = self.drop(placed(self.embedding(ids), memory.tokens))
        for n, layer in enumerate(self.layers):
            x = layer(x, memory, None if memory.caches is None else memory.caches[n], maps)
        memory.tokens += ids.shape[1]
        logits: Tensor = self.out(self.norm(x))
        return logits


def embedding(tokens: int, width: int) -> nn.Embedding:
    """Vectors of about the size of the positions that are added to them."""
    table = nn.Embedding(tokens, width)
    nn.init.normal_(table.weight, std=1.0 / math.sqrt(2))
    return table


def placed(x: Tensor, first: int = 0) -> Tensor:
    """x (B, T, width) and where each token stands, counted from `first`: PE(p, 2i) = sin(p / 10000^(2i/d)), odd: cos.

    Source: Vaswani et al. 2017, section 3.5.
    """
    width, positions = x.shape[-1], torch.arange(first, first + x.shape[1], device=x.device)
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = positions[:, None] * rates  # (T, width / 2)
    return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width].to(x.dtype)


def feed_forward(width: int, dropout: float) -> nn.Sequential:
    """Four times as wide in between."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))
