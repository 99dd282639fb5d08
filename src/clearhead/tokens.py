"""The text as the model reads it: token ids, and the pieces of the text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ModelError

__all__ = ["encode", "pieces", "pieces_of", "same_words", "spaced"]

CONTINUED = "\N{REPLACEMENT CHARACTER}"  # a token that holds further bytes of a character begun before it


def spaced(words: Sequence[object]) -> list[str]:
    """Words as the pieces of a text: all but the first after a space."""
    texts = list(map(str, words))
    return [text if n == 0 or text[:1].isspace() else f" {text}" for n, text in enumerate(texts)]


def same_words(pieces: Sequence[str]) -> Tensor:
    """A number a word, equal for equal words: what relations between tokens need.

    >>> same_words(["the", " cat", " the"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(piece.strip(), len(numbers)) for piece in pieces])


def encode(tokenizer: Any, text: object) -> tuple[dict[str, Tensor], list[str]]:
    """The tokenizer's tensors for one text (batch 1), and one piece of text per token.

    Raises ModelError for a text without tokens, or an object that is not a Hugging Face tokenizer.
    """
    if not callable(tokenizer):
        kind = type(tokenizer).__name__
        raise ModelError(f"look(model, tokenizer, text): expected a Hugging Face tokenizer, got {kind}.")
    if not isinstance(text, str):
        raise ModelError(f"look(model, tokenizer, text): expected the text as a str, got {type(text).__name__}.")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        raise ModelError("the text holds half a character (a lone surrogate): decode it as UTF-8 first.")
    if not text.strip():
        raise ModelError("the text is empty: there is nothing to attend to. Give at least one word.")
    fast = bool(getattr(tokenizer, "is_fast", False))
    # verbose=False: whether the text is too long for the model is said by us, as an error.
    found = dict(tokenizer(text, return_tensors="pt", return_offsets_mapping=fast, verbose=False))
    offsets = found.pop("offset_mapping")[0].tolist() if fast else None
    ids = found["input_ids"][0].tolist()
    if not ids:
        raise ModelError(f"the tokenizer makes no token of the text {text[:40]!r}.")
    if offsets is None:
        return found, [tokenizer.decode([i]) for i in ids]
    return found, pieces(text, offsets, tokenizer.convert_ids_to_tokens(ids))


def pieces(text: str, offsets: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """The text cut at the tokens: white space goes to the token after it, what is left over to the last one.

    A special token, which stands for no text, is its name; a token that continues a character is U+FFFD.

    >>> pieces("Hi  you", [(0, 0), (0, 2), (4, 7)], ["[CLS]", "hi", "you"])
    ['[CLS]', 'Hi', '  you']
    """
    found, end, last = [], 0, None
    for (start, stop), name in zip(offsets, names, strict=True):
        if stop > end:
            found.append(text[end:stop])
            end, last = stop, len(found) - 1
        else:
            found.append(name if start == stop else CONTINUED)
    if last is not None:
        found[last] += text[end:]
    return found


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The pieces of a text that is only known by its token ids; a special token is its name."""
    special, found = set(tokenizer.all_special_ids), list[str]()
    for n, i in enumerate(ids):
        before = [j for j in ids[max(0, n - 4) : n] if j not in special]  # a word's start may hang on the word before
        if i in special:
            found.append(str(tokenizer.convert_ids_to_tokens(int(i))))
            continue
        known, more = tokenizer.decode(before), tokenizer.decode([*before, i])
        piece = more[len(known) :] if more.startswith(known) else tokenizer.decode([i])
        found.append(CONTINUED if not piece or piece.strip() == CONTINUED else piece)
    return found
