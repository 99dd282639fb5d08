"""Calls that make no one text: what is said, and that each of them can be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.recording import record
from clearhead.recording.generating import way_of_generating

from .generated import argument_of, build, generated, prompt, whole, worst

transformers = pytest.importorskip("transformers")

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
    assert len(recording.texts) == len(recording.passes) > 1
    for each in recording.passes:
        assert (each[2].to_dense().sum(-1) - 1).abs().max() <= 1e-5
    assert touched()[:-1] == before[:-1]


def test_trap20_tokens_that_assisted_decoding_tried_last_and_took_back_are_no_part_of_a_text():
    recording, tokens = generated(build("llama"), prompt(B=1, T=6), prompt_lookup_num_tokens=3, max_new_tokens=12)
    assert sum(each[0].shape[2] for each in recording.passes) > tokens.shape[1] - 1  # more queries than the text has
    with pytest.raises(RecordingError, match="takes back those that it does not accept"):
        recording[0]


def test_trap20_the_only_call_of_a_beam_search_holds_beams_and_no_text_either():
    recording, tokens = generated(build("llama"), prompt(), num_beams=3, max_new_tokens=1)
    assert tokens.shape == (2, 6)
    assert recording.passes[0][0].shape[0] == 2 * 3
    with pytest.raises(RecordingError, match="beam search goes on with several texts"):
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


@pytest.mark.parametrize("module", ["transformers.generation.utils", "transformers_modules.custom", "my.own"])
@pytest.mark.parametrize("name", ["_beam_search", "_group_beam_search", "_contrastive_search", "_assisted_decoding"])
def test_trap20_a_way_of_generating_is_told_by_the_function_of_transformers_that_calls(name, module):
    namespace: dict[str, Any] = {"__name__": module}
    exec(f"def {name}(call):\n    return call()", namespace)
    way = namespace[name](lambda: way_of_generating())
    assert (way is None) == (module == "my.own")
    assert way is None or name.split("_")[-2].removeprefix("group") in way
    assert way_of_generating() is None
