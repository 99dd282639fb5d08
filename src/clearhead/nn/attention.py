"""The attention layer to put into a model: every variant in common use, through PyTorch's fused kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead._checks import check_count, describe, finite_number
from clearhead.errors import DTypeError, ShapeError
from clearhead.functional import split_mask, warn_of_an_inverted_mask
from clearhead.kernels.output import output
from clearhead.maps import SoftmaxMap
from clearhead.masks import MaskRule
from clearhead.masks.rule import all_of
from clearhead.nn import conversion
from clearhead.nn._shared import IgnoresMask, ScoreBias, check_dropout, check_heads, check_input, check_sizes
from clearhead.nn.cache import KeptBias, KeptKeys, KVCache
from clearhead.scores import Bias, Rotary, as_bias

__all__ = ["Attention"]


class _Call(NamedTuple):
    """One attention: what is multiplied, and what hides or moves the scores."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    v: Tensor  # (B, G, S, D)
    mask: MaskRule | None
    bias: Bias | None


class Attention(IgnoresMask):
    """Multi-head attention with the variants of today's models; the weights load from `MultiHeadAttention` and back.

        head_h = softmax(scale · rotate(x W_query)_h rotate(c W_key)_gᵀ + bias, masked) (c W_value)_g
        out = concat(heads) W_outᵀ + b,    c = x, or the context in cross-attention,    g = ⌊h / (H/G)⌋

    Args:
        d_in, d_out: widths of the input and of the output; a head is d_out / num_heads wide.
        context_length: longest text, enforced; None for no limit. No mask of that size is ever made.
        dropout: share of the weights that is dropped while training.
        qkv_bias, out_bias: whether the projections add a learned offset.
        num_kv_heads: G, fewer heads for keys and values (grouped-query attention; 1 is multi-query); H by default.
        d_context: width of a second sequence that the keys and values come from: cross-attention.
        is_causal: whether a token sees only itself and what is before it; by default unless there is a context.
        window: a token sees itself and the window - 1 before it; `sink_tokens`: and the first so many tokens.
        rotary: turns queries and keys by their positions, for example `Rotary(head_dim)`.
        bias: added to the scores, for example `scores.alibi(num_heads)`. A table that is an nn.Parameter, as in
            `scores.t5_bias(table)`, becomes a parameter of the layer.
        softcap: c · tanh(score / c), which no fused kernel of PyTorch's takes: it runs over tiles, without dropout.
        qk_norm: RMS-normalise queries and keys, a head at a time, before they are turned; `norm_eps` is added under
            the root.
        scale: 1/√(head width) by default.
        check_finite: raise on NaN or infinity in the input; costs one look at it.

    Shapes: x (B, T, d_in) or (T, d_in), context (B, S, d_context); the output is (B, T, d_out) or (T, d_out).
    Raises: ShapeError, DTypeError. Cost: four products and one fused attention, O(T) memory. While training, PyTorch
    itself holds T×S numbers a head where `dropout` > 0, and a mask or bias (a causal one apart) is kept block by block
    until the backward pass. Gradients: first derivatives, of everything; PyTorch's fused kernels have no second ones.
    Source: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023 (grouped heads).

    >>> _ = torch.manual_seed(0)
    >>> layer = Attention(8, 8, num_heads=4, num_kv_heads=2, window=2, rotary=Rotary(2))
    >>> out, attn = layer.attend(torch.randn(5, 8))
    >>> out.shape, attn.shape, attn[0, 4].count_nonzero().item()
    (torch.Size([5, 8]), (4, 5, 5), 2)
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None = None,
        dropout: float = 0.0,
        num_heads: int = 1,
        qkv_bias: bool = False,
        *,
        out_bias: bool = True,
        num_kv_heads: int | None = None,
        d_context: int | None = None,
        is_causal: bool | None = None,
        window: int | None = None,
        sink_tokens: int = 0,
        rotary: Rotary | None = None,
        bias: Bias | Tensor | None = None,
        softcap: float | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        check_finite: bool = False,
    ) -> None:
        super().__init__()
        self.d_in, self.d_out, self.context_length, self.dropout = d_in, d_out, context_length, dropout
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        self.d_context, self.window, self.sink_tokens = d_context, window, sink_tokens
        self.is_causal = d_context is None if is_causal is None else is_causal
        self.rotary, self.softcap, self.scale, self.check_finite = rotary, softcap, scale, check_finite
        self.score_bias = None if bias is None else ScoreBias(as_bias(bias))
        self._check_arguments()
        self.head_dim = d_out // num_heads
        self.rule = self._rule()
        d_kv, d_key = d_in if d_context is None else d_context, self.num_kv_heads * self.head_dim
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_kv, d_key, bias=qkv_bias)
        self.W_value = nn.Linear(d_kv, d_key, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out, bias=out_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None

    @property
    def bias(self) -> Bias | None:
        """What the layer adds to the scores."""
        return None if self.score_bias is None else self.score_bias()

    def forward(
        self,
        x: Tensor,  # (B, T, d_in) or (T, d_in)
        context: Tensor | None = None,  # (B, S, d_context)
        *,
        mask: MaskRule | Tensor | None = None,
        padding: Tensor | None = None,  # (B, T), or (B, S) with a cache
        context_padding: Tensor | None = None,  # (B, S)
        cache: KVCache | None = None,
    ) -> Tensor:  # (B, T, d_out)
        """The output; every argument is explained at `attend`."""
        return self._output(x, self._call(x, context, mask, padding, context_padding, cache))

    def attend(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: MaskRule | Tensor | None = None,
        padding: Tensor | None = None,
        context_padding: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, SoftmaxMap]:
        """The output, and the weights before dropout as a lazy map (B, H, T, S).

        Args:
            x: the tokens that ask. context: the tokens that answer, where the layer has a `d_context`.
            mask: a rule, a bool tensor (True = may attend) or a float tensor (added) of shape (T, S), (B, 1, T, S) or
                (B, H, T, S); it is joined to the layer's own rule by AND. With a cache it is about all tokens so far.
            padding: True or 1 where a token of x is real. Padded tokens are seen by nobody and see nothing: before
                `out_proj` they are 0. With a cache: of all tokens so far.
            context_padding: the same for the context, which has a padding of its own.
            cache: `new_cache(batch)`; x is then what follows the tokens in it, and is added to it.
        """
        call = self._call(x, context, mask, padding, context_padding, cache)
        k, v = (call.k, call.v) if cache is None else (call.k.clone(), call.v.clone())  # the cache will be overwritten
        attn = SoftmaxMap(call.q, k, v=v, mask=call.mask, bias=call.bias, scale=self.scale, softcap=self.softcap)
        return self._output(x, call), attn[0] if x.ndim == 2 else attn

    def new_cache(self, batch: int = 1, length: int | None = None, *, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for `length` tokens (context_length by default); one that rolls where there is a window."""
        length = self.context_length if length is None else length
        if not self.is_causal:
            raise ShapeError(
                "Attention.new_cache(): earlier tokens of this layer see later ones (is_causal=False), or another text"
                " (d_context); what was computed for them would no longer hold. A cache is for a causal layer."
            )
        if self.window is None and length is None:
            raise ShapeError("Attention.new_cache(batch, length=…): say for how many tokens.")
        return KVCache(
            batch,
            self.num_kv_heads,
            length,
            self.head_dim,
            window=self.window,
            sink_tokens=self.sink_tokens,
            dtype=dtype or self.W_key.weight.dtype,
            device=self.W_key.weight.device,
        )

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, cross: bool = False) -> Attention:
        """The same layer with the weights of an `nn.MultiheadAttention`, which sees everything: is_causal=False.

        `cross` makes a layer that takes a context; one with a `kdim` of its own always does. Its masks mean the
        opposite, True = hidden: pass `mask=~attn_mask`, and `padding=~key_padding_mask` in self-attention (padded
        queries are silenced too), `context_padding=~key_padding_mask` with a context. Ours is batch first whatever its
        `batch_first` says. Raises ShapeError for what has no counterpart here.
        """
        arguments = conversion.arguments(module, cross=cross)
        with torch.device(module.out_proj.weight.device):
            layer = cls(**arguments).to(module.out_proj.weight.dtype)
        layer.load_state_dict(conversion.weights(module))
        return layer.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """An `nn.MultiheadAttention` (batch first) with these weights; a causal mask is its caller's affair.

        Raises ShapeError where the layer does what that one cannot: grouped heads, rotary, windows and so on.
        """
        return conversion.to_torch(self)

    # --- the steps of one call ------------------------------------------------------------------------------------

    def _call(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: MaskRule | Tensor | None,
        padding: Tensor | None,
        context_padding: Tensor | None,
        cache: KVCache | None,
    ) -> _Call:
        self._check_call(x, context, cache)
        past = 0 if cache is None else cache.tokens
        B, T, S = x.shape[0] if x.ndim == 3 else 1, x.shape[-2], (x if context is None else context).shape[-2]
        rule, bias = self._rules(mask, self._real(padding, context_padding, B, T, past), T, past + S)
        if cache is not None:
            rule, bias, S = _of_kept(rule, bias, cache, T)
        if rule is not None:
            rule.check(B, self.num_heads, T, S)
        if bias is not None:
            bias.check(B, self.num_heads, T, S)
        q, k, v = self._project(x, x if context is None else context, past)
        if cache is not None:  # last: a call that raises leaves the cache as it was
            cache.claim(self)
            k, v = cache.append(k, v)
        return _Call(q, k, v, rule, bias)

    def _rules(
        self, mask: MaskRule | Tensor | None, real: MaskRule | None, T: int, S: int
    ) -> tuple[MaskRule | None, Bias | None]:
        """What hides and what moves scores, about the whole text: the layer's own, the call's, and the padding."""
        extra, added = split_mask(mask, 4)
        if isinstance(mask, Tensor) and extra is not None and self.d_context is None:
            warn_of_an_inverted_mask(mask, T, S)
        own, given = self.bias, None if added is None else as_bias(added)
        return all_of(self.rule, extra, real), own + given if own is not None and given is not None else own or given

    def _project(self, x: Tensor, context: Tensor, past: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of the context, a head at a time, normalised and turned."""
        q, k, v = self._heads(self.W_query(x)), self._heads(self.W_key(context)), self._heads(self.W_value(context))
        if self.q_norm is not None and self.k_norm is not None:
            wide = self.q_norm.weight.dtype  # under autocast wider than q
            q, k = self.q_norm(q.to(wide)).to(v.dtype), self.k_norm(k.to(wide)).to(v.dtype)
        if self.rotary is not None:
            positions = torch.arange(past, past + x.shape[-2], device=x.device)
            q, k = self.rotary.rotate(q, positions), self.rotary.rotate(k, positions)
        return q, k, v

    def _heads(self, features: Tensor) -> Tensor:
        """(B, T, H·D) or (T, H·D) → (B, H, T, D)."""
        heads = features.shape[-1] // self.head_dim  # counted, since -1 cannot be inferred of nothing
        split = features.view(*features.shape[:-1], heads, self.head_dim).transpose(-2, -3)
        return split[None] if split.ndim == 3 else split

    def _output(self, x: Tensor, call: _Call) -> Tensor:
        q, k, v, mask, bias = call
        dropout = self.dropout if self.training else 0.0
        heads = output(q, k, v, mask=mask, bias=bias, scale=self.scale, softcap=self.softcap, dropout_p=dropout)
        joined = heads.transpose(1, 2).flatten(2)
        out: Tensor = self.out_proj(joined[0] if x.ndim == 2 else joined)
        return out

    def _rule(self) -> MaskRule | None:
        """What the layer lets see, whatever the call says."""
        if self.window is not None:
            near = masks.sliding_window(self.window)
            return near | (masks.first_tokens(self.sink_tokens) & masks.causal()) if self.sink_tokens else near
        return masks.causal() if self.is_causal else None

    def _real(
        self, padding: Tensor | None, context_padding: Tensor | None, B: int, T: int, past: int
    ) -> MaskRule | None:
        """Both paddings as one rule."""
        if context_padding is not None and self.d_context is None:
            raise ShapeError("Attention(context_padding=…): this layer has no context; `padding` is that of x.")
        if padding is None:
            return None if context_padding is None else masks.padding(keys=context_padding)
        if not isinstance(padding, Tensor) or padding.shape not in ((B, past + T), (past + T,)):
            raise ShapeError(
                f"Attention(padding={describe(padding)}): expected a tensor ({B}, {past + T}), one flag per token of x"
                " (and of those in the cache), True where it is real."
            )
        return masks.padding(keys=padding if self.d_context is None else context_padding, queries=padding[..., past:])

    # --- bad input ------------------------------------------------------------------------------------------------

    def _check_arguments(self) -> None:
        """Sizes that fit together, and variants that go together."""
        check_sizes(self, d_in=self.d_in, d_out=self.d_out, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        for name in ("context_length", "d_context", "window"):
            if getattr(self, name) is not None:
                check_sizes(self, **{name: getattr(self, name)})
        check_count("Attention", "sink_tokens", self.sink_tokens, at_least=0)
        check_dropout(self, self.dropout)
        check_heads(self, self.d_out, self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"Attention(num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}): num_kv_heads has to"
                " divide num_heads, since as many query heads share each key head."
            )
        for name in ("softcap", "scale"):
            if getattr(self, name) is not None:
                finite_number("Attention", name, getattr(self, name))
        if self.softcap is not None and self.softcap <= 0:
            raise ShapeError(f"Attention(softcap={self.softcap!r}): expected a number above 0, or None for no cap.")
        if self.rotary is not None and not isinstance(self.rotary, Rotary):
            raise DTypeError(f"Attention(rotary={self.rotary!r}): expected scores.Rotary(width of a head).")
        if self.rotary is not None and self.rotary.dim > self.d_out // self.num_heads:
            raise ShapeError(f"Attention(rotary={self.rotary}): a head is only {self.d_out // self.num_heads} wide.")
        clashes = {
            "a context has no order that is_causal, window or rotary could follow": self.d_context is not None
            and (self.is_causal or self.window is not None or self.rotary is not None),
            "sink tokens are what a window keeps besides: give a window too": self.sink_tokens > 0
            and self.window is None,
            "a window looks back only: it implies is_causal": self.window is not None and not self.is_causal,
            "soft-capping runs over tiles, which know no dropout": self.softcap is not None and self.dropout > 0,
        }
        for reason, clash in clashes.items():
            if clash:
                raise ShapeError(f"{self!r}: {reason}.")

    def _check_call(self, x: Tensor, context: Tensor | None, cache: KVCache | None) -> None:
        check_input(self, x, self.d_in, self.context_length, finite=self.check_finite)
        if (context is None) != (self.d_context is None):
            told = "needs a context (B, S, d_context)" if context is None else "was made without d_context"
            raise ShapeError(f"Attention got x = {describe(x)} and context = {describe(context)}: this layer {told}.")
        if context is not None:
            check_input(self, context, self.d_context, name="context", finite=self.check_finite)
            if context.ndim != x.ndim or context.shape[:-2] != x.shape[:-2]:
                raise ShapeError(
                    f"Attention got x = {describe(x)} and context = {describe(context)}: expected one context for each"
                    " text, the same batch size (repeat it with expand where all texts share one)."
                )
        if cache is not None:
            self._check_cache(cache)
        end = x.shape[-2] + (0 if cache is None else cache.tokens)
        if self.context_length is not None and end > self.context_length:
            raise ShapeError(
                f"Attention got x = {describe(x)} after {end - x.shape[-2]} tokens in the cache: together {end}, more"
                f" than context_length={self.context_length}. Begin a new cache, or make the layer longer."
            )

    def _check_cache(self, cache: KVCache) -> None:
        if not isinstance(cache, KVCache):
            raise DTypeError(f"Attention(cache={describe(cache)}): expected what new_cache(batch) gives.")
        if not self.is_causal or (cache.window, cache.sink_tokens) != (self.window, self.sink_tokens):
            raise ShapeError(
                f"{cache!r} was not made by a layer with window={self.window}, sink_tokens={self.sink_tokens},"
                f" is_causal={self.is_causal}: use layer.new_cache(batch)."
            )

    def extra_repr(self) -> str:
        """The variants that are not visible from the submodules."""
        names = (
            "num_heads",
            "num_kv_heads",
            "d_context",
            "is_causal",
            "context_length",
            "dropout",
            "window",
            "sink_tokens",
        )
        more = ("rotary", "bias", "softcap", "scale")
        return ", ".join(f"{name}={value!r}" for name in (*names, *more) if (value := getattr(self, name)) is not None)


def _of_kept(
    rule: MaskRule | None, bias: Bias | None, cache: KVCache, T: int
) -> tuple[MaskRule | None, Bias | None, int]:
    """The same about the keys that a cache will hand out, and how many they are: where it rolls, some are gone."""
    S = cache.rows_after(T)
    where = {"sink_tokens": cache.sink_tokens, "gone": cache.tokens + T - S}
    if not where["gone"]:
        return rule, bias, S
    return None if rule is None else KeptKeys(rule, **where), None if bias is None else KeptBias(bias, **where), S
