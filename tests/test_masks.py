"""Mask rules: what a block's coverage says, what combinations mean, and that FlexAttention takes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from clearhead import DTypeError, ShapeError, masks, reference
from clearhead.masks import Coverage, MaskRule, all_of

DEFS = json.loads((Path(__file__).parent / "data" / "defs.json").read_text())
WINDOW, SINK = DEFS["window"], DEFS["sink"]
B, H = 2, 3


def simple_rules(T: int, S: int) -> dict[str, MaskRule]:
    """One of every kind, with tensors that fit T and S."""
    g = torch.Generator().manual_seed(T * 100 + S)
    rules = {
        "causal": masks.causal(),
        "upper-left": masks.causal_upper_left(),
        "window": masks.sliding_window(3),
        "symmetric": masks.symmetric_window(4),
        "first": masks.first_tokens(2),
        "first, per batch": masks.first_tokens(torch.tensor([0, 3])),
        "prefix": masks.prefix(2),
        "strided": masks.strided(3),
        "global": masks.global_tokens([1, 5, 6]),
        "global, none": masks.global_tokens([]),
        "padded keys": masks.padding(keys=torch.rand(B, S, generator=g) > 0.5),
        "padded queries": masks.padding(queries=torch.rand(B, T, generator=g) > 0.5),
        "dense": masks.dense(torch.rand(T, S, generator=g) > 0.5),
        "dense, per batch": masks.dense(torch.rand(B, 1, T, S, generator=g) > 0.5),
        "dense, per head": masks.dense(torch.rand(1, H, T, S, generator=g) > 0.5),
        "dense, all": masks.dense(torch.rand(B, H, T, S, generator=g) > 0.5),
        "dense, keys": masks.dense(torch.rand(B, 1, 1, S, generator=g) > 0.5),
    }
    if T <= S:
        rules["documents"] = masks.documents(torch.randint(0, 3, (S,), generator=g))
        rules["block sparse"] = masks.block_sparse(torch.rand(5, 5, generator=g) > 0.5, 2)
        rules["block sparse, per head"] = masks.block_sparse(torch.rand(1, H, 4, 4, generator=g) > 0.5, 3)
        rules["documents, per batch"] = masks.documents(torch.randint(0, 3, (B, S), generator=g).sort(-1).values)
    return rules


def dense_of(rule: MaskRule, T: int, S: int) -> Tensor:
    tile = rule.bind(T, S).tile(slice(0, T), slice(0, S), torch.arange(B), torch.arange(H))
    return tile.expand(B, H, T, S)


NAMES = list(simple_rules(4, 4))
rule_trees = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.one_of(st.tuples(st.just("~"), inner), st.tuples(st.sampled_from("&|"), inner, inner)),
    max_leaves=4,
)


def grow(tree: object, rules: dict[str, MaskRule]) -> MaskRule:
    if isinstance(tree, str):
        return rules.get(tree, masks.causal())  # documents and layouts where T > S
    assert isinstance(tree, tuple)
    if tree[0] == "~":
        return ~grow(tree[1], rules)
    left, right = grow(tree[1], rules), grow(tree[2], rules)
    return left & right if tree[0] == "&" else left | right


@given(tree=rule_trees, T=st.integers(1, 9), S=st.integers(1, 9), cuts=st.tuples(*[st.integers(0, 9)] * 4))
def test_coverage_agrees_with_every_single_pair(tree: object, T: int, S: int, cuts: tuple[int, ...]) -> None:
    rule = grow(tree, simple_rules(T, S))
    (r0, r1), (c0, c1) = sorted(min(c, T) for c in cuts[:2]), sorted(min(c, S) for c in cuts[2:])
    coverage = rule.bind(T, S).block(slice(r0, r1), slice(c0, c1))
    block = dense_of(rule, T, S)[..., r0:r1, c0:c1]
    if coverage is Coverage.FULL:
        assert block.numel()
        assert block.all()
    if coverage is Coverage.EMPTY:
        assert not block.any()


@given(tree=rule_trees, other=rule_trees, T=st.integers(1, 7), S=st.integers(1, 7))
def test_combinations_are_boolean_algebra(tree: object, other: object, T: int, S: int) -> None:
    rules = simple_rules(T, S)
    one, two = grow(tree, rules), grow(other, rules)
    a, b = dense_of(one, T, S), dense_of(two, T, S)
    assert torch.equal(dense_of(one & two, T, S), a & b)
    assert torch.equal(dense_of(one | two, T, S), a | b)
    assert torch.equal(dense_of(~one, T, S), ~a)
    assert torch.equal(dense_of(~(one & two), T, S), dense_of(~one | ~two, T, S))


@given(tree=rule_trees, T=st.integers(1, 9), S=st.integers(1, 9), cuts=st.tuples(*[st.integers(0, 9)] * 4))
def test_a_tile_is_a_part_of_the_whole(tree: object, T: int, S: int, cuts: tuple[int, ...]) -> None:
    rule = grow(tree, simple_rules(T, S))
    (r0, r1), (c0, c1) = sorted(min(c, T) for c in cuts[:2]), sorted(min(c, S) for c in cuts[2:])
    tile = rule.bind(T, S).tile(slice(r0, r1), slice(c0, c1), torch.tensor([1]), torch.tensor([2, 0]))
    assert tile.shape[-2:] == (r1 - r0, c1 - c0)
    assert torch.equal(tile.expand(1, 2, -1, -1), dense_of(rule, T, S)[1:, [2, 0], r0:r1, c0:c1])


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_a_bound_rule_is_a_flex_attention_mask_mod(name: str, shape: tuple[int, int]) -> None:
    T, S = shape
    rules = simple_rules(T, S)
    if name not in rules:
        pytest.skip("documents and layouts need T <= S")
    rule = rules[name] & ~masks.first_tokens(1) | rules[name]
    assert torch.equal(create_mask(rule.bind(T, S), B, H, T, S, device="cpu"), dense_of(rule, T, S))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's, about itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_flex_attention_takes_global_tokens() -> None:
    """Its compiler takes no tensor that a mask_mod makes, and no reduction."""
    n, real = 128, torch.arange(128) > torch.tensor([[20], [50]])
    rule = masks.global_tokens([1, 100]) & masks.padding(keys=real) | masks.global_tokens([])
    q = torch.randn(B, H, n, 16)
    blocks = create_block_mask(rule.bind(n, n), B, H, n, n, device="cpu")
    out = torch.compile(flex_attention, fullgraph=True)(q, q, q, block_mask=blocks)
    seen = reference.global_tokens(n, n, [1, 100]) & real[:, None, None]
    torch.testing.assert_close(out, reference.attention(q, q, q, mask=seen))


def test_flex_attention_finds_the_same_blocks() -> None:
    T = S = 512
    rule = masks.sliding_window(100) | masks.first_tokens(4) & masks.causal()
    blocks = create_block_mask(rule.bind(T, S), 1, 1, T, S, device="cpu", BLOCK_SIZE=128).to_dense()[0, 0]
    for i in range(4):
        for j in range(4):
            coverage = rule.bind(T, S).block(slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            assert (coverage is not Coverage.EMPTY) == bool(blocks[i, j]), (i, j)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (5, 5), (2, 6), (6, 2), (0, 3), (3, 0)])
def test_rules_agree_with_the_textbook(T: int, S: int) -> None:
    assert torch.equal(dense_of(masks.causal(), T, S)[0, 0], reference.causal(T, S))
    assert torch.equal(dense_of(masks.causal_upper_left(), T, S)[0, 0], reference.causal_upper_left(T, S))
    assert torch.equal(dense_of(masks.sliding_window(3), T, S)[0, 0], reference.sliding_window(T, S, 3))
    assert torch.equal(dense_of(masks.strided(2), T, S)[0, 0], reference.strided(T, S, 2))
    assert torch.equal(dense_of(masks.global_tokens([3, 1]), T, S)[0, 0], reference.global_tokens(T, S, [1, 3]))


def test_trap_06_one_query_against_five_cached_keys_sees_all() -> None:
    assert masks.causal().draw(1, 5) == "■ ■ ■ ■ ■"
    assert masks.causal_upper_left().draw(1, 5) == "■ ⬚ ⬚ ⬚ ⬚"
    assert masks.causal().draw(3, 2) == "⬚ ⬚\n■ ⬚\n■ ■"  # more queries than keys: the first sees nothing


def test_trap_16_a_window_counts_the_query_itself() -> None:
    assert dense_of(masks.sliding_window(3), 6, 6)[0, 0].sum(-1).tolist() == [1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("key", WINDOW["causal_nnz"])
def test_trap_16_window_counts(key: str) -> None:
    n, w = (int(part.split("=")[1]) for part in key.split(","))
    seen = dense_of(masks.sliding_window(w), n, n)[0, 0]
    counts = (int(seen.sum()), masks.sliding_window(w).bind(n, n).count(), n * w - w * (w - 1) // 2)
    assert counts == (WINDOW["causal_nnz"][key],) * 3


@pytest.mark.parametrize("key", WINDOW["symmetric_nnz"])
def test_symmetric_window_counts(key: str) -> None:
    n, w = (int(part.split("=")[1]) for part in key.split(","))
    rule = masks.symmetric_window(w)
    assert int(dense_of(rule, n, n)[0, 0].sum()) == rule.bind(n, n).count() == WINDOW["symmetric_nnz"][key]


@pytest.mark.parametrize("layers", WINDOW["layers_vs_reach_w4"])
def test_windows_reach_further_layer_by_layer(layers: str) -> None:
    """1 + L (W - 1) keys, the query included."""
    seen = dense_of(masks.sliding_window(4), 40, 40)[0, 0].double()
    reach = torch.linalg.matrix_power(seen, int(layers))[-1]
    assert int((reach > 0).sum()) == WINDOW["layers_vs_reach_w4"][layers] == 1 + int(layers) * 3


@given(tree=rule_trees, T=st.integers(0, 9), S=st.integers(0, 9), leaf=st.integers(1, 4))
def test_counts_are_those_of_the_dense_mask(tree: object, T: int, S: int, leaf: int) -> None:
    rule = grow(tree, simple_rules(T, S))
    seen, before = dense_of(rule, T, S), masks.rule.LEAF
    masks.rule.LEAF = leaf  # else so small a mask would be looked at pair by pair
    try:
        for batch in range(B):
            assert rule.bind(T, S).count(batch=batch, head=2) == int(seen[batch, 2].sum())
    finally:
        masks.rule.LEAF = before


@given(tree=rule_trees, T=st.integers(0, 9), S=st.integers(0, 9), rows=st.integers(1, 4), cols=st.integers(1, 4))
def test_blocks_are_counted_as_one_by_one(tree: object, T: int, S: int, rows: int, cols: int) -> None:
    bound = grow(tree, simple_rules(T, S)).bind(T, S)
    at = [
        (slice(t, min(t + rows, T)), slice(s, min(s + cols, S))) for t in range(0, T, rows) for s in range(0, S, cols)
    ]
    assert bound.count_blocks(rows, cols) == sum(bound.block(*block) is not Coverage.EMPTY for block in at)


def test_counting_a_long_window_looks_at_few_blocks() -> None:
    asked = 0

    class Counted(masks.Band):
        def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
            nonlocal asked
            asked += 1
            return super().coverage(rows, cols, T, S)

    n = 1 << 17  # 17 billion pairs
    assert Counted(0, 1024, "window").bind(n, n).count() == n * 1024 - 1024 * 1023 // 2
    assert asked < 30 * n // masks.rule.LEAF


def test_sinks_and_a_window() -> None:
    """StreamingLLM's cache: four sinks and the last four tokens."""
    rule = masks.first_tokens(4) & masks.causal() | masks.sliding_window(4)
    assert dense_of(rule, 12, 12)[0, 0, -1].nonzero().squeeze(-1).tolist() == SINK["last_row_n12_s4_w4"]


