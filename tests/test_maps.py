"""SoftmaxMap beyond the contract: identities, gradients, NaN, empty sizes, what may happen to its tensors."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead import (
    DenseMap,
    DTypeError,
    RecordingError,
    ShapeError,
    SoftmaxMap,
    average_heads,
    masks,
    reference,
    scores,
)
from clearhead.kernels import tiles
from clearhead.maps import AttentionMap
from clearhead.maps.base import Selection
from clearhead.maps.composed import OneSequence
from clearhead.testing import assert_close

B, H, G, T, S, D = 2, 4, 2, 6, 9, 8


@pytest.fixture
def g() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def qk(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, T, D, generator=g), torch.randn(B, G, S, D, generator=g)


# --- identities --------------------------------------------------------------------------------------------


def test_split_keys_merged_by_lse_are_the_whole(qk: tuple[Tensor, Tensor]) -> None:
    q, k = (t.double() for t in qk)
    v = torch.randn(B, G, S, 3, dtype=torch.float64)
    whole, parts = SoftmaxMap(q, k), [SoftmaxMap(q, k[:, :, :4]), SoftmaxMap(q, k[:, :, 4:])]
    lse = torch.stack([part.lse for part in parts])
    torch.testing.assert_close(whole.lse, torch.logsumexp(lse, 0), rtol=1e-15, atol=1e-14)
    shares = torch.softmax(lse, 0)[..., None]
    merged = shares[0] * (parts[0] @ v[:, :, :4]) + shares[1] * (parts[1] @ v[:, :, 4:])
    torch.testing.assert_close(whole @ v, merged, rtol=1e-14, atol=1e-14)


def test_permutation_equivariance(qk: tuple[Tensor, Tensor]) -> None:
    q, k = (t.double() for t in qk)
    order, other = torch.randperm(T), torch.randperm(S)
    permuted = SoftmaxMap(q[:, :, order], k[:, :, other])
    torch.testing.assert_close(permuted.to_dense(), SoftmaxMap(q, k).to_dense()[:, :, order][..., other])
    torch.testing.assert_close(permuted.entropy(), SoftmaxMap(q, k).entropy()[..., order])
    torch.testing.assert_close(permuted.received(), SoftmaxMap(q, k).received()[..., other])


@pytest.mark.parametrize("replacement", [7.0, math.inf, math.nan])
def test_a_causal_future_has_no_influence(replacement: float) -> None:
    q, k = torch.randn(1, 2, 300, D), torch.randn(1, 2, 300, D)
    edited_q, edited_k = q.clone(), k.clone()
    edited_q[:, :, 150:], edited_k[:, :, 150:] = replacement, replacement
    before, after = (SoftmaxMap(*t, mask=masks.causal())[..., :150, :] for t in ((q, k), (edited_q, edited_k)))
    assert torch.equal(before.to_dense(), after.to_dense())
    assert torch.equal(before.statistics().entropy, after.statistics().entropy)


def test_entropy_identity() -> None:
    """H[t] = lse[t] - scale · q[t] · (A @ K)[t] (DESIGN: the fused kernels' way to it)."""
    q, k = torch.randn(1, 2, 40, D, dtype=torch.float64), torch.randn(1, 2, 40, D, dtype=torch.float64)
    attn = SoftmaxMap(q, k, mask=masks.causal())
    torch.testing.assert_close(attn.entropy(), attn.lse - attn.scale * (q * (attn @ k)).sum(-1), atol=1e-13, rtol=0)


def test_the_jacobian_of_a_causal_output_is_lower_triangular() -> None:
    q, k, v = (torch.randn(5, 3, dtype=torch.float64) for _ in range(3))
    of_k = torch.autograd.functional.jacobian(lambda k: SoftmaxMap(q, k, mask=masks.causal()) @ v, k)
    upper = torch.triu(torch.ones(5, 5), 1).bool()
    assert (of_k.permute(0, 2, 1, 3)[upper] == 0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 100), (100, 2), (7, 7)])
