"""Every pair of values at least once, in far fewer cases than the full product."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Cases in which every two values of different factors meet; greedy and deterministic.

    Most faults need one value, or two that meet (Kuhn, Wallace, Gallo 2004), so this finds nearly what the full
    product finds. As many cases as the two longest factors have pairs, and some.

    >>> cases = pairwise({"a": "12", "b": "xyz", "c": "pq"})
    >>> len(cases), cases[0]
    (6, {'a': '1', 'b': 'x', 'c': 'p'})
    """
    names = sorted(factors, key=lambda name: -len(factors[name]))
    left: dict[Pair, None] = dict.fromkeys(  # a dict keeps its order, a set of strings does not
        ((one, i), (two, j))
        for one, two in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(factors[one])), range(len(factors[two])))
    )
    used = {name: [0] * len(factors[name]) for name in names}
    cases = []
    while left:
        chosen = dict(next(iter(left)))
        for name in names:
            if name not in chosen:
                chosen[name] = _best(name, chosen, names, left, used[name])
        for name, at in chosen.items():
            used[name][at] += 1
        for pair in itertools.combinations([(name, chosen[name]) for name in names], 2):
            left.pop(pair, None)
        cases.append({name: factors[name][chosen[name]] for name in factors})
    return cases


def _best(name: str, chosen: dict[str, int], names: list[str], left: dict[Pair, None], used: list[int]) -> int:
    """The value of this factor that meets the most new partners; of equals, the one used least."""

    def meets(at: int) -> int:
        mine = (name, at)
        pairs = (
            (other, mine) if names.index(other[0]) < names.index(name) else (mine, other) for other in chosen.items()
        )
        return sum(pair in left for pair in pairs)

    return max(range(len(used)), key=lambda at: (meets(at), -used[at]))
