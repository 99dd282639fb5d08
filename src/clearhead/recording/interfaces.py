"""What each of transformers' attention functions makes of its arguments: what is hidden, what is added.

The same arguments mean different things to different implementations. Read in transformers 5.24,
integrations/*.py:

    implementation   no mask given                          4-D mask            learned sinks   position bias
    sdpa             causal (upper-left) if is_causal and   bool, or added      not applied     added
                     more than one query
    flex             everything visible                     BlockMask, or its   applied         added
                                                            head 0 added
    flash            causal (lower-right) if is_causal;     2-D padding only    applied         not applied
                     window if there are more keys
    eager            everything visible                     added               applied         added
    registered       like eager, or like sdpa               bool, or added      applied         added

Eager functions differ from model to model, and users register their own: what they computed is compared with
what is said here on one query (`checking.py`), and a difference there is an error. Unnoticed is one that shows
only in other queries; and any in a call with dropout, in a batch entry whose middle query is padded, or in an
output that is not finite, where nothing can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead._checks import describe
from clearhead.errors import RecordingError
from clearhead.recording.blockmask import BlockRule, is_block_mask
from clearhead.recording.calls import Call, as_heads, as_heads_mask, usual_scale
from clearhead.recording.functional import causal_rule

__all__ = ["Arguments", "read_sdpa", "readings", "tensors_of_sdpa"]

Function = Callable[..., Any]

# Arguments that change the weights in a way that is not understood here; the others are for other layers.
_NOT_UNDERSTOOD = ("sinks", "block_indices", "block_table", "head_mask", "layer_head_mask")
_FLASH_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of one call of an attention interface, as every model of transformers passes them."""

    module: nn.Module
    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, G, S, D)
    value: Tensor  # (B, G, S, Dv)
    attention_mask: Any
    options: dict[str, Any]
    is_causal: bool = field(init=False)  # what the call says, else what the module says as it is called

    def __post_init__(self) -> None:
        said = self.options.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if said is None else said
        object.__setattr__(self, "is_causal", bool(causal))

    def arrived(self) -> str:
        """The call, restated for an error message."""
        given = [n for n, value in self.options.items() if value is not None]
        return (
            f"{type(self.module).__name__} called attention with query={describe(self.query)},"
            f" key={describe(self.key)}, attention_mask={describe(self.attention_mask)}, {', '.join(given)}"
        )

    @property
    def dropout(self) -> float:
        """The dropout that was applied to the weights."""
        return float(self.options.get("dropout") or 0.0)


@dataclass(frozen=True, eq=False)
class _Between:
    """What stands between q·k and the softmax."""

    masks: tuple[masks.MaskRule | Tensor, ...] = ()
    biases: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None


def readings(function: Function, arguments: Arguments) -> tuple[list[Call], bool]:
    """What the call may have computed, likeliest first, and whether the implementation alone makes that certain."""
    _refuse_unknown(arguments)
    name = _implementations().get(function)
    if name is not None:
        return [_call(arguments, _READERS[name](arguments))], True
    calls = [_call(arguments, _eager(arguments))]
    if arguments.attention_mask is None and arguments.is_causal and arguments.query.shape[2] > 1:
        calls.append(_call(arguments, _eager(arguments, causal=True)))
    return calls, False


def tensors_of_sdpa(function: Function, arguments: Arguments) -> list[Tensor] | None:
    """Every tensor that the reading of a call holds, if the function is transformers' sdpa; None for others."""
    own = getattr(sys.modules.get("transformers.integrations.sdpa_attention"), "sdpa_attention_forward", None)
    if function is not own:
        return None
    given = (arguments.attention_mask, arguments.options.get("position_bias"))
    return [arguments.query, arguments.key, arguments.value, *(one for one in given if isinstance(one, Tensor))]


def read_sdpa(arguments: Arguments) -> Call:
    """What a call of transformers' sdpa computes."""
    _refuse_unknown(arguments)
    return _call(arguments, _sdpa(arguments))


def _implementations() -> dict[Function, str]:
    """The functions that transformers itself registers."""
    modules = {name: sys.modules.get(f"transformers.integrations.{name}_attention") for name in _READERS}
    return {
        getattr(module, f"{name}_attention_forward"): name for name, module in modules.items() if module is not None
    }


def _call(arguments: Arguments, between: _Between) -> Call:
    q, k, v = as_heads(arguments.query, arguments.key, arguments.value)
    scale = arguments.options.get("scaling")
    return Call(
        q,
        k,
        v,
        scale=float(usual_scale(q) if scale is None else scale),
        masks=between.masks,
        biases=between.biases,
        softcap=arguments.options.get("softcap"),
        sinks=between.sinks,
    )


# --- one reader per implementation --------------------------------------------------------------------------


def _sdpa(arguments: Arguments) -> _Between:
    hidden: tuple[masks.MaskRule | Tensor, ...]
    hidden, biases = _four_dim(arguments)
    T, S = arguments.query.shape[2], arguments.key.shape[2]
    if arguments.attention_mask is None and arguments.is_causal and T > 1:
        hidden = (causal_rule(T, S),)
    return _Between(hidden, biases + _position_bias(arguments))


