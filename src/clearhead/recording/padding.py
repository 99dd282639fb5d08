"""Which tokens of a pass are real: read from the model's own `attention_mask`, joined to each map's mask.

A padded key is seen by nobody and a padded query sees nothing, whatever the model did with it: libraries hide
with the dtype's lowest number, which turns a padded row into a uniform one.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import masks
from clearhead._checks import describe
from clearhead.errors import ShapeError
from clearhead.recording.calls import AnyCall, Call, DenseCall
from clearhead.recording.sides import is_cross

__all__ = ["Padding", "check_padding", "read_padding"]


@dataclass(frozen=True, eq=False)
class Padding:
    """The real tokens of one call of the model, (B, tokens) bool; None where nothing is padded or was said."""

    tokens: Tensor | None = None  # attention_mask
    encoder: Tensor | None = None  # encoder_attention_mask
    decoder: Tensor | None = None  # decoder_attention_mask
    has_decoder: bool = False  # the model is an encoder-decoder: attention_mask is the encoder's
    stated: bool = False  # by the user (padding=), rather than read
    brought: int | None = None  # how many tokens came with the call, where that is known
    grown: dict[int, int] = field(default_factory=dict)  # by layer: length of a text that began as stated; 0 of others

    def rule(self, call: AnyCall, path: str, number: int) -> masks.MaskRule | None:
        """What this call's map must not show, or None: padding that the user stated, else all that is known."""
        real = None if self.stated or isinstance(call, DenseCall) else call.real_queries
        own = None if real is None else masks.padding(queries=real)
        if not self.stated and self.tokens is self.encoder is self.decoder is None:
            return own
        return masks.all_of(own, self._of_the_pass(call, path, number))

    def _of_the_pass(self, call: AnyCall, path: str, number: int) -> masks.MaskRule | None:
        """What the model's own arguments hide in this call.

        A call that came without any mask did not hide the padded keys, so the padding is not its own (the
        image tower of a vision-language model, say), but for the queries of a decoder's cross-attention, whose keys
        are whole; padding that the user stated is always joined where it fits.
        """
        B, _, T, S = call.shape
        keys, queries = self._of(path)
        if not self.stated and isinstance(call, Call) and not call.masks and not call.biases:
            keys, queries = None, queries if is_cross(path) and self._in_decoder(path) else None
        if self.stated and queries is not None and not is_cross(path):
            keys = queries = self._text(queries, number, T, S)
        keys = keys if keys is not None and keys.shape == (B, S) else None
        queries = queries if queries is not None and queries.shape[0] == B and queries.shape[1] >= T else None
        if queries is not None and not is_cross(path) and keys is None:
            return None  # self-attention of another length: not about these tokens
        if queries is not None and queries.shape[1] > T:  # a cached step has the last; other calls pooled ones, say
            queries = queries[:, -T:] if self.brought in (None, T) else None
        if not self.stated and isinstance(call, DenseCall) and not call.leaves_out(keys, queries):
            return None
        return masks.padding(keys=keys, queries=queries) if keys is not None or queries is not None else None

    def _in_decoder(self, path: str) -> bool:
        return self.has_decoder and "decoder" in path.split(".")

    def _of(self, path: str) -> tuple[Tensor | None, Tensor | None]:
        """The real keys and the real queries of the module at this path."""
        in_decoder = self._in_decoder(path)
        queries = self.decoder if in_decoder else self.tokens
        if not is_cross(path):
            return queries, queries
        return self.encoder if self.encoder is not None else self.tokens if in_decoder else None, queries

    def _text(self, real: Tensor, number: int, T: int, S: int) -> Tensor | None:
        """The stated tokens and what was generated after them, all of it real; None in another text.

        (B, S): of a cache that slides the last.
        """
        n, known = real.shape[1], self.grown.get(number)
        if known and T < S:
            self.grown[number] = known + T
        else:  # a text begins, or its last part is read; a single query is a step of another text
            self.grown[number] = n * (n == S and (T > 1 or T == S or known is None))
        return F.pad(real, (0, self.grown[number] - n), value=True)[:, -S:] if self.grown[number] else None


def check_padding(padding: object) -> None:
    """Raise ShapeError unless `padding` is None, False or a tensor (B, tokens)."""
    if padding is None or padding is False:
        return
    if not isinstance(padding, Tensor) or padding.ndim != 2 or padding.is_floating_point():
        raise ShapeError(
            f"record(padding={describe(padding)}): expected the tokenizer's attention_mask, a bool or 0/1 integer"
            " tensor (B, tokens) that is True where a token is real; False for no padding; None to read it from the"
            " call."
        )


def read_padding(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stated: Tensor | bool | None
) -> Padding:
    """The padding of the call `model(*args, **kwargs)`, or the one the user stated."""
    if stated is False:
        return Padding(stated=True)
    parameters, given = _bound(model, args, kwargs)
    has_decoder = "decoder_attention_mask" in parameters or "decoder_input_ids" in parameters
    decoder, brought = _flags(given.get("decoder_attention_mask")), _brought(given, "decoder_" if has_decoder else "")
    if isinstance(stated, Tensor):
        return Padding(_flags(stated), decoder=decoder, has_decoder=has_decoder, stated=True, brought=brought)
    tokens, encoder = (_flags(given.get(name)) for name in ("attention_mask", "encoder_attention_mask"))
    return Padding(tokens, encoder, decoder, has_decoder, brought=brought)


def _brought(given: dict[str, Any], side: str) -> int | None:
    """How many tokens a call of a transformers model brings, those in its cache not counted."""
    tensors = (given.get(side + name) for name in ("input_ids", "inputs_embeds"))
    return next((x.shape[1] for x in tensors if isinstance(x, Tensor) and x.ndim > 1), None)


def _bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """The names that `forward` takes, and the arguments of this call by name."""
    signature = inspect.signature(model.forward)
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will say so
        given = {}
    return set(signature.parameters), {**kwargs, **given}


def _flags(mask: object) -> Tensor | None:
    """A 2-D mask as bool; None where it is something else, or pads nothing."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or (mask.is_floating_point() and not _is_zero_one(mask)):
        return None
    real = mask != 0
    return None if bool(real.all()) else real


def _is_zero_one(mask: Tensor) -> bool:
    """Whether a float mask says which tokens are real, as transformers takes it; others are added to scores.

    Zeros alone are added: they hide nothing.
    """
    return bool(((mask == 0) | (mask == 1)).all()) and bool(mask.any())
