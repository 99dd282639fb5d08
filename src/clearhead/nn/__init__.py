"""Attention layers, from the simplest to the one to ship: a ladder to climb, one file a rung.

SimpleSelfAttention          no weights: every token looks at every other as it is
RawSelfAttention             queries, keys and values: three matrices, as bare parameters
SelfAttention                the same with nn.Linear
CausalAttention              no looking ahead, and dropout on the weights
MultiHeadAttentionWrapper    several such heads, side by side
MultiHeadAttention           one projection split into heads, one fused call, and an output projection

and the layer to ship:

Attention                    grouped heads, rotary, windows, soft-capping, cross-attention, and a KVCache

other mechanisms, each with its own map:

AdditiveAttention            a recurrent decoder asks, a small network compares (Bahdanau); keys projected once
DotAttention                 the same decoder, compared by a dot product (Luong)
GeneralAttention             with a learned matrix in between (Luong)
LinearAttention              O(n) time, and a LinearState of fixed size in place of a cache

Self-attention takes x of shape (T, d) or (B, T, d): `layer(x)` is a tensor, `layer.attend(x)` that tensor and the
weights as a lazy map, before dropout. A decoder's attention takes a query and keys.
"""

from clearhead.nn.additive import AdditiveAttention, DotAttention, GeneralAttention
from clearhead.nn.attention import Attention
from clearhead.nn.cache import KVCache
from clearhead.nn.causal import CausalAttention
from clearhead.nn.conversion import convert_rotary
from clearhead.nn.linear import LinearAttention, LinearState
from clearhead.nn.multi_head import MultiHeadAttention
from clearhead.nn.self_attention import RawSelfAttention, SelfAttention
from clearhead.nn.simple import SimpleSelfAttention
from clearhead.nn.wrapper import MultiHeadAttentionWrapper

__all__ = [
    "AdditiveAttention",
    "Attention",
    "CausalAttention",
    "DotAttention",
    "GeneralAttention",
    "KVCache",
    "LinearAttention",
    "LinearState",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "RawSelfAttention",
    "SelfAttention",
    "SimpleSelfAttention",
    "convert_rotary",
]