def _eager(arguments: Arguments, causal: bool = False) -> _Between:
    hidden: tuple[masks.MaskRule | Tensor, ...]
    hidden, biases = _four_dim(arguments)
    if causal:
        hidden = (causal_rule(arguments.query.shape[2], arguments.key.shape[2]),)
    return _Between(hidden, biases + _position_bias(arguments), _sinks(arguments))


def _flex(arguments: Arguments) -> _Between:
    mask, S = arguments.attention_mask, arguments.key.shape[2]
    biases = _position_bias(arguments)
    if is_block_mask(mask):
        return _Between((BlockRule(mask),), biases, _sinks(arguments))
    if mask is None:
        return _Between((), biases, _sinks(arguments))
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not mask.is_floating_point():
        raise _mask_error(arguments, "flex_attention takes a BlockMask or a 4-D float mask")
    return _Between((), (mask[:, :1, :, :S], *biases), _sinks(arguments))


def _flash(arguments: Arguments) -> _Between:
    if any(arguments.options.get(name) is not None for name in _FLASH_PACKED) or _is_packed(arguments):
        raise RecordingError(
            f"sequences packed into one row under flash attention cannot be recorded: {arguments.arrived()}."
            " Pass them as a padded batch, or use attn_implementation='sdpa'."
        )
    T, S = arguments.query.shape[2], arguments.key.shape[2]
    hidden: list[masks.MaskRule | Tensor] = []
    if arguments.is_causal and T > 1:
        hidden.append(masks.causal())
    window = arguments.options.get("sliding_window")
    if window is not None and window < S:
        hidden.append(_flash_window(window, causal=arguments.is_causal))
    if arguments.attention_mask is not None:
        hidden.append(_flash_padding(arguments, S))
    return _Between(tuple(hidden), (), _sinks(arguments))


_READERS: dict[str, Callable[[Arguments], _Between]] = {"sdpa": _sdpa, "flex": _flex, "flash": _flash}


# --- parts --------------------------------------------------------------------------------------------------


def _four_dim(arguments: Arguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A mask that broadcasts against the scores: hidden where a bool one is False, a float one added."""
    mask = arguments.attention_mask
    if mask is None:
        return (), ()
    if not isinstance(mask, Tensor):
        raise _mask_error(arguments, "this implementation takes a bool or float tensor (B, 1 or H, T, S), or None")
    mask_4d = as_heads_mask(mask, arguments.query, arguments.key)
    if mask.is_floating_point():
        return (), (mask_4d,)
    if mask.dtype != torch.bool:
        raise _mask_error(arguments, "an integer mask was added to the scores as it is, which no model means")
    return (mask_4d,), ()


def _position_bias(arguments: Arguments) -> tuple[Tensor, ...]:
    bias = arguments.options.get("position_bias")
    if bias is None:
        return ()
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise RecordingError(f"a position bias that is no float tensor: {describe(bias)}; {arguments.arrived()}.")
    return (as_heads_mask(bias, arguments.query, arguments.key)[..., : arguments.key.shape[2]],)


def _sinks(arguments: Arguments) -> Tensor | None:
    sinks = arguments.options.get("s_aux")
    if sinks is None:
        return None
    heads = arguments.query.shape[1]
    if not isinstance(sinks, Tensor) or sinks.numel() != heads:
        raise RecordingError(
            f"learned sinks (s_aux) of {describe(sinks)}, expected one logit per head ({heads},):"
            f" {arguments.arrived()}."
        )
    return sinks.reshape(heads)


def _flash_window(width: int, *, causal: bool) -> masks.MaskRule:
    """Flash's window is width - 1 keys to each side of the query, aligned lower-right."""
    if causal:
        return masks.sliding_window(width)
    return masks.symmetric_window(2 * (width - 1))


def _flash_padding(arguments: Arguments, S: int) -> masks.MaskRule:
    mask = arguments.attention_mask
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != S:
        raise _mask_error(arguments, f"flash attention takes the 2-D padding mask (B, {S}), or None")
    return masks.padding(keys=mask != 0)


def _is_packed(arguments: Arguments) -> bool:
    """Whether flash reads several sequences out of `position_ids`: one row in which they start again."""
    ids = arguments.options.get("position_ids")
    if arguments.attention_mask is not None or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] != 1:
        return False
    return bool((ids.diff(dim=-1) != 1).any())


def _refuse_unknown(arguments: Arguments) -> None:
    given = [name for name in _NOT_UNDERSTOOD if arguments.options.get(name) is not None]
    if given:
        raise RecordingError(
            f"{', '.join(given)} changes the weights in a way that clearhead does not know: {arguments.arrived()}."
            " This model cannot be recorded."
        )


def _mask_error(arguments: Arguments, expected: str) -> RecordingError:
    return RecordingError(
        f"an attention mask that clearhead does not understand: {expected}; {arguments.arrived()}."
        " Pass the tokenizer's 2-D attention_mask to the model, or none."
    )
