"""What PyTorch's own attention modules make of their arguments: q, k, v and what is hidden, as a `Call`.

Their masks mean the opposite of clearhead's: True = hidden. A float mask is added to the scores, except on the
fast path of an encoder layer, where PyTorch takes every number but 0 for "hidden". Masks are kept by reference, as
the module was given them (PyTorch joins them into one float tensor (B, H, T, S), which nobody should hold), and a
causal one as the rule that it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import masks
from clearhead.masks import MaskRule
from clearhead.recording.calls import Call, check_lasting, usual_scale
from clearhead.recording.functional import causal_rule

__all__ = ["Given", "read_layer", "read_native", "read_python"]


@dataclass(frozen=True, eq=False)
class Given:
    """What hides keys, in the words of the module that runs, and what else is known there."""

    attn_mask: Tensor | None = None  # (T, S) or (B·H, T, S)
    key_padding_mask: Tensor | None = None  # (B, S) or (S,)
    is_causal: bool = False  # a hint that attn_mask is causal; it may be wrong
    query_padding_mask: Tensor | None = None  # (B, T) or (T,), where the queries are of another sequence
    tokens: int | None = None  # of the padded batch that a nested tensor was made of
    known: dict[Any, Any] = field(default_factory=dict)  # what was made of a mask: layers share theirs


# --- the three ways to compute ------------------------------------------------------------------------------


def read_python(given: Given, projected: list[Tensor], arguments: Mapping[str, Any]) -> Call:
    """`F.multi_head_attention_forward(**arguments)`, within which q, k and v, each (tokens, B, E), were made."""
    heads, added = arguments["num_heads"], 0
    q, k, v = (_heads_first(x, heads) for x in projected)
    if arguments["static_k"] is not None:  # (B·H, S, D), ready-made
        k = _batch_first(arguments["static_k"], heads)
    if arguments["static_v"] is not None:
        v = _batch_first(arguments["static_v"], heads)
    if arguments["bias_k"] is not None:  # one learned key more
        bias_k, bias_v = (_heads_first(arguments[n], heads).expand(len(q), -1, -1, -1) for n in ("bias_k", "bias_v"))
        k, v, added = torch.cat([k, bias_k], 2), torch.cat([v, bias_v], 2), added + 1
    if arguments["add_zero_attn"]:  # and one that is zero
        k, v, added = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), added + 1
    if given.is_causal and given.key_padding_mask is None and not arguments["need_weights"]:
        hidden = _Hidden((causal_rule(q.shape[2], k.shape[2]),))  # PyTorch takes the hint at its word
    else:
        hidden = _by_mask(given, heads, added)
    hidden = hidden.joined(_by_padding(given, added, to_itself=arguments["query"] is arguments["key"]))
    return _call(q, k, v, hidden)


def read_native(
    given: Given,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    *rest: Any,
) -> Call:
    """The fast path of nn.MultiheadAttention: always self-attention, and never with float masks."""
    return _fast(given, query, num_head, qkv_weight, qkv_bias)


def read_layer(
    given: Given,
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *rest: Any,
) -> Call:
    """The fast path of nn.TransformerEncoderLayer, the whole layer in one kernel."""
    x = F.layer_norm(src, norm_weight.shape, norm_weight, norm_bias, eps) if norm_first else src
    return _fast(given, x, num_heads, qkv_weight, qkv_bias)


def _fast(given: Given, x: Tensor, heads: int, weight: Tensor, bias: Tensor) -> Call:
    """The kernel gives out no q and k: they are projected again."""
    if x.is_nested:
        x, real = _padded(x, given.tokens)
        hidden = _Hidden((masks.padding(keys=real, queries=real),))
    else:
        hidden = _by_mask(given, heads, fast=True).joined(_by_padding(given, to_itself=True, fast=True))
    B, T, E = x.shape
    q, k, v = F.linear(x, weight, bias).view(B, T, 3, heads, E // heads).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
    return _call(q, k, v, hidden)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """(tokens, B, E) → (B, H, tokens, D), a view."""
    return x.view(*x.shape[:2], heads, x.shape[-1] // heads).permute(1, 2, 0, 3)


def _batch_first(x: Tensor, heads: int) -> Tensor:
    """(B·H, n, m) → (B, H, n, m), a view."""
    return x.view(len(x) // heads, heads, *x.shape[1:])


def _padded(nested: Tensor, tokens: int | None) -> tuple[Tensor, Tensor]:
    """A nested tensor as (B, T, E) with zeros after each sequence, and which tokens are real, (B, T)."""
    lengths = torch.tensor([len(sequence) for sequence in nested.unbind()], device=nested.device)
    T = int(lengths.max()) if tokens is None else tokens
    padded: Tensor = torch.nested.to_padded_tensor(nested, 0.0, (len(lengths), T, nested.size(-1)))
    return padded, torch.arange(T, device=nested.device) < lengths[:, None]


# --- what is hidden -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Hidden:
    """What stands between q·k and the softmax, and which queries are padding."""

    masks: tuple[MaskRule | Tensor, ...] = ()
    biases: tuple[Tensor, ...] = ()
    real_queries: Tensor | None = None  # (B, T)

    def joined(self, other: _Hidden) -> _Hidden:
        """Both; the second says which queries are real."""
        return _Hidden(self.masks + other.masks, self.biases + other.biases, other.real_queries)


def _call(q: Tensor, k: Tensor, v: Tensor, hidden: _Hidden) -> Call:
    check_lasting(q, k, v)
    return Call(q, k, v, usual_scale(q), hidden.masks, hidden.biases, real_queries=hidden.real_queries)


def _by_mask(given: Given, heads: int, added: int = 0, *, fast: bool = False) -> _Hidden:
    """What attn_mask hides or adds; the keys that were `added` at the end are hidden by no mask."""
    mask = given.attn_mask
    if mask is None:
        return _Hidden()
    key = (id(mask), heads, added, given.is_causal, fast)  # `mask` itself is kept too, so that its id stays its own
    if key not in given.known:
        given.known[key] = mask, _read_mask(mask, heads, added, hint=given.is_causal, fast=fast)
    hidden: _Hidden = given.known[key][1]
    return hidden


def _read_mask(mask: Tensor, heads: int, added: int, *, hint: bool, fast: bool) -> _Hidden:
    if hint and not added and _is_causal(mask):
        return _Hidden((causal_rule(*mask.shape),))
    mask = mask[None, None] if mask.ndim == 2 else _batch_first(mask, heads)  # (B or 1, H or 1, T, S)
    mask = F.pad(mask, (0, added)) if added else mask
    if mask.is_floating_point():
        return _Hidden((mask == 0,)) if fast else _Hidden(biases=(mask,))
    return _Hidden((~masks.dense(mask),))


def _is_causal(mask: Tensor) -> bool:
    """Whether a mask hides what is above the diagonal and does nothing else."""
    hidden = _where_hidden(mask)
    return hidden is not None and mask.ndim == 2 and torch.equal(hidden, torch.ones_like(hidden).triu(1))


def _by_padding(given: Given, added: int = 0, *, to_itself: bool, fast: bool = False) -> _Hidden:
    """The padded keys; in self-attention they are the padded queries too."""
    mask = given.key_padding_mask
    if mask is None:
        return _Hidden(real_queries=_real(given.query_padding_mask))
    queries = mask if to_itself else given.query_padding_mask
    padded = F.pad(_batched(mask), (0, added))
    hidden = padded != 0 if fast else _where_hidden(padded)
    if hidden is None:
        return _Hidden(biases=(padded[:, None, None],), real_queries=_real(queries))
    return _Hidden((masks.padding(keys=~hidden),), real_queries=_real(queries))


def _real(padding_mask: Tensor | None) -> Tensor | None:
    """(B, T): which tokens a padding mask leaves visible; None where it does not say."""
    hidden = None if padding_mask is None else _where_hidden(_batched(padding_mask))
    return None if hidden is None else ~hidden


def _batched(padding_mask: Tensor) -> Tensor:
    """(tokens,) → (1, tokens)."""
    return padding_mask if padding_mask.ndim == 2 else padding_mask[None]


def _where_hidden(mask: Tensor) -> Tensor | None:
    """A mask as PyTorch means it, True = hidden; None for a float mask that adds other numbers than 0 and -inf."""
    if not mask.is_floating_point():
        return mask
    hidden = mask == -math.inf
    return hidden if bool((hidden | (mask == 0)).all()) else None
