"""Test the test: break one line of the core, and see that the check of that name fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import masks, scores
from clearhead.kernels import additive, linear
from clearhead.maps import AdditiveMap, LinearMap, SoftmaxMap, base, query_key, reductions, softmax
from clearhead.masks import sparse
from clearhead.testing import CHECKS, SUBJECTS, Case, build_case, failures

PLAIN = {
    "map": "SoftmaxMap",
    "mask": "causal",
    "size": "33x127",
    "bias": "none",
    "layout": "contiguous",
    "dtype": "float32",
    "heads": "4/2",
    "tile": "default",
}


@dataclass(frozen=True)
class Mutant:
    """A broken line, the input on which it shows, and the check that must see it."""

    check: str
    owner: Any
    name: str
    broken: Any
    case: dict[str, str]


MUTANTS: dict[str, Mutant] = {}


def mutant(check: str, owner: Any, name: str, **case: str) -> Callable[[Any], Any]:
    """Register what replaces `owner.name`."""

    def register(broken: Any) -> Any:
        named = broken.fget if isinstance(broken, property) else broken
        MUTANTS[named.__name__.replace("_", " ")] = Mutant(check, owner, name, broken, {**PLAIN, **case})
        return broken

    return register


# --- scores and masks --------------------------------------------------------------------------------------

init, tile = SoftmaxMap.__init__, SoftmaxMap.tile


@mutant("tiles", SoftmaxMap, "__init__")
def drop_the_scale(self: Any, *args: Any, **named: Any) -> None:
    init(self, *args, **named)
    self.scale = 1.0


@mutant("masked_weights_are_exactly_0", masks.Band, "allows")
def flip_the_mask(self: Any, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
    return q + S - T < k


@mutant("masked_weights_are_exactly_0", masks.Band, "_offset", size="127x33")
def align_upper_left(self: Any, T: int, S: int) -> int:
    return 0


@mutant("masked_weights_are_exactly_0", masks, "sliding_window", mask="window")
def window_one_too_wide(width: int) -> masks.MaskRule:
    return masks.Band(0, width + 1, "wide")


@mutant("to_dense", masks, "sliding_window", mask="window")
def window_one_too_narrow(width: int) -> masks.MaskRule:
    return masks.Band(0, width - 1, "narrow")


@mutant("to_dense", masks.Band, "coverage")
def call_mixed_blocks_empty(self: Any, rows: slice, cols: slice, T: int, S: int) -> masks.Coverage:
    return masks.Coverage.EMPTY


@mutant("masked_weights_are_exactly_0", masks.Band, "coverage")
def call_mixed_blocks_full(self: Any, rows: slice, cols: slice, T: int, S: int) -> masks.Coverage:
    return masks.Coverage.FULL


@mutant("masked_weights_are_exactly_0", masks.Both, "allows", mask="causal + padded keys")
def combine_with_or(self: Any, *at: Any) -> Tensor:
    return self.left.allows(*at) | self.right.allows(*at)


@mutant("tiles", scores.T5Bias, "values", bias="t5")
def align_the_bias_upper_left(self: Any, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
    return self.table[scores.t5_buckets(k - q), h]


@mutant("tiles", softmax, "softcap", bias="softcap")
def drop_the_softcap(dots: Tensor, cap: float | None) -> Tensor:
    return dots


@mutant("masked_weights_are_exactly_0", scores.DenseBias, "values", bias="finfo.min")
def leave_finfo_min_finite(self: Any, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
    return self.bias[b, h * 0, q, k].clamp(min=-50)


@mutant("rows_sum_to_at_most_1", SoftmaxMap, "_merge", bias="learned sinks")
def forget_the_learned_sinks(self: Any, parts: list[Tensor], rows: slice) -> Tensor:
    return torch.logsumexp(torch.stack(parts), 0)


@mutant("tiles", softmax, "grouped_matmul")
def tile_grouped_keys(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat(1, q.shape[1] // k.shape[1], 1, 1)


@mutant("product_of_grouped_heads", reductions, "grouped_matmul")
def tile_grouped_values(a: Tensor, x: Tensor) -> Tensor:
    return a @ (x if x.ndim < 4 else x.repeat(1, a.shape[1] // x.shape[1], 1, 1))


@mutant("empty_rows_are_0", SoftmaxMap, "tile", mask="dense (T, S)")
def drop_the_fix_of_fully_masked_rows(self: Any, rows: slice, cols: slice) -> Tensor:
    dots = self._scores(rows, cols)
    return torch.exp(dots - torch.logsumexp(dots, -1, keepdim=True))


@mutant("tile_size_changes_nothing", SoftmaxMap, "_merge", mask="none")
def merge_by_the_largest(self: Any, parts: list[Tensor], rows: slice) -> Tensor:
    return torch.stack(parts).amax(0)


@mutant("masked_weights_are_exactly_0", sparse.Strided, "allows", mask="strided")
def stride_from_the_first_query(self: Any, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
    return q % self.stride == k % self.stride


@mutant("tile_size_changes_nothing", sparse.Strided, "coverage", mask="strided")
def look_for_a_multiple_in_the_nearest_row_alone(self: Any, rows: slice, cols: slice, T: int, S: int) -> masks.Coverage:
    first = rows.start + S - T - cols.start
    return masks.Coverage.MIXED if first % self.stride == 0 else masks.Coverage.EMPTY


@mutant("to_dense", sparse.GlobalTokens, "allows", mask="global + window", size="33x33")
def global_tokens_are_seen_and_do_not_see(
    self: Any, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int
) -> Tensor:
    return (k[..., None] == torch.tensor(self.at)).any(-1)


@mutant("masked_weights_are_exactly_0", sparse.BlockSparse, "allows", mask="block sparse", size="33x33")
def transpose_the_layout(self: Any, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
    return self.layout[b * 0, h, k // self.block, (q + S - T) // self.block]


# --- additive and linear maps ------------------------------------------------------------------------------

features, linear_sums = linear.features, linear.attention


@mutant("tiles", additive, "_part", map="AdditiveMap")
def drop_the_tanh(q: Tensor, k: Tensor, score: Tensor) -> Tensor:
    return (q[..., :, None, :] + k[..., None, :, :]) @ score


@mutant("tiles", additive, "fold", map="AdditiveMap")
def fold_heads_in_tiles(x: Tensor, groups: int) -> Tensor:
    B, H, t, A = x.shape
    return x.reshape(B, H // groups, groups, t, A).transpose(1, 2).reshape(B, groups, H // groups * t, A)


@mutant("tiles", AdditiveMap, "_is_whole", map="AdditiveMap")
def normalise_every_tile(self: Any, rows: slice, cols: slice) -> bool:
    return True


@mutant("masked_weights_are_exactly_0", AdditiveMap, "_hide", map="AdditiveMap")
def compare_with_the_future(self: Any, block: Tensor, rows: slice, cols: slice, value: float) -> Tensor:
    return block


@mutant("leading_indices", query_key, "_groups_of", map="AdditiveMap")
def keep_the_first_key_head(heads: Any, per_group: int) -> int:
    return 0


@mutant("tiles", linear, "phi", map="LinearMap")
def elu_without_the_1(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x)


@mutant("rows_sum_to_at_most_1", linear, "divide", map="LinearMap")
def forget_the_denominator(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator


@mutant("product", linear, "attention", map="LinearMap, causal and padded", size="33x33")
def leave_the_query_itself_out(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> Any:
    return linear_sums(q, torch.nn.functional.pad(k, (0, 0, 1, 0))[:, :, :-1], v, *rest, **how)


@mutant("rows_sum_to_at_most_1", linear, "features", map="LinearMap, causal and padded", size="33x33")
def count_padded_keys(k: Tensor, padding: Tensor | None = None) -> Tensor:
    return features(k)


@mutant("product_of_grouped_heads", LinearMap, "_side_by_side", map="LinearMap", heads="4/2")
def repeat_the_heads_in_tiles(self: Any, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    B, H = self._q.shape[:2]
    x = x.expand(B, *x.shape[-3:]) if x.ndim > 2 else x.expand(B, 1, *x.shape)
    return k.repeat_interleave(H // k.shape[1], 1), x.repeat(1, H // x.shape[1], 1, 1)


# --- primitives and indices --------------------------------------------------------------------------------


@mutant("shape_dtype_and_device", SoftmaxMap, "dtype", dtype="bfloat16")
@property
def keep_half_precision(self: Any) -> torch.dtype:
    return torch.bfloat16


@mutant("to_dense", SoftmaxMap, "tile", size="33x33")
def transpose_the_tile(self: Any, rows: slice, cols: slice) -> Tensor:
    return tile(self, cols, rows).mT


@mutant("rows_and_columns", base.AttentionMap, "_read")
def read_the_first_row(self: Any, t: Any, s: Any) -> Any:
    return self.to_dense()[..., 0, :]


@mutant("pick", SoftmaxMap, "_pairs")
def pick_without_wrapping(self: Any, t: Any, s: Any) -> Any:
    return torch.broadcast_tensors(torch.as_tensor(t).abs(), torch.as_tensor(s).abs())


@mutant("diagonal", base.AttentionMap, "diagonal")
def diagonal_of_the_next_token(self: Any, offset: int = 0) -> Tensor:
    at = self.positions - offset
    t = ((at >= 0) & (at < self.shape[-1])).nonzero().squeeze(-1)
    return self.pick(t, at[t])


@mutant("selection_stays_lazy", base.AttentionMap, "_read")
def read_everything(self: Any, t: Any, s: Any) -> Any:
    return self.to_dense()


@mutant("leading_indices", query_key, "_groups_of")
def read_the_first_group(heads: Any, per_group: int) -> Any:
    return 0 if isinstance(heads, int) else torch.zeros_like(heads)


@mutant("positions_follow_selection", SoftmaxMap, "positions")
@property
def positions_of_a_whole_map(self: Any) -> Tensor:
    T, S = self.shape[-2:]
    return torch.arange(T) + S - T


# --- operations --------------------------------------------------------------------------------------------


@mutant("product", reductions.Product, "update")
def overwrite_instead_of_adding(self: Any, tile: Any) -> None:
    self._sum[..., tile.rows, :] = reductions.grouped_matmul(tile.weights, self._x[..., tile.cols, :]) * 0.5


@mutant("transposed_product", base.Transposed, "__matmul__", size="33x33")
def forget_to_transpose(self: Any, y: Tensor) -> Tensor:
    return self.mT @ y


@mutant("adjoint", base.Transposed, "__matmul__", size="33x33")
def forget_that_the_transpose_is_adjoint(self: Any, y: Tensor) -> Tensor:
    return self.mT @ y


@mutant("nan_reaches_only_who_gives_it_weight", base.AttentionMap, "_product")
def multiply_0_by_nan(self: Any, x: Tensor, *, transposed: bool) -> Tensor:
    return self._finite_product(x, transposed=transposed)


@mutant("entropy", reductions, "entropy")
def entropy_in_bits(tile: Any) -> Tensor:
    return -(tile.weights * tile.weights.clamp(min=1e-38).log2()).sum(-1)


def _signed(positions: Tensor) -> Any:
    return lambda tile: (
        tile.weights * (positions[tile.rows, None] - torch.arange(tile.cols.start, tile.cols.stop))
    ).sum(-1)


@mutant("distance", reductions, "distance", mask="none")
def signed_distance(positions: Tensor) -> Any:
    return _signed(positions)


@mutant("received", base.AttentionMap, "received")
def mean_instead_of_sum(self: Any) -> Tensor:
    return self.to_dense().mean(-2)


@mutant("mass", base.AttentionMap, "mass")
def count_a_key_as_often_as_named(self: Any, keys: Any) -> Tensor:
    return self.to_dense()[..., keys].sum(-1) if isinstance(keys, list) else self.to_dense()[..., keys]


@mutant("topk", reductions.TopK, "result")
def topk_smallest_first(self: Any) -> tuple[Tensor, Tensor]:
    return self.values.clamp(min=0).flip(-1), self.indices.flip(-1)


@mutant("topk", base.AttentionMap, "topk")
def topk_of_positions_in_the_tile(self: Any, k: int) -> tuple[Tensor, Tensor]:
    values, indices = self.to_dense().topk(k)
    return values, indices % 8


def _bins(self: Any, weights: Tensor, part: slice, size: int, bins: int) -> tuple[slice, Tensor]:
    """Bins of ⌈size/bins⌉, the last one short: the other convention."""
    width = math.ceil(size / bins)
    at = torch.arange(part.start, part.stop) // width
    parts = [weights[..., at == i] for i in range(bins)]
    reduced = [(p.amax(-1) if self._maximum else p.sum(-1)) if p.shape[-1] else p.sum(-1) for p in parts]
    return slice(0, bins), torch.stack(reduced, -1)


@mutant("pool_max", reductions.Pool, "_pool")
def pool_max_in_other_bins(*args: Any) -> Any:
    return _bins(*args)


@mutant("pool_sum", reductions.Pool, "_pool")
def pool_sum_in_other_bins(*args: Any) -> Any:
    return _bins(*args)


@mutant("statistics", reductions, "to_first")
def to_last_instead_of_first(tile: Any) -> Tensor:
    return tile.weights[..., -1]


# --- refusals ----------------------------------------------------------------------------------------------


@mutant("nothing_becomes_dense_by_accident", base.AttentionMap, "__array__")
def densify_for_numpy(self: Any, dtype: Any = None, copy: Any = None) -> Any:
    return self.to_dense().numpy()


@mutant("bad_indices_are_refused", base, "position")
def wrap_indices_around(index: int, size: int, what: str) -> int:
    return index % size


@mutant("repr_computes_nothing", SoftmaxMap, "_notes")
def show_the_lse(self: Any) -> list[str]:
    return [str(self.lse.sum())]


@cache
def _case_that_passes(names: tuple[tuple[str, str], ...]) -> Case:
    case = build_case(dict(names))
    assert not failures(SUBJECTS[case.names["map"]](case)), "a check fails before anything is broken"
    return case


@pytest.mark.parametrize("name", MUTANTS)
def test_the_named_check_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MUTANTS[name]
    whole = _case_that_passes(tuple(broken.case.items()))
    monkeypatch.setattr(broken.owner, broken.name, broken.broken)
    case = build_case(broken.case)  # again: some mutants break what a case is made of
    found = failures(SUBJECTS[case.names["map"]](replace(case, seen=whole.seen)))
    assert broken.check in found, f"{name}: {broken.check} passes; failing: {sorted(found)}"


def test_every_check_has_a_mutant() -> None:
    assert sorted({broken.check for broken in MUTANTS.values()}) == sorted(CHECKS)
