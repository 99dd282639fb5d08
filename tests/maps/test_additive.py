"""Additive attention: the textbook's weights, bounded memory, and what a padded sentence may not do."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clearhead import DTypeError, RecordingError, ShapeError, masks, reference
from clearhead.functional import additive_attention
from clearhead.kernels import additive
from clearhead.kernels.tiles import tile_size
from clearhead.maps import AdditiveMap
from clearhead.testing import Allocations

BAHDANAU = json.loads((Path(__file__).parents[1] / "data" / "defs.json").read_text())["bahdanau"]
(T, S), D_KEY = BAHDANAU["e_shape"], BAHDANAU["context_shape"][1]
D_QUERY, A = 4, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def test_requirement_02_the_papers_formula() -> None:
    s, h = random(T, D_QUERY), random(S, D_KEY)
    W, U, v = random(D_QUERY, A), random(D_KEY, A), random(A)
    context, attn = additive_attention(s @ W, h @ U, h, v)
    weights = reference.softmax(reference.additive_scores(s, h, W, U, v))
    assert list(attn.shape) == BAHDANAU["e_shape"]
    assert list(context.shape) == BAHDANAU["context_shape"]
    torch.testing.assert_close(attn.to_dense(), weights, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(context, weights @ h, rtol=1e-14, atol=1e-14)
    assert float((attn.to_dense().sum(-1) - 1).abs().max()) <= 4 * BAHDANAU["rows_sum"]


def test_by_a_triple_loop() -> None:
    q, k, score = random(2, 3), random(4, 3), random(3)
    attn = AdditiveMap(q, k, score)
    for t in range(2):
        e = [sum(float(score[a]) * math.tanh(float(q[t, a] + k[s, a])) for a in range(3)) for s in range(4)]
        total = sum(map(math.exp, e))
        assert attn[t].tolist() == pytest.approx([math.exp(x) / total for x in e], rel=1e-13)


RULE = masks.causal() & masks.padding(keys=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]))
SEEN = reference.causal(4, 4) & torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).bool()[:, None]


@pytest.mark.parametrize("at_once", [1 << 21, 16, 1])
@pytest.mark.parametrize("tile", [(100, 100), (2, 3)])
def test_gradcheck_in_any_tiles(tile: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that sees nothing included; `at_once` tanh values at a time, computed again in the backward pass."""
    monkeypatch.setattr(additive, "TILE_ELEMENTS", at_once)
    inputs = [x.requires_grad_() for x in (random(2, 4, 3), random(2, 4, 3, seed=1), random(2, 4, 2), random(3))]
    q, k, v, score = inputs
    with tile_size(*tile):
        assert torch.autograd.gradcheck(lambda *x: additive_attention(*x, mask=RULE)[0], inputs)
        out, _ = additive_attention(*inputs, mask=RULE)
        same = torch.eye(3, dtype=torch.float64)
        want = reference.softmax(reference.additive_scores(q, k, same, same, score), SEEN) @ v
        torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-14)
        ours, theirs = (torch.autograd.grad(o.square().sum(), inputs) for o in (out, want))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_trap_04_a_row_that_sees_nothing_is_0_with_finite_gradients() -> None:
    inputs = [x.requires_grad_() for x in (random(2, 4, 3), random(2, 4, 3), random(2, 4, 2), random(3))]
    out, attn = additive_attention(*inputs, mask=RULE)
    assert (out[0, :2] == 0).all()
    assert (attn.to_dense()[0, :2] == 0).all()
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][0, :2] == 0).all()


def test_trap_23_nan_in_padded_keys_and_values_reaches_nobody() -> None:
    q, k, v, score = random(2, 4, 3), random(2, 4, 3), random(2, 4, 2), random(3)
    want, _ = additive_attention(q, k, v, score, mask=RULE)
    k[0, :2], v[0, :2] = torch.nan, torch.nan
    k[1, 3], v[1, 3] = torch.inf, torch.nan
    assert torch.equal(additive_attention(q, k, v, score, mask=RULE)[0], want)


