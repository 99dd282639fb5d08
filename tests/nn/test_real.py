"""Layers of real models, rebuilt from `nn.Attention` with their own weights: same hidden states, same text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.nn import Attention
from clearhead.nn.cache import KVCache
from clearhead.scores import Rotary

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PROMPT = "The three colours of the French flag are"


class Swapped(nn.Module):
    """Stands where a model's own self-attention stood; keeps a cache of its own when it is given one."""

    def __init__(self, layer: Attention, *, returns_weights: bool) -> None:
        super().__init__()
        self.layer, self.returns_weights = layer, returns_weights
        self.cache: KVCache | None = None
        self.padding: Tensor | None = None

    def forward(self, hidden_states: Tensor, *rest: Any, **kwargs: Any) -> Any:
        out = self.layer(hidden_states, padding=self.padding, cache=self.cache)
        return (out, None) if self.returns_weights else out


def take(layer: Attention, linears: dict[str, nn.Linear]) -> Attention:
    """The layer with the weights of these projections."""
    state = {f"{name}.{kind}": w for name, linear in linears.items() for kind, w in linear.state_dict().items()}
    layer.load_state_dict(state)
    return layer.eval()


def of_llama(attention: Any, config: Any) -> Attention:
    layer = Attention(
        config.hidden_size,
        config.hidden_size,
        config.max_position_embeddings,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        rotary=Rotary(attention.head_dim, base=config.rope_parameters["rope_theta"]),
        out_bias=False,
    )
    names = {"W_query": "q_proj", "W_key": "k_proj", "W_value": "v_proj", "out_proj": "o_proj"}
    return take(layer, {ours: getattr(attention, theirs) for ours, theirs in names.items()})


def of_bert(attention: Any, config: Any) -> Attention:
    width = config.hidden_size
    layer = Attention(width, width, num_heads=config.num_attention_heads, qkv_bias=True, is_causal=False)
    own = attention.self
    linears = {"W_query": own.query, "W_key": own.key, "W_value": own.value}
    return take(layer, {**linears, "out_proj": attention.output.dense})


@pytest.fixture(scope="module")
def rebuilt(smollm2: tuple[Any, Any]) -> tuple[Any, Any, list[Swapped]]:
    """SmolLM2 with every self-attention swapped for ours: rotary embedding, 9 query heads on 3 key heads."""
    model, tokenizer = smollm2
    ours = copy.deepcopy(model)
    swapped = [Swapped(of_llama(block.self_attn, ours.config), returns_weights=True) for block in ours.model.layers]
    for block, other in zip(ours.model.layers, swapped, strict=True):
        block.self_attn = other
    return ours, tokenizer, swapped


@torch.no_grad()
def test_a_real_language_model_of_our_layers_predicts_the_same(
    smollm2: tuple[Any, Any], rebuilt: tuple[Any, Any, list[Swapped]]
) -> None:
    ids = rebuilt[1](PROMPT, return_tensors="pt").input_ids
    theirs, ours = smollm2[0](ids, use_cache=False).logits, rebuilt[0](ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@torch.no_grad()
def test_generation_with_our_cache_writes_the_same_tokens(
    smollm2: tuple[Any, Any], rebuilt: tuple[Any, Any, list[Swapped]]
) -> None:
    ours, tokenizer, swapped = rebuilt
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    written = smollm2[0].generate(prompt, max_new_tokens=8, do_sample=False)
    assert greedy(ours, prompt, 8, fresh=lambda: None) == written[0].tolist()
    for one in swapped:
        one.cache = one.layer.new_cache(1, prompt.shape[1] + 8)
    try:
        assert greedy(ours, prompt, 8, fresh=lambda: swapped[0].cache) == written[0].tolist()
    finally:
        for one in swapped:
            one.cache = None


def greedy(model: Any, prompt: Tensor, steps: int, *, fresh: Callable[[], KVCache | None]) -> list[int]:
    """The likeliest tokens, one after another: of all so far again each time, or of the last one with a cache."""
    ids = prompt
    for _ in range(steps):
        cache = fresh()
        given = ids if cache is None else ids[:, cache.tokens :]
        ids = torch.cat([ids, model(given, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return [int(one) for one in ids[0]]


@torch.no_grad()
def test_a_real_encoder_with_padding_has_the_same_hidden_states(minilm: tuple[Any, Any]) -> None:
    model, tokenizer = minilm
    batch = tokenizer(
        ["The dog chased the cat.", "A much longer sentence about a lamp."], padding=True, return_tensors="pt"
    )
    expected = model(**batch).last_hidden_state
    ours = copy.deepcopy(model)
    for block in ours.encoder.layer:
        layer = of_bert(block.attention, ours.config)
        own = Swapped(layer, returns_weights=True)
        own.padding = batch["attention_mask"]
        block.attention.self, block.attention.output.dense = own, nn.Identity()
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(ours(**batch).last_hidden_state[real], expected[real], atol=1e-5, rtol=0)
