"""Attention of a recurrent decoder: its state asks, the encoder's states answer, and a learned score compares them."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead import masks
from clearhead._checks import check_floats, describe
from clearhead.errors import ShapeError
from clearhead.functional import additive_attention, mask_rule, scaled_dot_product_attention
from clearhead.maps import AdditiveMap, SoftmaxMap
from clearhead.masks import MaskRule, all_of
from clearhead.nn._shared import check_input, check_sizes

__all__ = ["AdditiveAttention", "DotAttention", "GeneralAttention"]


class AdditiveAttention(nn.Module):
    """Bahdanau's attention: e_ij = vᵀ tanh(W s_{i-1} + U h_j), α_i = softmax(e_i), context c_i = Σ_j α_ij h_j.

    W is `W_query`, U is `W_key`, v is `score`. The query s_{i-1} is the decoder's state before it writes word i.

    Args:
        d_query: width of the decoder's states. d_key: of the encoder's (both directions together). d_attn: of tanh.

    U h_j is the same for every query. A decoder that asks one query at a time projects it once per sentence:

        projected = layer.project_keys(states)
        context = layer(s[:, None], states, projected=projected)

    Raises: ShapeError, DTypeError. Source: Bahdanau, Cho, Bengio 2015, section 3.1 and appendix A.1.2.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> layer = AdditiveAttention(d_query=5, d_key=8, d_attn=6)
    >>> context, attn = layer.attend(torch.randn(3, 5), torch.randn(7, 8))
    >>> context.shape, attn.shape
    (torch.Size([3, 8]), (3, 7))
    """

    def __init__(self, d_query: int, d_key: int, d_attn: int) -> None:
        super().__init__()
        check_sizes(self, d_query=d_query, d_key=d_key, d_attn=d_attn)
        self.W_query = nn.Linear(d_query, d_attn, bias=False)
        self.W_key = nn.Linear(d_key, d_attn, bias=False)
        self.score = nn.Linear(d_attn, 1, bias=False)

    def project_keys(self, keys: Tensor) -> Tensor:
        """U h_j for all keys (…, S, d_key), (…, S, d_attn): once per sentence, then pass it as `projected`."""
        check_input(self, keys, self.W_key.in_features, name="keys")
        return self.W_key(keys)  # type: ignore[no-any-return]

    def forward(
        self,
        query: Tensor,  # (B, T, d_query) or (T, d_query)
        keys: Tensor,  # (B, S, d_key) or (S, d_key)
        *,
        projected: Tensor | None = None,  # (B, S, d_attn)
        padding: Tensor | None = None,  # (B, S), or (S,) for one text: True or 1 where a key is real
        mask: MaskRule | Tensor | None = None,
    ) -> Tensor:  # (B, T, d_key)
        """The context of every query."""
        return self.attend(query, keys, projected=projected, padding=padding, mask=mask)[0]

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        *,
        projected: Tensor | None = None,
        padding: Tensor | None = None,
        mask: MaskRule | Tensor | None = None,
    ) -> tuple[Tensor, AdditiveMap]:
        """The context (…, T, d_key) of every query, and the weights (…, T, S); padded keys get none."""
        check_input(self, query, self.W_query.in_features, name="query")
        check_input(self, keys, self.W_key.in_features, name="keys")
        k = self.W_key(keys) if projected is None else projected
        check_floats("AdditiveAttention", keys.device, projected=k)
        if k.shape != (*keys.shape[:-1], self.W_key.out_features):
            raise ShapeError(
                f"AdditiveAttention(keys={describe(keys)}, projected={describe(k)}): expected what"
                f" project_keys(keys) gives, {(*keys.shape[:-1], self.W_key.out_features)}."
            )
        # Under autocast, projections come in another dtype than the keys, which are the values. The score is a copy: an
        # optimiser overwrites the layer's own, which the map would not survive.
        q, k = self.W_query(query).to(keys.dtype), k.to(keys.dtype)
        score = self.score.weight[0].to(keys.dtype, copy=True)
        return additive_attention(q, k, keys, score, mask=_seen(mask, padding, query, keys))


class DotAttention(nn.Module):
    """Luong's simplest score: the context Σ_s softmax_s(q_t · h_s) h_s, with nothing learned and nothing scaled.

    Queries and keys need one width. Raises: ShapeError, DTypeError. Source: Luong, Pham, Manning 2015, section 3.1.

    >>> import torch
    >>> DotAttention()(torch.tensor([[9.0, 0.0]]), torch.eye(2))
    tensor([[9.9988e-01, 1.2339e-04]])
    """

    def forward(
        self,
        query: Tensor,  # (B, T, d) or (T, d)
        keys: Tensor,  # (B, S, d) or (S, d)
        *,
        padding: Tensor | None = None,  # (B, S), or (S,) for one text
        mask: MaskRule | Tensor | None = None,
    ) -> Tensor:  # (B, T, d)
        """The context of every query."""
        return self.attend(query, keys, padding=padding, mask=mask)[0]

    def attend(
        self, query: Tensor, keys: Tensor, *, padding: Tensor | None = None, mask: MaskRule | Tensor | None = None
    ) -> tuple[Tensor, SoftmaxMap]:
        """The context (…, T, d) of every query, and the weights (…, T, S); padded keys get none."""
        check_input(self, query, name="query")
        check_input(self, keys, query.shape[-1], name="keys")
        return self._attend(query, keys, _seen(mask, padding, query, keys))

    def _attend(self, query: Tensor, keys: Tensor, mask: MaskRule | None) -> tuple[Tensor, SoftmaxMap]:
        return scaled_dot_product_attention(query, keys, keys, mask, scale=1.0)


class GeneralAttention(DotAttention):
    """Luong's general score, q_tᵀ W h_s: the query is mapped to the keys' space (`W_query`) and compared there.

    Raises: ShapeError, DTypeError. Source: Luong, Pham, Manning 2015, section 3.1.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> GeneralAttention(d_query=5, d_key=8)(torch.randn(3, 5), torch.randn(7, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(self, d_query: int, d_key: int) -> None:
        super().__init__()
        check_sizes(self, d_query=d_query, d_key=d_key)
        self.W_query = nn.Linear(d_query, d_key, bias=False)

    def attend(
        self, query: Tensor, keys: Tensor, *, padding: Tensor | None = None, mask: MaskRule | Tensor | None = None
    ) -> tuple[Tensor, SoftmaxMap]:
        """The context (…, T, d_key) of every query, and the weights (…, T, S); padded keys get none."""
        check_input(self, query, self.W_query.in_features, name="query")
        check_input(self, keys, self.W_query.out_features, name="keys")
        return self._attend(self.W_query(query).to(keys.dtype), keys, _seen(mask, padding, query, keys))


def _seen(mask: MaskRule | Tensor | None, padding: Tensor | None, query: Tensor, keys: Tensor) -> MaskRule | None:
    """Both as one rule."""
    return all_of(mask_rule(mask, query, keys), None if padding is None else masks.padding(keys=padding))
