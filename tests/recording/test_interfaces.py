"""What each implementation of transformers makes of its arguments, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from clearhead import masks
from clearhead.errors import RecordingError
from clearhead.recording.calls import Call
from clearhead.recording.checking import confirmed
from clearhead.recording.interfaces import Arguments, readings

pytest.importorskip("transformers")

import transformers.modeling_utils  # noqa: F401
from transformers.integrations.flash_attention import flash_attention_forward as flash
from transformers.integrations.flex_attention import flex_attention_forward as flex
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa


def eager(*args: Any, **kwargs: Any) -> None:
    """Stands for a model's own eager function: only its name matters here."""


def arguments(T: int = 4, S: int = 4, mask: Any = None, *, causal: bool = True, **options: Any) -> Arguments:
    module = nn.Module()
    module.is_causal = causal
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, T, 8, generator=generator), torch.randn(2, 2, S, 8, generator=generator)
    return Arguments(module, q, k, k, mask, options)


def read(function: Any, *args: Any, **kwargs: Any) -> Call:
    return readings(function, arguments(*args, **kwargs))[0][0]


def drawn(call: Call) -> list[str]:
    rule = call.rule()
    return rule.draw(call.q.shape[2], call.k.shape[2]).split("\n") if rule is not None else []


@pytest.mark.parametrize(
    ("function", "T", "S", "causal", "expected"),
    [
        (sdpa, 3, 3, True, "causal()"),
        (
            sdpa,
            3,
            5,
            True,
            "causal_upper_left()",
        ),  # an empty static cache: the keys after the queries are empty
        (sdpa, 1, 5, True, "None"),  # one query of a generation sees the whole cache
        (sdpa, 3, 3, False, "None"),
        (flash, 3, 5, True, "causal()"),
        (flash, 1, 5, True, "None"),
        (flash, 3, 5, False, "None"),
        (flex, 3, 3, True, "None"),
        (eager, 3, 3, True, "None"),
    ],
)
def test_trap06_what_no_mask_means(function, T, S, causal, expected):
    assert repr(read(function, T, S, causal=causal).rule()) == expected


def test_what_the_call_says_about_causality_outranks_the_module():
    assert repr(read(sdpa, 3, 3, causal=False, is_causal=True).rule()) == "causal()"
    assert read(sdpa, 3, 3, causal=True, is_causal=False).rule() is None


def test_masks_are_kept_by_reference():
    seen, added = torch.ones(2, 1, 4, 4, dtype=torch.bool), torch.zeros(2, 1, 4, 4)
    assert read(sdpa, mask=seen).masks[0].data_ptr() == seen.data_ptr()
    assert read(eager, mask=added).biases[0].data_ptr() == added.data_ptr()


def test_trap16_flash_windows_count_the_query():
    assert drawn(read(flash, 5, 5, sliding_window=3)) == [
        "■ ⬚ ⬚ ⬚ ⬚", "■ ■ ⬚ ⬚ ⬚", "■ ■ ■ ⬚ ⬚", "⬚ ■ ■ ■ ⬚", "⬚ ⬚ ■ ■ ■",
    ]  # fmt: skip
    assert drawn(read(flash, 4, 4, sliding_window=2, causal=False)) == [
        "■ ■ ⬚ ⬚",
        "■ ■ ■ ⬚",
        "⬚ ■ ■ ■",
        "⬚ ⬚ ■ ■",
    ]
    assert repr(read(flash, 4, 4, sliding_window=4).rule()) == "causal()"  # no more keys than that: not used


def test_flash_padding_hides_keys():
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert drawn(read(flash, 4, 4, padding)) == ["⬚ ⬚ ⬚ ⬚", "⬚ ■ ⬚ ⬚", "⬚ ■ ■ ⬚", "⬚ ■ ■ ■"]


def test_flash_with_packed_sequences_is_refused():
    with pytest.raises(RecordingError, match="packed into one row under flash attention"):
        read(flash, 4, 4, cu_seq_lens_q=torch.tensor([0, 2, 4]))
    one = arguments(position_ids=torch.tensor([[0, 1, 0, 1]]))
    with pytest.raises(RecordingError, match="packed into one row"):
        readings(flash, one)
    assert readings(flash, arguments(position_ids=torch.tensor([[3, 4, 5, 6]])))[1]


def test_flex_reads_any_mask_mod_and_skips_empty_blocks():
    documents, real = torch.arange(300) // 100, torch.ones(1, 300, dtype=torch.bool)  # the same for each batch entry

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return real[b, k] & (documents[q] == documents[k]) & (q >= k) & (h != 1)

    block = create_block_mask(mask_mod, 1, 4, 300, 300, device="cpu")
    call = read(flex, 300, 300, block)
    rule = call.rule()
    expected = (documents[:, None] == documents) & torch.ones(300, 300).tril().bool()
    tile = rule.bind(300, 300).tile(slice(0, 300), slice(0, 300), torch.arange(2), torch.arange(4))
    assert torch.equal(tile[0, 0], expected)
    assert not tile[0, 1].any()
    assert rule.bind(300, 300).block(slice(0, 128), slice(256, 300)).name == "EMPTY"
    assert rule.bind(300, 300).block(slice(0, 128), slice(0, 128)).name == "MIXED"
    t, s = torch.tensor([5, 150, 299]), torch.tensor([5, 20, 250])
    attn = call.to_map()
    assert torch.allclose(attn.pick(t, s), attn.to_dense()[:, :, t, s], atol=1e-7)


def flex_call(mask_mod: Any, *, batches: int, heads: int) -> Call:
    return read(flex, 5, 5, create_block_mask(mask_mod, batches, heads, 5, 5, device="cpu"))


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k) >= h - b


