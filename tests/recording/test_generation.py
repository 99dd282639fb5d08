"""Texts that grow call by call: one map a layer, equal to one call over the whole text."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead.nn
from clearhead.errors import RecordingError
from clearhead.maps import SoftmaxMap
from clearhead.maps.composed import Stitched
from clearhead.recording import record
from clearhead.recording.buffers import filled, is_borrowed
from clearhead.recording.calls import Call
from clearhead.testing.memory import Allocations

from .generated import CACHES, NEW, argument_of, both_sides, build, generated, prompt, whole, worst

transformers = pytest.importorskip("transformers")

# --- one map a layer -------------------------------------------------------------------------------


def test_trap23_keys_that_are_not_a_number_go_on_as_themselves(attend):
    k = torch.randn(1, 2, 6, 4)
    k[0, 1, 0] = torch.nan
    with record(attend) as recording:
        attend(k[:, :, :5], k[:, :, :5].clone(), k[:, :, :5])
        attend(k[:, :, 5:], k, k)
    assert len(recording.texts) == 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("gpt2", "sdpa"),
        ("mistral window", "sdpa"),
        ("gemma2 windows, softcap", "eager"),
        ("gpt-oss windows, sinks", "eager"),
        ("bloom by hand", "eager"),
    ],
)
def test_trap20_a_generation_is_one_map_a_layer_equal_to_one_call(name, implementation, cache, padded):
    model, inputs = build(name, implementation), prompt(padded)
    recording, tokens = generated(model, inputs, cache_implementation=CACHES[cache])
    expected = whole(model, tokens, inputs["attention_mask"])
    assert tokens.shape == (2, 5 + NEW)
    assert {attn.shape for attn in recording} == {(2, 4, 10, 10)}  # the last new token is never a query
    assert (recording.layers, recording.paths) == (expected.layers, expected.paths)
    assert worst(recording, expected) <= 5e-7


def test_trap20_sampled_texts_too():
    model, inputs = build("llama"), prompt(padded=True)
    recording, tokens = generated(model, inputs, do_sample=True, num_return_sequences=2)
    assert worst(recording, whole(model, tokens, inputs["attention_mask"].repeat_interleave(2, 0))) <= 5e-7


@pytest.mark.parametrize("cache", CACHES)
def test_trap20_each_call_stays_readable_and_unfilled_slots_are_no_keys(cache):
    model = build("llama")
    recording, _ = generated(model, prompt(padded=True), cache_implementation=CACHES[cache])
    dense = recording[1].to_dense()
    assert [each[1].shape[-2:] for each in recording.passes] == [(5, 5), *((1, n) for n in range(6, 11))]
    for each in recording.passes:
        T, S = each[1].shape[-2:]
        assert (each[1].to_dense() - dense[:, :, S - T : S, :S]).abs().max() <= 2e-7


def test_a_plain_text_is_one_causal_map_again():
    recording, _ = generated(build("llama"), prompt())
    assert isinstance(recording[0], SoftmaxMap)
    assert repr(recording[0].mask) == "causal()"
    assert recording[0].v is None
    recording, _ = generated(build("llama"), prompt(padded=True))
    assert isinstance(recording[0], Stitched)
    assert len(recording[0].parts) == 2


@pytest.mark.parametrize("name", ["llama", "mistral window"])
def test_trap20_a_prompt_in_chunks_and_a_chat_that_goes_on_are_one_text(name):
    model, inputs = build(name), prompt()
    with record(model) as recording:
        first = model.generate(**inputs, max_new_tokens=4, prefill_chunk_size=2, return_dict_in_generate=True)
        said = torch.cat([first.sequences, inputs["input_ids"][:, :3]], 1)
        cache = "cache" if "cache" in first else "past_key_values"  # renamed in transformers 5.24
        kept = {cache: first[cache]}
        tokens = model.generate(said, attention_mask=torch.ones_like(said), max_new_tokens=4, **kept)
    assert [each[0].shape[2] for each in recording.passes] == [2, 2, 1, 1, 1, 1, 4, 1, 1, 1]
    assert worst(recording, whole(model, tokens, inputs["attention_mask"])) <= 5e-7


def test_trap20_a_text_reads_its_parts_as_any_map_does():
    model, inputs = build("mistral window"), prompt(padded=True)
    recording, tokens = generated(model, inputs)
    attn, other = recording[2], whole(model, tokens, inputs["attention_mask"])[2]
    assert torch.equal(attn.positions, other.positions)
    for ask in (
        lambda a: a[1, 2, 7],
        lambda a: a[0, 3].entropy(),
        lambda a: a[..., -1, :],
        lambda a: a.diagonal(-1),
        lambda a: a.mass([0, 4]),
        lambda a: a.received(),
        lambda a: a.statistics().distance,
        lambda a: a @ torch.eye(10),
    ):
        assert torch.allclose(ask(attn), ask(other), atol=1e-6)


class Cached(nn.Module):
    """clearhead's own layers, whose cache is one buffer."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.layer = clearhead.nn.Attention(16, 16, 32, num_heads=4, num_kv_heads=2, is_causal=True, window=window)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return self.layer(x, cache=cache)


