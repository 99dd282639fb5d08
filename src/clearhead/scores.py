"""What stands between q·k and the softmax: scale, soft-cap, and biases (additive, ALiBi, T5), each as a rule; and the
rotary embedding, which turns q and k before they meet.

    score(t, s) = softcap(scale · q_t·k_s) + bias(t, s),    masked pairs -inf,    softcap(x) = c · tanh(x / c)

Positions are aligned lower-right: with T queries and S keys, query t stands at position t + S - T, so that a
bias under a KV cache belongs to the last T rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._checks import check_broadcast, check_count, describe, finite_number, read_broadcast
from clearhead._watch import HoldsTensors
from clearhead.errors import DTypeError, ShapeError

__all__ = [
    "Bias",
    "Rotary",
    "alibi",
    "alibi_slopes",
    "as_bias",
    "dense_bias",
    "rotary_order",
    "softcap",
    "t5_bias",
    "t5_buckets",
]


class Bias(HoldsTensors):
    """A number added to each score; -inf hides the pair. Subclasses say `values`."""

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        """The bias of each (batch, head, query, key), of the indices' broadcast shape."""
        raise NotImplementedError(f"{type(self).__name__} must define values(b, h, q, k, T, S)")

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Raise ShapeError where the bias does not fit an attention of this size."""

    @property
    def per_head(self) -> bool:
        """Whether heads may get different values."""
        return True

    def hidden(self) -> Bias | None:
        """The same bias with 0 for every finite value: what it hides, and nothing else. None where it hides nothing."""
        return None

    def __add__(self, other: Bias) -> Bias:
        return Sum(self, as_bias(other))


@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """A bias that somebody already has as a tensor."""

    bias: Tensor  # (B or 1, H or 1, T or 1, S or 1)

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        bias = self.bias.to(k.device)
        values = read_broadcast(bias, b, h, q, k)
        # Libraries write "hidden" as the dtype's lowest number, and two of those add up to -inf: both mean -inf here.
        return values.masked_fill(values <= torch.finfo(bias.dtype).min / 2, -math.inf)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        check_broadcast("a bias tensor", self.bias, (B, H, T, S))

    @property
    def per_head(self) -> bool:
        return self.bias.shape[1] > 1

    def hidden(self) -> Bias:
        return Hidden(self)

    def __repr__(self) -> str:
        return f"dense_bias({tuple(self.bias.shape)})"


@dataclass(frozen=True)
class Sum(Bias):
    """Two biases added, neither copied."""

    left: Bias
    right: Bias

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return self.left.values(b, h, q, k, T, S) + self.right.values(b, h, q, k, T, S)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        self.left.check(B, H, T, S)
        self.right.check(B, H, T, S)

    @property
    def per_head(self) -> bool:
        return self.left.per_head or self.right.per_head

    def hidden(self) -> Bias | None:
        left, right = self.left.hidden(), self.right.hidden()
        return left + right if left is not None and right is not None else left or right

    def __repr__(self) -> str:
        return f"{self.left!r} + {self.right!r}"


@dataclass(frozen=True)
class Hidden(Bias):
    """0 where the bias is finite, -inf where it hides the pair."""

    bias: Bias

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        values = self.bias.values(b, h, q, k, T, S)
        return torch.zeros_like(values).masked_fill(values == -math.inf, -math.inf)

    @property
    def per_head(self) -> bool:
        return self.bias.per_head


def dense_bias(bias: Tensor) -> Bias:
    """A float tensor (T, S) or (1 or B, 1 or H, T, S) that is added to the scores.

    Values at or below half the dtype's lowest number, and -inf, hide the pair: its weight is exactly 0.
    """
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise DTypeError(f"dense_bias(bias): expected a float tensor, got {describe(bias)}.")
    if bias.ndim not in (2, 4):
        raise ShapeError(
            f"dense_bias(bias): expected (T, S) or (B, H, T, S), got {tuple(bias.shape)}."
            " Write (B, 1, T, S) for one per batch entry, (1, H, T, S) for one per head."
        )
    return DenseBias(bias.expand((1,) * (4 - bias.ndim) + tuple(bias.shape)))


def as_bias(bias: Bias | Tensor) -> Bias:
    """A bias rule as it is, a tensor as `dense_bias(tensor)`."""
    return bias if isinstance(bias, Bias) else dense_bias(bias)


@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """slope_h · (s - position(t))."""

    slopes: Tensor  # (H,)

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        # Half precision cannot count: bfloat16 has no 257.
        slopes = self.slopes.to(k.device, torch.promote_types(self.slopes.dtype, torch.float32))
        return slopes[h] * (k - (q + S - T))

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if self.slopes.shape != (H,):
            raise ShapeError(f"alibi(slopes): expected one slope per head, ({H},), got {tuple(self.slopes.shape)}.")

    def __repr__(self) -> str:
        return f"alibi({self.slopes.numel()} heads)"


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of ALiBi: 2^(-8k/n), k = 1…n; for n not a power of two, the lower power's, then every other one of
    twice that. Shape (heads,), float32. Source: Press, Smith, Lewis 2022, section 3.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    check_count("alibi_slopes", "heads", heads, at_least=1)
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    more = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power + 1)][::2]
    return torch.tensor((slopes + more)[:heads])


def alibi(slopes: Tensor | int) -> Bias:
    """Attention with linear biases: slope_h · (s - position(t)), not scaled. An int takes `alibi_slopes(heads)`."""
    return ALiBi(alibi_slopes(slopes) if isinstance(slopes, int) else slopes)


def t5_buckets(distance: Tensor, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
    """T5's bucket of each signed distance s - position(t): half of the buckets for each sign where `bidirectional`;
    of those, the first half exact, the rest logarithmic up to `max_distance`.
    Source: Raffel et al. 2020, section 2.1.

    >>> t5_buckets(torch.tensor([-200, -3, 0, 3, 200])).tolist()
    [15, 3, 0, 19, 31]
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


