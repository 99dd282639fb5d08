"""What a model's config says about attention: against what the model really keeps, and what is refused."""

from __future__ import annotations

import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearhead import ModelError
from clearhead.cost import Cost, from_config

GPT = {"hidden_size": 96, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 64}


def config(**settings: Any) -> SimpleNamespace:
    """A small causal model's, with other settings besides."""
    return SimpleNamespace(**{**GPT, "architectures": ["XForCausalLM"], **settings})


def test_sizes_come_from_the_config_and_what_is_given_goes_first() -> None:
    some = config(num_key_value_heads=2, head_dim=None, max_position_embeddings=2048, sliding_window=128)
    assert from_config(some) == Cost(2048, 8, 2, 3, 12, window=128, width=96)
    assert from_config(some, tokens=7, kv_heads=8, window=None) == Cost(7, 8, 8, 3, 12, window=128, width=96)
    given = {"tokens": 5, "heads": 4, "kv_heads": 1, "layers": 2, "head_dim": 6, "window": 3, "width": 9}
    assert from_config(some, **given, dtype="int8", causal=False) == Cost(**given, dtype="int8", causal=False)
    assert from_config(SimpleNamespace(get_text_config=lambda: some)) == from_config(some)


def test_what_is_not_known_by_name_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'head'"):
        from_config(config(), head=3)  # type: ignore[call-arg]


# --- keys and values that heads share ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({}, 8),
        ({"num_key_value_heads": 2}, 2),
        ({"num_kv_heads": 4}, 4),
        ({"n_head_kv": 4}, 4),
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 8),
        ({"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 8}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": False, "new_decoder_architecture": False, "num_kv_heads": 8}, 8),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"multi_query_attention": False, "multi_query_group_num": 1}, 8),
        ({"attn_config": {"kv_n_heads": 2}}, 2),
        ({"attn_config": SimpleNamespace(kv_n_heads=4)}, 4),
        ({"attn_config": {"attn_pdrop": 0.0}}, 8),
    ],
)
def test_key_heads_under_every_name(settings: dict[str, Any], groups: int) -> None:
    assert from_config(config(**settings)).groups == groups


def test_falcon_7b_keeps_one_head() -> None:
    transformers = pytest.importorskip("transformers")
    cost = from_config(transformers.FalconConfig(), tokens=2048)
    assert (cost.layers, cost.heads, cost.groups, cost.head_dim) == (32, 71, 1, 64)
    assert cost.tiled.cache == 2 * 32 * 2048 * 64 * 2  # 16.8 MB, not 71 times that


