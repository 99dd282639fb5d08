"""Padded tokens: read from the model's own call, in every way that it can be written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.recording import Recording, record


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


# --- texts that grow ------------------------------------------------------------------------------


class Cached(nn.Module):
    """Attends to the newest tokens of a text; its cache keeps at most `window` keys. Hides nothing by itself."""

    def __init__(self, window: int = 99) -> None:
        super().__init__()
        self.window = window

    def forward(self, text: Tensor, new: int, fails: bool = False) -> Tensor:
        T = text.shape[2]
        keys = text if new == T else text[:, :, max(0, T - max(self.window, new)) :]
        out = F.scaled_dot_product_attention(text[:, :, T - new :], keys, keys)
        return 1 / 0 if fails else out


def text(length: int) -> Tensor:
    return torch.randn(2, 3, length, 4, generator=torch.Generator().manual_seed(length))


def seen(recording: Recording, n: int) -> list[bool]:
    """Which keys of the first sequence the last query of a call sees."""
    return (recording.passes[n][0].to_dense()[0, 0, -1] > 0).tolist()


@pytest.mark.parametrize("window", [99, 5, 3])
@pytest.mark.parametrize("how", [{}, {"keep": lambda name, attn: attn.to_dense()}])
def test_trap20_stated_padding_is_the_prompts_and_what_is_generated_is_real(window, how):
    model, texts = Cached(window), text(8)
    with record(model, padding=MASK, **how) as recording:
        model(texts[:, :, :5], 5)
        for length in (6, 7, 8):
            model(texts[:, :, :length], 1)
    real = [False, False, *[True] * 6]
    for n, length in enumerate([5, 6, 7, 8]):
        if how:
            dense = recording.passes[n].results["L0"]
            assert (dense[0, 0, -1] > 0).tolist() == real[:length][-dense.shape[-1] :]
        else:
            assert seen(recording, n) == real[:length][-window if n else None :]


def test_trap20_stated_padding_does_not_go_on_in_another_text():
    model = Cached()
    with record(model, padding=MASK) as recording:
        model(text(5), 5)
        model(text(4), 4)  # shorter: not the stated one
        model(text(5), 1)  # and no more so with one token more
        model(text(6), 1)
        model(text(7), 7)  # nor a longer one
        model(text(8), 1)
    assert seen(recording, 0) == [False, False, True, True, True]
    assert all(all(seen(recording, n)) for n in range(1, 6))


def test_trap20_a_failed_step_does_not_move_stated_padding():
    model, texts = Cached(window=5), text(7)
    with record(model, padding=MASK) as recording:
        model(texts[:, :, :5], 5)
        with pytest.raises(ZeroDivisionError):
            model(texts[:, :, :6], 1, fails=True)
        model(texts[:, :, :6], 1)
    assert seen(recording, 1) == [False, True, True, True, True]


def test_trap20_a_prompt_in_parts_has_its_stated_padding_once_it_is_whole():
    model, texts = Cached(), text(6)
    with record(model, padding=MASK) as recording:
        model(texts[:, :, :2], 2)
        model(texts[:, :, :5], 3)
        model(texts, 1)
    assert seen(recording, 1) == [False, False, True, True, True]
    assert seen(recording, 2) == [False, False, True, True, True, True]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("length", [4, 5])
def test_trap20_stated_padding_of_a_generation_equals_what_is_read_from_one_call(length, cache):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.MistralConfig(**config, num_attention_heads=4, num_key_value_heads=2, sliding_window=4)
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    ids, mask = torch.arange(3, 3 + 2 * length).view(2, -1), torch.ones(2, length, dtype=torch.long)
    mask[0, :2] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    with record(model, padding=mask) as recording:
        tokens = model.generate(ids, attention_mask=mask, **options)
    whole = torch.cat([mask, mask.new_ones(2, 4)], 1)
    with record(model) as expected, torch.no_grad():
        model(tokens[:, :-1], attention_mask=whole, position_ids=(whole.cumsum(1) - 1).clamp(min=0))
    for got, other in zip(recording, expected, strict=True):
        assert (got.to_dense() - other.to_dense()).abs().max() <= 5e-7


# --- tokens that are pooled -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["read", "stated"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_trap05_queries_that_are_pooled_from_tokens_are_not_taken_for_the_last_tokens(side, how):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = {"vocab_size": 60, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 32}
    model = transformers.FunnelModel(transformers.FunnelConfig(**config, block_sizes=[1, 2])).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.25)
    ids, mask = torch.arange(5, 25).view(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, slice(0, 3) if side == "left" else slice(7, 10)] = 0
    with torch.no_grad():
        dense = model(ids, attention_mask=mask, output_attentions=True).attentions
        with record(model, padding=mask if how == "stated" else None) as recording:
            model(ids, attention_mask=mask)
    assert [attn.shape[-2:] for attn in recording] == [(10, 10), (5, 10), (5, 5), (10, 10), (10, 10)]
    for ours, theirs in zip(recording, dense, strict=True):
        pooled = theirs.shape[2] < 10  # which of those are padding is not known
        real = 1 if pooled else mask.bool()[:, None, :, None]
        assert (ours.to_dense() - theirs * real).abs().max() <= 1e-6