@dataclass(frozen=True, eq=False)
class T5Bias(Bias):
    """table[bucket(s - position(t)), h]."""

    table: Tensor  # (buckets, H)
    max_distance: int
    bidirectional: bool

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        bucket = t5_buckets(
            k - (q + S - T),
            buckets=self.table.shape[0],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return self.table.to(k.device)[bucket, h]

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if self.table.ndim != 2 or self.table.shape[1] != H:
            raise ShapeError(f"t5_bias(table): expected (buckets, {H}), got {tuple(self.table.shape)}.")

    def __repr__(self) -> str:
        return f"t5_bias({tuple(self.table.shape)})"


def t5_bias(table: Tensor, *, max_distance: int = 128, bidirectional: bool = True) -> Bias:
    """T5's relative position bias from its learned table (buckets, H); T5 also uses scale = 1."""
    return T5Bias(table, max_distance, bidirectional)


def softcap(scores: Tensor, cap: float | None) -> Tensor:
    """c · tanh(score / c), before the mask; None leaves the scores alone. Source: Gemma 2, 2024, section 2."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


# --- rotary embedding -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: pair i of a vector's features is turned by position · base^(-2i / dim).

    A score then depends on how far two tokens are apart, and not on where they stand. Two layouts are in use, and
    weights of one are wrong in the other (`rotary_order` converts): `interleaved=False` pairs feature i with
    i + dim/2 (Llama and all of Hugging Face), `interleaved=True` pairs 2i with 2i + 1 (the paper). Features from `dim`
    on are left alone. Source: Su et al. 2021, equation 34.

    >>> Rotary(4).rotate(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([0])).tolist()
    [[1.0, 0.0, 0.0, 0.0]]
    """

    dim: int
    base: float = 10000.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_count("Rotary", "dim", self.dim, at_least=2)
        if self.dim % 2:
            raise ShapeError(f"Rotary(dim={self.dim}): features are turned in pairs, so dim must be even.")
        if finite_number("Rotary", "base", self.base) <= 0:
            raise ShapeError(f"Rotary(base={self.base!r}): expected a number above 0.")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (…, T, D) with the tokens at `positions` (T,); computed in float32 or wider, returned in x's dtype."""
        if not (isinstance(x, Tensor) and x.is_floating_point() and isinstance(positions, Tensor)):
            raise DTypeError(f"{self!r}.rotate(x={describe(x)}, positions={describe(positions)}): x is a float tensor.")
        if x.shape[-1] < self.dim or positions.shape != x.shape[-2:-1]:
            raise ShapeError(
                f"{self!r}.rotate(x={describe(x)}, positions={describe(positions)}): expected x (…, T, D) with"
                f" D >= {self.dim}, and positions (T,)."
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        pair = torch.arange(self.dim // 2, device=x.device, dtype=wide)
        angles = positions.to(x.device, wide)[:, None] * self.base ** (-2 * pair / self.dim)
        cos, sin = angles.cos(), angles.sin()
        left, right = self._pairs(x.to(wide))
        turned = self._join(left * cos - right * sin, left * sin + right * cos).to(x.dtype)
        return turned if x.shape[-1] == self.dim else torch.cat([turned, x[..., self.dim :]], -1)

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = self.dim // 2
        if self.interleaved:
            return x[..., 0 : self.dim : 2], x[..., 1 : self.dim : 2]
        return x[..., :half], x[..., half : self.dim]

    def _join(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.stack([left, right], -1).flatten(-2) if self.interleaved else torch.cat([left, right], -1)


def rotary_order(dim: int, *, interleaved: bool) -> Tensor:
    """Which feature of the other layout each feature of this one is, (dim,): index the rows of W_query and W_key.

    >>> rotary_order(6, interleaved=False).tolist()  # half-split weights out of interleaved ones
    [0, 2, 4, 1, 3, 5]
    >>> rotary_order(6, interleaved=True).tolist()  # and back
    [0, 3, 1, 4, 2, 5]
    """
    check_count("rotary_order", "dim", dim, at_least=2)
    order = torch.arange(dim)
    return order.view(2, -1).mT.flatten() if interleaved else order.view(-1, 2).mT.flatten()
