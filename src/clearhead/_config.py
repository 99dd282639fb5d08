"""What a Hugging Face config says about attention, under whichever names it says it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, TypeGuard

from clearhead.errors import ModelError

_NAMES = {
    "tokens": ("max_position_embeddings", "seq_length"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "layers": ("num_hidden_layers", "num_layers"),
    "head_dim": ("attention_head_dim", "head_dim", "kv_channels", "d_head"),
    "window": ("sliding_window",),
    "width": ("hidden_size",),
}
_REFUSED = {
    "is_encoder_decoder": "an encoder and a decoder",
    "kv_lora_rank": "compressed keys",
    "num_kv_shared_layers": "layers that share keys and values",
    "n_recurrent_layers": "layers that run several times",
    "loop_layer_index_end": "layers that run several times",
    "cross_attention_layers": "layers that attend to something else than the text",
}
_UNALIKE = {  # a second size, of some of the layers or of the values
    "swa_num_attention_heads": "heads",
    "num_sliding_attention_heads": "heads",
    "num_attention_heads_per_layer": "heads",
    "swa_num_key_value_heads": "kv_heads",
    "swa_head_dim": "head_dim",
    "v_head_dim": "head_dim",
}
_KINDS = ("layer_types", "layers_block_type", "attn_layers")  # what each layer is
_ATTENDING = ("attn_layer_indices", "full_attn_idxs")  # which layers attend
_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"}
_OTHER = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe"}
_MIXED = ("mamba_d_state", "ssm_state_size", "linear_num_key_heads", "conv_L_cache", "lru_width")  # not all attend
_ENCODERS = {"bert-generation", "xlnet"}  # that transformers lists under generation alone


def sizes(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `Cost`: what is given, else what the config tells; not the dtype, which its loader chooses.

    Raises: ModelError for what is not counted, makes no sense or is not told.
    """
    text = _text_config(config)
    for sign, what in _REFUSED.items():
        if _read(config, sign) or _read(text, sign):
            raise _refusal(f"has {what}")
    told = {ours: value for ours in _NAMES if ours not in given and (value := _size(text, ours)) is not None}
    for name, ours in _UNALIKE.items():
        if ours in told and any(one != told[ours] for one in _as_list(_read(text, name))):
            raise _refusal(f"has sizes that are not all alike ({name})")
    if "layers" in told:
        told["layers"] = _attending(text, told["layers"])
    found = told | dict(given)
    if "head_dim" not in found:
        found["head_dim"] = _head_dim(text, found)
    if "causal" not in found:
        found["causal"] = _causal(config, text)
    _check_told(text, found)
    _check_groups(found, told)
    return found


# --- sizes --------------------------------------------------------------------------------------------------------


def _size(text: Any, ours: str) -> int | None:
    """A size by our name, None where the config does not tell it."""
    name, value = (_shared(text) if ours == "kv_heads" else None) or _first(text, _NAMES[ours])
    if value is None or (ours == "window" and not _is_size(value)):  # 0 and -1: no window
        return None
    if not _is_size(value):
        raise ModelError(f"{_named(text)} says {name}={value!r}, which is no size: give {_option(ours)}.")
    return int(value)


def _first(text: Any, names: tuple[str, ...]) -> tuple[str, Any]:
    found = ((name, _read(text, name)) for name in names)
    return next(((name, value) for name, value in found if value is not None), ("", None))


def _shared(text: Any) -> tuple[str, Any] | None:
    """Key/value heads where a flag says that query heads share them: another number beside it is then not used."""
    if _read(text, "multi_query") and not _read(text, "new_decoder_architecture"):  # Falcon, GPTBigCode
        return "multi_query", 1
    flag = _read(text, "multi_query_attention")  # ChatGLM
    if flag is not None:
        name = "multi_query_group_num" if flag else "num_attention_heads"
        return name, _read(text, name)
    inner = _read(text, "attn_config")  # DBRX, MPT
    groups = inner.get("kv_n_heads") if isinstance(inner, Mapping) else _read(inner, "kv_n_heads")
    return None if groups is None else ("kv_n_heads", groups)