def test_trap_10_a_rule_makes_no_copy_per_head() -> None:
    tile = masks.causal().bind(8, 8).tile(slice(0, 8), slice(0, 8), torch.arange(B), torch.arange(H))
    assert tile.shape == (1, 1, 8, 8)
    padding = masks.causal() & masks.padding(keys=torch.ones(B, 8, dtype=torch.bool))
    assert padding.bind(8, 8).tile(slice(0, 8), slice(0, 8), torch.arange(B), torch.arange(H)).shape == (
        B,
        1,
        8,
        8,
    )
    per_batch = masks.dense(torch.ones(B, 1, 8, 8, dtype=torch.bool))
    assert per_batch.bind(8, 8).tile(slice(0, 8), slice(0, 8), torch.arange(B), torch.arange(H)).shape == (
        B,
        1,
        8,
        8,
    )


def test_zeros_and_ones_are_bools() -> None:
    flags = torch.tensor([[0, 1, 1]])
    assert masks.padding(keys=flags).draw(2, 3) == masks.padding(keys=flags.bool()).draw(2, 3) == "⬚ ■ ■\n⬚ ■ ■"


def test_the_padding_of_one_text_is_a_batch_of_one() -> None:
    keys, queries = torch.tensor([0, 1, 1]), torch.tensor([True, False])
    one, batch = masks.padding(keys, queries), masks.padding(keys[None], queries[None])
    assert (repr(one), one.draw(2, 3)) == (repr(batch), batch.draw(2, 3))
    one.check(1, 4, 2, 3)
    with pytest.raises(ShapeError, match=r"expected shape \(2, 3\), .* got the flags of one text, \(3,\) or \(1, 3\)"):
        one.check(2, 4, 2, 3)


