"""Padded tokens: read from the model's own call, in every way that it can be written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.recording import record


class Masked(nn.Module):
    """Hides padded keys, as most encoders do: its padded queries attend all the same."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        seen = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=seen, scale=scale)


MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))


def padded_rows_are_empty(dense: Tensor) -> bool:
    return bool((dense[0, :, :2] == 0).all()) and bool((dense[0, :, 2:].sum(-1) - 1).abs().max() <= 1e-6)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.int32, torch.float32, torch.float16])
@pytest.mark.parametrize("positional", [False, True])
def test_trap05_the_calls_own_mask_is_read_by_name_and_by_position(x, dtype, positional):
    model, mask = Masked(), MASK.to(dtype)
    with record(model) as recording:
        model(x, mask) if positional else model(x, attention_mask=mask)
    assert padded_rows_are_empty(recording[0].to_dense())
    assert (recording[0].entropy()[0, :, :2] == 0).all()


def test_padding_false_takes_all_queries_for_real(x):
    model = Masked()
    with record(model, padding=False) as recording:
        model(x, MASK)
    assert (recording[0].to_dense()[0, :, :2].sum(-1) - 1).abs().max() <= 1e-6


def test_stated_padding_outranks_the_call(x):
    model = Masked()
    with record(model, padding=MASK) as recording:
        model(x)
        model(x, 1 - MASK)
    assert padded_rows_are_empty(recording.passes[0][0].to_dense())
    assert (recording.passes[1][0].to_dense()[0, :, :2] == 0).all()


def test_stated_padding_that_fits_nothing_says_so(x):
    model = Masked()
    fits_nothing = pytest.raises(RecordingError, match=r"padding=\(2, 4\).*fits no attention call;.*\(2, 5\)")
    with fits_nothing, record(model, padding=MASK[:, 1:]):
        model(x)


def test_padding_of_another_length_or_of_an_unmasked_call_is_left_alone(x):
    class Tower(nn.Module):
        """Attends without a mask: the padding is about other tokens (an image tower beside a text)."""

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = Tower()
    with record(model) as recording:
        model(x, attention_mask=MASK)
    assert recording[0].mask is None
    model = Masked()
    with record(model) as recording:
        model(x[:, :, :1], attention_mask=torch.tensor([[0], [1]]))
        model(x, attention_mask=torch.tensor([[0], [1]]))  # broadcast by the model: one flag for five keys
    assert "padding" in repr(recording.passes[0][0].mask)
    assert "padding" not in repr(recording.passes[1][0].mask)


def test_nothing_padded_adds_no_mask(x):
    model = Masked()
    with record(model) as recording:
        model(x, torch.ones(2, 5))
        model(x, torch.ones(2, 5, dtype=torch.long))
    assert all("padding" not in repr(each[0].mask) for each in recording.passes)


@pytest.mark.parametrize("added", [0.0, -1e9, -torch.inf, 0.5])
def test_a_float_mask_that_is_added_to_scores_is_no_padding(x, added):
    class Added(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask[:, None, None, :])

    model, mask = Added(), (1 - MASK.float()).masked_fill(MASK == 0, added)
    with record(model) as recording:
        model(x, mask)
    assert recording[0].mask is None
    assert (recording[0].to_dense().sum(-1) - 1).abs().max() <= 1e-6


def test_trap18_a_cached_step_takes_the_last_queries(x):
    class Step(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            seen = attention_mask[:, None, None, :].bool()
            return F.scaled_dot_product_attention(x[:, :, -2:], x, x, attn_mask=seen)

    model = Step()
    with record(model) as recording:
        model(x, MASK)
        model(x, attention_mask=MASK.flip(1))
    first, second = (each[0].to_dense() for each in recording.passes)
    assert (first.sum(-1) - 1).abs().max() <= 1e-6
    assert (second[0] == 0).all()  # the last two tokens are padding now
