"""LinearMap: the weights of linear attention, φ(q)·φ(k) made to sum to 1, with a product in O(n) time.

A[t, s] = φ(q_t)·φ(k_s) / Σ_s φ(q_t)·φ(k_s),    φ(x) = elu(x) + 1
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from clearhead._checks import check_floats, check_qkv, describe
from clearhead.errors import ShapeError
from clearhead.kernels import linear
from clearhead.kernels.grouped import grouped_matmul
from clearhead.maps.base import AttentionMap, Selection
from clearhead.maps.query_key import QueryKeyMap
from clearhead.masks import all_of, causal
from clearhead.masks import padding as real_keys

__all__ = ["LinearMap"]


class LinearMap(QueryKeyMap):
    """The weights of linear attention as a lazy operator; `attn @ x` takes O(T + S) time, and no T×S tensor.

    Args:
        q: (B, H, T, D), (B, T, D) or (T, D). k: (B, G, S, D), G dividing H.
        is_causal: whether query t sees the keys up to its own; T and S must be equal.
        padding: (B, S), or (S,) for one text: True or 1 where a key is real.
        past: (B, G, D), Σ φ(k) of keys before these: rows then sum to less than 1, the rest is theirs.
        past_keys: how many keys that were, for all texts or (B,); only `uniform()` has to know.

    Any query may be far below 0. Keys are added up as they are: where all that a query sees lie below -85 in every
    feature (float64: -700), gradients overflow, and below -103 (-745) such keys weigh 0.

    Cost of what is no product: one pass, O(T·S·D) time, O(T + S) memory. Source: Katharopoulos et al. 2020, equation 4.

    >>> x = torch.tensor([[0.0], [2.0]])  # φ: 1 and 3
    >>> LinearMap(x, x, is_causal=True).to_dense()
    tensor([[1.0000, 0.0000],
            [0.2500, 0.7500]])
    """

    _held = QueryKeyMap._held | {"padding": "B", "_past": "BG", "_past_keys": "B", "_norm": "BHT"}
    _leaves: ClassVar[tuple[str, ...]] = (*QueryKeyMap._leaves, "_past")

    def __init__(
        self,
        q: Tensor,  # (B, H, T, D)
        k: Tensor,  # (B, G, S, D)
        *,
        is_causal: bool = False,
        padding: Tensor | None = None,  # (B, S), or (S,) for one text
        past: Tensor | None = None,  # (B, G, D)
        past_keys: int | Tensor | None = None,  # (B,)
    ) -> None:
        check_qkv("LinearMap", q, k)
        check_order("LinearMap", q, k, is_causal=is_causal)
        if past is not None:
            check_floats("LinearMap", q.device, past=past)
        real = None if padding is None else real_keys(keys=padding)
        rule = all_of(causal() if is_causal else None, real)
        super().__init__(q, k, rule, past=() if past is None else (past,))
        B, G, _, D = self._k.shape
        if past is not None and past.shape != (B, G, D):
            raise ShapeError(
                f"LinearMap(past={describe(past)}): expected ({B}, {G}, {D}), a sum for each feature of k."
            )
        self.padding, self._is_causal, self._past = None if real is None else real.keys, is_causal, past
        self._past_keys = None if past_keys is None else torch.as_tensor(past_keys, device=q.device).expand(B)
        self._norm: Tensor | None = None

    def uniform(self) -> LinearMap:
        """The head that spreads evenly over the keys it may see, those of the past among them."""
        even = super().uniform()
        even._norm = None
        if self._past is not None:
            if self._past_keys is None:
                raise ShapeError(f"{self!r}.uniform(): pass LinearMap(…, past_keys=…), how many keys its past holds.")
            even._past = self._past_keys[:, None, None].expand(*self._past.shape[:2], 1).to(self.dtype)  # φ(0) is 1
        return even

    def _weights(self, rows: slice, cols: slice) -> Tensor:
        q, k = linear.query_features(self._q[:, :, rows]), linear.features(self._k[:, :, cols])
        return linear.divide(self._hide(grouped_matmul(q, k.mT), rows, cols, 0.0), self._norm_of(rows))

    def _select(self, lead: tuple[int | Tensor, ...], rows: Tensor | None) -> AttentionMap:
        chosen = super()._select(lead, None)
        if rows is None:
            return chosen
        everything = tuple(torch.arange(n, device=self.device) for n in chosen.shape[:-2])
        return Selection(chosen, everything, rows)  # a causal product goes through all queries, in order

    def _norm_of(self, rows: slice) -> Tensor:
        """The denominators of some rows, (B, H, t, 1); of all of them once, where no gradient is asked of it."""
        norm = self._norm
        if norm is None or self._needs_graph():
            norm = self._denominators().to(self.dtype)
        if not self._needs_graph():
            self._norm = norm
        return norm[:, :, rows]

    def _denominators(self) -> Tensor:
        """φ(q_t)·Σ_s φ(k_s) of all queries, in float64. Summed in pairs: equal keys round alike, one by one adds up."""
        self._check_unchanged()
        q, k = linear.query_features(self._q[:]).double(), linear.features(self._k[:], self.padding).double()
        sums = linear.running_sums(k) if self._is_causal else k.sum(-2, keepdim=True)
        if self._past is not None:
            sums = sums + self._past[:, :, None].to(sums.dtype)
        sums = sums.repeat_interleave(q.shape[1] // sums.shape[1], 1)
        return (q[..., None, :] @ sums[..., None])[..., 0]

    def _sums(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numerators and denominators of all queries for keys and values of the same heads, in the keys' dtype."""
        self._check_unchanged()
        before = None
        if self._past is not None:
            before = self._past.repeat_interleave(k.shape[1] // self._past.shape[1], 1)[..., None].to(k.dtype)
            before = torch.nn.functional.pad(before, (x.shape[-1], 0))
        q, x = linear.query_features(self._q).to(k.dtype), x.to(k.dtype)
        numerator, norm, _ = linear.attention(q, k, x, before, is_causal=self._is_causal)
        return numerator, norm

    def _finite_product(self, x: Tensor, *, transposed: bool) -> Tensor:
        if transposed:
            return super()._finite_product(x, transposed=True)
        k, x = self._side_by_side(linear.features(self._k, self.padding), x)
        return self._shown(linear.divide(*self._sums(k, x)))

    def _side_by_side(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with the same batch entries and heads: x's heads may be 1, G, H, or others that divide H."""
        lead = dict(zip(reversed(self._axes), reversed(x.shape[:-2]), strict=False))
        x = x.reshape(lead.get("B", 1), lead.get("H", 1), *x.shape[-2:])
        (B, H), G = self._q.shape[:2], k.shape[1]
        if x.shape[1] not in (1, G):
            k, x = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, x))
        return k, x.expand(B, k.shape[1], -1, -1)

    def columns(self, keys: Tensor) -> Tensor:
        """The weights on some keys (n,), (…, T, n): a product, O((T + S)·n·D)."""
        return self @ (torch.arange(self.shape[-1], device=self.device)[:, None] == keys).to(self.dtype)

    def _notes(self) -> list[str]:
        return super()._notes() + ([] if self._past is None else ["a past: rows sum to less than 1"])


def check_order(call: str, q: Tensor, k: Tensor, *, is_causal: bool) -> None:
    """Raise where a causal order is asked for, and there are not as many queries as keys."""
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ShapeError(
            f"{call}(q={describe(q)}, k={describe(k)}, is_causal=True): expected as many queries as keys. Keys before"
            " the first query are carried as sums: linear_attention(…, state=LinearState())."
        )