@pytest.mark.parametrize("window", [None, 4])
def test_trap20_clearheads_own_cache_makes_one_text(window):
    torch.manual_seed(0)
    model, x = Cached(window).eval(), torch.randn(2, 12, 16)
    cache = model.layer.new_cache(2)
    with torch.no_grad():
        with record(model) as steps:
            for part in x.split([5, *[1] * 7], 1):
                model(part, cache=cache)
        with record(model) as expected:
            model(x)
    assert worst(steps, expected) <= 5e-7
    assert [each[0].shape[-1] for each in steps.passes] == ([5, *range(6, 13)] if window is None else [5, *[4] * 7])


# --- encoder-decoder models -------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["t5", "bart", "marian", "whisper"])
def test_trap18_encoder_decoder_and_cross_attention_are_groups_of_one_text(name, cache):
    model = build(name)
    inputs = both_sides(name)
    recording, tokens = generated(model, inputs, cache_implementation=CACHES[cache])
    start = model.generation_config.decoder_start_token_id
    said = torch.cat([tokens.new_full((2, 1), start), tokens], 1) if name == "whisper" else tokens
    with record(model) as expected, torch.no_grad():
        model(**inputs, decoder_input_ids=said[:, :-1])
    assert (recording.layers, recording.paths) == (expected.layers, expected.paths)
    S, T = expected.encoder[0].shape[-1], said.shape[1] - 1
    for side, shape in (("encoder", (S, S)), ("decoder", (T, T)), ("cross", (T, S))):
        group = getattr(recording, side)
        assert {attn.shape[-2:] for attn in group} == {shape}
        assert worst(group, getattr(expected, side)) <= 5e-7
    assert len(recording.encoder) == len(recording.decoder) == len(recording.cross) == 2
    assert recording.cross[0] is recording[recording.cross.paths[0]]
    assert recording.cross.labels == [f"L{n}" for n in recording.cross.layers]


def test_trap18_the_keys_of_the_source_are_kept_once():
    recording, _ = generated(build("bart"), both_sides("bart"))
    path = recording.cross.paths[0]
    keys = {each[path].k.untyped_storage().data_ptr() for each in recording.passes}
    assert len(keys) == 1
    assert isinstance(recording.cross[0], SoftmaxMap)


def test_trap18_layers_of_cross_attention_alone_make_one_text_too():
    model, inputs = build("bart"), both_sides("bart")
    recording, _ = generated(model, inputs)
    with record(model, layers=recording.cross.layers) as alone:
        model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert worst(alone, recording.cross) == 0
    assert alone.layers == recording.cross.layers


def test_trap18_a_model_of_one_side_says_that_it_has_no_others():
    recording, _ = generated(build("llama"), prompt())
    for side in ("encoder", "decoder", "cross"):
        with pytest.raises(
            RecordingError, match=rf"recording\.{side}: there is no such layer.*'model\.layers\.0\.self"
        ):
            getattr(recording, side)
    recording, _ = generated(build("t5"), both_sides("t5"))
    with pytest.raises(RecordingError, match="no such layer"):
        recording.passes[1].encoder  # noqa: B018


