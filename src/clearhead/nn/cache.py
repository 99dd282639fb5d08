"""The memory of a generating model: keys and values of the tokens so far, in buffers that are allocated once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._checks import check_count, describe
from clearhead._format import size
from clearhead.errors import DTypeError, ShapeError
from clearhead.masks import Coverage, MaskRule
from clearhead.scores import Bias

__all__ = ["KVCache"]


class KVCache:
    """Keys and values (B, G, n, D) of past tokens, preallocated: `Attention.new_cache` makes one that fits.

    Without `window` it holds `length` tokens, and one more is an error. With `window` it rolls: it holds the first
    `sink_tokens` and the last `window` tokens, however many come, and `length` limits nothing. Keys are kept as they
    are scored, after rotary embedding, at their places in the text. It belongs to the layer that first used it, until
    `reset`. For generation under `torch.no_grad()`: it keeps no graph.

    Cost: appending copies the new rows; a rolling cache moves its rows once in every `window` / 4 tokens, and one
    with sinks copies what it hands out. Source: Xiao et al. 2023 (sinks and a rolling window).
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        length: int | None,
        width: int,
        *,
        window: int | None = None,
        sink_tokens: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        least = {"batch": 0, "heads": 1, "length": 1, "width": 1, "window": 1, "sink_tokens": 0}
        sizes = {"batch": batch, "heads": heads, "length": length, "width": width, "window": window}
        sizes["sink_tokens"] = sink_tokens
        for name, value in sizes.items():
            if not (name in ("length", "window") and value is None):
                check_count("KVCache", name, value, at_least=least[name])
        if window is None and (sink_tokens or length is None):
            raise ShapeError(
                f"KVCache(length={length}, sink_tokens={sink_tokens}): without a window a cache needs a length, and"
                " has no sink tokens."
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise DTypeError(f"KVCache(dtype={dtype!r}): expected a float dtype, for example torch.bfloat16.")
        self.window, self.sink_tokens = window, sink_tokens
        room = (length or 0) if window is None else sink_tokens + window + max(1, window // 4)
        with torch.inference_mode(False):  # a tensor born in inference mode could not be written to outside of it
            self._kept = torch.empty(2, batch, heads, room, width, dtype=dtype, device=device)
        self._owner: weakref.ref[nn.Module] | None = None
        self.reset()

    def __len__(self) -> int:
        """How many tokens are held."""
        return self._end

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers: 2 · B · G · n · D · bytes per number."""
        return self._kept.numel() * self._kept.element_size()

    def reset(self) -> None:
        """Forget every token, and whose they were; the buffers stay."""
        self.tokens = 0  # how many were appended; the next one stands at this position
        self._end = 0  # rows in use
        self._owner = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is for whoever uses it first."""
        return {**vars(self), "_owner": None}

    def claim(self, layer: nn.Module) -> None:
        """Raise unless the tokens in here are this layer's own; an empty cache becomes its."""
        if self._owner is not None and self._owner() is not layer:
            raise ShapeError(
                f"{self!r} holds the keys of another layer: each needs a cache of its own, layer.new_cache(batch)."
            )
        self._owner = weakref.ref(layer)

    def rows_after(self, T: int) -> int:
        """How many keys `append` will hand out for T new tokens."""
        S = self._end + T
        return S if self.window is None else min(S, self.sink_tokens + self.window + T - 1)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v (B, G, T, D), and return all that the T new queries may need, (B, G, S, D), oldest first.

        The result is a view of the buffers that the next call overwrites. Raises ShapeError where the cache is full.
        """
        self._check(k, v)
        new = torch.stack([k, v])
        T, room = k.shape[2], self._kept.shape[3]
        if self._end + T > room:
            seen = torch.cat([self._kept[:, :, :, : self._end], new], 3)
            self._roll(seen)
        else:
            self._kept[:, :, :, self._end : self._end + T] = new
            self._end += T
            seen = self._kept[:, :, :, : self._end]
        self.tokens += T
        return self._needed(seen, T)

    def _needed(self, seen: Tensor, T: int) -> tuple[Tensor, Tensor]:
        """The sinks, and the keys that lie in the window of one of the T newest tokens."""
        near = None if self.window is None else self.window + T - 1
        if near is not None and self.sink_tokens + near < seen.shape[3]:
            recent = seen[:, :, :, -near:] if near else seen[:, :, :, :0]
            seen = torch.cat([seen[:, :, :, : self.sink_tokens], recent], 3) if self.sink_tokens else recent
        return seen[0], seen[1]

    def _roll(self, seen: Tensor) -> None:
        """Keep the sinks and the last window of these rows, at the front of the buffers."""
        window = self.window or 0
        first, last = seen[:, :, :, : self.sink_tokens], seen[:, :, :, self.sink_tokens :][:, :, :, -window:]
        self._end = first.shape[3] + last.shape[3]
        self._kept[:, :, :, : self._end] = torch.cat([first, last], 3)

    def _check(self, k: object, v: object) -> None:
        _, B, G, room, D = self._kept.shape
        arrived = f"KVCache.append(k={describe(k)}, v={describe(v)})"
        if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
            raise DTypeError(f"{arrived}: expected tensors (B={B}, G={G}, T, D={D}).")
        if k.ndim != 4 or k.shape != v.shape or k.shape[:2] != (B, G) or k.shape[3] != D:
            raise ShapeError(f"{arrived}: this cache takes (B={B}, G={G}, T, D={D}) for both; make one that fits.")
        for one in (k, v):
            if one.dtype != self._kept.dtype or one.device != self._kept.device:
                raise DTypeError(
                    f"{arrived} on {one.device}: this cache holds {self._kept.dtype} on {self._kept.device}. Make it on"
                    f" the layer's device and with new_cache(…, dtype={one.dtype}), which autocast may have changed."
                )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise DTypeError(f"{arrived} with gradients: a cache keeps no graph. Generate under torch.no_grad().")
        if self.window is None and self._end + k.shape[2] > room:
            raise ShapeError(
                f"{self!r}: there is no room for {k.shape[2]} more tokens. Make the cache longer, new_cache(batch,"
                " length=…), call reset() before a new text, or use a layer with a window, whose cache rolls."
            )

    def __repr__(self) -> str:
        B, G, room, D = self._kept.shape[1:]
        rolling = "" if self.window is None else f", window={self.window}, sink_tokens={self.sink_tokens}"
        held = f"{self._end} of {room} rows" if self.window is None else f"{self._end} rows of {self.tokens} tokens"
        return f"KVCache(B={B}, G={G}, D={D}{rolling}; {held}, {size(self.nbytes)})"


# --- rules about a text of which not every key is kept ----------------------------------------------------------------


@dataclass(frozen=True)
class KeptKeys(MaskRule):
    """A rule about the whole text, read where the `gone` keys after the first `sink_tokens` have been dropped."""

    rule: MaskRule
    sink_tokens: int
    gone: int

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return self.rule.allows(b, h, q, _in_text(k, self.sink_tokens, self.gone), T, S + self.gone)

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        start = cols.start + (self.gone if cols.start >= self.sink_tokens else 0)
        stop = cols.stop + (self.gone if cols.stop > self.sink_tokens else 0)
        return self.rule.coverage(rows, slice(start, stop), T, S + self.gone)  # of a hull, EMPTY and FULL hold

    def check(self, B: int, H: int, T: int, S: int) -> None:
        self.rule.check(B, H, T, S + self.gone)

    @property
    def leads(self) -> tuple[int | None, int | None]:
        return self.rule.leads


@dataclass(frozen=True)
class KeptBias(Bias):
    """A bias about the whole text, read where the `gone` keys after the first `sink_tokens` have been dropped."""

    bias: Bias
    sink_tokens: int
    gone: int

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return self.bias.values(b, h, q, _in_text(k, self.sink_tokens, self.gone), T, S + self.gone)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        self.bias.check(B, H, T, S + self.gone)

    @property
    def per_head(self) -> bool:
        return self.bias.per_head

    def hidden(self) -> Bias | None:
        hidden = self.bias.hidden()
        return None if hidden is None else KeptBias(hidden, self.sink_tokens, self.gone)


def _in_text(k: Tensor, sink_tokens: int, gone: int) -> Tensor:
    """The place in the text of each kept key."""
    return torch.where(k < sink_tokens, k, k + gone)
