"""Texts that grow call by call: one map a layer, equal to one call over the whole text."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead.nn
from clearhead.errors import RecordingError
from clearhead.maps import SoftmaxMap
from clearhead.maps.composed import Stitched
from clearhead.recording import Recording, record
from clearhead.testing.memory import Allocations

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 60, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {**SMALL, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
WINDOW = {**LLAMA, "head_dim": 8, "sliding_window": 4}
BOTH_SIDES = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=3, n_head=4),
    "mistral window": lambda: transformers.MistralConfig(**WINDOW),
    "gemma2 windows, softcap": lambda: transformers.Gemma2Config(**WINDOW, attn_logit_softcapping=2.0),
    "gpt-oss windows, sinks": lambda: transformers.GptOssConfig(**WINDOW, num_local_experts=2, num_experts_per_tok=1),
    "bloom by hand": lambda: transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=3, n_head=4),
    "t5": lambda: transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    "bart": lambda: transformers.BartConfig(**BOTH_SIDES, max_position_embeddings=64),
    "marian": lambda: transformers.MarianConfig(**BOTH_SIDES, max_position_embeddings=64),
    "whisper": lambda: transformers.WhisperConfig(
        **BOTH_SIDES,
        max_source_positions=20,
        max_target_positions=40,
        num_mel_bins=8,
        bos_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
}
NEW = 6
CACHES = {"dynamic": None, "static": "static"}


def build(name: str, implementation: str = "sdpa") -> Any:
    """A model with weights large enough that attention is not uniform."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    auto = {"whisper": transformers.AutoModelForSpeechSeq2Seq}.get(
        name, transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.25)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.eval()


def prompt(padded: bool = False, B: int = 2, T: int = 5) -> dict[str, Tensor]:
    """Tokens, and a mask that pads the first sequence by two on the left."""
    mask = torch.ones(B, T, dtype=torch.long)
    mask[0, :2] = 0 if padded else 1
    return {
        "input_ids": torch.randint(3, 60, (B, T), generator=torch.Generator().manual_seed(1)),
        "attention_mask": mask,
    }


def generated(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Recording, Tensor]:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    torch.manual_seed(3)
    with record(model) as recording:
        tokens = model.generate(**inputs, **options)
    torch.manual_seed(3)
    assert torch.equal(tokens, model.generate(**inputs, **options))  # the same as without us
    return recording, tokens


def whole(model: Any, tokens: Tensor, mask: Tensor) -> Recording:
    """One call over the text but its last token, which never was a query."""
    mask = torch.cat([mask, mask.new_ones(len(mask), tokens.shape[1] - 1 - mask.shape[1])], 1)
    with record(model) as recording, torch.no_grad():
        at = {} if model.config.model_type == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        model(tokens[:, :-1], attention_mask=mask, **at)
    return recording


def worst(got: Any, expected: Any) -> float:
    """The largest difference of any weight of any layer."""
    with torch.no_grad():
        return max(float((a.to_dense() - b.to_dense()).abs().max()) for a, b in zip(got, expected, strict=True))


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


def both_sides(name: str, model: Any) -> dict[str, Tensor]:
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))}
    inputs = prompt(T=7)
    inputs["attention_mask"][0, 5:] = 0
    return inputs


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["t5", "bart", "marian", "whisper"])
def test_trap18_encoder_decoder_and_cross_attention_are_groups_of_one_text(name, cache):
    model = build(name)
    inputs = both_sides(name, model)
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
    recording, _ = generated(build("bart"), both_sides("bart", None))
    path = recording.cross.paths[0]
    keys = {each[path].k.untyped_storage().data_ptr() for each in recording.passes}
    assert len(keys) == 1
    assert isinstance(recording.cross[0], SoftmaxMap)


def test_trap18_layers_of_cross_attention_alone_make_one_text_too():
    model, inputs = build("bart"), both_sides("bart", None)
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
    recording, _ = generated(build("t5"), both_sides("t5", None))
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


