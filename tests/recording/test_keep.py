"""record(keep=function): each map is reduced as it is made, and nothing of it is kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.maps import AttentionMap
from clearhead.recording import record
from clearhead.testing.memory import Allocations


def entropy(name: str, attn: AttentionMap) -> Any:
    return attn.entropy()


def test_results_are_by_label(nano, ids):
    with record(nano) as whole:
        nano(ids)
    with record(nano, keep=entropy) as recording:
        out = nano(ids)
    assert torch.equal(out, nano(ids))
    assert list(recording.results) == ["L0", "L1", "L2"] == recording.labels
    for label, attn in zip(recording.labels, whole, strict=True):
        assert torch.equal(recording.results[label], attn.entropy())
    assert recording.passes[0].results is recording.results


def test_what_was_recorded_is_still_said_but_there_are_no_maps(nano, ids):
    with record(nano, keep=entropy) as recording:
        nano(ids)
    assert (len(recording), recording.layers) == (3, [0, 1, 2])
    assert recording.paths == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert (recording.nbytes, recording.dense_nbytes) == (0, 11616)
    for ask in (
        lambda: recording[1],
        lambda: recording["h.1.attn"],
        lambda: list(recording),
        lambda: recording.attentions,
    ):
        with pytest.raises(RecordingError, match=r"was not kept: record\(keep=…\).*recording\.results\['L[01]'\]"):
            ask()
    assert repr(recording) == "Recording(layers=3, each (2, 4, 11, 11); holds 0 B, dense 11.6 kB)"


def test_layers_and_padding_go_with_it(nano, ids):
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with record(nano, keep=entropy, layers=[1, 2], padding=mask) as recording:
        nano(ids)
    assert list(recording.results) == ["L1", "L2"]
    assert (recording.results["L1"][0, :, :4] == 0).all()


def test_each_call_has_results_of_its_own(nano, ids):
    with record(nano, keep=lambda name, attn: attn.shape[-1]) as recording:
        nano(ids)
        nano(ids[:, :5])
    assert [each.results["L2"] for each in recording.passes] == [11, 5]
    with pytest.raises(
        RecordingError, match=r"recording\.results: .*called 2 times.*recording\.passes\[0\]\.results …"
    ):
        recording.results  # noqa: B018


def test_trap10_queries_and_keys_are_freed_at_once():
    class Deep(nn.Module):
        def forward(self, x: Any) -> Any:
            for _ in range(16):
                x = F.scaled_dot_product_attention(x + 1, x + 2, x + 3)
            return x

    model, x = Deep(), torch.randn(1, 4, 512, 16)

    def peak(**how: Any) -> int:
        with Allocations() as allocations, record(model, **how):
            model(x)
        return allocations.peak

    assert peak(keep=lambda name, attn: attn[0, 0, -1]) <= 8 * x.nbytes
    assert peak() >= 40 * x.nbytes


def test_the_map_dies_with_the_call(nano, ids):
    maps = []
    with record(nano, keep=lambda name, attn: maps.append(weakref.ref(attn))) as recording:
        nano(ids)
        gc.collect()
        assert [ref() for ref in maps] == [None] * 3
    assert recording.results == {"L0": None, "L1": None, "L2": None}


def test_detach_false_lets_a_loss_on_the_results_train(nano, ids):
    with record(nano, keep=lambda name, attn: attn.entropy().mean(), detach=False) as recording:
        nano(ids)
    sum(recording.results.values()).backward()
    assert nano.h[0].attn.c_attn.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("what", [ZeroDivisionError, KeyError])
def test_an_error_inside_the_function_names_the_layer(nano, ids, touched, what):
    before = touched()

    def second(name: str, attn: AttentionMap) -> None:
        if name == "L1":
            raise what("too bad")

    message = (
        rf"record\(NanoGPT, keep=.*second\): the function failed on layer L1 \('h\.1\.attn'\).*{what.__name__}: .*too"
    )
    with pytest.raises(RecordingError, match=message) as caught, record(nano, keep=second):
        nano(ids)
    assert isinstance(caught.value.__cause__, what)
    assert touched() == before


def test_calls_that_the_function_makes_are_not_recorded(nano, ids):
    with record(nano, keep=lambda name, attn: nano(ids[:, :3]).shape, layers=[0, 1, 2]) as recording:
        nano(ids)
    assert list(recording.results) == ["L0", "L1", "L2"]


@pytest.mark.parametrize("keep", [1, "entropy", [entropy]])
def test_keep_is_a_function(nano, keep):
    with pytest.raises(
        RecordingError, match=r"record\(keep=.*expected a function of a layer's label \('L17'\) and its map"
    ):
        record(nano, keep=keep)


def test_one_module_called_many_times_has_a_label_for_each_call():
    transformers = pytest.importorskip("transformers")
    config = transformers.AlbertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        embedding_size=16,
        intermediate_size=48,
    )
    model = transformers.AlbertModel(config).eval()
    with record(model, keep=entropy) as recording, torch.no_grad():
        model(torch.arange(6)[None])
    assert len(set(recording.paths)) == 1
    assert list(recording.results) == ["L0", "L1", "L2"]


def test_trap20_each_step_of_a_generation_is_reduced_while_its_cache_can_be_read():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(3, 8)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "eos_token_id": None}
    with record(model) as whole:
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    with record(model, keep=entropy) as recording:
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert [each.results["L1"].shape[-1] for each in recording.passes] == [5, 1, 1, 1]
    joined = torch.cat([each.results["L1"] for each in recording.passes], -1)
    assert torch.allclose(joined, whole[1].entropy(), atol=1e-6)
