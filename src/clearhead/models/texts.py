"""A text as the batches that a language model is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead._checks import check_count
from clearhead.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

__all__ = ["read_texts", "token_ids", "tokenizer_for", "windows", "wrapped"]

BYTES = 256
_PIECE = 100_000  # characters that the tokenizer is given at once


def read_texts(files: Sequence[Path | str]) -> str:
    """The texts of these files, one after another. Raises ModelError for a file that is not there, or not text."""
    return "\n".join(_read(Path(file)) for file in files)


def _read(file: Path) -> str:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not text: byte {error.start} is not UTF-8") from None
    if "\0" in text:
        raise ModelError(f"{file} is not text: it has a zero byte at character {text.index(chr(0))}")
    return text


def tokenizer_for(text: str, vocab_size: int = BYTES) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, and beyond 256 of the pairs that are most frequent in the text.

    Source: Sennrich et al. 2016 (byte-pair encoding); Radford et al. 2019 (on bytes).
    Cost: 5 MB take a second, and 10 s with 4,096 tokens.

    >>> tokenizer_for("", 256)("né")["input_ids"]
    [110, 195, 169]
    """
    check_count("tokenizer_for", "vocab_size", vocab_size, at_least=BYTES)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    names = _names_of_bytes()
    made = Tokenizer(models.BPE({name: byte for byte, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if vocab_size > BYTES:
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=names, show_progress=False)
        made.train_from_iterator(_pieces(text), trainer)
    return wrapped(made)


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer with the calls of transformers."""
    from transformers import PreTrainedTokenizerFast

    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=names, clean_up_tokenization_spaces=False
    )


def _names_of_bytes() -> list[str]:
    """What tokenizers call each byte: itself where that is a letter, else the next letter from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(BYTES)]


def token_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """The whole text as ids (n,)."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
    return torch.cat([torch.tensor(piece.ids, dtype=torch.int32) for piece in encoded] or [torch.zeros(0)]).long()


def _pieces(text: str) -> Iterator[str]:
    """The text in lines, many at a time."""
    lines, held = list[str](), 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        held += len(line)
        if held >= _PIECE:
            yield "".join(lines)
            lines, held = [], 0
    if lines:
        yield "".join(lines)


def windows(ids: Tensor, batch: int, length: int) -> Callable[[int], Tensor]:
    """Batches for `fit`: (batch, length + 1) ids, each row from a place in the text that is drawn.

    Raises: ModelError for a text that is shorter than one row.
    """
    if len(ids) <= length:
        raise ModelError(
            f"the text has {len(ids):,} tokens, and this model reads {length:,} and foretells one more: give a text of"
            f" more than {length:,}, or make a smaller model."
        )

    def drawn(n: int) -> Tensor:
        starts = torch.randint(len(ids) - length, (batch, 1))
        return ids[starts + torch.arange(length + 1)]

    return drawn
