"""Attention layers, from the simplest to the one to ship: a ladder to climb, one file a rung.

SimpleSelfAttention          no weights: every token looks at every other as it is
RawSelfAttention             queries, keys and values: three matrices, as bare parameters
SelfAttention                the same with nn.Linear
CausalAttention              no looking ahead, and dropout on the weights
MultiHeadAttentionWrapper    several such heads, side by side
MultiHeadAttention           one projection split into heads, one fused call, and an output projection

and the layer to ship:

Attention                    grouped heads, rotary, windows, soft-capping, cross-attention, and a KVCache

Every layer takes x of shape (T, d) or (B, T, d): `layer(x)` is a tensor, `layer.attend(x)` that tensor and the weights
as a lazy map, before dropout.
"""

from clearhead.nn.attention import Attention
from clearhead.nn.cache import KVCache
from clearhead.nn.causal import CausalAttention
from clearhead.nn.conversion import convert_rotary
from clearhead.nn.multi_head import MultiHeadAttention
from clearhead.nn.self_attention import RawSelfAttention, SelfAttention
from clearhead.nn.simple import SimpleSelfAttention
from clearhead.nn.wrapper import MultiHeadAttentionWrapper

__all__ = [
    "Attention",
    "CausalAttention",
    "KVCache",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "RawSelfAttention",
    "SelfAttention",
    "SimpleSelfAttention",
    "convert_rotary",
]
