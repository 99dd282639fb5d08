"""One run of a model, recorded: what each kind of model is given, and what its queries and keys stand for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._checks import describe
from clearhead._progress import Progress
from clearhead.errors import ModelError, ShapeError
from clearhead.looking.images import as_image, picture_of
from clearhead.maps.base import AttentionMap
from clearhead.maps.composed import OneSequence
from clearhead.maps.softmax import SoftmaxMap
from clearhead.models import GPT
from clearhead.page.payload import ENDS
from clearhead.page.texts import Tokens
from clearhead.projections import Watch, find, is_sequence, rows_of
from clearhead.recording import record
from clearhead.recording.sides import sides_of
from clearhead.tokens import encode, pieces_of, same_words, spaced
from clearhead.view import Find, View, is_plain
from clearhead.zoo import context_length
from clearhead.zoo.loading import frugal, known_tokens

__all__ = ["Given", "name_of", "of_image", "of_layer", "of_text", "writes_a_second_text"]

LONGEST = 64  # tokens that an encoder-decoder model writes where no target is given


@dataclass(frozen=True)
class Given:
    """What every run is told: the model, which layers to keep, what to call it, whom to tell of progress."""

    model: nn.Module
    layers: Iterable[int] | None
    name: str
    report: Progress


def of_text(given: Given, tokenizer: Any, text: object, target: str | None, generate: int) -> View:
    """A language model on a text, which it may go on with, or an encoder-decoder model on two."""
    inputs, pieces = encode(tokenizer, text)
    source = Tokens(pieces, inputs["input_ids"][0])
    _check_tokens(given, source)
    if writes_a_second_text(given.model):
        return _of_two_texts(given, tokenizer, inputs, source, target, generate)
    if target is not None:
        raise ModelError(f"look(…, target=…): {given.name} reads one text; target is for encoder-decoder models.")
    if generate:
        inputs, source = _continued(given, tokenizer, inputs, source, generate)
    return _run(given, (), inputs, [source])


def of_image(given: Given, processor: Any, image: object) -> View:
    """A model that reads an image in patches."""
    inputs = {"pixel_values": processor(images=as_image(image), return_tensors="pt")["pixel_values"]}
    return _run(given, (), inputs, [], processor)


def of_layer(given: Given, x: Tensor, words: Sequence[str] | None) -> View:
    """A layer of the reader's own on its input x (T, d) or (1, T, d)."""
    if x.ndim not in (2, 3) or (x.ndim == 3 and x.shape[0] != 1) or x.shape[-2] == 0:
        raise ShapeError(f"look(layer, x): expected one sequence, x (T, d) or (1, T, d), got {describe(x)}.")
    pieces = spaced(range(x.shape[-2]) if words is None else words)
    if len(pieces) != x.shape[-2]:
        raise ShapeError(f"look(layer, x, tokens=…): x has {x.shape[-2]} rows, but there are {len(pieces)} tokens.")
    tokens = Tokens(pieces, same_words(pieces))
    attend = getattr(given.model, "attend", None)
    if attend is None:
        return _run(given, (x,), {}, [tokens])
    attn, finder = _attended(given.model, attend, x)
    return View([attn], [0], [tokens], given.name, given.report, [finder])


def writes_a_second_text(model: nn.Module) -> bool:
    """Whether it is an encoder-decoder model; the config of its encoder alone says the same."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def name_of(model: nn.Module) -> str:
    """What its authors or its folder call it; else its class."""
    path = getattr(getattr(model, "config", None), "name_or_path", "")
    return Path(path).name if path else type(model).__name__


# --- the run ------------------------------------------------------------------------------------------------------


def _run(
    given: Given, args: Sequence[Tensor], kwargs: Mapping[str, Tensor], texts: list[Tokens], processor: Any = None
) -> View:
    """Call the model, keep its maps, and the inputs of its layers; an image's tokens are told by the maps."""
    model, lengths = given.model, list(map(len, texts)) or _patches(given.model, kwargs["pixel_values"])
    given.report("model", 0, 1)
    with record(model, layers=given.layers) as recording, Watch(model, *lengths) as watch, torch.no_grad():
        there = next(model.parameters(), [*args, *kwargs.values()][0]).device
        moved = {name: tensor.to(there) for name, tensor in kwargs.items()}
        model(*(tensor.to(there) for tensor in args), **moved, **frugal(model))
    given.report("model", 1, 1)
    maps, paths = list(recording), recording.paths
    if processor is not None:
        texts = [picture_of(given.model, processor, kwargs["pixel_values"], maps[0].shape[-1])]
    sides = sides_of(paths) if len(texts) > 1 else [""] * len(maps)
    if not any(sides) and len(texts) > 1:  # the layers of one side alone were asked for
        texts = [next(text for text in texts if len(text) == maps[0].shape[-1])]
    for attn, side in zip(maps, sides, strict=True):
        _check_sizes(attn, side, texts)
    watch.keep_only(paths)
    finders: list[Find] = [partial(find, model=model, watch=watch, path=path) for path in paths]
    ours = [replace(text, ids=text.ids.cpu()) for text in texts]
    return View(maps, list(recording.layers), ours, given.name, given.report, finders, sides)


def _check_sizes(attn: AttentionMap, side: str, texts: list[Tokens]) -> None:
    queries, keys = (len(texts[n]) for n in ENDS[side])
    if len(attn.shape) != 4 or attn.shape[0] != 1 or attn.shape[-2:] != (queries, keys):
        of = f"the self-attention of the {keys} tokens" if len(texts) < 2 else f"{queries} queries on {keys} keys"
        raise ModelError(
            f"a call with {attn!r} is not {of} (other calls are recorded with clearhead.record, and not shown by look)."
        )