# --- against the models themselves ---------------------------------------------------------------------------------

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32, "intermediate_size": 64, "pad_token_id": 0}
SHARED = {**SMALL, "num_key_value_heads": 2}
FALCON = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 32}
BIGCODE = {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {  # layers that attend, key heads, settings
    "Falcon": (3, 1, FALCON),
    "Falcon, not multi-query": (3, 4, {**FALCON, "multi_query": False}),
    "GPTBigCode": (3, 1, BIGCODE),
    "GPTBigCode, not multi-query": (3, 4, {**BIGCODE, "multi_query": False}),
    "Llama": (3, 2, {**SHARED, "num_hidden_layers": 3}),
    "Gemma2": (4, 2, {**SHARED, "num_hidden_layers": 4, "head_dim": 8}),
    "JetMoe": (
        3,
        4,
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "vocab_size": 32,
            "num_key_value_heads": 4,
            "kv_channels": 8,
            "num_local_experts": 2,
            "intermediate_size": 32,
        },
    ),
    "Qwen3Next": (1, 2, {**SHARED, **DELTA, "num_hidden_layers": 4, "head_dim": 16, "num_experts": 16}),
    "OlmoHybrid": (1, 2, {**SHARED, **DELTA, "num_hidden_layers": 4}),
    "Jamba": (
        2,
        2,
        {**SHARED, "num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2},
    ),
    "Bamba": (2, 2, {**SHARED, **MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]}),
    "Lfm2": (1, 2, {**SHARED, "num_hidden_layers": 4, "full_attn_idxs": [2]}),
    "Zamba2": (
        2,
        4,
        {
            **SMALL,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_headdim": 16,
            "n_mamba_heads": 8,
            "mamba_d_state": 8,
        },
    ),
    "GraniteMoeHybrid": (
        1,
        2,
        {
            **SHARED,
            **MAMBA,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
    ),
    "NemotronH": (
        1,
        2,
        {
            **SHARED,
            "head_dim": 16,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
        },
    ),
    "FalconH1": (3, 2, {**SHARED, **MAMBA, "num_hidden_layers": 3, "mamba_d_ssm": 128}),
    "MiniMax": (2, 2, {**SHARED, "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 2}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_is_what_the_model_keeps(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    layers, groups, settings = MODELS[name]
    some = getattr(transformers, name.partition(",")[0] + "Config")(**settings)
    cost = from_config(some, tokens=5, dtype="float32")
    assert (cost.layers, cost.groups, cost.causal) == (layers, groups, True)
    model = transformers.AutoModelForCausalLM.from_config(some, attn_implementation="eager").eval()
    with torch.no_grad():
        kept = model(torch.arange(5)[None], use_cache=True).past_key_values.layers
    attending = [layer for layer in kept if getattr(layer, "keys", None) is not None]
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in attending) == cost.tiled.cache


# --- layers that do something else ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"layer_types": ["linear_attention", "full_attention", "linear_attention"]}, 1),
        ({"layer_types": ["sliding_attention", "full_attention", "chunked_attention"]}, 3),
        ({"layers_block_type": ["recurrent", "recurrent", "attention"]}, 1),
        ({"layers_block_type": ["mamba", "hybrid", "moe", "attention", "attention"]}, 1),  # num_hidden_layers = 3
        ({"attn_layer_indices": [0, 2]}, 2),
        ({"full_attn_idxs": [1]}, 1),
        ({"attention_layers": ["global", "local", "global"]}, 3),  # GPT-Neo
    ],
)
def test_only_layers_that_attend_are_counted(settings: dict[str, Any], layers: int) -> None:
    assert from_config(config(**settings)).layers == layers
    assert from_config(config(**settings), layers=9).layers == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"kv_lora_rank": 512}, "compressed keys"),
        ({"num_kv_shared_layers": 1}, "layers that share keys and values"),
        ({"n_recurrent_layers": 2}, "layers that run several times"),
        ({"cross_attention_layers": [1]}, "layers that attend to something else"),
        (
            {"layer_types": ["full_attention", "odd", "lsh"]},
            r"layers of a kind that these formulas do not know \(lsh, odd\)",
        ),
        ({"layer_types": ["mamba"] * 3}, "no layer that attends"),
        ({"attn_layer_indices": []}, "no layer that attends"),
        ({"mamba_d_state": 16}, r"layers that do not attend \(mamba_d_state\), and does not say which"),
        ({"linear_num_key_heads": 16}, r"layers that do not attend \(linear_num_key_heads\)"),
        ({"swa_num_attention_heads": 4}, r"sizes that are not all alike \(swa_num_attention_heads\)"),
        ({"num_attention_heads_per_layer": [8, 4, 8]}, r"not all alike \(num_attention_heads_per_layer\)"),
        ({"head_dim": 16, "v_head_dim": 8}, r"not all alike \(v_head_dim\)"),
    ],
)
def test_what_is_not_counted_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(
        ModelError, match=rf"this model has .*{message}.*: that is not counted here\. Leave the model out"
    ):
        from_config(config(**settings))


def test_sizes_that_are_alike_after_all_are_counted() -> None:
    alike = {"swa_num_attention_heads": 8, "num_attention_heads_per_layer": [8, 8, 8], "v_head_dim": 12}
    assert from_config(config(**alike)) == from_config(config())


def test_what_transformers_does_not_tell_of_all_layers_is_refused() -> None:
    class Unlike(SimpleNamespace):
        @property
        def head_dim(self) -> int:
            raise RuntimeError("'head_dim' is a per-layer attribute")

    with pytest.raises(ModelError, match=r"sizes that are not all alike \(head_dim\)"):
        from_config(Unlike(**GPT, architectures=["XForCausalLM"]))


@pytest.mark.parametrize(
    "name",
    ["T5Config", "BartConfig", "DeepseekV3Config", "ReformerConfig", "MusicgenConfig", "MambaConfig", "MllamaConfig"],
)
def test_models_that_the_formulas_do_not_describe_are_refused(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="that is not counted here"):
        from_config(getattr(transformers, name)(), tokens=8)


def test_every_model_that_writes_is_counted_or_refused_with_a_remedy() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    prices = {}
    for name in NAMES:
        with suppress(Exception):  # a config that needs what has no default
            prices[name] = _price_or_remedy(CONFIG_MAPPING[name]())
    unclear = {name: told for name, told in prices.items() if isinstance(told, str) and not re.search(REMEDY, told)}
    assert unclear == {}
    assert sum(isinstance(told, Cost) for told in prices.values()) > len(NAMES) / 2


REMEDY = r"give (numbers|heads|layers|head_dim|causal)"


