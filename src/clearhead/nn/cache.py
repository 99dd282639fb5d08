"""The memory of a generating model: keys and values of the tokens so far, in buffers that are allocated once."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead._checks import check_count, describe
from clearhead._format import size
from clearhead.errors import DTypeError, ShapeError

__all__ = ["KVCache"]


class KVCache:
    """Keys and values (B, G, n, D) of past tokens, preallocated: `Attention.new_cache` makes one that fits.

    Without `window` it holds `length` tokens, and one more is an error. With `window` it rolls: it holds the first
    `sinks` tokens and the last `window`, however many come, and `length` limits nothing. Keys are kept as they are
    scored, after rotary embedding, at their places in the text.

    Cost: appending copies the new rows; a rolling cache moves its rows once in every `window` / 4 tokens.
    Source: Xiao et al. 2023 (sinks and a rolling window).
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        length: int,
        width: int,
        *,
        window: int | None = None,
        sinks: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_count("KVCache", "batch", batch, at_least=0)
        check_count("KVCache", "length", length, at_least=1)
        self.window, self.sinks = window, sinks
        room = length if window is None else sinks + window + max(1, window // 4)
        self._kept = torch.empty(2, batch, heads, room, width, dtype=dtype, device=device)
        self.tokens = 0  # how many were appended; the next one stands at this position
        self._end = 0  # rows in use

    def __len__(self) -> int:
        """How many tokens are held."""
        return self._end

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers: 2 · B · G · n · D · bytes per number."""
        return self._kept.numel() * self._kept.element_size()

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.tokens = self._end = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v (B, G, T, D), and return all that the T new queries may need, (B, G, S, D), oldest first.

        The result is a view of the buffers that the next call overwrites. Raises ShapeError where the cache is full.
        """
        self._check(k, v)
        new = torch.stack([k, v])
        T, room = k.shape[2], self._kept.shape[3]
        if self.window is None and self._end + T > room:
            raise ShapeError(
                f"{self!r}: there is no room for {T} more tokens. Make the cache longer, new_cache(batch, length=…),"
                " call reset() before a new text, or use a layer with a window, whose cache rolls."
            )
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
        if near is not None and self.sinks + near < seen.shape[3]:
            recent = seen[:, :, :, -near:]
            seen = torch.cat([seen[:, :, :, : self.sinks], recent], 3) if self.sinks else recent
        return seen[0], seen[1]

    def _roll(self, seen: Tensor) -> None:
        """Keep the sinks and the last window of these rows, at the front of the buffers."""
        assert self.window is not None
        first, last = seen[:, :, :, : self.sinks], seen[:, :, :, self.sinks :][:, :, :, -self.window :]
        self._end = first.shape[3] + last.shape[3]
        self._kept[:, :, :, : self._end] = torch.cat([first, last], 3)

    def _check(self, k: Tensor, v: Tensor) -> None:
        _, B, G, _, D = self._kept.shape
        arrived = f"KVCache.append(k={describe(k)}, v={describe(v)})"
        if k.shape != v.shape or k.shape[:2] != (B, G) or k.shape[3] != D:
            raise ShapeError(f"{arrived}: this cache takes (B={B}, G={G}, T, D={D}) for both; make one that fits.")
        if k.dtype != self._kept.dtype or k.device != self._kept.device:
            raise DTypeError(
                f"{arrived} on {k.device}: this cache holds {self._kept.dtype} on {self._kept.device}. Make it with"
                " new_cache(…, dtype=…) after moving the layer."
            )

    def __repr__(self) -> str:
        B, G, room, D = self._kept.shape[1:]
        rolling = "" if self.window is None else f", window={self.window}, sinks={self.sinks}"
        held = f"{self._end} of {room} rows" if self.window is None else f"{self._end} rows of {self.tokens} tokens"
        return f"KVCache(B={B}, G={G}, D={D}{rolling}; {held}, {size(self.nbytes)})"