# --- what is no one text ---------------------------------------------------------------------------


NO_TEXT = {
    "beam search": {"num_beams": 3},
    "beam search, sampled": {"num_beams": 2, "do_sample": True},
    "assisted decoding": {"assistant_model": True, "max_new_tokens": 10},
    "assisted decoding, by the prompt": {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12},
}


@pytest.mark.filterwarnings("ignore:Passing `generation_config` together")
@pytest.mark.parametrize("way", NO_TEXT)
def test_trap20_beams_and_assisted_decoding_are_no_one_text_and_each_call_is_readable(way, touched):
    model, options, before = build("llama"), dict(NO_TEXT[way]), touched()
    if "assistant_model" in options:
        options["assistant_model"] = build("llama")  # the same: all that it tries is accepted, as a text that grows
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])
    recording, _ = generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **options)
    message = rf"called \d+ times.*and {way.split(',')[0]}.*recording\.passes\[0\].*call the model on the text"
    for ask in (lambda: recording[0], lambda: len(recording), lambda: recording.attentions, lambda: recording.cross):
        with pytest.raises(RecordingError, match=message):
            ask()
    for each in recording.passes:
        assert (each[2].to_dense().sum(-1) - 1).abs().max() <= 1e-5
    assert touched()[:-1] == before[:-1]


def test_trap20_tokens_that_assisted_decoding_tried_last_and_took_back_are_no_part_of_a_text():
    recording, tokens = generated(build("llama"), prompt(B=1, T=6), prompt_lookup_num_tokens=3, max_new_tokens=12)
    assert sum(each[0].shape[2] for each in recording.passes) > tokens.shape[1] - 1  # more queries than the text has
    with pytest.raises(RecordingError, match="takes back those that it does not accept"):
        recording[0]


def test_trap20_a_cache_that_rounds_keys_makes_no_one_text():
    from transformers.cache_utils import Cache, QuantizedLayer

    class Rounded(QuantizedLayer):
        """In steps of 1/8, as a backend of transformers' quantised cache rounds."""

        def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
            return (tensor * 8).round()

        def _dequantize(self, q_tensor: Tensor) -> Tensor:
            return q_tensor / 8

    model, inputs = build("llama"), prompt()
    with record(model) as recording, torch.no_grad():
        cache = Cache(layers=[Rounded() for _ in range(3)])
        for part in inputs["input_ids"].split([3, 1, 1], 1):
            model(part, **{argument_of(model): cache})
    with pytest.raises(RecordingError, match=r"call 1 does not go on from call 0.*a quantised cache rounds them"):
        recording[0]
    assert [each[0].shape[-2:] for each in recording.passes] == [(3, 3), (1, 4), (1, 5)]