def _price_or_remedy(some: Any) -> Cost | str:
    """What it costs, or what a reader is told; any other error as its repr, which holds no remedy."""
    try:
        return from_config(some, tokens=8)
    except ModelError as error:
        return str(error)
    except Exception as error:
        return repr(error)


# --- sizes that make no sense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_position_embeddings": -1}, r"max_position_embeddings=-1, which is no size: give tokens \(--tokens N\)"),
        ({"max_position_embeddings": 0}, r"max_position_embeddings=0, which is no size: give tokens"),
        ({"head_dim": 0}, r"head_dim=0, which is no size: give head_dim \(--head-dim N\)"),
        ({"num_attention_heads": [2, 4]}, r"num_attention_heads=\[2, 4\], which is no size: give heads"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads=0, which is no size: give kv_heads \(--kv-heads N\)"),
        ({"hidden_size": 100}, r"8 heads do not divide the model's width 100: give head_dim \(--head-dim N\)"),
        ({"hidden_size": None}, r"does not say how wide a head is: give head_dim"),
        ({"num_hidden_layers": None}, r"does not say how many layers it has: give layers \(--layers N\)"),
        (dict.fromkeys(GPT), r"how many heads and layers and tokens it has: give heads \(--heads N\), layers"),
    ],
)
def test_sizes_that_make_no_sense_or_are_missing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"the model's config \(SimpleNamespace\) .*" + message):
        from_config(config(**settings))


def test_what_is_given_stands_in_for_what_makes_no_sense() -> None:
    odd = config(max_position_embeddings=-1, head_dim=0, hidden_size=100)
    assert from_config(odd, tokens=5, head_dim=7) == Cost(5, 8, None, 3, 7, width=100)
    assert (
        from_config(config(sliding_window=0)).window == from_config(config(sliding_window=-1)).window == Cost(1).window
    )


def test_heads_that_are_given_leave_the_width_of_a_head() -> None:
    assert from_config(config(), heads=5).head_dim == 96 // 8
    assert from_config(config(num_attention_heads=[2, 4]), heads=6).head_dim == 96 // 6


@pytest.mark.parametrize("name", ["heads", "kv_heads"])
def test_a_number_that_does_not_fit_the_models_other_one(name: str) -> None:
    other = "kv_heads" if name == "heads" else "heads"
    with pytest.raises(ModelError, match=rf"must be a multiple .*{other}=\d is the model's\. Give {other} \(--"):
        from_config(config(num_key_value_heads=2), **{name: 5})  # type: ignore[arg-type]


# --- causal or not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("BertConfig", False),
        ("RobertaConfig", False),
        ("DistilBertConfig", False),
        ("DebertaV2Config", False),
        ("ModernBertConfig", False),
        ("XLNetConfig", False),
        ("BertGenerationConfig", False),
        ("GPT2Config", True),
        ("GPTNeoXConfig", True),
        ("LlamaConfig", True),
        ("Qwen3Config", True),
        ("ModernBertDecoderConfig", True),
        ("LlavaConfig", True),
    ],
)
def test_without_architectures_the_kind_of_model_decides(name: str, causal: bool) -> None:
    transformers = pytest.importorskip("transformers")
    some = getattr(transformers, name)()
    assert from_config(some, tokens=8).causal is causal
    assert from_config(some, tokens=8, causal=not causal).causal is not causal
    some.architectures = ["SomethingModel"]  # an embedding model on top of it
    assert from_config(some, tokens=8).causal is causal


def test_an_encoder_that_is_told_to_decode_is_causal_and_the_other_way_round() -> None:
    transformers = pytest.importorskip("transformers")
    assert from_config(transformers.BertConfig(is_decoder=True)).causal
    assert not from_config(transformers.Gemma3TextConfig(use_bidirectional_attention=True)).causal


@pytest.mark.parametrize(
    ("settings", "causal"),
    [
        ({"architectures": ["XForCausalLM"]}, True),
        ({"architectures": ["XLMHeadModel"]}, True),
        ({"architectures": ["XForMaskedLM"]}, False),
        ({"architectures": ["XModel"], "is_decoder": True}, True),
        ({"architectures": ["XModel"], "model_type": "bert"}, False),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert", "is_decoder": False}, False),
    ],
)
def test_causal_by_flag_type_and_class(settings: dict[str, Any], causal: bool) -> None:
    assert from_config(config(**settings)).causal is causal


@pytest.mark.parametrize("settings", [{"architectures": None}, {"architectures": ["XModel"], "model_type": "x"}])
def test_where_nothing_tells_it_asks(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ModelError, match=r"whether tokens see later ones: give causal=True \(--causal\) or causal=False"
    ):
        from_config(config(**settings))
    assert from_config(config(**settings), causal=True).causal