def test_the_values_of_tanh_are_never_all_held() -> None:
    """256 × 256 × 64 of them are 33 MB; a tile is 8 MB, forward and backward."""
    q, k, v = (torch.randn(1, 256, 64, requires_grad=True) for _ in range(3))
    score = torch.randn(64, requires_grad=True)
    with Allocations() as allocations:
        out, attn = additive_attention(q, k, v, score)
        out.sum().backward()
        attn.statistics()
    assert allocations.largest <= 4 * additive.TILE_ELEMENTS < 4 * 256 * 256 * 64
    assert allocations.peak <= 6 * 4 * additive.TILE_ELEMENTS
    assert all(x.grad is not None for x in (q, k, v, score))


def test_whole_rows_are_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scored, score = 0, additive.scores

    def count(*arguments: Tensor) -> Tensor:
        nonlocal scored
        scored += 1
        return score(*arguments)

    monkeypatch.setattr(additive, "scores", count)
    additive_attention(torch.randn(5, 3), torch.randn(7, 3), torch.randn(7, 2), torch.randn(3))
    assert scored == 1


def test_a_selection_stays_an_additive_map_and_shares_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, score, same = random(2, 2, 5, 3), random(2, 1, 7, 3), random(3), torch.eye(3, dtype=torch.float64)
    attn = AdditiveMap(q, k, score, mask=masks.causal())
    whole, rows = attn.to_dense(), attn[1, :, [4, 0]]
    assert isinstance(rows, AdditiveMap)
    monkeypatch.setattr(AdditiveMap, "_logsumexp", None)  # nothing is left to compute
    scores = reference.additive_scores(q, k, same, same, score).masked_fill(~reference.causal(5, 7), -math.inf)
    torch.testing.assert_close(attn.lse, torch.logsumexp(scores, -1), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(attn[1, :, 2:4].tile(slice(0, 2), slice(0, 3)), whole[1, :, 2:4, :3])
    torch.testing.assert_close(rows.to_dense(), whole[1][:, [4, 0]], rtol=1e-14, atol=1e-15)


def test_heads_in_groups() -> None:
    q, k, v, score = random(2, 4, 3, 5), random(2, 2, 6, 5), random(2, 2, 6, 3), random(5)
    out, attn = additive_attention(q, k, v, score)
    for head in range(4):
        alone, _ = additive_attention(q[:, head], k[:, head // 2], v[:, head // 2], score)
        torch.testing.assert_close(out[:, head], alone)
        assert isinstance(attn[0, head], AdditiveMap)
        torch.testing.assert_close(attn[0, head] @ v[0, head // 2], alone[0])


def test_half_precision_in_and_out() -> None:
    q, k, v, score = (x.bfloat16() for x in (random(2, 3, 5), random(2, 6, 5), random(2, 6, 3), random(5)))
    out, attn = additive_attention(q, k, v, score)
    assert (out.dtype, attn.dtype) == (torch.bfloat16, torch.float32)
    same = torch.eye(5, dtype=torch.float64)
    exact = reference.softmax(reference.additive_scores(q.double(), k.double(), same, same, score.double()))
    torch.testing.assert_close(attn.to_dense().double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("rows", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_trap_22_no_queries_or_no_keys(rows: int, keys: int) -> None:
    q, k, v = random(2, rows, 3).requires_grad_(), random(2, keys, 3).requires_grad_(), random(2, keys, 5)
    out, attn = additive_attention(q, k, v, random(3))
    assert out.shape == (2, rows, 5)
    assert attn.to_dense().shape == (2, rows, keys)
    assert (out == 0).all()
    out.sum().backward()


def test_trap_04_nothing_visible_at_all_still_has_gradients() -> None:
    inputs = [x.requires_grad_() for x in (random(2, 4, 3), random(2, 6, 3), random(2, 6, 3), random(3))]
    out, _ = additive_attention(*inputs, mask=masks.first_tokens(0))
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(out.sum(), inputs))


def test_inference_mode_and_a_gradient_afterwards() -> None:
    with torch.inference_mode():
        attn = AdditiveMap(random(5, 3), random(7, 3), random(3))
        with tile_size(2, 3):
            attn.entropy()
    torch.testing.assert_close(attn.to_dense().sum(-1), torch.ones(5, dtype=torch.float64))


def test_an_overwritten_key_is_noticed() -> None:
    k = random(7, 3)
    attn = AdditiveMap(random(5, 3), k, random(3))
    k.zero_()
    with pytest.raises(RecordingError, match=r"its k was overwritten .* make it of a clone of k\."):
        attn.entropy()


def test_an_overwritten_score_is_named() -> None:
    score = random(3)
    attn = AdditiveMap(random(5, 3), random(7, 3), score)
    score.zero_()
    with pytest.raises(RecordingError, match="its score was overwritten"):
        attn.entropy()


def test_gradients_keep_two_numbers_a_pair_and_not_the_values_of_tanh() -> None:
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    q, k, v, score = (torch.randn(*size, requires_grad=True) for size in ((512, 16), (512, 16), (512, 3), (16,)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        additive_attention(q, k, v, score)
    assert sum(held.values()) < 4 * 2.2 * 512 * 512


def test_a_uniform_map_sees_the_keys_whose_weight_underflows() -> None:
    q, k, score = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3), torch.full((3,), 100.0)
    k[:, 0] = -9  # e^-600 of the others
    attn = AdditiveMap(q, k, score, mask=RULE)
    assert (attn.to_dense()[1, :, 0] == 0).any()
    want = SEEN / SEEN.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(attn.uniform().to_dense(), want)
    torch.testing.assert_close(attn[1, [3, 1]].uniform().to_dense(), want[1, [3, 1]])
    torch.testing.assert_close(attn.uniform().uniform()[..., 3, :], want[..., 3, :])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"score": random(4)},
            ShapeError,
            r"additive_attention\(q=.*score=a float64 tensor of shape \(4,\)\): expected",
        ),
        ({"score": random(3).float()}, DTypeError, r"additive_attention\(q=.*expected one dtype"),
        ({"score": [1.0, 2.0, 3.0]}, DTypeError, r"additive_attention\(score=list\): expected a float tensor on cpu"),
        ({"score": None}, DTypeError, r"score=NoneType\): expected a float tensor"),
        ({"score": torch.ones(3).long()}, DTypeError, "score=a int64 tensor .*: expected a float tensor"),
        ({"score": random(3).to("meta")}, DTypeError, r"shape \(3,\) on meta\): expected a float tensor on cpu"),
        ({"k": random(2, 6, 4)}, ShapeError, r"additive_attention\(q=.*same last dimension"),
        ({"k": random(1, 6, 3)}, ShapeError, "same batch size"),
        ({"v": random(2, 5, 3)}, ShapeError, "k and v must agree"),
        ({"mask": torch.ones(3, 4, 6).bool()}, ShapeError, r"\(3, 1, 4, 6\) does not broadcast"),
        ({"mask": torch.zeros(4, 6)}, DTypeError, r"is added to the scores: .* pass mask == 0"),
        ({"mask": masks.padding(keys=torch.ones(2, 5).bool())}, ShapeError, r"expected shape \(2, 6\)"),
        ({"q": [[1.0]]}, DTypeError, "expected torch tensors"),
    ],
)
def test_bad_arguments_name_shapes(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"q": random(2, 4, 3), "k": random(2, 6, 3), "v": random(2, 6, 3), "score": random(3)} | change
    with pytest.raises(error, match=message):
        additive_attention(**arguments)  # type: ignore[arg-type]


def test_the_map_itself_takes_a_tensor_as_score() -> None:
    with pytest.raises(DTypeError, match=r"AdditiveMap\(score=list\): expected a float tensor"):
        AdditiveMap(random(4, 2), random(5, 2), [1.0, 2.0])  # type: ignore[arg-type]


def test_a_mask_per_text_may_have_three_dimensions() -> None:
    q, k, v, score = random(2, 4, 3), random(2, 4, 3), random(2, 4, 2), random(3)
    assert torch.equal(
        additive_attention(q, k, v, score, mask=SEEN)[0], additive_attention(q, k, v, score, mask=RULE)[0]
    )


def test_trap_03_an_inverted_mask_is_noticed() -> None:
    x, blocked = random(4, 3), torch.ones(4, 4).triu(1).bool()
    with pytest.warns(UserWarning, match=r"^mask=a bool tensor .* pass ~mask") as caught:
        additive_attention(x, x, x, random(3), mask=blocked)
    assert caught[0].filename == __file__
    additive_attention(x, x, x, random(3), mask=~blocked)