def _head_dim(text: Any, found: Mapping[str, Any]) -> int | None:
    """The width of the model over its heads, its own ones where others are given."""
    own = {name: _first(text, _NAMES[name])[1] for name in ("width", "heads")}
    width, heads = (value if _is_size(value) else found.get(name) for name, value in own.items())
    if not (_is_size(width) and _is_size(heads)):
        return None
    if width % heads:
        raise ModelError(
            f"{_named(text)} does not say how wide a head is, and {heads} heads do not divide the model's width"
            f" {width}: give {_option('head_dim')}."
        )
    return width // heads


def _check_told(text: Any, found: Mapping[str, Any]) -> None:
    missing = [name for name in ("heads", "layers", "tokens") if name not in found]
    if missing:
        many, options = " and ".join(missing), ", ".join(map(_option, missing))
        raise ModelError(f"{_named(text)} does not say how many {many} it has: give {options}.")
    if found["head_dim"] is None:
        raise ModelError(f"{_named(text)} does not say how wide a head is: give {_option('head_dim')}.")
    if found["causal"] is None:
        raise ModelError(
            f"{_named(text)} does not say whether tokens see later ones: give causal=True (--causal) or causal=False"
            " (--no-causal)."
        )


def _check_groups(found: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """One of two numbers that belong together was given: the other is the model's, and may not fit."""
    heads, groups = found["heads"], found.get("kv_heads")
    own = [name for name in ("heads", "kv_heads") if name in told]
    if len(own) == 1 and _is_size(heads) and _is_size(groups) and heads % groups:
        raise ModelError(
            f"heads={heads} with kv_heads={groups}: the number of heads must be a multiple of the number of key/value"
            f" heads, and {own[0]}={found[own[0]]} is the model's. Give {_option(own[0])} too."
        )


# --- layers -------------------------------------------------------------------------------------------------------


def _attending(text: Any, layers: int) -> int:
    """How many layers attend, of a model in which others do something else."""
    kinds = next((found for name in _KINDS if (found := _as_list(_read(text, name)))), [])[:layers]
    if unknown := sorted(set(map(str, kinds)) - _ATTENTION - _OTHER):
        raise _refusal(f"has layers of a kind that these formulas do not know ({', '.join(unknown)})")
    _, attending = _first(text, _ATTENDING)
    if not kinds and attending is None and (sign := _first(text, _MIXED)[0]):
        raise _refusal(f"has layers that do not attend ({sign}), and does not say which")
    if kinds:
        layers = sum(kind in _ATTENTION for kind in kinds)
    elif attending is not None:
        layers = len(attending)
    if not layers:
        raise _refusal("has no layer that attends")
    return layers


# --- causal or not ------------------------------------------------------------------------------------------------


def _causal(config: Any, text: Any) -> bool | None:
    """Whether no token sees a later one, by flag, model type or class; None where none of them tells."""
    if _read(text, "use_bidirectional_attention") in (True, "all"):  # "vision": only within an image
        return False if config is text else None  # PaliGemma: the prompt both ways, then one
    if _read(text, "is_decoder") or _read(text, "causal"):
        return True
    both_ways, generating = _model_types()
    types = {_read(one, "model_type") for one in (config, text)}
    if types & (both_ways | _ENCODERS):
        return False
    classes = "".join(_read(config, "architectures") or _read(text, "architectures") or ())
    if types & generating or "CausalLM" in classes or "LMHead" in classes:
        return True
    return False if "MaskedLM" in classes else None


def _model_types() -> tuple[set[str], set[str]]:
    """Model types that fill gaps, and such that write on."""
    try:
        from transformers.models.auto import modeling_auto as auto
    except ImportError:  # the config is not theirs
        return set(), set()
    generating = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES), generating


# --- reading and refusing -----------------------------------------------------------------------------------------


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:  # transformers': which of them?
        raise _refusal("has several models of text in it") from None


def _read(config: Any, name: str) -> Any:
    """A setting, or None."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers', where a setting differs between layers
        raise _refusal(f"has sizes that are not all alike ({name})") from None


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_size(value: object) -> TypeGuard[int]:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) > 0


def _option(name: str) -> str:
    """As an argument and on the command line."""
    return f"{name} (--{name.replace('_', '-')} N)"


def _named(text: Any) -> str:
    return f"the model's config ({type(text).__name__})"


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"this model {what}: that is not counted here. Leave the model out and give numbers, as in Cost(tokens=512,"
        " heads=8, layers=6) or clearhead cost --tokens 512 --heads 8 --layers 6."
    )
