"""A recording as views, one for each item of its batch, without the padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import ShapeError
from clearhead.maps.base import AttentionMap
from clearhead.maps.composed import Stitched
from clearhead.maps.dense import DenseMap
from clearhead.maps.softmax import SoftmaxMap
from clearhead.masks import BoundMask, MaskRule, as_rule, causal
from clearhead.page.payload import ENDS
from clearhead.page.texts import Tokens
from clearhead.recording import Recording
from clearhead.recording.recording import Text
from clearhead.recording.sides import sides_of
from clearhead.tokens import pieces_of, same_words, spaced
from clearhead.view import View

__all__ = ["of_item", "of_recording"]

Words: TypeAlias = "Sequence[str] | Sequence[Sequence[str]]"


def of_recording(
    recording: Recording, tokenizer: Any, ids: Any, *, tokens: Words | None, target: Any, name: str
) -> list[View]:
    """One view an item. Args: see `look`."""
    maps = list(recording)
    if any(len(attn.shape) != 4 for attn in maps):
        raise ShapeError(f"look(recording): expected maps (B, H, T, S), got {[attn.shape for attn in maps][:3]}.")
    sides = sides_of(recording.paths)
    given = _given(tokenizer, ids, tokens, target, two=any(sides))
    prompt = _prompt(recording, maps[0])
    return [_item(recording, maps, sides, given, b, prompt, name) for b in range(maps[0].shape[0])]


def _item(
    recording: Recording,
    maps: Sequence[AttentionMap],
    sides: Sequence[str],
    given: Sequence[_Given],
    b: int,
    prompt: int | None,
    name: str,
) -> View:
    ends = [ENDS[side] for side in sides]
    real = _real(maps, ends, b, len(given))
    cut = [of_item(attn, b, real[q], real[k]) for attn, (q, k) in zip(maps, ends, strict=True)]
    texts = [one.tokens(b, part) for one, part in zip(given, real, strict=True)]
    if prompt is not None:
        texts = [replace(texts[0], prompt=prompt - real[0].start)]
    return View(cut, list(recording.layers), texts, name, sides=sides)


def _prompt(recording: Recording, first: AttentionMap) -> int | None:
    """How many tokens the model was given, where it wrote the rest."""
    texts = recording.texts
    if len(texts) != 1 or len(texts[0].passes) < 2 or not isinstance(texts[0], Text):
        return None
    whole, begun = first.shape[-1], texts[0].passes[0][0].shape[-1]
    return begun if first.shape[-2] == whole and begun < whole else None


# --- what the tokens are ------------------------------------------------------------------------------------------


class _Given:
    """What is known of the tokens of one side: of each item, or of all alike."""

    def __init__(self, name: str, pieces: Words | None, ids: Tensor | None, tokenizer: Any) -> None:
        self._name, self._pieces, self._ids, self._tokenizer = name, pieces, ids, tokenizer

    def tokens(self, b: int, part: slice) -> Tokens:
        """The tokens of an item, those of padding left out."""
        length = part.stop - part.start
        if self._ids is not None:
            own = self._ids[b % len(self._ids)].cpu()[part]
            if len(own) < length:
                raise ShapeError(
                    f"look(recording, tokenizer, ids): {len(own)} ids of item {b}, its maps have {length}."
                )
            return Tokens(pieces_of(self._tokenizer, own.tolist()), own, self._name)
        words: Sequence[Any] = range(length)
        if self._pieces is not None:
            each = isinstance(self._pieces[0], str)
            words = self._pieces if each else self._pieces[b]
            words = words[part] if len(words) >= part.stop and len(words) != length else words
        if len(words) != length:
            raise ShapeError(f"look(recording, tokens=…): {len(words)} tokens for item {b}, whose maps have {length}.")
        pieces = spaced(words)
        return Tokens(pieces, same_words(pieces), self._name)


def _given(tokenizer: Any, ids: Any, tokens: Words | None, target: Any, *, two: bool) -> list[_Given]:
    if isinstance(ids, Mapping):
        target = ids.get("decoder_input_ids") if target is None else target
        ids = ids.get("input_ids")
    known = [_as_ids(one) if tokenizer is not None else None for one in (ids, target)]
    words = [tokens, None if known[1] is not None else target]
    names = ["source", "target"] if two else [""]
    return [_Given(name, words[n], known[n], tokenizer) for n, name in enumerate(names)]


def _as_ids(ids: Any) -> Tensor | None:
    """(B, n), or None where none are given."""
    if ids is None:
        return None
    found = torch.as_tensor(ids)
    if found.ndim not in (1, 2) or found.is_floating_point():
        raise ShapeError(f"look(recording, tokenizer, ids): expected token ids (n,) or (B, n), got {describe(found)}.")
    return found if found.ndim == 2 else found[None]


# --- one item -----------------------------------------------------------------------------------------------------


def _real(maps: Sequence[AttentionMap], ends: Sequence[tuple[int, int]], b: int, texts: int) -> list[slice]:
    """The tokens of each text that no map hides as padding: from the first to the last."""
    seen: list[Tensor | None] = [None] * texts
    for attn, (queries, keys) in zip(maps, ends, strict=True):
        even = attn[b : b + 1, :1].uniform() if attn.heads_alike else attn[b : b + 1].uniform()
        T, S = even.shape[-2:]
        rows = (even @ even.like.new_ones(S, 1))[0, ..., 0].amax(0) > 0
        columns = (even.mT @ even.like.new_ones(T, 1))[0, ..., 0].amax(0) > 0
        found = {queries: rows, keys: columns} if queries != keys else {keys: _both(rows, columns)}
        for text, here in found.items():
            known = seen[text]
            if known is not None and len(known) != len(here):
                raise ShapeError(
                    f"look(recording): maps of {len(known)} and of {len(here)} tokens where one text is read. Record"
                    " some layers only, record(model, layers=[…]), or look at the model itself."
                )
            seen[text] = here if known is None else known & here
    return [_hull(one) for one in seen]


def _both(rows: Tensor, columns: Tensor) -> Tensor:
    """A token of self-attention is real if it is seen or sees; queries are the last of the keys."""
    sees = columns.new_zeros(columns.shape)
    sees[len(columns) - len(rows) :] = rows[-len(columns) :]
    return columns | sees


def _hull(real: Tensor | None) -> slice:
    where = [] if real is None else real.nonzero().squeeze(-1).tolist()
    return slice(where[0], where[-1] + 1) if where else slice(0, 0 if real is None else len(real))


def of_item(attn: AttentionMap, b: int, rows: slice, cols: slice) -> AttentionMap:
    """One item of a batch on some of its queries and keys, as a map (1, H, T, S).

    Cost: of a mask that is no rule, its part is looked at; of a map that is no softmax of q and k, its weights are.
    """
    one = attn[b : b + 1]
    if isinstance(one, Stitched):
        return _stitched(one, rows, cols)
    if not isinstance(one, SoftmaxMap):
        whole = (rows.stop - rows.start, cols.stop - cols.start) == tuple(one.shape[-2:])
        return one if whole else DenseMap(one.tile(rows, cols))
    v = None if one.v is None else one.v[:, :, cols]
    bias = one._bias_of(rows, cols)
    return SoftmaxMap(
        one.q[:, :, rows],
        one.k[:, :, cols],
        v=v,
        mask=_mask(one, rows, cols),
        scale=one.scale,
        bias=bias,
        softcap=one.softcap,
        sinks=one.sinks,
    )


def _mask(attn: SoftmaxMap, rows: slice, cols: slice) -> MaskRule | None:
    """What the mask hides in a part of the map: nothing, the future, or as it is."""
    rule = attn.mask
    if rule is None or (rule == causal() and (rows, cols) == tuple(slice(0, n) for n in attn.shape[-2:])):
        return rule
    seen = BoundMask(rule, *attn._bound).tile(rows, cols, attn._b, attn._h)
    if bool(seen.all()):
        return None
    t, s = seen.shape[-2:]
    return causal() if bool((seen == torch.ones(t, s, dtype=torch.bool).tril(s - t)).all()) else as_rule(seen)


def _stitched(attn: Stitched, rows: slice, cols: slice) -> Stitched:
    """The parts of a map of generation, each without padding."""
    kept, starts = [], []
    for part in attn._parts:
        own, keys = part.within(rows, cols)
        if own.start < own.stop:
            kept.append(of_item(part.attn, 0, own, keys))
            starts.append(max(0, part.cols.start - cols.start))
    return Stitched(kept, starts)
