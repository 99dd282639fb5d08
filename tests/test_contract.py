"""Every map class keeps the contract, on inputs that break attention code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from clearhead.kernels.tiles import tile_size
from clearhead.testing import SUBJECTS, build_case, pairwise, verify
from clearhead.testing.cases import FACTORS, LARGE

SAMPLE = pairwise({"map": list(SUBJECTS), **FACTORS})
# 1,025 queries on 1,025 keys take a second: a few, in which everything that matters at that size occurs.
BIG = [
    {
        "map": "SoftmaxMap",
        "mask": mask,
        "size": LARGE[0],
        "bias": bias,
        "layout": layout,
        "dtype": dtype,
        "heads": heads,
        "tile": tile,
    }
    for mask, bias, layout, dtype, heads, tile in (
        ("causal + padded keys", "softcap", "tokens first", "bfloat16", "4/2", "default"),
        ("dense (T, S)", "alibi", "contiguous", "float32", "2/2", "third"),
    )
]


def _verify(names: dict[str, str], seed: int) -> None:
    case = build_case(names, seed=seed)
    if case.tile is None:
        return verify(SUBJECTS[names["map"]](case))
    with tile_size(*case.tile):
        verify(SUBJECTS[names["map"]](case))


@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=lambda n: ", ".join(SAMPLE[n].values()))
def test_contract_pairwise(number: int) -> None:
    _verify(SAMPLE[number], number)


@pytest.mark.full
@pytest.mark.parametrize("names", BIG, ids=lambda names: ", ".join(names.values()))
def test_contract_at_size_1025(names: dict[str, str]) -> None:
    _verify(names, 0)


def test_the_sample_meets_every_pair() -> None:
    factors = {"map": list(SUBJECTS), **FACTORS}
    met = {pair for names in SAMPLE for pair in itertools.combinations(names.items(), 2)}
    for (one, ones), (two, twos) in itertools.combinations(factors.items(), 2):
        missing = [(i, j) for i in ones for j in twos if ((one, i), (two, j)) not in met]
        assert not missing, f"{one} × {two}: {missing[:3]} never met"


def _product(mask: str, dtype: str) -> Iterator[dict[str, str]]:
    """size × heads × bias in full; map, layout and tile go round, so that each is met by all."""
    rest = itertools.cycle(itertools.product(SUBJECTS, FACTORS["layout"], FACTORS["tile"]))
    whole = itertools.product(FACTORS["size"], FACTORS["heads"], FACTORS["bias"])
    for size, heads, bias in [*whole, (LARGE[0], "4/2", "none"), (LARGE[0], "3/1", "-inf")]:
        name, layout, tile = next(rest)
        yield {
            "map": name,
            "size": size,
            "mask": mask,
            "bias": bias,
            "layout": layout,
            "dtype": dtype,
            "heads": heads,
            "tile": tile,
        }


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("mask", FACTORS["mask"])
def test_contract_full(mask: str, dtype: str) -> None:
    for seed, names in enumerate(_product(mask, dtype)):
        _verify(names, seed)