def test_trap18_pytorchs_own_decoder_layers_are_grouped_too():
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 2, 32, batch_first=True).eval()
    with record(model) as recording, torch.no_grad():
        model(torch.randn(2, 7, 16), torch.randn(2, 5, 16))
    assert [attn.shape[-2:] for attn in recording.encoder] == [(7, 7)]
    assert [attn.shape[-2:] for attn in recording.decoder] == [(5, 5)] * 2
    assert [attn.shape[-2:] for attn in recording.cross] == [(5, 7)] * 2


# --- the user's own caches ------------------------------------------------------------------------

OWN: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: transformers.DynamicCache(),
    "dynamic, by layer": lambda model: transformers.DynamicCache(config=model.config),
    "static": lambda model: transformers.StaticCache(config=model.config, max_cache_len=12),
}


@pytest.mark.parametrize("cache", OWN)
@pytest.mark.parametrize("name", ["llama", "mistral window", "gpt-oss windows, sinks"])
def test_trap20_a_cache_of_the_users_goes_on_across_calls_and_across_blocks(name, cache):
    model, inputs = build(name, "eager"), prompt(T=9)
    ids, mask = inputs.values()
    given = {argument_of(model): OWN[cache](model)}
    blocks = []
    with torch.no_grad():
        for part in ([(0, 4), (4, 5), (5, 6)], [(6, 7), (7, 9)]):
            with record(model) as recording:
                for start, stop in part:
                    model(ids[:, start:stop], attention_mask=mask[:, :stop], **given)
            blocks.append(recording)
    expected = whole(model, torch.cat([ids, ids[:, :1]], 1), mask)
    for recording, rows in zip(blocks, (slice(0, 6), slice(6, 9)), strict=True):
        assert len(recording.texts) == 1
        for ours, theirs in zip(recording, expected, strict=True):
            dense, other = ours.to_dense(), theirs.to_dense()[:, :, rows]
            S = min(dense.shape[-1], other.shape[-1])  # a window's cache has the last keys only
            last = rows.stop - S
            assert (dense[..., -S:] - other[..., last : rows.stop]).abs().max() <= 5e-7


# --- caches in one buffer --------------------------------------------------------------------------


class Slots:
    """A layer of a static cache; offloaded, its keys lie on another device by the time of the call."""

    max_cache_len = 9

    def __init__(self, keys: Tensor, length: int) -> None:
        self.keys, self.length = keys, length

    def get_seq_length(self) -> Tensor:
        return torch.tensor(self.length)


def test_trap20_unfilled_slots_of_an_offloaded_cache_are_no_keys():
    k = torch.randn(2, 3, 9, 4)
    call = Call(torch.randn(2, 3, 1, 4), k, k, 0.5, masks=((torch.arange(9) < 6)[None, None, None],))
    others = [Slots(k.new_empty(2, 3, 9, 8, device="meta"), 4), Slots(k.clone(), 2)]
    for buffer in (Slots(k, 6), Slots(k.new_empty(k.shape, device="meta"), 6)):
        assert filled(call, [*others, buffer]).shape == (2, 3, 1, 6)
        assert is_borrowed(call, [*others, buffer])
    assert filled(call, others).shape == (2, 3, 1, 9)


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("name", "groups"), [("llama", 2), ("gpt2", 4)])
def test_trap10_a_text_costs_its_queries_and_keys_once(name, groups, cache):
    model = build(name)
    recording, _ = generated(model, prompt(B=1, T=40), max_new_tokens=30, cache_implementation=CACHES[cache])
    rows = 69
    masks = 29 * rows if cache == "static" else 0  # a row of bools a step, shared by the layers
    assert recording.nbytes == 3 * rows * (4 + groups) * 8 * 4 + masks
    text = recording[0]
    assert text.nbytes == rows * (4 + groups) * 8 * 4 + rows * 4 * 4  # its log-sum-exp, too
    del text


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "mistral window", "bart"])
def test_trap02_no_tensor_is_alive_after_a_generation_but_those_that_the_recording_counts(alive, name, cache):
    model, inputs = build(name), prompt(padded=True)
    options = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": CACHES[cache]}
    model.generate(**inputs, **options)  # whatever is made once
    vars(model).pop("_cache", None)  # transformers keeps the last static one
    before = alive()
    with record(model) as recording:
        model.generate(**inputs, **options)
    vars(model).pop("_cache", None)
    held = {at: nbytes for at, nbytes in alive().items() if at not in before}
    assert sum(held.values()) == recording.nbytes