def test_tile_size_moves_weights_by_rounding_only(size: tuple[int, int], qk: tuple[Tensor, Tensor]) -> None:
    q, k = qk
    exact = reference.weights(q.double(), k.double(), mask=reference.causal(T, S))
    plain = reference.weights(q, k, mask=reference.causal(T, S))
    with tiles.tile_size(*size):
        assert_close(SoftmaxMap(q, k, mask=masks.causal()).to_dense(), exact, plain, terms=S + D)


def test_row_by_row_in_any_order_is_all_at_once(qk: tuple[Tensor, Tensor]) -> None:
    attn = SoftmaxMap(*qk, mask=masks.causal())
    whole = SoftmaxMap(*qk, mask=masks.causal()).to_dense()
    for t in torch.randperm(T).tolist():
        torch.testing.assert_close(attn[..., t, :], whole[..., t, :])


# --- gradients ---------------------------------------------------------------------------------------------

RULES = {
    "none": None,
    "causal": masks.causal(),
    "padded": masks.causal() & masks.padding(keys=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]])),
    "empty rows": masks.dense(torch.tensor([[False] * 5, [True, False, True, True, False], [False] * 5])),
}
DIFFERENTIABLE: dict[str, Callable[[AttentionMap], Tensor]] = {
    "@": lambda a: a @ torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(5, 2),
    "mT @": lambda a: a.mT @ torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2),
    "pick": lambda a: a.pick(torch.tensor([[0], [2]]), torch.tensor([0, 1, 4])),
    "mass": lambda a: a.mass([0, 3]),
    "mass of many": lambda a: a.mass(torch.tensor([True, False, True, True, True])),
    "entropy": lambda a: a.entropy(),
    "row": lambda a: a[..., 1, :],
    "average": lambda a: average_heads(a).entropy(),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name: str, rule: str) -> None:
    q = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 1, 5, 3, dtype=torch.float64, requires_grad=True)

    def of(q: Tensor, k: Tensor) -> Tensor:
        return DIFFERENTIABLE[name](SoftmaxMap(q, k, mask=RULES[rule]))

    assert torch.autograd.gradcheck(of, (q, k))
    with tiles.tile_size(2, 2):
        assert torch.autograd.gradcheck(of, (q, k), fast_mode=True)


@pytest.mark.parametrize("kind", ["softcap", "bias", "sinks"])
def test_gradcheck_of_what_stands_between(kind: str) -> None:
    q, k, x = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    extra = {
        "softcap": 1.5,
        "bias": scores.alibi(torch.tensor([0.5, 0.25]).double()),
        "sinks": torch.zeros(2),
    }[kind]
    assert torch.autograd.gradcheck(
        lambda q, k, x: SoftmaxMap(q, k, mask=masks.causal(), **{kind: extra}) @ x, (q, k, x)
    )


def test_trap_04_rows_with_nothing_to_attend_to() -> None:
    """Left padding and causal make them: weights 0, lse -inf, entropy 0, finite gradients for everything."""
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    attn = SoftmaxMap(q, k, mask=masks.causal() & masks.padding(keys=torch.tensor([[0, 0, 1, 1, 1]])))
    assert (attn.to_dense()[:, :, :2] == 0).all()
    assert torch.isneginf(attn.lse[:, :, :2]).all()
    assert (attn.entropy()[:, :, :2] == 0).all()
    assert ((attn @ v)[:, :, :2] == 0).all()
    assert (attn.statistics().peak[:, :, :2] == 0).all()
    total = attn.entropy().sum() + (attn @ v).sum() + attn.pick(0, 0).sum() + attn.mass([0, 3]).sum()
    total.backward()
    for t in (q, k, v):
        assert t.grad is not None
        assert torch.isfinite(t.grad).all()


