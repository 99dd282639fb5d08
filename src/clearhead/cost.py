"""What attention costs: time, memory of the weights and of the cache, for each way of computing it, by counting.

>>> cost = Cost(tokens=131_072, heads=32, layers=32, head_dim=128, dtype="float16")
>>> cost.dense.weights == 32 * 2**40  # 32 TiB: why nobody stores them
True
>>> cost.tiled.weights  # what has to be kept to have any of them again: 0.5 GB
536870912
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

from clearhead._config import sizes
from clearhead.errors import DTypeError, ShapeError

__all__ = ["Cost", "Price", "from_config"]

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}
LARGEST = 10**12  # of any size: what is larger is a slip of the keyboard
WINDOW = 4096  # Mistral's
_LSE_ITEMSIZE = 4  # a row's log-sum-exp is kept in float32 or wider


@dataclass(frozen=True)
class Price:
    """What one way of computing attention takes, over all heads and layers.

    Attributes:
        pairs: (query, key) pairs that one head computes a score for; 0 where there are no scores
        flops: multiplications and additions, without the projections: 4 · pairs · head_dim a head
        weights: bytes to have the weights of every layer; where they are not stored, of one log-sum-exp a row, from
            which (with q and k) any weight can be had again
        cache: bytes kept of earlier tokens to generate the next one; 0 if not causal, since nothing is generated then
    """

    pairs: int
    flops: int
    weights: int
    cache: int


@dataclass(frozen=True)
class Cost:
    """The cost of self-attention over `tokens` tokens, forward, batch 1.

    Args:
        tokens: length of the sequence, n
        heads: query heads, H
        kv_heads: key/value heads, G; as many as heads if None
        layers: L
        head_dim: width of one head, d
        dtype: of weights, keys and values: float64, float32, float16, bfloat16, float8 or int8
        window: keys that a query sees in the sliding-window variant, itself included; half on each side if not causal
        width: of the model, which the projections read and write; heads · head_dim if None
        causal: whether no token sees a later one: tiles that are all future are skipped

    Raises: ShapeError, DTypeError.
    Source: 4 n² d: Vaswani et al. 2017, table 1, with both products and both operations counted; Katharopoulos et al.
    2020 for the linear form; Ainslie et al. 2023 for kv_heads.
    """

    tokens: int
    heads: int = 1
    kv_heads: int | None = None
    layers: int = 1
    head_dim: int = 64
    dtype: str = "float16"
    window: int = WINDOW
    width: int | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "layers", "head_dim", "window", "kv_heads", "width"):
            value = getattr(self, name)
            if value is not None or name not in ("kv_heads", "width"):
                object.__setattr__(self, name, _size("Cost", name, value))
        if self.heads % self.groups:
            raise ShapeError(
                f"Cost(heads={self.heads}, kv_heads={self.kv_heads}): the number of heads must be a multiple of the"
                " number of key/value heads, which several query heads share."
            )
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZE:
            raise DTypeError(f"Cost(dtype={self.dtype!r}): expected one of {', '.join(ITEMSIZE)}, as a string.")
        if not isinstance(self.causal, bool):
            raise DTypeError(f"Cost(causal={self.causal!r}): expected True or False.")

    # --- the ways of computing it ---------------------------------------------------------------------------------

    @property
    def dense(self) -> Price:
        """Every score computed and every weight stored: O(n² d) time, O(n²) memory. A mask saves nothing."""
        pairs = self.tokens**2
        weights = self.dense_head * self.heads * self.layers
        return Price(pairs, self._flops(pairs), weights, self.kv_cache(self.tokens))

    @property
    def dense_head(self) -> int:
        """Bytes of the weights of one head of one layer: n² · bytes."""
        return self.tokens**2 * ITEMSIZE[self.dtype]

    @property
    def tiled(self) -> Price:
        """FlashAttention: the same products tile by tile; memory O(n), time O(n² d), half of it if causal."""
        return self.sparse(self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens**2)

    @property
    def windowed(self) -> Price:
        """A sliding window of W: nW - W(W-1)/2 pairs, a rolling cache of W tokens; W/2 to each side if not causal."""
        n, w, half = self.tokens, min(self.window, self.tokens), min(self.window // 2, self.tokens - 1)
        causal, symmetric = n * w - w * (w - 1) // 2, n * (2 * half + 1) - half * (half + 1)
        return self.sparse(causal if self.causal else symmetric, kept=w)

    @property
    def linear(self) -> Price:
        """No softmax: φ(k) vᵀ and φ(k) are summed up as the text goes on, a state of d × (d + 1) a key/value head."""
        state = self.head_dim * (self.head_dim + 1)  # added to for each key/value head, read for each query head
        flops = 2 * self.tokens * (self.groups + self.heads) * state * self.layers
        cache = state * self.groups * self.layers * ITEMSIZE[self.dtype]
        return Price(0, flops, 0, cache if self.causal else 0)

    def sparse(self, pairs: int, *, kept: int | None = None) -> Price:
        """Tiled attention under a mask with so many visible pairs (`rule.bind(n, n).count()`).

        `kept` is how many tokens the cache must hold, all by default.
        """
        pairs = _size("sparse", "pairs", pairs, at_least=0, at_most=self.tokens**2)
        lse = self.tokens * self.heads * self.layers * _LSE_ITEMSIZE
        return Price(pairs, self._flops(pairs), lse, self.kv_cache(self.tokens if kept is None else kept))

    # --- what stands beside it ------------------------------------------------------------------------------------

    @property
    def projections(self) -> int:
        """FLOP of the four projections: 8 n d_model² a layer, less where key/value heads are shared."""
        width = self.heads * self.head_dim if self.width is None else self.width
        return 2 * self.tokens * width * 2 * (self.heads + self.groups) * self.head_dim * self.layers

    @property
    def crossover(self) -> float:
        """The number of tokens at which dense attention takes as long as the projections: 2 · d_model if G = H."""
        return self.tokens * self.projections / self.dense.flops

    def kv_cache(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens: 2 · L · n · G · d · bytes; 0 if not causal."""
        tokens = _size("kv_cache", "tokens", tokens, at_least=0)
        return 2 * self.layers * tokens * self.groups * self.head_dim * ITEMSIZE[self.dtype] * self.causal

    @property
    def groups(self) -> int:
        """Key/value heads, G."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def as_dict(self) -> dict[str, Any]:
        """Sizes and prices as plain numbers, for JSON."""
        kinds = {name: asdict(getattr(self, name)) for name in ("dense", "tiled", "windowed", "linear")}
        sizes = asdict(self) | {"kv_heads": self.groups}
        return sizes | kinds | {"projections": self.projections, "dense_head": self.dense_head}

    def _flops(self, pairs: int) -> int:
        """2 for a multiplication and an addition, for each of d features, in Q Kᵀ and again in A V."""
        return 4 * pairs * self.head_dim * self.heads * self.layers


def from_config(
    config: Any,
    *,
    tokens: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    layers: int | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    window: int | None = None,
    width: int | None = None,
    causal: bool | None = None,
) -> Cost:
    """The cost of a model, by its Hugging Face config; what is given by name overrides what the config says.

    Without `tokens`, as many as the model has positions for. Of a model that mixes attention with other layers
    (state spaces, convolutions), those that attend are counted. No weights are needed: see `clearhead.zoo.config`.

    Raises: ModelError where the config tells too little, or something that these formulas do not count.

    >>> from types import SimpleNamespace
    >>> gpt2 = SimpleNamespace(hidden_size=768, num_attention_heads=12, num_hidden_layers=12)
    >>> from_config(gpt2, tokens=1024, causal=True).projections == 12 * 8 * 1024 * 768**2
    True
    """
    given = {
        "tokens": tokens,
        "heads": heads,
        "kv_heads": kv_heads,
        "layers": layers,
        "head_dim": head_dim,
        "dtype": dtype,
        "window": window,
        "width": width,
        "causal": causal,
    }
    return Cost(**sizes(config, {name: value for name, value in given.items() if value is not None}))


def _size(call: str, name: str, value: object, *, at_least: int = 1, at_most: int = LARGEST) -> int:
    """An integer, NumPy's included, as Python's: theirs overflow."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not at_least <= int(value) <= at_most:
        raise ShapeError(f"{call}({name}={value!r}): expected an integer from {at_least} to {at_most:,}.")
    return int(value)
