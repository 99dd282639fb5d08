"""What `look` takes, and what it makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from torch import Tensor, nn

from clearhead._checks import describe
from clearhead._progress import Progress, silent
from clearhead.errors import ModelError, ShapeError
from clearhead.looking import runs
from clearhead.looking.items import Words, of_recording
from clearhead.recording import Recording
from clearhead.view import View
from clearhead.views import Views

__all__ = ["look"]


@overload
def look(
    model: nn.Module,
    tokenizer: Any,
    text: list[Any],
    *,
    target: list[str] | None = None,
    generate: int = 0,
    layers: Iterable[int] | None = None,
    labels: Sequence[str | int] | None = None,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> Views: ...
@overload
def look(
    model: nn.Module,
    tokenizer: Any,
    text: Any,
    *,
    target: str | None = None,
    generate: int = 0,
    layers: Iterable[int] | None = None,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> View: ...
@overload
def look(
    model: nn.Module,
    x: Tensor,
    /,
    *,
    tokens: Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> View: ...
@overload
def look(
    recording: Recording,
    tokenizer: Any = None,
    ids: Any = None,
    /,
    *,
    tokens: Words | None = None,
    target: Any = None,
    labels: Sequence[str | int] | None = None,
    name: str | None = None,
) -> Views: ...
@overload
def look(
    views: Sequence[View | Views | Recording],
    /,
    *,
    tokens: Words | None = None,
    labels: Sequence[str | int] | None = None,
    name: str | None = None,
) -> Views: ...
def look(
    model: Any,
    tokenizer: Any = None,
    text: Any = None,
    *,
    target: Any = None,
    generate: int = 0,
    tokens: Any = None,
    layers: Iterable[int] | None = None,
    labels: Sequence[str | int] | None = None,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> View | Views:
    """Look at the attention of a model on a text or an image, of a layer of your own on its input, or of a recording.

    look(model, tokenizer, text)      a language model, or an encoder; a list of texts: several views on one page
    look(model, tokenizer, text, target=…)    an encoder-decoder model, which writes the target itself if none is given
    look(model, processor, image)     a model that reads an image in patches: a PIL image, its file, or an array
    look(layer, x, tokens=…)          a layer of your own
    look(recording, tokenizer, ids)   what `record` has seen, each item of the batch without its padding
    look([view, view], labels=…)      views, or recordings, on one page: two models, two texts, steps of a training run

    Args:
        model: a Hugging Face model with its `tokenizer` and a `text`; or a module with its input `x` (T, d) or
            (1, T, d) and, if you like, the `tokens` that the T rows stand for. Such a module is called with `x` alone
            (record others yourself); it computes softmax(q @ k.T) @ v or calls PyTorch's attention function. Or it has
            a method `attend(x)` that returns (output, map), as every layer of `clearhead.nn` does: the map may be
            (T, T), (H, T, T) or (1, H, T, T).
            Of a recording, `ids` are those that the model was given, (B, n), or its inputs, a mapping; without them
            `tokens` may say what they stand for, one list for all items or one an item.
        target: of an encoder-decoder model, what its decoder reads; of a recording, its ids or its tokens.
        generate: how many tokens the model goes on with, the likeliest each; the page tells them from the text.
        layers: the layers to keep, by number; all by default.
        labels: what the page calls each of several views; numbers make its control a slider.
        name: what the page calls the model.
        on_progress: called as (stage, done, total), with stages "model" and "heads".

    Returns: a `View`; `Views` of a list, or of a recording, which holds a batch.

    The model runs once, as it is (its own kernels, no gradients, evaluation mode if it is in it), after it has written
    what it is to write; its output is thrown away. Raises ModelError, RecordingError, ShapeError.
    Cost: one forward pass; memory: q, k, v of the kept layers, never a T×S matrix.
    """
    if isinstance(model, Recording):
        views = of_recording(model, tokenizer, text, tokens=tokens, target=target, name=name or "recording")
        return Views(views, labels if labels is not None else [f"item {n}" for n in range(len(views))])
    if isinstance(model, (list, tuple)):
        return _of_several(model, tokens, labels, name or "recording")
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"look(model, …): expected a PyTorch module first, got {describe(model)}; see zoo.load. Recordings and"
            " lists of views can be looked at too."
        )
    given = runs.Given(model, layers, name or runs.name_of(model), on_progress or silent)
    if isinstance(tokenizer, Tensor) and text is None:
        return runs.of_layer(given, tokenizer, tokens)
    _check_call(tokenizer, text, tokens)
    if not isinstance(text, list):
        return _of_one(given, tokenizer, text, target, generate)
    targets = [None] * len(text) if target is None else target
    if isinstance(targets, str) or len(targets) != len(text):
        arrived = "one target" if isinstance(targets, str) else f"{len(targets)} targets"
        raise ShapeError(
            f"look(model, tokenizer, text, target=…): {len(text)} texts, and {arrived}; expected a list of as many."
        )
    pairs = zip(text, targets, strict=True)
    return Views([_of_one(given, tokenizer, one, other, generate) for one, other in pairs], labels)


def _of_one(given: runs.Given, tokenizer: Any, text: Any, target: str | None, generate: int) -> View:
    if getattr(given.model, "main_input_name", "") == "pixel_values":
        return runs.of_image(given, tokenizer, text)
    return runs.of_text(given, tokenizer, text, target, generate)


def _of_several(views: Sequence[Any], tokens: Any, labels: Sequence[str | int] | None, name: str) -> Views:
    """All of them in one: views, those within others, and the items of recordings."""
    each: list[View] = []
    for one in views:
        if isinstance(one, Recording):
            each += of_recording(one, None, None, tokens=tokens, target=None, name=name)
        elif isinstance(one, (View, Views)):
            each += one if isinstance(one, Views) else [one]
        else:
            raise ModelError(f"look([…]): expected views, as look(…) returns them, or recordings, got {describe(one)}.")
    return Views(each, labels)


def _check_call(tokenizer: object, text: object, tokens: object) -> None:
    if text is None:
        raise ModelError(
            f"look(model, {describe(tokenizer)}): the text is missing: look(model, tokenizer, text). The input of a"
            " layer of your own is one tensor, look(layer, x)."
        )
    if tokens is not None:
        raise ModelError("look(model, tokenizer, text, tokens=…): a tokenizer makes the tokens; leave tokens out.")
