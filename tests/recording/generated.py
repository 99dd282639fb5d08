"""Small models that generate, recorded, and the one call over the whole text to which a recording is held."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.recording import Recording, record

__all__ = ["CACHES", "LLAMA", "NEW", "argument_of", "both_sides", "build", "generated", "prompt", "whole", "worst"]

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


def both_sides(name: str) -> dict[str, Tensor]:
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))}
    inputs = prompt(T=7)
    inputs["attention_mask"][0, 5:] = 0
    return inputs


def argument_of(model: Any) -> str:
    """How a model calls its cache: renamed in transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
