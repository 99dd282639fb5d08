"""Relations between tokens of a text, as pairs: which keys each query is expected to attend to.

Where words are split into tokens, weights count as in Clark et al. 2019: those on a word's tokens are summed, those
from a word's tokens averaged. So a pair is of units, words or single tokens, and a token of no unit (a special one,
in a relation between words) is nobody's prediction.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import torch
from torch import Tensor

from clearhead._checks import check_count, describe
from clearhead.errors import DTypeError, ShapeError
from clearhead.maps.expected import Expected

__all__ = ["Pairs", "Tokens", "aligned", "is_delimiter", "near_patches"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of query and key units; each of these is one or more tokens.

    expected: which key units each query unit expects. queries: (T,), keys: (S,) the unit of each token, -1 for those of
    none.
    """

    name: str
    expected: Expected
    queries: Tensor
    keys: Tensor

    @classmethod
    def listed(cls, name: str, pairs: Iterable[tuple[int, int]], queries: Tensor, keys: Tensor) -> Pairs:
        """Pairs (query unit, key unit), in any order; one that is there twice counts once."""
        q, k = torch.tensor(sorted(_whole_numbers(name, pairs)), dtype=torch.long).reshape(-1, 2).T.contiguous()
        last = [int(units.max()) if units.numel() else -1 for units in (queries, keys)]
        for what, at, most in (("query", q, last[0]), ("key", k, last[1])):
            if at.numel() and (int(at.min()) < 0 or int(at.max()) > most):
                raise ShapeError(
                    f"pairs {name!r}: a {what} in [{int(at.min())}, {int(at.max())}]; there are 0 to {most}."
                )
        units = torch.arange(last[0] + 1)
        ends = torch.searchsorted(q, units), torch.searchsorted(q, units, right=True)
        return cls(name, Expected(k, *ends), queries, keys)

    @property
    def q(self) -> Tensor:
        """The query unit of each pair, (N,)."""
        return self.expected.pairs(0, len(self.expected.start))[0]

    @property
    def k(self) -> Tensor:
        """The key unit of each pair, (N,)."""
        return self.expected.pairs(0, len(self.expected.start))[1]

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs of tokens that these are: number of the pair, query and key, each (M,)."""
        q, k = self.expected.pairs(0, len(self.expected.start))
        pair, t = _members(q, self.queries)
        again, s = _members(k[pair], self.keys)
        return pair[again], t[again], s

    def __repr__(self) -> str:
        return f"Pairs({self.name!r}, {self.q.numel()} of {self.queries.numel()} queries and {self.keys.numel()} keys)"


def _whole_numbers(name: str, pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Each pair once."""
    try:
        return {(index(t), index(s)) for t, s in pairs}
    except (TypeError, ValueError):
        raise DTypeError(
            f"pairs {name!r}: expected (query, key) pairs of whole numbers, as [(3, 1), (4, 1)]."
        ) from None