def test_what_is_a_maximum_keeps_no_graph() -> None:
    q = torch.randn(1, 1, 5, 4, requires_grad=True)
    attn = SoftmaxMap(q, q, mask=masks.causal())
    for result in (attn.topk(2)[0], attn.pool_max((2, 2))):
        assert not result.requires_grad
    for result in (attn.entropy(), attn.statistics().received, attn.pool_sum((2, 2)), attn.distance()):
        assert result.requires_grad


def test_an_overview_is_the_statistics_and_the_picture_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 300, 4)
    passes = []
    stream = SoftmaxMap._stream
    monkeypatch.setattr(SoftmaxMap, "_stream", lambda self, *asked: passes.append(len(asked)) or stream(self, *asked))
    found, picture = SoftmaxMap(q, q, mask=masks.causal()).overview((7, 5))
    assert passes == [8]
    attn = SoftmaxMap(q, q, mask=masks.causal())
    assert torch.equal(picture, attn.pool_max((7, 5)))
    assert torch.equal(found.received, attn.statistics().received)
    with pytest.raises(ShapeError, match="a picture of 0×5 pixels"):
        attn.overview((0, 5))


# --- traps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_trap_23_nan_in_masked_keys_does_not_leak(bad: float) -> None:
    q, k, x = torch.randn(1, 2, 300, D), torch.randn(1, 2, 300, D), torch.randn(1, 2, 300, 3)
    real = torch.arange(300) >= 140
    mask = masks.causal() & masks.padding(keys=real[None], queries=real[None])
    clean = SoftmaxMap(q, k, mask=mask)
    dirty_q, dirty_k, dirty_x = (t.masked_fill(~real[:, None], bad) for t in (q, k, x))
    dirty = SoftmaxMap(dirty_q, dirty_k, mask=mask)
    assert torch.equal(clean.to_dense(), dirty.to_dense())
    for name in ("entropy", "distance", "to_first", "to_self", "peak", "received", "received_peak"):
        assert torch.equal(getattr(clean.statistics(), name), getattr(dirty.statistics(), name)), name
    torch.testing.assert_close(dirty @ dirty_x, clean @ x)
    assert torch.equal(clean.topk(3)[0], dirty.topk(3)[0])
    assert torch.equal(clean.mass([150]), dirty.mass([150]))


def test_trap_23_nan_in_one_query_stays_in_its_row() -> None:
    q, k = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    q[0, 0, 2] = math.nan
    weights = SoftmaxMap(q, k).to_dense()[0, 0]
    assert weights[2].isnan().all()
    assert weights[[0, 1, 3, 4]].isfinite().all()


EMPTY = {
    "0 queries": (2, 0, 4),
    "0 keys": (2, 4, 0),
    "batch 0": (0, 4, 4),
    "nothing": (0, 0, 0),
    "one": (1, 1, 1),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("rule", [None, masks.causal(), masks.sliding_window(2)])
def test_trap_22_sizes(name: str, rule: masks.MaskRule | None) -> None:
    B, T, S = EMPTY[name]
    attn = SoftmaxMap(torch.randn(B, 2, T, 4), torch.randn(B, 1, S, 4), mask=rule)
    assert attn.to_dense().shape == (B, 2, T, S)
    assert (attn @ torch.ones(S, 3)).shape == (B, 2, T, 3)
    assert (attn.mT @ torch.ones(T, 3)).shape == (B, 2, S, 3)
    assert attn.statistics().entropy.shape == attn.lse.shape == (B, 2, T)
    assert attn.received().shape == (B, 2, S)
    assert attn.mass([]).shape == (B, 2, T)
    assert attn.pick([], []).shape == (B, 2, 0)  # type: ignore[arg-type]
    if S:
        assert attn.topk(1)[0].shape == (B, 2, T, 1)


def test_trap_22_stride_0_keys_and_queries() -> None:
    q, k = torch.randn(1, 1, 1, 4).expand(2, 3, 5, 4), torch.randn(1, 1, 1, 4).expand(2, 3, 7, 4)
    torch.testing.assert_close(SoftmaxMap(q, k).to_dense(), torch.full((2, 3, 5, 7), 1 / 7))


def test_trap_22_more_than_65536_keys_with_a_mask() -> None:
    n = 70_000
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, n, 4)
    attn = SoftmaxMap(q, k, mask=masks.causal())
    assert attn.to_dense()[0, 0, :, -2:].ne(0).tolist() == [[False, False], [True, False], [True, True]]
    torch.testing.assert_close(attn.received().sum(), torch.tensor(3.0))


