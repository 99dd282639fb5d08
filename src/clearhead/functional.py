"""Attention as a function: PyTorch's arguments, PyTorch's output, and the weights as a lazy map beside it."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead._checks import check_all_finite, check_count, check_qkv, describe, four, has_numbers
from clearhead.errors import DTypeError, ShapeError
from clearhead.kernels import linear
from clearhead.kernels.flash import TILE
from clearhead.kernels.linear import LinearState
from clearhead.kernels.output import output
from clearhead.maps.additive import AdditiveMap, check_score
from clearhead.maps.linear import LinearMap, check_order
from clearhead.maps.softmax import SoftmaxMap
from clearhead.masks import MaskRule, all_of, causal, dense
from clearhead.scores import Bias

__all__ = [
    "LinearState",
    "additive_attention",
    "flash_attention",
    "linear_attention",
    "scaled_dot_product_attention",
]


def scaled_dot_product_attention(
    q: Tensor,  # (B, H, T, D), (B, T, D) or (T, D)
    k: Tensor,  # (B, G, S, D)
    v: Tensor,  # (B, G, S, Dv)
    attn_mask: MaskRule | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    check_finite: bool = False,
) -> tuple[Tensor, SoftmaxMap]:  # (B, H, T, Dv), map (B, H, T, S)
    """softmax(scale · Q Kᵀ + mask) V, and the softmax as a lazy map.

    The output is `torch.nn.functional.scaled_dot_product_attention`'s, bit for bit, for 2-D to 4-D inputs and every
    other argument that function takes. `attn_mask` may also be a rule of `clearhead.masks`: it never becomes a T×S
    tensor, since the fused kernel is run per block of queries over the keys that the block may see.

    Differences from PyTorch, each an error and not a guess: `is_causal=True` with T ≠ S (PyTorch is silently
    upper-left); a (B, T, S) mask beside 4-D queries. The reported weights are those before dropout.
    `is_causal` together with a mask is AND.

    NaN in masked keys or values does not reach the map, but PyTorch's fused kernel lets it reach the output;
    `check_finite=True` raises instead, at the cost of one look at q, k and v.

    Raises: ShapeError, DTypeError. Cost: one fused attention; the map holds references to q, k, v.
    Source: Vaswani et al. 2017, equation 1.

    >>> import torch
    >>> x = torch.eye(3)[None]
    >>> out, attn = scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> attn[0, 0]
    tensor([1., 0., 0.])
    """
    call = "scaled_dot_product_attention"
    check_qkv(call, q, k, v)
    if check_finite:
        check_all_finite(call, q=q, k=k, v=v)
    _check_causal(q, k, is_causal)
    if q.ndim == 4 and q.shape[1] != k.shape[1] and not enable_gqa:
        raise ShapeError(f"{call}: {q.shape[1]} query heads and {k.shape[1]} key heads: pass enable_gqa=True.")
    mask, bias = split_mask(attn_mask, q.ndim)
    given = attn_mask if isinstance(attn_mask, Tensor) else None
    if given is not None and bias is None:
        given = given.bool()  # 0/1 integers, which PyTorch does not take
        warn_of_an_inverted_mask(given, q.shape[-2], k.shape[-2], name="attn_mask")
    mask = all_of(mask, causal() if is_causal else None)
    attn = SoftmaxMap(q, k, v=v, mask=mask, bias=bias, scale=scale)
    if mask is not None and (isinstance(attn_mask, MaskRule) or (is_causal and given is not None)):
        out = output(four(q), four(k), four(v), mask=mask, bias=attn.bias, scale=scale, dropout_p=dropout_p)
        return out.reshape(*q.shape[:-1], v.shape[-1]), attn
    out = F.scaled_dot_product_attention(q, k, v, given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out, attn


def flash_attention(
    q: Tensor,  # (B, H, T, D), (B, T, D) or (T, D)
    k: Tensor,  # (B, G, S, D)
    v: Tensor,  # (B, G, S, Dv)
    *,
    mask: MaskRule | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    tile: tuple[int, int] = TILE,
) -> tuple[Tensor, SoftmaxMap]:  # (B, H, T, Dv), map (B, H, T, S)
    """softmax(softcap(scale · Q Kᵀ) + bias, masked) V over tiles, forward and backward, in plain PyTorch.

    The readable version of FlashAttention: `clearhead.kernels.flash` is the algorithm, written out. It gives what the
    dense formula gives, for every size of `tile` (queries, keys), soft-capped scores included, which no fused kernel
    of PyTorch's takes. Half-precision inputs are summed in float32. NaN in values that a mask hides may reach
    the output, as with PyTorch's kernels.

    Raises: ShapeError, DTypeError (a bias that requires a gradient, too).
    Cost: O(T·S·D) time over the mask's non-empty blocks; memory beyond the output: a tile of scores a head, forward
    and backward. It saves memory and not operations: `scaled_dot_product_attention` is faster where it can be used.
    Gradients: of q, k and v, also under torch.func; no forward mode, no gradients of gradients.
    Source: Dao et al. 2022, algorithms 1 and 4.

    >>> import torch
    >>> x = torch.eye(3)
    >>> flash_attention(x, x, x, mask=causal(), softcap=1.0, tile=(2, 2))[0][1]
    tensor([0.3727, 0.6273, 0.0000])
    """
    call = "flash_attention"
    check_qkv(call, q, k, v)
    if not isinstance(tile, tuple) or len(tile) != 2:
        raise ShapeError(f"{call}(tile={tile!r}): expected (queries, keys), the size of a tile, such as (128, 128).")
    for name, size in zip(("tile[0]", "tile[1]"), tile, strict=True):
        check_count(call, name, size, at_least=1)
    rule, bias = mask_rule(mask, q, k), per_text(bias, q.ndim) if isinstance(bias, Tensor) else bias
    attn = SoftmaxMap(q, k, v=v, mask=rule, bias=bias, scale=scale, softcap=softcap)
    rules = {"mask": attn.mask, "bias": attn.bias, "scale": attn.scale, "softcap": attn.softcap}
    out = output(four(q), four(k), four(v), **rules, tile=tile)  # type: ignore[arg-type]
    return out.reshape(*q.shape[:-1], v.shape[-1]), attn


def additive_attention(
    q: Tensor,  # (B, T, A), or (B, H, T, A), or (T, A)
    k: Tensor,  # (B, S, A)
    v: Tensor,  # (B, S, Dv)
    score: Tensor,  # (A,)
    *,
    mask: MaskRule | Tensor | None = None,
) -> tuple[Tensor, AdditiveMap]:  # (B, T, Dv), map (B, T, S)
    """softmax(score · tanh(q_t + k_s), masked) V: query and key are compared by a small network.

    q and k are projected to a common width A before: W s_{i-1} and U h_j in the paper. U h_j does not depend on the
    query, so a decoder projects its keys once per sentence: `nn.AdditiveAttention.project_keys`. v are the h_j.
    A query that sees no key gets 0. NaN in a value reaches the queries that give it weight, and no other.

    Raises: ShapeError, DTypeError. Cost: O(T·S·A) time; memory O(T + S) beyond the inputs. With gradients, 2·T·S
    numbers a head are kept for the backward pass; the T·S·A values of tanh are not, they are computed again.
    Source: Bahdanau, Cho, Bengio 2015, section 3.1 (score is v_a).

    >>> import torch
    >>> states = torch.eye(3)
    >>> additive_attention(states[:1], states, states, torch.tensor([1.0, 1.0, 1.0]))[0]
    tensor([[0.2223, 0.3888, 0.3888]])
    """
    call = "additive_attention"
    check_qkv(call, q, k, v)
    check_score(call, q, score)
    attn = AdditiveMap(q, k, score, mask=mask_rule(mask, q, k))
    return _on_graph((attn @ v).to(v.dtype), q, k, v, score), attn


def linear_attention(
    q: Tensor,  # (B, H, T, D), (B, T, D) or (T, D)
    k: Tensor,  # (B, G, S, D)
    v: Tensor,  # (B, G, S, Dv)
    *,
    is_causal: bool = False,
    padding: Tensor | None = None,  # (B, S), or (S,) for one text
    state: LinearState | None = None,
    chunk: int = 128,
) -> tuple[Tensor, LinearMap]:  # (B, H, T, Dv), map (B, H, T, S)
    """φ(Q) φ(K)ᵀ V, each row divided by its weights' sum, φ(x) = elu(x) + 1: attention in O(n) time.

    It is not softmax attention and does not approximate it: a model has to be trained with it. `chunk` chooses between
    equal forms of the causal sum: 1 is the recurrent form, T the parallel one; in between lies what is fast.
    `padding` is True or 1 where a key is real, (S,) for one text. A `state` holds all earlier tokens: pass the same
    `LinearState` with each new token or piece of text, and it goes on; generate under torch.no_grad(), or the graph
    grows with the text. A query that sees no key gets 0. A NaN in a future value can reach earlier rows of its chunk,
    since 0 · NaN is NaN; in `attn @ v` it reaches only rows that give it weight. Queries may lie far below 0; keys that
    all lie below -85 (float64: -700) are too small to add up, see LinearMap.

    Raises: ShapeError (is_causal with T ≠ S among others), DTypeError.
    Cost: O((T + S)·D·Dv) time, T·chunk·D more if causal; a state of D·(Dv + 1) numbers a head. Gradients: all.
    Source: Katharopoulos et al. 2020, equations 4 to 7 and 16 to 20.

    >>> import torch
    >>> x, state = torch.tensor([[0.0], [2.0]]), LinearState()
    >>> whole, _ = linear_attention(x, x, x, is_causal=True)
    >>> steps = [linear_attention(token, token, token, is_causal=True, state=state)[0] for token in x.split(1)]
    >>> whole.tolist(), torch.cat(steps).tolist(), state
    ([[0.0], [1.5]], [[0.0], [1.5]], LinearState(2 tokens in 8 B))
    """
    call = "linear_attention"
    check_qkv(call, q, k, v)
    check_count(call, "chunk", chunk, at_least=1)
    check_order(call, q, k, is_causal=is_causal)
    past = None if state is None else _carried(call, state, k, v)
    held = {} if state is None else {"past": None if past is None else past[..., -1], "past_keys": state.keys}
    attn = LinearMap(q, k, is_causal=is_causal, padding=padding, **held)  # type: ignore[arg-type]
    keys, values = linear.features(four(k), attn.padding), four(v).to(attn.dtype)
    values = values if attn.padding is None else linear.hide(values, attn.padding)
    queries = linear.query_features(four(q))
    *parts, sums = linear.attention(queries, keys, values, past, is_causal=is_causal, chunk=chunk)
    if state is not None:
        state.sums, state.tokens = sums, state.tokens + k.shape[-2]
        state.keys = state.keys + (k.shape[-2] if attn.padding is None else attn.padding.sum(-1))
    out = linear.divide(*parts).to(q.dtype).reshape(*q.shape[:-1], v.shape[-1])
    return _on_graph(out, q, k, v), attn


def _on_graph(out: Tensor, *inputs: Tensor) -> Tensor:
    """The output; where nothing at all was visible its gradients are 0, and not an error."""
    if out.requires_grad or not torch.is_grad_enabled():
        return out
    return sum(((x.sum() * 0).nan_to_num() for x in inputs if x.requires_grad), out)


def _carried(call: str, state: LinearState, k: Tensor, v: Tensor) -> Tensor | None:
    """What the state holds, if it belongs to keys and values like these."""
    if not isinstance(state, LinearState):
        raise DTypeError(f"{call}(state={describe(state)}): expected LinearState(), the same one in every call.")
    want = (*four(k).shape[:2], k.shape[-1], v.shape[-1] + 1)
    if state.sums is not None and state.sums.shape != want:
        raise ShapeError(
            f"{call}(k={describe(k)}, v={describe(v)}, state={state!r}): the state holds {describe(state.sums)},"
            f" expected {want}. A state belongs to one layer and one batch: pass a new LinearState()."
        )
    if state.sums is not None and state.sums.is_inference() and not torch.is_inference_mode_enabled():
        return state.sums.clone()  # begun in inference mode: no graph could hold it outside
    return state.sums


def _check_causal(q: Tensor, k: Tensor, is_causal: bool) -> None:
    T, S = q.shape[-2], k.shape[-2]
    if is_causal and T != S:
        raise ShapeError(
            f"scaled_dot_product_attention(is_causal=True) with {T} queries and {S} keys is ambiguous. Say which:"
            " attn_mask=masks.causal() (lower-right: the last query sees every key, what a KV cache needs) or"
            " attn_mask=masks.causal_upper_left() (PyTorch's is_causal)."
        )


def warn_of_an_inverted_mask(mask: Tensor, T: int, S: int, *, name: str = "mask") -> None:
    """Say so where a bool mask of self-attention keeps every token from itself."""
    square = T == S > 1 and mask.shape[-2:] == (T, T)
    if square and has_numbers(mask) and not bool(mask.diagonal(dim1=-2, dim2=-1).any()):
        warnings.warn(
            f"{name}={describe(mask)} keeps every token from attending to itself. True means may attend, as in"
            " PyTorch's scaled_dot_product_attention; nn.MultiheadAttention's masks mean the opposite: pass ~mask.",
            stacklevel=_callers_level(),
        )


def _callers_level() -> int:
    """How far up the stack the code lies that called us, a function or a layer."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("clearhead", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def mask_rule(mask: MaskRule | Tensor | None, q: Tensor, k: Tensor) -> MaskRule | None:
    """A mask as a rule, a tensor beside (B, T, d) also as (B, T, S); one that looks inverted is warned of."""
    if not isinstance(mask, Tensor):
        return all_of(mask)
    rule = dense(per_text(mask, q.ndim))
    warn_of_an_inverted_mask(mask, q.shape[-2], k.shape[-2])
    return rule


def per_text(mask: Tensor, rank: int) -> Tensor:
    """Queries (B, T, d) have one head, so their (B, T, S) mask or bias is (B, 1, T, S)."""
    return mask[:, None] if rank == mask.ndim == 3 else mask


def split_mask(attn_mask: MaskRule | Tensor | None, rank: int) -> tuple[MaskRule | None, Tensor | None]:
    """The rule and the bias that a mask stands for: a bool one hides, a float one is added."""
    if attn_mask is None or isinstance(attn_mask, MaskRule):
        return attn_mask, None
    if not isinstance(attn_mask, Tensor):
        raise DTypeError(f"attn_mask={describe(attn_mask)}: expected a mask rule, a bool or a float tensor, or None.")
    if rank == 4 and attn_mask.ndim == 3:
        raise ShapeError(
            f"attn_mask={describe(attn_mask)} beside 4-D queries could mean one mask per batch entry or per head: write"
            " attn_mask[:, None] (B, 1, T, S) or attn_mask[None] (1, H, T, S). A (B, S) padding mask is"
            " masks.padding(keys=mask)."
        )
    mask = per_text(attn_mask, rank)
    return (None, mask) if mask.is_floating_point() else (dense(mask), None)