@pytest.mark.parametrize(("batches", "heads"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_rule_of_a_block_mask_is_itself_a_mask_mod(batches, heads):
    rule = flex_call(by_head, batches=batches, heads=heads).rule()
    tile = rule.bind(5, 5).tile(slice(0, 5), slice(0, 5), torch.arange(2), torch.arange(4))
    ours = create_mask(rule.bind(5, 5), 2, 4, 5, 5, device="cpu")
    assert torch.equal(ours, tile.expand(2, 4, 5, 5))
    assert torch.equal(ours, create_mask(by_head, batches, heads, 5, 5, device="cpu").expand(2, 4, 5, 5))
    one = [torch.tensor(n) for n in (0, 0, 3, 2)]
    assert bool(rule.bind(5, 5)(*one)) == bool(ours[0, 0, 3, 2])
    assert torch.equal(create_mask((rule & masks.causal()).bind(5, 5), 2, 4, 5, 5, device="cpu"), ours & ours.tril())


def test_a_block_mask_says_whether_its_heads_differ():
    assert flex_call(by_head, batches=2, heads=4).rule().per_head
    assert not flex_call(by_head, batches=2, heads=1).rule().per_head
    assert not flex_call(by_head, batches=2, heads=4).to_map().heads_alike


def test_a_block_mask_names_its_tensors_wherever_its_mask_mod_keeps_them():
    real, ids = torch.ones(2, 5, dtype=torch.bool), torch.zeros(5, dtype=torch.long)

    def padding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return real[b, k]

    def both(*functions: Any) -> Any:
        return lambda b, h, q, k: functions[0](b, h, q, k) & functions[1](b, h, q, k)

    call = flex_call(both(padding, masks.documents(ids).bind(5, 5)), batches=2, heads=1)
    held = [id(tensor) for tensor in call.tensors()]
    assert id(real) in held
    assert id(ids) in held
    assert len(set(held)) == 2 + 4 + 2  # q, and k, which is v too; the table; what the mask_mod holds
    assert len(held) == len(set(held)) + 1
    attn = call.to_map()
    attn.to_dense()
    real[:, 3] = False
    with pytest.raises(RecordingError, match="overwritten in place"):
        attn.to_dense()


def test_flex_adds_the_first_head_of_a_float_mask():
    mask = torch.randn(2, 4, 4, 6)
    assert torch.equal(read(flex, mask=mask).biases[0], mask[:, :1, :, :4])


@pytest.mark.parametrize(
    ("function", "mask", "expected"),
    [
        (sdpa, object(), "object"),
        (sdpa, "causal", "str"),
        (sdpa, torch.ones(2, 1, 4, 4, dtype=torch.long), "int64 tensor"),
        (flex, torch.ones(2, 1, 4, 4, dtype=torch.bool), "bool tensor"),
        (flash, torch.ones(2, 1, 4, 4), r"float32 tensor of shape \(2, 1, 4, 4\)"),
        (flash, torch.ones(2, 3), r"shape \(2, 3\)"),
    ],
)
def test_a_mask_that_is_not_understood_says_what_arrived(function, mask, expected):
    with pytest.raises(
        RecordingError, match=f"(?s)mask that clearhead does not understand.*attention_mask=.*{expected}"
    ):
        read(function, mask=mask)


def test_trap17_sinks_are_where_the_implementation_applies_them():
    sinks = torch.randn(4)
    assert torch.equal(read(eager, s_aux=sinks).sinks, sinks)
    assert torch.equal(read(flash, s_aux=sinks).sinks, sinks)
    assert read(sdpa, s_aux=sinks).sinks is None
    with pytest.raises(RecordingError, match=r"one logit per head \(4,\)"):
        read(eager, s_aux=torch.randn(3))


def test_trap17_a_position_bias_and_a_float_mask_add_up():
    bias, mask = torch.randn(1, 4, 4, 6), torch.randn(2, 1, 4, 4)
    call = read(sdpa, mask=mask, position_bias=bias)
    q, k = call.q, call.k.repeat_interleave(2, 1)
    expected = (q @ k.mT / 8**0.5 + bias[..., :4] + mask).softmax(-1)
    assert (call.to_map().to_dense() - expected).abs().max() <= 1e-6
    with pytest.raises(RecordingError, match="position bias that is no float tensor"):
        read(sdpa, position_bias=3)


def test_an_argument_that_changes_weights_in_an_unknown_way_is_refused():
    with pytest.raises(RecordingError, match="block_indices changes the weights in a way that clearhead does not know"):
        read(eager, block_indices=torch.zeros(2))


def test_softcap_and_scale_are_read():
    call = read(eager, scaling=0.3, softcap=5.0)
    assert (call.scale, call.softcap) == (0.3, 5.0)
    assert read(eager).scale == 8**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reading_is_confirmed_by_the_output_and_by_nothing_else(dtype):
    given = arguments(9, 9, causal=True)
    given = Arguments(given.module, *(x.to(dtype) for x in (given.query, given.key, given.value)), None, {})
    calls, certain = readings(eager, given)
    assert not certain
    assert [repr(call.rule()) for call in calls] == ["None", "causal()"]
    for call in calls:
        weights = call.to_map().to_dense()
        output = (weights @ call.v.repeat_interleave(2, 1).float()).to(dtype).transpose(1, 2)
        assert confirmed(calls, output, given) is call
    with pytest.raises(RecordingError, match=r"is not softmax\(scale · q·k \+ mask\) @ v"):
        confirmed(calls, output.roll(1, 1), given)
