"""Hugging Face's names for sizes and weights of GPT-2 and of Llama -> those of `GPT`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from clearhead.errors import ModelError

__all__ = ["arguments", "weights"]

_GPT2 = {
    "transformer.wte.": "tokens.",
    "transformer.wpe.": "positions.",
    "transformer.h.": "blocks.",
    "transformer.ln_f.": "norm.",
    ".ln_1.": ".norm1.",
    ".ln_2.": ".norm2.",
    ".attn.c_proj.": ".attention.out_proj.",
    ".mlp.c_fc.": ".mlp.up.",
    ".mlp.c_proj.": ".mlp.down.",
    "lm_head.": "head.",
}
_LLAMA = {
    "model.embed_tokens.": "tokens.",
    "model.layers.": "blocks.",
    "model.norm.": "norm.",
    ".input_layernorm.": ".norm1.",
    ".post_attention_layernorm.": ".norm2.",
    ".self_attn.q_proj.": ".attention.W_query.",
    ".self_attn.k_proj.": ".attention.W_key.",
    ".self_attn.v_proj.": ".attention.W_value.",
    ".self_attn.o_proj.": ".attention.out_proj.",
    ".mlp.gate_proj.": ".mlp.gate.",
    ".mlp.up_proj.": ".mlp.up.",
    ".mlp.down_proj.": ".mlp.down.",
    "lm_head.": "head.",
}


def arguments(config: Any) -> dict[str, Any]:
    """What a `GPTConfig` is made of, from a transformers config; ModelError for what a GPT cannot be."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in _KINDS:
        raise ModelError(f"GPT.from_huggingface(model): expected a GPT-2 or a Llama, got a model of type {kind!r}.")
    return _KINDS[kind](config)


def weights(model: Any) -> dict[str, Tensor]:
    """The state of the `GPT` that is the same as this model with its head."""
    if getattr(model, "lm_head", None) is None:
        raise ModelError(
            f"GPT.from_huggingface(model): {type(model).__name__} has no head that gives logits: load a language model,"
            " as AutoModelForCausalLM does."
        )
    gpt2, tied = model.config.model_type == "gpt2", model.config.tie_word_embeddings
    names, found = (_GPT2 if gpt2 else _LLAMA), dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if not (tied and name.startswith("head.")):
            found.update(_unpacked(name, tensor) if gpt2 else [(name, tensor)])
    return found


def _unpacked(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """GPT-2 keeps the three projections in one, and matrices of blocks as (d_in, d_out)."""
    tensor = tensor.mT if name.startswith("blocks.") and tensor.ndim == 2 else tensor
    if ".attn.c_attn." not in name:
        yield name, tensor
        return
    for which, part in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
        yield name.replace(".attn.c_attn.", f".attention.W_{which}."), part


def _of_gpt2(config: Any) -> dict[str, Any]:
    _refuse(
        {
            f"activation_function={config.activation_function!r}": config.activation_function != "gelu_new",
            "scale_attn_weights=False": not config.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx=True": config.scale_attn_by_inverse_layer_idx,
            "add_cross_attention=True": config.add_cross_attention,
        }
    )
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.n_positions,
        "width": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "d_hidden": config.n_inner,
        "tied": config.tie_word_embeddings,
        "norm_eps": config.layer_norm_epsilon,
    }


def _of_llama(config: Any) -> dict[str, Any]:
    rotary = config.rope_parameters
    _refuse(
        {
            f"hidden_act={config.hidden_act!r}": config.hidden_act != "silu",
            f"rope_type={rotary['rope_type']!r}": rotary["rope_type"] != "default",
            f"head_dim={config.head_dim}": config.head_dim * config.num_attention_heads != config.hidden_size,
            "attention_bias=True": config.attention_bias,
            "mlp_bias=True": config.mlp_bias,
        }
    )
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "width": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "d_hidden": config.intermediate_size,
        "bias": False,
        "rotary": float(rotary["rope_theta"]),
        "rms_norm": True,
        "gated": True,
        "tied": config.tie_word_embeddings,
        "norm_eps": config.rms_norm_eps,
    }


_KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {"gpt2": _of_gpt2, "llama": _of_llama}


def _refuse(signs: dict[str, bool]) -> None:
    found = [sign for sign, there in signs.items() if there]
    if found:
        raise ModelError(f"GPT.from_huggingface(model): its config has {', '.join(found)}, which a GPT has not.")
