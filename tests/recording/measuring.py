"""What a model attends to by its own account, and how far a recording of it is off.

A model's own account is its eager `output_attentions`; what its eager attention functions return, where it does not
hand out all of it; or the formula, written out in float64 from the inputs of its attention modules.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn

from clearhead import AttentionMap, SoftmaxMap
from clearhead.recording import Recording, record
from clearhead.testing.budgets import budget

__all__ = ["Expected", "Inputs", "Measured", "arguments_of", "compare", "handed_out", "returned", "weights_of"]

Inputs: TypeAlias = "dict[str, Any]"
Expected: TypeAlias = "tuple[Tensor, Tensor | None]"  # weights (B, H, T, S), and which queries are real (B, T)

# --- what a model attends to --------------------------------------------------------------------------------


def handed_out(model: nn.Module, inputs: Inputs) -> list[Expected]:
    """What eager `output_attentions` returns: encoder, decoder, cross; or image, text; or all layers."""
    out, real = model(**inputs, output_attentions=True), inputs.get("attention_mask")
    if "encoder_attentions" in out:
        target = inputs["decoder_attention_mask"]
        sides = [(out.encoder_attentions, real), (out.decoder_attentions, target), (out.cross_attentions, target)]
    elif "text_model_output" in out:
        sides = [(out.vision_model_output.attentions, None), (out.text_model_output.attentions, real)]
    else:
        sides = [(out.attentions, real)]
    return [(weights, mask) for layers, mask in sides for weights in layers]


def returned(model: nn.Module, inputs: Inputs) -> list[Expected]:
    """What the eager attention functions of transformers return, call by call."""
    seen: list[Tensor] = []

    def spied(function: Callable[..., Any]) -> Callable[..., Any]:
        def attention(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            seen.append(result[1])
            return result

        return attention

    with contextlib.ExitStack() as patches:
        for module in {sys.modules[type(part).__module__] for part in model.modules()}:
            eager = getattr(module, "eager_attention_forward", None)
            if eager is not None:
                patches.enter_context(mock.patch.object(module, "eager_attention_forward", spied(eager)))
        model(**inputs)
    real = inputs.get("attention_mask")
    about = (None, None) if real is None else real.shape
    return [(weights, real if about == (len(weights), weights.shape[2]) else None) for weights in seen]


def arguments_of(model: nn.Module, kind: type[nn.Module], inputs: Inputs) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """(path, module, positional arguments) of each call of a module of this kind."""
    seen: list[tuple[str, Any, tuple[Any, ...]]] = []

    def note(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, args: seen.append((path, module, args))

    found = [(path, module) for path, module in model.named_modules() if isinstance(module, kind)]
    hooks = [module.register_forward_pre_hook(note(path)) for path, module in found]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return seen


def weights_of(q: Tensor, k: Tensor, hidden: Tensor | None = None) -> Tensor:
    """softmax(q·k/√D) in float64 of (B, H, tokens, D); a query that sees nothing has no weights."""
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)


# --- how far a recording is off -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Of all weights of real queries, in all layers and heads."""

    error: float  # the largest |recorded - expected|
    excess: float  # the largest error of a map over what rounding explains
    difference: float  # of the output from that of the unobserved model
    kinds: frozenset[str]  # of the maps

    def joined(self, other: Measured) -> Measured:
        """Of both."""
        numbers = ("error", "excess", "difference")
        return Measured(*(max(getattr(self, n), getattr(other, n)) for n in numbers), self.kinds | other.kinds)


def compare(model: nn.Module, inputs: Inputs, expected: list[Expected]) -> Measured:
    """Record a call, and hold it to what is expected and to the unobserved call.

    AssertionError for other layers, other shapes, or padded queries that attend to something.
    """
    plain = model(**inputs)
    with record(model) as recording:
        out = model(**inputs)
    maps = in_sides(recording, inputs)
    assert [attn.shape for attn in maps] == [tuple(weights.shape) for weights, _ in expected]
    errors = [_errors(attn, *one, before=n) for n, (attn, one) in enumerate(zip(maps, expected, strict=True))]
    return Measured(
        max(error for error, _ in errors),
        max(error / allowed for error, allowed in errors),
        max(_difference(*pair) for pair in zip(tensors(out), tensors(plain), strict=True)),
        frozenset(type(attn).__name__ for attn in maps),
    )


def in_sides(recording: Recording, inputs: Inputs) -> list[AttentionMap]:
    """All maps; of an encoder-decoder side by side, which must leave none out."""
    if not inputs.keys() & {"decoder_input_ids", "tgt"}:
        return list(recording)
    maps = [*recording.encoder, *recording.decoder, *recording.cross]
    assert {id(attn) for attn in maps} == {id(attn) for attn in recording}
    return maps


def _errors(attn: AttentionMap, weights: Tensor, real: Tensor | None, before: int) -> tuple[float, float]:
    """The largest error of a map's weights, and what rounding explains, its own and that of the layers before it.

    See `testing.budgets`: another implementation rounds in another order from the first layer on.
    """
    ours = attn.to_dense()
    rows = torch.ones(1, 1, 1, 1, dtype=torch.bool) if real is None else real.bool()[:, None, :, None]
    assert (ours.masked_select(~rows) == 0).all(), "padded queries attend to nothing: our rule"
    weights = weights.masked_fill(~rows, 0)
    width, score = 1, 0.0
    if isinstance(attn, SoftmaxMap):
        k = attn.k.repeat_interleave(attn.q.shape[1] // attn.k.shape[1], 1)
        width, score = attn.q.shape[-1], float((attn.scale * attn.q @ k.mT).abs().max())
    allowed = budget(weights.double(), weights.float(), terms=width * (before + 1), score=score)
    return _largest(ours - weights), allowed


def tensors(out: Any) -> Iterator[Tensor]:
    """Every tensor of an output, those in tuples and in the outputs of parts included."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)) or hasattr(out, "to_tuple"):
        for part in out.to_tuple() if hasattr(out, "to_tuple") else out:
            yield from tensors(part)


def _difference(a: Tensor, b: Tensor) -> float:
    return 0.0 if torch.equal(a, b) else _largest(a.double() - b.double())


def _largest(difference: Tensor) -> float:
    return float(difference.abs().nan_to_num(torch.inf).max())
