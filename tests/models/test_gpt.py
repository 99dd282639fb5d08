"""GPT: the same numbers as transformers with the same weights, the same text, and attention that is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import reference
from clearhead.errors import DTypeError, ModelError, ShapeError
from clearhead.models import GPT, GPTConfig

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 40, "context_length": 24, "width": 32, "num_layers": 2, "num_heads": 4}
LLAMA = {"bias": False, "rotary": 10_000.0, "rms_norm": True, "gated": True, "num_kv_heads": 2, "d_hidden": 50}


def gpt(**more: Any) -> GPT:
    torch.manual_seed(3)
    model = GPT(GPTConfig(**{**SIZES, **more})).eval()
    for parameter in model.parameters():  # far from what training begins with, so that weights differ
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(params=[{}, LLAMA], ids=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> GPT:
    return gpt(**request.param)


def ids(batch: int = 2, tokens: int = 12) -> Tensor:
    return torch.randint(40, (batch, tokens), generator=torch.Generator().manual_seed(1))


def llama(**more: Any) -> Any:
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{**sizes, "num_key_value_heads": 2, "vocab_size": 40, "initializer_range": 0.3, **more}
    )
    return transformers.LlamaForCausalLM(config).eval()


# -- sizes and numbers


def test_the_sizes_of_gpt2_give_its_number_of_parameters_with_tied_weights():
    with torch.device("meta"):
        model, untied = GPT(), GPT(GPTConfig(tied=False, num_layers=1))
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert untied.head.weight.shape == (50257, 768)


def test_the_loss_is_the_mean_of_what_the_next_tokens_cost(model: GPT):
    text = ids()
    with torch.no_grad():
        p = torch.softmax(model(text).double(), -1)
        cost = [-p[b, t, text[b, t + 1]].log() for b in range(2) for t in range(11)]
        assert model.loss(text).item() == pytest.approx(torch.stack(cost).mean().item(), rel=1e-5)


def test_dropout_is_of_training_alone():
    model = gpt(dropout=0.5)
    with torch.no_grad():
        assert torch.equal(model(ids()), gpt()(ids()))
        model.train()
        assert not torch.equal(model(ids()), model(ids()))


def test_no_token_is_moved_by_a_later_one(model: GPT):
    text = ids()
    other = text.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 40
    with torch.no_grad():
        torch.testing.assert_close(model(text)[:, :7], model(other)[:, :7])


# -- weights of transformers


def test_a_gpt2_has_the_logits_of_transformers(writer: Any):
    text = torch.randint(1000, (2, 30), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(text)
    real[1, 20:] = 0
    with torch.no_grad():
        ours = GPT.from_huggingface(writer)
        torch.testing.assert_close(ours(text), writer(text).logits, atol=1e-4, rtol=0)
        theirs = writer(text, attention_mask=real).logits
        torch.testing.assert_close(ours(text, real)[real.bool()], theirs[real.bool()], atol=1e-4, rtol=0)


@pytest.mark.full
def test_a_gpt2_of_full_size_has_the_logits_of_transformers():
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    text = torch.randint(50257, (1, 128))
    with torch.no_grad():
        torch.testing.assert_close(GPT.from_huggingface(theirs)(text), theirs(text).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_has_the_logits_and_the_text_of_transformers(tied: bool):
    theirs = llama(tie_word_embeddings=tied, eos_token_id=None)
    ours = GPT.from_huggingface(theirs)
    assert (ours.config.num_kv_heads, ours.head is None) == (2, tied)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids()), theirs(ids()).logits, atol=1e-4, rtol=0)
    written = theirs.generate(ids(), max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(ids(), 10), written)


@pytest.mark.full
def test_smollm2_writes_the_same_64_tokens(smollm2: Any):
    theirs, tokenizer = smollm2
    ours = GPT.from_huggingface(theirs)
    text = tokenizer("The keeper of the lighthouse", return_tensors="pt")["input_ids"]
    written = theirs.generate(text, min_new_tokens=64, max_new_tokens=64, do_sample=False)
    assert torch.equal(ours.generate(text, 64), written)
    with torch.no_grad():
        error = (ours(written) - theirs(written).logits).abs().max()
    print(f"{tokenizer.decode(written[0])!r}: largest error of {len(written[0])} logits {error:.1e}")
    assert error <= 1e-4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='linear'"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"attention_bias": True, "hidden_act": "relu"}, "hidden_act='relu', attention_bias=True"),
    ],
)
def test_what_a_gpt_cannot_be_is_refused(config: dict[str, Any], said: str):
    with pytest.raises(ModelError, match=f"its config has {said}, which a GPT has not"):
        GPT.from_huggingface(llama(**config))


def test_other_architectures_are_refused(translator: Any):
    with pytest.raises(ModelError, match="expected a GPT-2 or a Llama, got a model of type 'marian'"):
        GPT.from_huggingface(translator)
    with pytest.raises(ModelError, match="LlamaModel has no head that gives logits"):
        GPT.from_huggingface(llama().model)


# -- writing


def test_what_is_written_with_a_cache_is_what_the_whole_text_says(model: GPT):
    text = ids()
    for _ in range(12):
        with torch.no_grad():
            text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(model.generate(ids(), 12), text)
    assert torch.equal(model.generate(ids(), 12, temperature=0.7, top_k=1), text)


def test_a_text_goes_on_beyond_the_context_from_its_last_half(model: GPT):
    text = model.generate(ids(), 40)
    assert text.shape == (2, 52)
    with torch.no_grad():  # 24 tokens read, the 25th written: of 25, the last 12 are read anew
        assert torch.equal(model(text[:, 13:25])[:, -1].argmax(-1), text[:, 25])
    assert torch.equal(model.generate(text, 2)[:, :-2], text)  # of a prompt longer than the context, its end counts


def test_temperature_draws_from_the_softmax_and_top_k_among_the_likeliest(model: GPT):
    text = ids(1).expand(1000, -1)
    torch.manual_seed(0)
    with torch.no_grad():
        p = torch.softmax(model(text[:1])[0, -1] / 2, -1)
    drawn = torch.bincount(model.generate(text, 1, temperature=2.0)[:, -1], minlength=40) / 1000
    assert (drawn - p).abs().max() < 5 * (p.max() / 1000) ** 0.5
    few = model.generate(text[:200], 1, temperature=2.0, top_k=3)[:, -1].unique()
    assert set(few.tolist()) == set(p.topk(3).indices.tolist())


# -- attention, seen


def test_the_recorded_weights_are_those_of_the_formula(model: GPT):
    with clearhead.record(model) as recording, torch.no_grad():
        model(ids())
    block = model.blocks[0]
    x = model.tokens(ids()) + (0 if model.positions is None else model.positions(torch.arange(12)))
    q, k, _ = block.attention._project(block.norm1(x), block.norm1(x), 0)
    wanted = reference.weights(q.double(), k.double(), mask=reference.causal(12, 12))
    assert [attn.shape for attn in recording] == [(2, 4, 12, 12)] * 2
    torch.testing.assert_close(recording[0].to_dense().double(), wanted, atol=1e-6, rtol=0)


def test_what_is_written_is_one_text_to_a_recording(model: GPT):
    with clearhead.record(model) as recording:
        text = model.generate(ids(), 5)
    with clearhead.record(model) as whole, torch.no_grad():
        model(text[:, :-1])
    for ours, once in zip(recording, whole, strict=True):
        torch.testing.assert_close(ours.to_dense(), once.to_dense(), atol=1e-6, rtol=0)


def test_padding_is_read_from_the_call(model: GPT):
    real = torch.ones(2, 12, dtype=torch.int64)
    real[0, 9:] = 0
    with clearhead.record(model) as recording, torch.no_grad():
        model(ids(), real)
    assert not recording[1][0, :, 9:].to_dense().any()
    assert not recording[1].to_dense()[0, :, :, 9:].any()


def test_a_head_is_knocked_out(model: GPT):
    with torch.no_grad():
        before = model(ids())
        with clearhead.knockout(model, {(1, 2): "zero"}):
            without = model(ids())
        model.blocks[1].attention.out_proj.weight[:, 16:24] = 0  # what head 2 of 8 wide brings
        torch.testing.assert_close(without, model(ids()))
    assert (before - without).abs().max() > 1e-2


# -- bad input


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (torch.zeros(1, 3), DTypeError, r"input_ids = a float32 tensor of shape \(1, 3\): expected token ids"),
        (torch.zeros(3, dtype=torch.int64), ShapeError, r"expected \(B, T\).*ids\[None\]"),
        (torch.zeros(1, 0, dtype=torch.int64), ShapeError, "at least one token"),
        (torch.zeros(1, 25, dtype=torch.int64), ShapeError, "more than context_length=24"),
        (torch.full((1, 3), 40), ShapeError, "from 40 to 40: the model has 40 tokens"),
    ],
)
def test_ids_that_cannot_be_read(given: Tensor, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        gpt()(given)


def test_too_many_tokens_after_those_in_the_caches():
    model = gpt()
    caches = model.new_caches(2)
    with torch.no_grad():
        model(ids(2, 20), caches=caches)
        with pytest.raises(ShapeError, match=r"shape \(2, 12\) after 20 in the caches: more than context_length=24"):
            model(ids(), caches=caches)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"num_layers": 1.5}, {"num_heads": 5}, {"d_hidden": -1}])
def test_sizes_that_make_no_model(wrong: dict[str, Any]):
    with pytest.raises(ShapeError, match=next(iter(wrong))):
        GPT(replace(GPTConfig(**SIZES), **wrong))


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"max_new_tokens": -1}])
def test_ways_of_writing_that_make_no_sense(wrong: dict[str, Any]):
    with pytest.raises(ShapeError, match=next(iter(wrong))):
        gpt().generate(ids(), **{"max_new_tokens": 1, **wrong})