@pytest.mark.parametrize(
    ("rule", "sizes", "message"),
    [
        (masks.causal(), (-1, 3), r"causal\(\).bind\(T=-1\): expected an integer >= 0"),
        (masks.causal(), (3, 2.5), r"bind\(S=2.5\): expected an integer"),
        (masks.padding(keys=torch.ones(2, 5).bool()), (4, 6), r"padding\(keys=...\): expected shape \(2, 6\)"),
        (masks.documents(torch.zeros(2, 5).long()), (4, 6), r"documents\(ids\): expected shape \(6,\) or \(2, 6\)"),
        (masks.documents(torch.zeros(5).long()), (6, 5), r"6 queries but only 5 keys"),
        (masks.dense(torch.ones(2, 3, 4, 5).bool()), (4, 6), r"does not broadcast to \(B, H, T, S\) = \(2, 3, 4, 6\)"),
        (masks.block_sparse(torch.ones(1, 3, 2, 2).bool(), 2), (4, 6), r"expected at least \(3, 3\) blocks"),
        (masks.first_tokens(torch.tensor([1])) & masks.padding(keys=torch.ones(2, 5) > 0), (5, 5), r"shape \(1, 5\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_when_a_rule_is_bound(
    rule: MaskRule, sizes: tuple[int, int], message: str
) -> None:
    for wrapped in (rule, masks.strided(2) & rule, ~rule):
        with pytest.raises(ShapeError, match=message.removeprefix(r"causal\(\).")):
            wrapped.bind(*sizes)
        with pytest.raises(ShapeError):
            wrapped.draw(*sizes)


def test_counts_and_drawings_are_of_a_text_and_a_head_that_there_are() -> None:
    rule = masks.dense(torch.ones(2, 3, 4, 4).bool()) & masks.causal()
    assert rule.bind(4, 4).count(batch=1, head=2) == masks.causal().bind(4, 4).count(batch=7, head=9) == 10
    for where, message in (
        ({"batch": 2}, r"count\(batch=2\): .*dense.* is made for 2, from 0 on"),
        ({"head": 3}, r"count\(head=3\)"),
        ({"batch": -1}, r"count\(batch=-1\): expected an integer >= 0"),
    ):
        with pytest.raises(ShapeError, match=message):
            rule.bind(4, 4).count(**where)
        with pytest.raises(ShapeError, match=message.replace("count", "draw")):
            rule.draw(4, 4, **where)


def test_all_of_joins_what_is_given() -> None:
    mask = torch.tensor([[1, 1], [0, 1]])
    joined = all_of(None, masks.causal(), mask)
    assert joined is not None
    assert joined.draw(2, 2) == "■ ⬚\n⬚ ■"
    assert repr(all_of(masks.causal(), None)) == "causal()"
    assert all_of(None) is all_of() is None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: masks.sliding_window(0), ShapeError, r"sliding_window\(width=0\): expected an integer >= 1"),
        (lambda: masks.sliding_window(True), ShapeError, "expected an integer"),
        (lambda: masks.sliding_window(2.0), ShapeError, "expected an integer"),  # type: ignore[arg-type]
        (lambda: masks.padding(), ShapeError, "needs keys=, queries= or both"),
        (lambda: masks.padding(keys=torch.ones(3)), ShapeError, r"keys.*\(B, tokens\).*shape \(3,\)"),
        (lambda: masks.documents(torch.ones(3)), ShapeError, "integer tensor"),
        (lambda: masks.dense(torch.ones(3, 3)), DTypeError, "is added to the scores: .* pass mask == 0"),
        (
            lambda: masks.dense(torch.ones(2, 3, 3, dtype=torch.bool)),
            ShapeError,
            r"\(B, 1, T, S\) for one mask",
        ),
        (lambda: masks.dense([[True]]), DTypeError, "got list"),  # type: ignore[arg-type]
        (lambda: masks.causal() & "x", DTypeError, "got str"),  # type: ignore[operator]
        (lambda: masks.strided(0), ShapeError, r"strided\(stride=0\): expected an integer >= 1"),
        (lambda: masks.block_sparse(torch.ones(2, 2), 4), DTypeError, "expected a bool or 0/1 integer tensor"),
        (lambda: masks.block_sparse(torch.tensor([[2, 0], [1, 1]]), 4), DTypeError, "holds other numbers than 0 and 1"),
        (lambda: masks.block_sparse(torch.ones(3, 2, 2).bool(), 4), ShapeError, r"\(1, H, R, C\) for one layout per"),
        (lambda: masks.block_sparse(torch.ones(2, 2).bool(), 0), ShapeError, r"block_sparse\(block=0\)"),
        (lambda: masks.global_tokens(3), ShapeError, r"expected a list of positions, .* got int"),  # type: ignore[arg-type]
        (lambda: masks.global_tokens([0, -1]), ShapeError, r"global_tokens\(index=-1\): expected an integer >= 0"),
        (lambda: masks.global_tokens(torch.tensor([0.5])), ShapeError, r"index=0.5\)"),
        (lambda: masks.causal().bind(4, 4).count_blocks(0, 2), ShapeError, r"count_blocks\(rows=0\)"),
    ],
)
def test_bad_rules_are_refused(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            masks.padding(keys=torch.ones(2, 5, dtype=torch.bool)),
            r"padding\(keys=...\): expected shape \(2, 6\)",
        ),
        (
            masks.padding(queries=torch.ones(2, 5, dtype=torch.bool)),
            r"padding\(queries=...\): expected shape \(2, 4\)",
        ),
        (masks.documents(torch.zeros(4, dtype=torch.long)), r"expected shape \(6,\) or \(2, 6\)"),
        (masks.block_sparse(torch.ones(2, 3).bool(), 2), r"with 6 keys, .* expected at least \(3, 3\) blocks"),
        (masks.block_sparse(torch.ones(1, 2, 9, 9).bool(), 2), r"2 batch entries and 3 heads: .*\(1, 3, …\) per head"),
        (masks.first_tokens(torch.tensor([1])), r"one count per batch entry means shape \(2,\)"),
        (
            masks.dense(torch.ones(6, 4, dtype=torch.bool)),
            r"does not broadcast to \(B, H, T, S\) = \(2, 3, 4, 6\)",
        ),
    ],
)
def test_rules_that_do_not_fit_say_so(rule: MaskRule, message: str) -> None:
    for wrapped in (rule, rule & masks.causal(), masks.causal() | rule, ~rule):
        with pytest.raises(ShapeError, match=message):
            wrapped.check(2, 3, 4, 6)


def test_a_dense_mask_knows_its_empty_and_full_blocks() -> None:
    bound = masks.dense(torch.ones(6, 6, dtype=torch.bool).tril()).bind(6, 6)
    assert bound.block(slice(0, 2), slice(2, 6)) is Coverage.EMPTY
    assert bound.block(slice(4, 6), slice(0, 4)) is Coverage.FULL
    assert bound.block(slice(0, 3), slice(0, 3)) is Coverage.MIXED


def test_counts_are_integers() -> None:
    for rule in (masks.first_tokens, masks.prefix):
        with pytest.raises(DTypeError, match="expected an integer, or integers"):
            rule(torch.tensor([0.5]))
