"""One tiny model with random weights for each row of the table in docs/models.md, and its measurement.

Weights are those that a model starts with and noise, so that attention is far from uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from . import tiny_models as tiny
from .measuring import Expected, Inputs, Measured, compare, handed_out, returned

__all__ = ["ARCHITECTURES", "GROUPS", "REASONS", "Architecture", "build", "measure"]

EAGER, SDPA, FLEX = "eager", "sdpa", "flex_attention"
BY_HAND, FAST = "written out", "fast path"
GROUPS = {"transformers": (EAGER, SDPA, FLEX), "PyTorch": (BY_HAND, SDPA, FAST)}  # the ways to compute attention
NONE, SINKS, BATCH = "does not support an attention implementation", "sinks cannot be run on CPU", "out of bounds"
REASONS = {  # what a model says that cannot be run, recorded or not; and what it means
    NONE: "There is no such implementation of it.",
    SINKS: "FlexAttention gives out what sinks need on a GPU alone.",
    BATCH: "transformers indexes the bias by batch entry, of which it has one. A single sequence is recorded.",
}


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    what: str  # is particular about its attention
    make: Callable[[str], nn.Module]  # for an implementation
    inputs: Callable[[bool], Inputs]  # padded or not
    expected: Callable[[nn.Module, Inputs], list[Expected]]
    kind: str = "SoftmaxMap"  # of its maps
    group: str = "transformers"
    refused: Mapping[str, str] = field(default_factory=dict)  # implementations without it, and why
    noise: float = 0.15

    @property
    def runs(self) -> list[str]:
        """The implementations it can be run with, first the one that it has by default."""
        can = [one for one in GROUPS[self.group] if one not in self.refused]
        return sorted(can, key=[FAST, SDPA, EAGER, BY_HAND, FLEX].index)


ARCHITECTURES: dict[str, Architecture] = {}


def build(name: str, implementation: str = EAGER) -> Any:
    """The model of a row, with the same weights each time."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = architecture.make(implementation)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=architecture.noise)
    return model.eval()


def measure(name: str, implementation: str) -> Measured:
    """The model of a row under an implementation, without and with padding, against its own account."""
    architecture, model = ARCHITECTURES[name], build(name, implementation)
    own, found = build(name, GROUPS[architecture.group][0]), []
    with torch.no_grad():
        for padded in (False, True):
            inputs = architecture.inputs(padded)
            found.append(compare(model, inputs, architecture.expected(own, inputs)))
    if architecture.group == "transformers":
        assert model.config._attn_implementation == implementation
    return reduce(Measured.joined, found)


# --- models of transformers ---------------------------------------------------------------------------------


def of_transformers(model: str, config: str, options: Mapping[str, Any], implementation: str) -> nn.Module:
    import transformers

    configured = getattr(transformers, config)(**options)
    made: nn.Module = getattr(transformers, model)._from_config(configured, attn_implementation=implementation)
    return made


def add(
    name: str,
    what: str,
    model: str,
    config: str = "",
    *,
    options: Mapping[str, Any],
    runs: Collection[str] = (EAGER, SDPA, FLEX),
    fails: Mapping[str, str] | None = None,
    inputs: Callable[[bool], Inputs] = tiny.text,
    expected: Callable[[nn.Module, Inputs], list[Expected]] = handed_out,
    **more: Any,
) -> None:
    """Register a model of transformers by its class, and its configuration by name and options."""
    config = config or model.partition("For")[0].removesuffix("Model") + "Config"
    refused = {one: NONE for one in GROUPS["transformers"] if one not in runs} | dict(fails or {})
    make = partial(of_transformers, model, config, options)
    ARCHITECTURES[name] = Architecture(what, make, inputs, expected, refused=refused, **more)


SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 48}
GROUPED = {**WIDE, "num_key_value_heads": 2, "max_position_embeddings": 64}
IMAGE = {**{name: n for name, n in WIDE.items() if name != "vocab_size"}, "image_size": 16, "patch_size": 4}
SHORT = {"vocab_size": 60, "d_model": 32}
SIDES = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 32))}
SIDES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, **SHORT}
WINDOW = {**GROUPED, "head_dim": 8, "sliding_window": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
OWN = (EAGER,)  # its attention is no function of the interface

add(
    "GPT-2",
    "scores divided by the layer's number",
    "GPT2LMHeadModel",
    "GPT2Config",
    runs=(EAGER, SDPA),
    options={
        "vocab_size": 60,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "scale_attn_by_inverse_layer_idx": True,
        **ENDS,
    },
)
add("Llama", "grouped heads, rotary embedding", "LlamaForCausalLM", options=GROUPED)
add("Mistral", "sliding window", "MistralForCausalLM", options={**GROUPED, "sliding_window": 4})
add(
    "Qwen2",
    "window from the second layer on",
    "Qwen2ForCausalLM",
    options={**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
)
add("Qwen3", "normalised queries and keys", "Qwen3ForCausalLM", options={**GROUPED, "head_dim": 8})
add(
    "Gemma 2",
    "soft-capped scores, windows in turn, a scale of its own",
    "Gemma2ForCausalLM",
    runs=(EAGER, FLEX),
    options={**WINDOW, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0},
)
add(
    "Gemma 3",
    "normalised queries and keys, windows in most layers",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    options={**WINDOW, "query_pre_attn_scalar": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
)
add("GPT-NeoX", "a quarter of each head rotates", "GPTNeoXForCausalLM", options={**WIDE, "max_position_embeddings": 64})
add("Phi", "half of each head rotates", "PhiForCausalLM", options={**WIDE, "max_position_embeddings": 64})
add("Mixtral", "routers, which are no attention", "MixtralForCausalLM", options={**GROUPED, "num_local_experts": 4})
add(
    "GPT-OSS",
    "learned sinks: rows sum to less than 1",
    "GptOssForCausalLM",
    runs=(EAGER, FLEX),
    fails={FLEX: SINKS},
    options={**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
)
add(
    "Bloom",
    "ALiBi",
    "BloomForCausalLM",
    runs=OWN,
    options={"vocab_size": 60, "hidden_size": 32, "n_layer": 3, "n_head": 4, **ENDS},
)
add("MPT", "ALiBi", "MptForCausalLM", runs=OWN, options={**SHORT, "n_layers": 3, "n_heads": 4, "max_seq_len": 64})
add("Falcon", "one key head", "FalconForCausalLM", runs=(EAGER, SDPA), options={**SMALL, **ENDS})
add(
    "XGLM",
    "sinusoidal positions",
    "XGLMForCausalLM",
    runs=OWN,
    options={**SHORT, "num_layers": 3, "attention_heads": 4, "ffn_dim": 32},
)
add(
    "OPT",
    "learned positions that count real tokens",
    "OPTForCausalLM",
    options={**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
)
add("BERT", "sees both sides", "BertModel", options=WIDE)
add(
    "DistilBERT",
    "sees both sides",
    "DistilBertModel",
    options={"vocab_size": 60, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48},
)
add("ALBERT", "one module, called once for each layer", "AlbertModel", options={**WIDE, "embedding_size": 16})
add("RoBERTa", "positions that count real tokens", "RobertaModel", options=WIDE)
add("ELECTRA", "narrow embeddings", "ElectraModel", options={**WIDE, "embedding_size": 16})
add("Megatron-BERT", "norms before the layers", "MegatronBertModel", runs=OWN, options=WIDE)
add(
    "DeBERTa-v2",
    "disentangled: content and positions are compared apart",
    "DebertaV2Model",
    runs=OWN,
    kind="DenseMap",
    options={**WIDE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
)
add("MPNet", "a learned bias for each distance", "MPNetModel", runs=OWN, kind="DenseMap", options=WIDE)
add(
    "XLNet",
    "relative positions, compared with a query of their own",
    "XLNetModel",
    runs=OWN,
    kind="DenseMap",
    options={**SHORT, "n_layer": 3, "n_head": 4, "d_inner": 32},
)
add(
    "T5",
    "a learned bias for each distance, scale 1; encoder, decoder, cross",
    "T5ForConditionalGeneration",
    inputs=tiny.two_texts,
    noise=0.08,  # its scores are not divided by √D
    fails={FLEX: BATCH},
    options={**SHORT, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
)
add("BART", "encoder, decoder, cross", "BartForConditionalGeneration", inputs=tiny.two_texts, options=SIDES)
add(
    "Marian",
    "encoder, decoder, cross; sinusoidal positions",
    "MarianMTModel",
    "MarianConfig",
    inputs=tiny.two_texts,
    options={**SIDES, "pad_token_id": 1, "decoder_start_token_id": 1},
)
add(
    "Whisper",
    "encoder of sound, decoder, cross",
    "WhisperForConditionalGeneration",
    inputs=tiny.speech,
    options={
        **SIDES,
        **ENDS,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
)
add("ViT", "patches of an image", "ViTModel", inputs=tiny.image, options=IMAGE)
add("DINOv2", "patches of an image", "Dinov2Model", inputs=tiny.image, options={**IMAGE, "mlp_ratio": 2})
add(
    "Swin",
    "windows of patches, shifted in turn, with a bias for each offset",
    "SwinModel",
    runs=(EAGER, SDPA),
    inputs=partial(tiny.image, size=32),
    expected=returned,
    options={
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
)
add(
    "CLIP",
    "a tower for images and a causal one for text",
    "CLIPModel",
    inputs=tiny.text_and_image,
    options={"text_config": {**WIDE, **ENDS}, "vision_config": IMAGE, "projection_dim": 16},
)
add(
    "Llava",
    "an image tower before a language model",
    "LlavaForConditionalGeneration",
    "LlavaConfig",
    inputs=partial(tiny.image_in_text, tokens=16),
    expected=returned,
    options={
        "text_config": {"model_type": "llama", **GROUPED},
        "vision_config": {"model_type": "clip_vision_model", **IMAGE},
        "image_token_index": 59,
        "image_seq_length": 16,
    },
)
add(
    "Qwen2-VL",
    "images packed into one row, rotary embedding in three axes",
    "Qwen2VLForConditionalGeneration",
    "Qwen2VLConfig",
    runs=(EAGER, SDPA),
    inputs=tiny.patches_in_text,
    expected=returned,
    options={
        "text_config": {**GROUPED, **ENDS, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
        "image_token_id": 59,
        "video_token_id": 58,
    },
)


# --- PyTorch's own, and as timm writes it -------------------------------------------------------------------


def of_pytorch(name: str, *row: Any, lacks: str) -> None:
    """Register what transformers knows nothing of."""
    ARCHITECTURES[name] = Architecture(*row, group="PyTorch", refused={lacks: NONE})


of_pytorch(
    "timm's attention",
    "patches of an image, normalised queries and keys",
    lambda implementation: tiny.TimmModel(fused=implementation == SDPA),
    tiny.patches,
    tiny.of_patches,
    lacks=FAST,
)
of_pytorch(
    "nn.Transformer",
    "encoder, decoder, cross",
    lambda implementation: tiny.Translator(fast=implementation == FAST),
    tiny.two_sequences,
    tiny.of_two_sequences,
    lacks=BY_HAND,
)