def _members(wanted: Tensor, unit_of: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each wanted unit, side by side: which wanted one it is, and the token."""
    order = torch.argsort(unit_of, stable=True)
    wanted, units = wanted.contiguous(), unit_of[order].contiguous()
    ends = torch.searchsorted(units, wanted), torch.searchsorted(units, wanted, right=True)
    return Expected(order, *ends).pairs(0, len(wanted))


class Tokens:
    """A token sequence, and the relations within it, each a method that returns `Pairs`.

    Pairs that a head's mask hides (later keys, under a causal one) are left out where a head is scored.

    Args:
        ids: token ids (n,), a tensor or a list.
        texts: one piece of text a token, for `punctuation`.
        words: the number of the word that each token belongs to, None for special tokens, as a fast tokenizer's
            `encoding.word_ids()`; for `same_word` and relations between words. Each token is a word by default.

    >>> mat_cat = Tokens([5, 7, 5, 7])
    >>> mat_cat.induction().k  # the token after the earlier "mat" is "cat"
    tensor([1, 2])
    """

    def __init__(
        self,
        ids: Tensor | Sequence[int],
        *,
        texts: Sequence[str] | None = None,
        words: Sequence[int | None] | None = None,
    ) -> None:
        self.ids = _ids(ids)
        n = self.ids.numel()
        for name, given in (("texts", texts), ("words", words)):
            if given is not None and len(given) != n:
                raise ShapeError(f"Tokens({name}): expected one a token, {n}, got {len(given)}.")
        self.texts = texts
        self.words = torch.arange(n) if words is None else _numbered(words)

    def __len__(self) -> int:
        return self.ids.numel()

    # --- by position ----------------------------------------------------------------------------------------------

    def offset(self, o: int) -> Pairs:
        """The key o tokens after the query (before it, where o < 0)."""
        try:
            index(o)
        except TypeError:
            raise ShapeError(f"Tokens.offset(o={o!r}): expected an integer.") from None
        return self._range(f"offset({o})", o, o)

    def previous(self) -> Pairs:
        """The token before the query."""
        return self._range("previous", -1, -1)

    def next(self) -> Pairs:
        """The token after the query."""
        return self._range("next", 1, 1)

    def itself(self) -> Pairs:
        """The query."""
        return self._range("self", 0, 0)

    def first(self) -> Pairs:
        """The first token, of every query after it."""
        return self._to("first", torch.zeros(min(1, len(self)), dtype=torch.long))

    def window(self, w: int) -> Pairs:
        """The last w tokens, the query itself counted."""
        check_count("Tokens.window", "w", w, at_least=1)
        return self._range(f"window({w})", 1 - w, 0)

    def near(self, most: int, *, least: int = 0) -> Pairs:
        """The tokens `least` to `most` away, on either side."""
        check_count("Tokens.near", "least", least, at_least=0)
        check_count("Tokens.near", "most", most, at_least=least)
        return self._range(f"near({least}, {most})", -most, most, but=tuple(range(1 - least, least)))

    # --- by what stands there -------------------------------------------------------------------------------------

    def same_token(self, *, nearest: bool = False, later: bool = False) -> Pairs:
        """Earlier copies of the query token; only the nearest, or the later ones too, if asked for."""
        order, begin, place, end = self._copies
        if nearest:
            return self._pairs("same token (nearest)", Expected(order, torch.maximum(begin, place - 1), place))
        return self._pairs("same token", Expected(order, begin, end if later else place, (0,)))

    def induction(self, *, later: bool = False) -> Pairs:
        """The token after an earlier copy of the query token (Olsson et al. 2022); after any, if asked for."""
        order, begin, place, end = self._copies
        after = order + 1
        if len(after):
            end = torch.where(after[end - 1] < len(self), end, end - 1)  # after the last token there is none
        # Not the query itself, and not what follows it: that is no copy of it.
        return self._pairs("induction", Expected(after, begin, end if later else place, (0, 1)))

    @cached_property
    def _copies(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tokens with copies side by side; where those of each token begin, where it stands, where they end."""
        _, kind = torch.unique(self.ids, return_inverse=True)
        order = torch.argsort(kind, stable=True)
        sorted_kinds = kind[order].contiguous()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(self))
        return order, torch.searchsorted(sorted_kinds, kind), place, torch.searchsorted(sorted_kinds, kind, right=True)

    def punctuation(self) -> Pairs:
        """Tokens that are punctuation and nothing else: Clark's delimiters."""
        if self.texts is None:
            raise ShapeError("Tokens.punctuation(): the pieces of text are not known; Tokens(ids, texts=…).")
        at = [n for n, text in enumerate(self.texts) if _is_punctuation(text.strip())]
        return self._to("punctuation", torch.tensor(at, dtype=torch.long))

    def special(self, ids: Collection[int] | None = None) -> Pairs:
        """Special tokens (BOS, SEP): those with these ids, or those that belong to no word."""
        chosen = self.words < 0 if ids is None else torch.isin(self.ids, torch.tensor(sorted(ids)))
        return self._to("special", chosen.nonzero()[:, 0])

    def same_word(self) -> Pairs:
        """The other tokens of the query's word."""
        token = (self.words >= 0).nonzero()[:, 0]
        which, s = _members(self.words[token], self.words)
        pairs = zip(token[which].tolist(), s.tolist(), strict=True)
        return self.pairs(((t, other) for t, other in pairs if t != other), "same word")

    # --- given by the user ----------------------------------------------------------------------------------------

    def pairs(self, pairs: Iterable[tuple[int, int]], name: str = "pairs") -> Pairs:
        """(query, key) pairs of tokens."""
        tokens = torch.arange(len(self))
        return Pairs.listed(name, pairs, tokens, tokens)

    def spans(self, chains: Iterable[Sequence[tuple[int, int]]]) -> Pairs:
        """Coreference: of each chain of spans [start, stop), the tokens of its other spans; of none is it itself."""
        checked = [[self._span(span) for span in chain] for chain in chains]
        found = (
            (t, s)
            for chain in checked
            for a, span in enumerate(chain)
            for b, other in enumerate(chain)
            if a != b
            for t in span
            for s in other
            if t != s  # spans may overlap
        )
        return self.pairs(found, "spans")

    def _span(self, given: tuple[int, int]) -> range:
        try:
            start, stop = map(index, given)
        except (TypeError, ValueError):
            start, stop = -1, -1
        if not 0 <= start < stop <= len(self):
            raise ShapeError(
                f"Tokens.spans: {given!r} is no span; expected (start, stop), 0 <= start < stop <= {len(self)}."
            )
        return range(start, stop)

    def of_words(self, pairs: Iterable[tuple[int, int]], name: str = "words") -> Pairs:
        """(query, key) pairs of words, by the numbers that `words` gives them."""
        return Pairs.listed(name, pairs, self.words, self.words)

    # --- making them ----------------------------------------------------------------------------------------------

    def _range(self, name: str, low: int, high: int, *, but: tuple[int, ...] = ()) -> Pairs:
        """The keys at offsets low to high from the query."""
        t, n = torch.arange(len(self)), len(self)
        return self._pairs(name, Expected(t, (t + low).clamp(0, n), (t + high + 1).clamp(0, n), but))

    def _to(self, name: str, keys: Tensor) -> Pairs:
        """These keys, of every other query."""
        zeros = torch.zeros(len(self), dtype=torch.long)
        return self._pairs(name, Expected(keys, zeros, zeros + len(keys), (0,)))

    def _pairs(self, name: str, expected: Expected) -> Pairs:
        tokens = torch.arange(len(self))
        return Pairs(name, expected, tokens, tokens)