# --- texts that the model writes ----------------------------------------------------------------------------------


def _of_two_texts(
    given: Given, tokenizer: Any, inputs: dict[str, Tensor], source: Tokens, target: str | None, generate: int
) -> View:
    start = _start(given)
    if target is None:
        written = _generated(given, inputs, generate or LONGEST)[:, :-1]  # the last token was never read
    else:
        ids = tokenizer(text_target=target, return_tensors="pt", verbose=False)["input_ids"]
        written = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)
    ids = written[0]
    read = Tokens(pieces_of(tokenizer, ids.tolist()), ids, "target")
    _check_tokens(given, read)
    return _run(given, (), inputs | {"decoder_input_ids": written}, [replace(source, name="source"), read])


def _start(given: Given) -> int:
    configs = [getattr(given.model, name, None) for name in ("config", "generation_config")]
    names = ("decoder_start_token_id", "bos_token_id")
    said = [getattr(config, name, None) for name in names for config in configs]
    start = next((token for token in said if token is not None), None)
    if start is None:
        raise ModelError(f"{given.name} does not say with which token its decoder starts (decoder_start_token_id).")
    return int(start)


def _continued(
    given: Given, tokenizer: Any, inputs: dict[str, Tensor], prompt: Tokens, generate: int
) -> tuple[dict[str, Tensor], Tokens]:
    """The text and what the model goes on with."""
    whole = _generated(given, inputs, generate)
    added = whole[0, len(prompt) :].tolist()
    pieces = prompt.pieces + pieces_of(tokenizer, whole[0].tolist())[len(prompt) :]
    if not added:
        raise ModelError(f"look(…, generate={generate}): {given.name} ends the text at once.")
    return {"input_ids": whole}, Tokens(pieces, whole[0], prompt=len(prompt))


def _generated(given: Given, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
    """The likeliest token at each step: (1, n)."""
    if isinstance(given.model, GPT):
        return given.model.generate(inputs["input_ids"], tokens)
    if not getattr(given.model, "can_generate", lambda: False)():
        raise ModelError(f"look(…, generate={tokens}): {given.name} does not write text.")
    there, accepted = next(given.model.parameters()).device, inspect.signature(given.model.forward).parameters
    with torch.no_grad():
        written: Tensor = given.model.generate(  # type: ignore[operator]
            **{name: tensor.to(there) for name, tensor in inputs.items() if name in accepted},
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
        )
    return written


def _check_tokens(given: Given, text: Tokens) -> None:
    model, limit, n = given.model, context_length(given.model), len(text)
    if limit is not None and n > limit:
        raise ModelError(f"the text has {n:,} tokens, and {given.name} reads at most {limit:,}. Shorten the text.")
    size = known_tokens(model)
    if size is not None and int(text.ids.max()) >= size:
        raise ModelError(
            f"token {int(text.ids.max())} is beyond the {size} that {given.name} knows: is this its own tokenizer?"
        )
    if next(model.parameters(), text.ids).is_meta:
        raise ModelError(f"{given.name} has no weights: it is on PyTorch's meta device. Load it onto a real one.")


def _patches(model: nn.Module, pixels: Tensor) -> list[int]:
    """How many tokens an image may become: patches, and a few special ones."""
    patch = getattr(getattr(model, "config", None), "patch_size", None)
    side = patch if isinstance(patch, int) else patch[0] if patch else 1
    count = (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
    return [count + extra for extra in range(6)] if patch else [0]


# --- a layer that hands out its map -------------------------------------------------------------------------------


def _attended(layer: nn.Module, attend: Any, x: Tensor) -> tuple[AttentionMap, Find]:
    """The map of a layer that hands it out itself, as (1, H, T, T), and how to find its matrices."""
    call = f"look({type(layer).__name__}, x): attend(x)"
    with Watch(layer, x.shape[-2]) as watch, torch.no_grad():
        result = attend(x.to(next(layer.parameters(), x).device))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], AttentionMap)):
        raise ModelError(
            f"{call} returned {describe(result)}: expected (output, map), the map for example"
            " clearhead.SoftmaxMap(q, k, v=v, mask=…) of your queries and keys, or clearhead.DenseMap(weights)."
        )
    attn = _as_heads(result[1])
    if attn.shape[0] != 1 or attn.shape[-2:] != (x.shape[-2], x.shape[-2]):
        raise ModelError(f"{call} returned {result[1]!r}: expected the weights of {x.shape[-2]} queries and keys.")
    given, out = x.detach().reshape(x.shape[-2:]), result[0]
    returned = rows_of(out.reshape(out.shape[-2:])) if is_sequence(out, len(given)) else None
    return attn, partial(find, model=layer, watch=watch, path="", x=given, out=returned)


def _as_heads(attn: AttentionMap) -> AttentionMap:
    """(T, S) and (H, T, S), the map of one sequence, as (1, H, T, S)."""
    if len(attn.shape) == 4:
        return attn
    if not (isinstance(attn, SoftmaxMap) and is_plain(attn)):
        return OneSequence(attn)
    q, k, v = (None if t is None else t.reshape(1, -1, *t.shape[-2:]) for t in (attn.q, attn.k, attn.v))
    return SoftmaxMap(q, k, v=v, mask=attn.mask, scale=attn.scale)  # type: ignore[arg-type]  # the page derives it
