"""FlexAttention that a model calls by itself: seam 3."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import DenseMap, SoftmaxMap
from clearhead.recording import record

flex = pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse")

B, H, T, D = 2, 4, 9, 16
Q, K, V = (torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
TABLE = torch.randn(H, T, T, generator=torch.Generator().manual_seed(3))
PART = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1, 1]])  # (B, T)


class Flexible(nn.Module):
    """FlexAttention with whatever arguments."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return flex.flex_attention(q, k, v, **options)


def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    model = Flexible()
    plain = model(q, k, v, **options)
    with record(model) as recording:
        out = model(q, k, v, **options)
    assert torch.equal(out, plain)
    return recording


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def same_part(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return PART[b, i] == PART[b, j]


def block_mask(mask_mod: Callable[..., Tensor], batches: int | None = None) -> Any:
    return flex.create_block_mask(mask_mod, batches, None, T, T, device="cpu")


def of_table(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + TABLE[h, i, j]


def hiding(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, score, -math.inf)


def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.tanh(score / 2) * 2


LATER = torch.ones(T, T, dtype=torch.bool).triu(1)
OTHER = (PART[:, :, None] != PART[:, None, :])[:, None]
SCORES = Q.double() @ K.double().mT / 4


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does not trace the functions: a second for each (newer versions can; older trace them all the same)."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.mark.parametrize(
    ("options", "expected", "kind"),
    [
        ({"scale": 0.1}, SCORES * 0.4, SoftmaxMap),
        ({"block_mask": block_mask(causal)}, SCORES.masked_fill(LATER, -math.inf), SoftmaxMap),
        ({"block_mask": block_mask(same_part, B)}, SCORES.masked_fill(OTHER, -math.inf), SoftmaxMap),
        ({"score_mod": hiding}, SCORES.masked_fill(LATER, -math.inf), SoftmaxMap),
        ({"score_mod": capped}, 2 * (SCORES / 2).tanh(), DenseMap),
        (
            {"score_mod": capped, "block_mask": block_mask(causal)},
            (2 * (SCORES / 2).tanh()).masked_fill(LATER, -math.inf),
            DenseMap,
        ),
    ],
    ids=["scale", "causal", "per entry", "hidden by the score", "soft-cap", "both"],
)
@pytest.mark.usefixtures("untraced")
def test_what_is_hidden_and_added_is_read(options, expected, kind):
    (attn,) = recorded(Q, K, V, **options)
    assert type(attn) is kind
    assert (attn.to_dense() - expected.softmax(-1)).abs().max() <= 1e-6


def test_trap15_functions_that_were_traced_are_read_with_what_they_close_over_and_heads_stay_shared():
    recording = recorded(Q, K[:, :2], V[:, :2], enable_gqa=True, score_mod=of_table, block_mask=block_mask(causal))
    (attn,) = recording
    assert attn.k.shape == (B, 2, T, D)
    scores = Q.double() @ K[:, :2].double().repeat_interleave(2, 1).mT / 4 + TABLE
    assert (attn.to_dense() - scores.masked_fill(LATER, -math.inf).softmax(-1)).abs().max() <= 1e-6
    assert torch.equal(pickle.loads(pickle.dumps(recording))[0].to_dense(), attn.to_dense())


def test_a_model_that_calls_both_functions_has_no_gap_and_no_bias_where_none_was_given():
    class Both(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flex.flex_attention(F.scaled_dot_product_attention(q, q, q), q, q)

    with record(model := Both()) as recording:
        model(Q)
    assert [(attn.mask, attn.bias) for attn in recording] == [(None, None)] * 2


@pytest.mark.usefixtures("untraced")
def test_trap04_a_query_that_sees_nothing_has_no_weights():
    (attn,) = recorded(Q, K, V, block_mask=block_mask(lambda b, h, i, j: i > j))
    assert (attn.to_dense()[:, :, 0] == 0).all()
    assert attn.entropy().isfinite().all()
