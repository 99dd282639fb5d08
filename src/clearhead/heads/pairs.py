"""Relations between tokens of a text, as pairs: which keys each query is expected to attend to.

Where words are split into tokens, weights count as in Clark et al. 2019: those on a word's tokens are summed, those
from a word's tokens averaged. So a pair is of units, words or single tokens, and a token of no unit (a special one,
in a relation between words) is nobody's prediction.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import ShapeError

__all__ = ["Pairs", "Tokens", "aligned"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of query and key units; each of these is one or more tokens.

    q, k: (N,) units. queries: (T,), keys: (S,) the unit of each token, -1 for those of none.
    """

    name: str
    q: Tensor
    k: Tensor
    queries: Tensor
    keys: Tensor

    def __post_init__(self) -> None:
        if self.q.shape != self.k.shape or self.q.ndim != 1:
            raise ShapeError(f"pairs {self.name!r}: q {describe(self.q)} and k {describe(self.k)} must be lists alike.")
        for what, at, units in (("query", self.q, self.queries), ("key", self.k, self.keys)):
            last = int(units.max()) if units.numel() else -1
            if at.numel() and (int(at.min()) < 0 or int(at.max()) > last):
                raise ShapeError(
                    f"pairs {self.name!r}: a {what} in [{int(at.min())}, {int(at.max())}]; there are 0 to {last}."
                )

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs of tokens that these are: number of the pair, query and key, each (M,)."""
        pair, t = _members(self.q, self.queries)
        again, s = _members(self.k[pair], self.keys)
        return pair[again], t[again], s

    def __repr__(self) -> str:
        return f"Pairs({self.name!r}, {self.q.numel()} of {self.queries.numel()} queries and {self.keys.numel()} keys)"


def _members(wanted: Tensor, unit_of: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each wanted unit, side by side: which wanted one it is, and the token."""
    order = torch.argsort(unit_of, stable=True)
    wanted, units = wanted.contiguous(), unit_of[order].contiguous()
    start, stop = torch.searchsorted(units, wanted), torch.searchsorted(units, wanted, right=True)
    count = stop - start
    which = torch.repeat_interleave(torch.arange(wanted.numel()), count)
    within = torch.arange(which.numel()) - (count.cumsum(0) - count)[which]
    return which, order[start[which] + within]


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
        self.ids = torch.as_tensor(ids)
        n = self.ids.numel()
        if self.ids.ndim != 1 or self.ids.is_floating_point():
            raise ShapeError(f"Tokens(ids): expected the token ids of one sequence, (n,), got {describe(self.ids)}.")
        for name, given in (("texts", texts), ("words", words)):
            if given is not None and len(given) != n:
                raise ShapeError(f"Tokens({name}): expected one a token, {n}, got {len(given)}.")
        self.texts = texts
        self.words = torch.arange(n) if words is None else torch.tensor([-1 if w is None else w for w in words])

    def __len__(self) -> int:
        return self.ids.numel()

    # --- by position ----------------------------------------------------------------------------------------------

    def offset(self, o: int) -> Pairs:
        """The key o tokens after the query (before it, where o < 0)."""
        n = len(self)
        t = torch.arange(n)[max(0, -o) : max(0, n - o)]
        return self._pairs(f"offset({o})", t, t + o)

    def previous(self) -> Pairs:
        """The token before the query."""
        return self._named("previous", self.offset(-1))

    def next(self) -> Pairs:
        """The token after the query."""
        return self._named("next", self.offset(1))

    def itself(self) -> Pairs:
        """The query."""
        return self._named("self", self.offset(0))

    def first(self) -> Pairs:
        """The first token, of every query after it."""
        t = torch.arange(1, max(1, len(self)))
        return self._pairs("first", t, torch.zeros_like(t))

    def window(self, w: int) -> Pairs:
        """The last w tokens, the query itself counted."""
        t, back = torch.arange(len(self))[:, None], torch.arange(w)
        t, s = torch.broadcast_tensors(t, t - back)  # type: ignore[no-untyped-call]
        return self._pairs(f"window({w})", t[s >= 0], s[s >= 0])

    # --- by what stands there -------------------------------------------------------------------------------------

    def same_token(self, *, nearest: bool = False) -> Pairs:
        """Earlier copies of the query token; only the nearest, if asked for."""
        later, earlier = self._copies(nearest)
        return self._pairs("same token (nearest)" if nearest else "same token", later, earlier)

    def induction(self) -> Pairs:
        """The token after an earlier copy of the query token (Olsson et al. 2022)."""
        later, earlier = self._copies(nearest=False)
        after = earlier + 1
        return self._pairs("induction", later[after < later], after[after < later])

    def _copies(self, nearest: bool) -> tuple[Tensor, Tensor]:
        """Every token with each earlier copy of it, or with the nearest one."""
        n = len(self)
        _, kind = torch.unique(self.ids, return_inverse=True)
        order = torch.argsort(kind, stable=True)  # copies side by side, in the order of the text
        starts = torch.searchsorted(kind[order].contiguous(), kind[order].contiguous())
        rank = torch.arange(n) - starts  # how many copies come before
        count = rank.clamp(max=1) if nearest else rank
        which = torch.repeat_interleave(torch.arange(n), count)
        back = torch.arange(which.numel()) - (count.cumsum(0) - count)[which] + 1
        later, earlier = order[which], order[which - back]
        by_query = torch.argsort(later * n + earlier)
        return later[by_query], earlier[by_query]

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
        t = token[which]
        return self._pairs("same word", t[t != s], s[t != s])

    # --- given by the user ----------------------------------------------------------------------------------------

    def pairs(self, pairs: Iterable[tuple[int, int]], name: str = "pairs") -> Pairs:
        """(query, key) pairs of tokens."""
        return self._pairs(name, *_columns(pairs))

    def spans(self, chains: Iterable[Sequence[tuple[int, int]]]) -> Pairs:
        """Coreference: of each chain of spans [start, stop), the tokens of its other spans."""
        found = {
            (t, s)
            for chain in chains
            for a, (start, stop) in enumerate(chain)
            for b, (other, end) in enumerate(chain)
            if a != b
            for t in range(start, stop)
            for s in range(other, end)
        }
        return self.pairs(sorted(found), "spans")

    def of_words(self, pairs: Iterable[tuple[int, int]], name: str = "words") -> Pairs:
        """(query, key) pairs of words, by the numbers that `words` gives them."""
        return Pairs(name, *_columns(pairs), self.words, self.words)

    # --- making them ----------------------------------------------------------------------------------------------

    def _to(self, name: str, keys: Tensor) -> Pairs:
        """These keys, of every other query."""
        t, s = torch.broadcast_tensors(torch.arange(len(self))[:, None], keys)  # type: ignore[no-untyped-call]
        return self._pairs(name, t[t != s], s[t != s])

    def _pairs(self, name: str, t: Tensor, s: Tensor) -> Pairs:
        tokens = torch.arange(len(self))
        return Pairs(name, t, s, tokens, tokens)

    def _named(self, name: str, pairs: Pairs) -> Pairs:
        return Pairs(name, pairs.q, pairs.k, pairs.queries, pairs.keys)


def aligned(pairs: Iterable[tuple[int, int]], queries: Tokens, keys: Tokens) -> Pairs:
    """Aligned words, for cross-attention: (word of the queries' text, word of the keys' text)."""
    return Pairs("aligned", *_columns(pairs), queries.words, keys.words)


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    table = torch.tensor(list(pairs), dtype=torch.long).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _is_punctuation(text: str) -> bool:
    return bool(text) and all(unicodedata.category(letter).startswith("P") for letter in text)