def _ids(given: Any) -> Tensor:
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(f"Tokens(ids): expected token ids, a tensor or a list, got {describe(given)}.") from None
    ids = ids.long() if ids.shape == (0,) else ids  # PyTorch makes float32 of an empty list
    if ids.ndim != 1 or ids.is_floating_point():
        raise ShapeError(f"Tokens(ids): expected the token ids of one sequence, (n,), got {describe(ids)}.")
    return ids


def _numbered(words: Sequence[int | None]) -> Tensor:
    try:
        return torch.tensor([-1 if w is None else index(w) for w in words], dtype=torch.long)
    except TypeError:
        raise DTypeError(f"Tokens(words={words!r}): expected the number of each token's word, or None.") from None


def near_patches(first: int, rows: int, columns: int, n: int) -> Pairs:
    """Of an image in patches, row by row, the first of them token number `first` of n: the patches one or two away."""
    at = {(row, column): first + row * columns + column for row in range(rows) for column in range(columns)}
    steps = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if (y, x) != (0, 0)]
    found = (
        (t, at[row + y, column + x]) for (row, column), t in at.items() for y, x in steps if (row + y, column + x) in at
    )
    return Tokens(torch.zeros(n, dtype=torch.long)).pairs(found, "near patches")


def aligned(pairs: Iterable[tuple[int, int]], queries: Tokens, keys: Tokens) -> Pairs:
    """Aligned words, for cross-attention: (word of the queries' text, word of the keys' text)."""
    return Pairs.listed("aligned", pairs, queries.words, keys.words)


def is_delimiter(piece: str) -> bool:
    """Whether a piece of text is punctuation and nothing else, or the name of a special token, [SEP] or <s>.

    >>> [is_delimiter(piece) for piece in (" .", "[SEP]", "<|im_end|>", " cat", "\\n")]
    [True, True, True, False, False]
    """
    return _is_punctuation(piece.strip()) or re.fullmatch(r"\[[A-Z]+\]|<\|?[\w/]+\|?>", piece.strip()) is not None


def _is_punctuation(text: str) -> bool:
    return bool(text) and all(unicodedata.category(letter).startswith("P") for letter in text)
