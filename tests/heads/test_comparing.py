"""Which heads changed: distances against the dense formula, what is comparable, and the permutation baseline."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import DenseMap, SoftmaxMap, compare
from clearhead.errors import DTypeError, ModelError, ShapeError
from clearhead.kernels.tiles import tile_size
from clearhead.masks import causal
from clearhead.testing.memory import Allocations

B, H, T = 2, 4, 9


def dense(seed: int, tokens: int = T, lower: bool = True) -> Tensor:
    scores = torch.randn(B, H, tokens, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if lower:
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1) > 0, -torch.inf)
    return scores.softmax(-1)


def tvd(a: Tensor, b: Tensor) -> Tensor:
    return ((a - b).abs().sum(-1) / 2).mean((0, 2))


def jsd(a: Tensor, b: Tensor) -> Tensor:
    middle = (a + b) / 2
    kl = [torch.where(x > 0, x * (x / middle).log(), 0).sum(-1) for x in (a, b)]
    return (sum(kl) / 2).mean((0, 2))


def columns(found: Any, *names: str) -> list[Tensor]:
    return [torch.tensor([getattr(head, name) for head in found], dtype=torch.float64) for name in names]


@pytest.mark.parametrize("size", [(2, 3), (128, 128)])
def test_distances_are_those_of_the_dense_weights(size: tuple[int, int]) -> None:
    a, b = dense(0), dense(1)
    with tile_size(*size):
        found = compare(DenseMap(a), DenseMap(b))
    own = columns(found, "tvd", "jsd")
    torch.testing.assert_close(own, [tvd(a, b), jsd(a, b)])
    rolled = [torch.stack([kind(a, b.roll(n, 1)) for n in (1, 2, 3)]) for kind in (tvd, jsd)]
    others = columns(found, "tvd_others", "jsd_others", "tvd_others_std", "jsd_others_std")
    torch.testing.assert_close(others[:2], [one.mean(0) for one in rolled])
    torch.testing.assert_close(others[2:], [one.std(0) for one in rolled])
    assert found.queries == T


def test_the_same_maps_are_no_distance_apart_and_disjoint_ones_all_there_is() -> None:
    first, second = torch.eye(2)[None, None].expand(1, 2, 2, 2), torch.eye(2).flip(-1)[None, None].expand(1, 2, 2, 2)
    assert [(head.tvd, head.jsd) for head in compare(DenseMap(first), DenseMap(first))] == [(0, 0), (0, 0)]
    apart = compare(DenseMap(first), DenseMap(second))[0]
    assert (apart.tvd, apart.jsd) == pytest.approx((1, math.log(2)))


def test_a_permuted_layer_is_closer_to_the_other_heads_than_to_itself() -> None:
    a = dense(0)
    found = compare(DenseMap(a), DenseMap(a.roll(1, 1)))
    assert all(head.tvd > head.tvd_others for head in found if head.tvd_others is not None)


def test_fewer_permutations_are_fewer_of_the_same_and_none_is_no_baseline() -> None:
    a, b = dense(0), dense(1)
    one = compare(DenseMap(a), DenseMap(b), permutations=1)
    torch.testing.assert_close(columns(one, "tvd_others")[0], tvd(a, b.roll(1, 1)))
    assert one[0].tvd_others_std is None
    assert compare(DenseMap(a), DenseMap(b), permutations=0)[0].jsd_others is None


def test_a_longer_causal_text_is_compared_by_its_beginning() -> None:
    a, b = torch.randn(2, 1, H, 12, 8, dtype=torch.float64)
    short, long = (SoftmaxMap(x[:, :, :n], x[:, :, :n], mask=causal()) for x, n in ((a, 7), (b, 12)))
    found = compare(short, long)
    beginning = SoftmaxMap(b[:, :, :7], b[:, :, :7], mask=causal())
    torch.testing.assert_close(columns(found, "tvd"), [tvd(short.to_dense(), beginning.to_dense())])
    assert found.queries == 7


def test_what_a_row_lacks_of_one_is_a_key_more() -> None:
    """As where a learned sink takes it, or a head is set to zero."""
    rows = torch.tensor([[0.25, 0.25], [0.0, 0.0], [1.0, 0.0]]).view(1, 1, 3, 2)
    others = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]).view(1, 1, 3, 2)
    assert compare(DenseMap(rows), DenseMap(others))[0].tvd == pytest.approx((0.5 + 1 + 1) / 3)


def test_queries_that_attend_to_nothing_in_both_are_left_out() -> None:
    a, b = dense(0), dense(1)
    shorter = tvd(a[:, :, 3:], b[:, :, 3:])
    a[:, :, :3], b[:, :, :3] = 0, 0
    torch.testing.assert_close(columns(compare(DenseMap(a), DenseMap(b)), "tvd"), [shorter])


def test_a_knocked_out_head_is_the_one_that_changed_in_its_layer(nano: Any) -> None:
    x = torch.arange(6)[None]
    with clearhead.record(nano) as whole:
        nano(x)
    with clearhead.knockout(nano, {(0, 1): "previous"}), clearhead.record(nano) as changed:
        nano(x)
    found = compare(whole, changed)
    assert [head.label for head in found if head.layer == 0 and head.tvd > 0] == ["L0H1"]
    assert found.strongest(1)[0].label == "L0H1"


def test_views_are_compared_by_the_numbers_of_their_layers(writer: Any, wordpieces: Any) -> None:
    one, other = (clearhead.look(writer, wordpieces, text, layers=[1]) for text in ("the old cat", "the new cat"))
    assert {head.layer for head in compare(one, other)} == {1}
    with pytest.raises(ShapeError, match="expected the same layers"):
        compare(one, clearhead.look(writer, wordpieces, "the new cat"))


def test_it_can_be_written_as_json_and_as_a_table(pandas_rows: Any) -> None:
    found = compare([DenseMap(dense(0)), DenseMap(dense(1))], [DenseMap(dense(2)), DenseMap(dense(3))])
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False)) == found.as_dict()
    assert [(row["layer"], row["head"]) for row in found.to_pandas()] == [(n // H, n % H) for n in range(2 * H)]
    assert repr(found).startswith(f"Comparison({2 * H} heads, {T} queries; most L")


def test_bad_input_is_told() -> None:
    a = DenseMap(dense(0))
    with pytest.raises(ShapeError, match="as many heads"):
        compare(a, DenseMap(dense(0)[:, :2]))
    with pytest.raises(ShapeError, match=r"2 layers .* in one, 1"):
        compare([a, a], a)
    with pytest.raises(ShapeError, match="takes causal self-attention"):
        compare(DenseMap(dense(0, 5, lower=False)), DenseMap(dense(0, 7, lower=False)))
    with pytest.raises(DTypeError, match="expected two views"):
        compare(a, "text")
    with pytest.raises(ShapeError, match="permutations=-1"):
        compare(a, a, permutations=-1)
    broken = dense(0)
    broken[0, 1, 3, 0] = math.nan
    with pytest.raises(ModelError, match="the weights of layer 1 are not finite"):
        compare([a, DenseMap(broken)], [a, a])


def test_one_text_in_other_tokens_is_told(writer: Any, wordpieces: Any) -> None:
    view = clearhead.look(writer, wordpieces, "the old cat")
    other = clearhead.View(view.maps, view.layers, view.texts, "other")
    other.texts = [type(view.texts[0])(["[CLS]", "the ", "old", " cat", "[SEP]"], view.texts[0].ids)]
    assert "".join(other.tokens) == "".join(view.tokens) == "[CLS]the old cat[SEP]"
    with pytest.raises(ShapeError, match="different tokenizers"):
        compare(view, other)


def test_memory_grows_with_the_text_not_with_its_square() -> None:
    x = torch.randn(1, 1, 1024, 8)
    one = SoftmaxMap(x, x, mask=causal())
    with tile_size(128, 128), Allocations() as allocations:
        compare(one, one)
    assert allocations.peak < one.dense_nbytes / 4