def test_trap_15_grouped_heads_are_interleaved() -> None:
    q, k = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 3, 4)
    attn = SoftmaxMap(q, k)
    for head in range(4):
        torch.testing.assert_close(attn[0, head].to_dense(), SoftmaxMap(q[0, head], k[0, head // 2]).to_dense())
    assert attn[:, [3, 0]].k.shape[1] == 2
    assert attn[0, 3].k.shape == (3, 4)


def test_values_of_grouped_heads_multiply_a_selection(qk: tuple[Tensor, Tensor]) -> None:
    v = torch.randn(B, G, S, 3)
    attn = SoftmaxMap(*qk, v=v)
    whole = attn @ v
    torch.testing.assert_close(attn[1] @ attn[1].v, whole[1])
    torch.testing.assert_close(attn[1, 2] @ attn[1, 2].v, whole[1, 2])
    torch.testing.assert_close(attn[:, 3] @ attn[:, 3].v, whole[:, 3])


def test_batches_are_never_taken_for_groups_of_heads() -> None:
    attn = SoftmaxMap(torch.randn(4, 3, 2), torch.randn(4, 3, 2))  # (B, T, D)
    with pytest.raises(ShapeError, match=r"takes x"):
        attn @ torch.randn(2, 3, 2)
    with pytest.raises(ShapeError, match="expected a map with a head dimension"):
        average_heads(attn)


def test_repr_names_the_dimensions_that_are_left(qk: tuple[Tensor, Tensor]) -> None:
    attn = SoftmaxMap(*qk, mask=masks.causal())
    assert repr(attn).startswith("SoftmaxMap(B=2, H=4, T=6, S=9, causal, float32; holds ")
    assert repr(attn[0]).startswith("SoftmaxMap(H=4, T=6, S=9")
    assert repr(attn[:, 0]).startswith("SoftmaxMap(B=2, T=6, S=9")
    assert repr(average_heads(attn)).startswith("HeadAverage(B=2, T=6, S=9")


def test_overwritten_queries_are_noticed() -> None:
    q, k = torch.randn(3, 4), torch.randn(3, 4)
    attn = SoftmaxMap(q, k)
    attn.entropy()
    k.mul_(2)
    for read in (attn.to_dense, attn.entropy, lambda: attn[1:].to_dense(), lambda: attn.pick(0, 0)):
        with pytest.raises(RecordingError, match=r"its k was overwritten in place after the map.*clone of k\."):
            read()


def test_inference_tensors() -> None:
    """Begun in inference mode and read outside, made inside and read outside, and the other way round."""
    with torch.inference_mode():
        q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
        attn = SoftmaxMap(q, k, mask=masks.causal())
        attn.tile(slice(0, 2), slice(0, 5))
    want = SoftmaxMap(q.clone(), k.clone(), mask=masks.causal())
    assert torch.equal(attn.to_dense(), want.to_dense())
    torch.testing.assert_close(attn.entropy(), want.entropy())
    with torch.inference_mode():
        torch.testing.assert_close(want[0].entropy(), attn[0].entropy())
    assert want.statistics().received.shape == (1, 2, 5)


def test_a_cached_lse_keeps_no_graph_from_being_built() -> None:
    q, k = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    attn = SoftmaxMap(q, k)
    with torch.no_grad():
        before = attn.to_dense()
    after = attn.to_dense()
    assert after.requires_grad
    assert torch.equal(before, after.detach())
    (grad,) = torch.autograd.grad(after[0, 0], q)
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("index", [torch.tensor(1), [1], slice(1, 2), torch.tensor([False, True])])
def test_indices_of_every_kind(index: object, qk: tuple[Tensor, Tensor]) -> None:
    dense = SoftmaxMap(*qk).to_dense()
    torch.testing.assert_close(SoftmaxMap(*qk)[index].to_dense(), dense[index])


def test_a_tile_takes_slices_as_python_reads_them(qk: tuple[Tensor, Tensor]) -> None:
    attn = SoftmaxMap(*qk, mask=masks.causal())
    dense = attn.to_dense()
    for rows, cols in (
        (slice(None), slice(0, 3)),
        (slice(-2, None), slice(2, 100)),
        (slice(3, 1), slice(None)),
    ):
        torch.testing.assert_close(attn.tile(rows, cols), dense[..., rows, cols])
    with pytest.raises(IndexError, match="a slice without a step"):
        attn.tile(slice(0, 6, 2), slice(0, 3))


@pytest.mark.parametrize(
    ("q", "k", "error", "message"),
    [
        (
            (2, 4, 3, 8),
            (2, 3, 3, 8),
            ShapeError,
            r"multiple of the number of key heads.*\(batch, heads, tokens, width\)",
        ),
        ((2, 4, 3, 8), (1, 4, 3, 8), ShapeError, "same batch size"),
        ((2, 4, 3, 8), (2, 4, 3, 6), ShapeError, "same last dimension D"),
        ((2, 4, 3, 8), (4, 3, 8), ShapeError, "same rank for q and k"),
        ((8,), (8,), ShapeError, r"\(B, H, T, D\), \(B, T, D\) or \(T, D\)"),
        ((1, 1, 1, 3, 8), (1, 1, 1, 3, 8), ShapeError, "expected"),
    ],
)
def test_trap_21_and_24_sizes_that_do_not_fit(
    q: tuple[int, ...], k: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SoftmaxMap(torch.randn(q), torch.randn(k))


def test_trap_24_what_is_not_a_float_tensor() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(DTypeError, match=r"use torch.as_tensor\(array\) first"):
        SoftmaxMap(x.numpy(), x)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="expected torch tensors"):
        SoftmaxMap([[1.0]], x)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"floating-point tensors; convert with .float\(\)"):
        SoftmaxMap(x.long(), x.long())
    with pytest.raises(DTypeError, match="one dtype"):
        SoftmaxMap(x, x.double())
    with pytest.raises(ShapeError, match="k and v must agree"):
        SoftmaxMap(x, x, v=torch.randn(4, 4))
    with pytest.raises(ShapeError, match=r"one logit per head, \(1,\)"):
        SoftmaxMap(x, x, sinks=torch.zeros(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor([x[0], x[0, :, :2]]),
    ],
    ids=["float8", "sparse", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_trap_24_tensors_that_cannot_be_multiplied_here(make: Callable[[Tensor], Tensor]) -> None:
    x = make(torch.randn(1, 2, 4, 8))
    with pytest.raises(DTypeError, match=r"SoftmaxMap\(q=a .*(float8|sparse|nested).*convert with"):
        SoftmaxMap(x, x)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda a: a.pool_max(3), r"a picture of size 3: expected \(rows, columns\)"),
        (lambda a: a.pool_sum((2, 2, 2)), r"a picture of size \(2, 2, 2\)"),
        (lambda a: a.overview((2.0, 2.0)), r"a picture of size \(2.0, 2.0\)"),
        (lambda a: a.topk(2.0), r"topk\(k=2.0\): expected an integer >= 1"),
        (lambda a: a.pick([0, 1, 2], [0, 1]), r"pick\(t \(3,\), s \(2,\)\)"),
        (lambda a: a.mass(None), "mass: key: expected integers, a slice or a bool tensor, got NoneType"),
    ],
)
def test_trap_24_questions_that_have_no_answer(
    ask: Callable[[SoftmaxMap], object], message: str, qk: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises((ShapeError, DTypeError), match=message):
        ask(SoftmaxMap(*qk))


def test_a_figure_has_one_panel_a_head(qk: tuple[Tensor, Tensor]) -> None:
    pytest.importorskip("matplotlib")
    attn = SoftmaxMap(*qk, mask=masks.causal())
    assert len(attn.draw().axes) == len(attn[0].draw().axes) == H
    assert len(attn[0, 1].draw().axes) == len(average_heads(attn).draw().axes) == 1


def test_trap_19_half_precision_is_judged_against_float32_of_the_same_inputs() -> None:
    q, k = torch.randn(1, 2, 33, 8).half(), torch.randn(1, 2, 33, 8).half()
    attn = SoftmaxMap(q, k)
    assert attn.dtype == attn.entropy().dtype == (attn @ torch.ones(33, 1).half()).dtype == torch.float32
    exact, plain = reference.weights(q.double(), k.double()), reference.weights(q.float(), k.float())
    assert_close(attn.to_dense(), exact, plain, terms=41)


def test_trap_19_column_sums_do_not_lose_what_comes_late() -> None:
    """float32 column sums lose 6e-4 at 65k tokens under a 0.9 sink."""
    n = 1 << 17
    q = torch.ones(1, 1, n, 1)
    k = torch.tensor([math.log(9.0), 0.0])[None, None, :, None]
    got = SoftmaxMap(q, k, scale=1.0).received()[0, 0]
    torch.testing.assert_close(got / n, torch.tensor([0.9, 0.1]), rtol=2e-7, atol=0)


def test_gradients_of_a_bias_alone() -> None:
    """A trainable bias over frozen q and k: what was read before without gradients must not be reused."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 5, 4, dtype=torch.float64), torch.randn(1, 2, 5, 4, dtype=torch.float64)
    table = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def read(bias: Tensor, extra: Tensor) -> Tensor:
        attn = SoftmaxMap(q, k, bias=bias, sinks=extra, mask=masks.causal())
        with torch.no_grad():
            attn.entropy()
        return attn.pick(3, 2)

    assert torch.autograd.gradcheck(read, (table, sinks))
    attn = SoftmaxMap(q, k, bias=table)
    for _ in range(2):
        attn.pick(3, 2).sum().backward()


def test_an_overwritten_mask_or_bias_is_noticed() -> None:
    mask, bias, sinks = torch.ones(4, 4, dtype=torch.bool), torch.zeros(4, 4), torch.zeros(1)
    for name, tensor in {"mask": mask, "bias": bias, "sinks": sinks}.items():
        attn = SoftmaxMap(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), mask=mask, bias=bias, sinks=sinks)
        attn.entropy()
        tensor.fill_(1)
        with pytest.raises(RecordingError, match=f"its {name} was overwritten"):
            attn.to_dense()


def test_a_few_weights_need_the_lse_of_their_rows_alone(g: torch.Generator) -> None:
    q, k = (torch.randn(B, n, 40, D, generator=g, dtype=torch.float64) for n in (H, G))
    how = {"mask": masks.causal() & ~masks.first_tokens(2), "bias": scores.alibi(torch.ones(H, dtype=torch.float64))}
    attn, dense = SoftmaxMap(q, k, **how), SoftmaxMap(q, k, **how).to_dense()
    t, s = torch.tensor([[-1, 7], [0, 7]]), torch.tensor([3, 5])
    for n in range(2):  # found, and then known
        torch.testing.assert_close(attn.pick(t, s), dense[..., t, s], msg=f"{n}")
        assert (~attn._lse.isnan()).nonzero()[:, -1].unique().tolist() == [0, 7, 39]
    torch.testing.assert_close(attn[1, 2].pick(11, s), dense[1, 2, 11, s])
    assert (~attn._lse.isnan()).nonzero()[:, -1].unique().tolist() == [0, 7, 11, 39]  # shared with the whole
    torch.testing.assert_close(attn.diagonal(), dense.diagonal(0, -2, -1))
    assert not attn._lse.isnan().any()


def test_lse_is_the_callers_own() -> None:
    attn = SoftmaxMap(torch.randn(5, 4), torch.randn(5, 4))
    before = attn.to_dense()
    attn.lse.zero_()
    assert torch.equal(attn.to_dense(), before)


def test_a_uniform_map_has_the_dimensions_of_its_map() -> None:
    average = average_heads(SoftmaxMap(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)))
    assert repr(average.uniform()).startswith("Uniform(B=2, T=5, S=5")
    with pytest.raises(ShapeError, match="expected a map with a head dimension"):
        average_heads(average.uniform())


def test_a_uniform_map_of_a_part_or_an_average_sees_the_keys_whose_weight_underflows() -> None:
    q, k = torch.ones(1, 2, 4, 1), torch.zeros(1, 2, 4, 1)
    k[:, :, 0] = -500
    attn = SoftmaxMap(q, k, mask=masks.causal(), scale=1.0)
    assert attn[0, 0, 3, 0] == 0
    want = torch.ones(4, 4).tril() / torch.arange(1.0, 5)[:, None]
    for derived in (average_heads(attn)[0], Selection(attn, (0, 1), torch.arange(4)), OneSequence(attn[0])[0, 1]):
        torch.testing.assert_close(derived.uniform().to_dense(), want)


def test_a_uniform_map_whose_mask_is_overwritten_says_so() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    even = SoftmaxMap(torch.zeros(4, 2), torch.zeros(4, 2), mask=mask).uniform()
    mask.tril_()
    with pytest.raises(RecordingError, match="its mask was overwritten"):
        even.to_dense()


def test_a_nan_under_a_negative_weight_is_not_lost() -> None:
    out = DenseMap(torch.tensor([[-1.0, 2.0]])) @ torch.tensor([[torch.nan], [1.0]])
    assert out.isnan().all()


def test_no_heads_have_no_weights() -> None:
    attn = SoftmaxMap(torch.randn(2, 4, 5, 4), torch.randn(2, 2, 5, 4))[:, []]
    assert attn.pick(0, 0).shape == (2, 0)
    assert attn.to_dense().shape == (2, 0, 5, 5)


def test_one_layer_of_a_tuple_reads_no_other() -> None:
    layers = (torch.rand(1, 2, 6, 6), torch.rand(1, 2, 6, 6))
    one = DenseMap(layers)[0]
    assert one.nbytes == layers[0].nbytes
    torch.testing.assert_close(one[0].to_dense(), layers[0][0])


def test_trap_22_no_features() -> None:
    with pytest.raises(ShapeError, match=r"q and k have no features \(D = 0\)"):
        SoftmaxMap(torch.zeros(3, 0), torch.zeros(3, 0))


def test_copies_and_pickles_of_a_map_can_be_read() -> None:
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    q.mul_(2)  # a version that a copy does not have
    attn = SoftmaxMap(q, k, mask=masks.causal() & masks.dense(torch.ones(5, 5, dtype=torch.bool)))
    for other in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn)), copy.copy(attn)):
        assert torch.equal(other.to_dense(), attn.to_dense())
    k.zero_()
    with pytest.raises(RecordingError, match="cannot be copied"):
        copy.deepcopy(attn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"softcap": 0.0}, r"softcap=0\.0\): expected a number above 0"),
        ({"softcap": "x"}, r"softcap='x'\): expected a finite number"),
        ({"scale": math.inf}, r"scale=inf\): expected a finite number"),
        ({"scale": "a"}, r"scale='a'\): expected a finite number"),
        ({"sinks": [0.0]}, r"SoftmaxMap\(sinks=list\): expected a float tensor on cpu"),
    ],
)
def test_scale_softcap_and_sinks_are_numbers(arguments: dict[str, float], message: str) -> None:
    with pytest.raises((ShapeError, DTypeError), match=message):
        SoftmaxMap(torch.zeros(3, 2), torch.zeros(3, 2), **arguments)  # type: ignore[arg-type]