def test_trap10_while_it_grows_no_earlier_keys_are_alive():
    model, inputs = build("llama"), prompt(B=1, T=256)

    def peak(run: Callable[[], Any]) -> int:
        with Allocations() as allocations:
            run()
        return allocations.peak

    def recorded() -> None:
        with record(model):
            model.generate(**inputs, max_new_tokens=40, do_sample=False)

    with torch.no_grad():
        plain = peak(lambda: model.generate(**inputs, max_new_tokens=40, do_sample=False))
        more = peak(recorded) - plain
    keys = 3 * 2 * 8 * 4 * sum(256 + n for n in range(40))  # if each step's were kept
    queries = 3 * 4 * 8 * 4 * 295
    assert more <= 1.5 * queries < keys / 8


def test_trap10_a_map_read_between_two_steps_holds_nothing_once_it_is_dropped(attend):
    x = torch.randn(1, 2, 6, 4)
    keys = x[:, :, :5].clone()
    alive = weakref.ref(keys.untyped_storage())
    with record(attend) as recording:
        attend(x[:, :, :5], keys, x[:, :, :5])
        del keys
        recording[0].entropy()
        attend(x[:, :, 5:], x.clone(), x)
        gc.collect()
        assert alive() is None
    assert recording[0].shape == (1, 2, 6, 6)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_text_can_be_copied_and_pickled_and_its_keys_stay_one_tensor(again):
    recording, _ = generated(build("llama"), prompt(padded=True))
    dense = recording[1].to_dense()
    copied = again(recording)
    assert torch.equal(copied[1].to_dense(), dense)
    assert torch.equal(copied.passes[3][1].to_dense(), recording.passes[3][1].to_dense())
    assert copied.nbytes <= 1.05 * recording.nbytes  # masks of which parts were shared come apart
    assert copied.texts[0].passes[2] is copied.passes[2]


@pytest.mark.full
def test_trap10_smollm2_writes_128_tokens_after_512_for_60_megabytes(smollm2):
    model, tokenizer = smollm2
    text = "When Mary and John went to the store, John gave a drink to Mary. The store was old and the drink cold. "
    ids = tokenizer(text * 40, return_tensors="pt").input_ids[:, :512]
    mask = torch.ones_like(ids)
    with record(model) as recording:
        tokens = model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=128, max_new_tokens=128)
    assert len(recording.passes) == 128
    assert recording.nbytes <= 60e6
    assert worst(recording, whole(model, tokens, mask)) <= 1e-5


def test_trap20_smollm2_continues_a_left_padded_batch(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is Paris, and the capital of Italy is", return_tensors="pt").input_ids
    inputs = {"input_ids": ids.repeat(2, 1), "attention_mask": torch.ones_like(ids).repeat(2, 1)}
    inputs["attention_mask"][0, :4] = 0
    recording, tokens = generated(model, inputs, min_new_tokens=8, max_new_tokens=8)
    assert worst(recording, whole(model, tokens, inputs["attention_mask"])) <= 1e-5


# --- compiled by generate itself --------------------------------------------------------------------


def test_what_generate_would_compile_runs_uncompiled_in_the_block_and_it_is_said(touched):
    model, inputs, before = build("llama"), prompt(), touched()
    config = transformers.CompileConfig(backend="eager")
    config._compile_all_devices = True  # as on a GPU
    options = {"cache_implementation": "static", "compile_config": config, "max_new_tokens": NEW, "do_sample": False}
    with (
        pytest.warns(UserWarning, match="generate would compile the model.*runs uncompiled"),
        record(model) as recording,
    ):
        tokens = model.generate(**inputs, **options)
    assert not hasattr(model, "_compiled_call")
    assert worst(recording, whole(model, tokens, inputs["attention_mask"])) <= 5e-7
    assert touched() == before