def argument_of(model: Any) -> str:
    """How a model calls its cache: renamed in transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def test_trap20_two_texts_in_one_block_are_two():
    model, inputs = build("llama"), prompt()
    shorter = {name: x[:, 1:] for name, x in inputs.items()}
    with record(model) as recording:
        tokens = [model.generate(**each, max_new_tokens=4, do_sample=False) for each in (inputs, shorter)]
    with pytest.raises(RecordingError, match=r"called 8 times.*passes\[7\], or which text: recording\.texts\[0\] …"):
        recording[0]
    for text, each, said in zip(recording.texts, (inputs, shorter), tokens, strict=True):
        assert worst(text, whole(model, said, each["attention_mask"])) <= 5e-7
    assert repr(recording.texts[1]).startswith("Text(passes=4, layers=3, each (2, 4, 7, 7)")


def test_trap20_a_text_without_a_cache_is_so_many_calls():
    recording, _ = generated(build("llama"), prompt(), use_cache=False)
    with pytest.raises(RecordingError, match=r"called 6 times in this block\. Say which call"):
        recording[0]


def test_trap20_calls_of_which_the_weights_alone_are_known_do_not_go_on():
    class Squared(nn.Module):
        """Weights that are no softmax of scores: no keys are known."""

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            weights = (q @ k.mT).softmax(-1) ** 2
            return (weights / weights.sum(-1, keepdim=True)).softmax(-1) @ k

    model, x = Squared(), torch.randn(1, 2, 6, 4)
    with record(model) as recording:
        model(x[:, :, :5], x[:, :, :5])
        model(x[:, :, 5:], x)
    with pytest.raises(RecordingError, match=r"call 1 cannot be told to go on from call 0: of some layers the weights"):
        recording[0]


def test_trap20_keys_that_differ_in_one_bit_do_not_go_on(attend):
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 6, 4)
    other = k.clone()
    other[0, 1, 2, 3] = torch.nextafter(other[0, 1, 2, 3], torch.tensor(9.0))
    for earlier, texts in ((k, 1), (other, 2)):
        with record(attend) as recording:
            attend(k[:, :, :5], earlier[:, :, :5].clone(), k[:, :, :5])
            attend(q, k, k)
        assert len(recording.texts) == texts


def test_trap20_a_step_that_failed_and_was_repeated_leaves_no_trace():
    class Fragile(nn.Module):
        def forward(self, q: Tensor, k: Tensor, fails: bool = False) -> Tensor:
            out = F.scaled_dot_product_attention(q, k, k, is_causal=q.shape[2] > 1)
            return 1 / 0 if fails else out

    model, x = Fragile(), torch.randn(1, 2, 7, 4)
    with record(model) as recording:
        model(x[:, :, :5], x[:, :, :5].clone())
        with pytest.raises(ZeroDivisionError):
            model(x[:, :, 5:6] + 1, torch.cat([x[:, :, :5], x[:, :, :1]], 2), fails=True)
        for n in (6, 7):
            model(x[:, :, n - 1 : n], x[:, :, :n].clone())
    with record(model) as expected:
        model(x, x)
    assert worst(recording, expected) <= 2e-7


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


# --- training --------------------------------------------------------------------------------------


def trained(model: Any, inputs: dict[str, Tensor]) -> tuple[Recording, dict[str, Tensor]]:
    """One step of training against low entropy: the recording and the gradients."""
    model.zero_grad()
    with record(model, detach=False) as recording:
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        (loss + sum(attn.entropy().mean() for attn in recording)).backward()
    return recording, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def test_gradient_checkpointing_records_each_call_once_and_gives_the_same_gradients():
    model, inputs = build("llama").train(), prompt()
    plain, expected = trained(model, inputs)
    model.activation_checkpointing_enable({"use_reentrant": False})
    recording, gradients = trained(model, inputs)
    assert [len(each) for each in recording.passes] == [3]
    assert worst(recording, plain) == 0
    assert gradients.keys() == expected.keys()
    assert max(float((gradients[name] - expected[name]).abs().max()) for name in expected) <= 1e-6


def test_reentrant_checkpointing_is_recorded_once_and_keeps_no_graph():
    model, inputs = build("llama").train(), prompt()
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with record(model, detach=False) as recording:
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert [len(each) for each in recording.passes] == [3]
    assert not recording[0].entropy().requires_grad  # PyTorch computes it without one, and again later


def test_an_entropy_penalty_trains():
    model, inputs = build("llama").train(), prompt()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    entropies = []
    for _ in range(8):
        with record(model, detach=False) as recording:
            model(**inputs)
        penalty = sum(attn.entropy().mean() for attn in recording)
        entropies.append(penalty.item())
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
    assert entropies[-1] < 0.9 * entropies[0]


def test_a_block_around_steps_of_training_holds_a_pass_for_each():
    model, inputs = build("llama").train(), prompt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with record(model) as recording:
        for _ in range(3):
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            optimizer.step()
    assert len(recording.passes) == 3
    assert worst(recording.passes[0], recording.passes[2]) > 1e-4
