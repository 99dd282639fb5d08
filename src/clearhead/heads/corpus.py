"""A corpus as a model reads it: documents of any length, cut into windows that overlap, in batches of one length.

Nothing is held but the part of a document that is being read and the windows that wait for others of their length. Of
the same documents the same batches come, in the same order: whoever goes on from batch n need not have seen the others.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead.errors import ModelError

__all__ = ["Batch", "Corpus", "Document", "Window", "check_documents", "windows_of"]

Document: TypeAlias = str | Path  # a text, or a file of one
PIECE = 1 << 20  # characters that are tokenized together
POOL = 16  # batches' worth of windows that wait for others of their length


@dataclass(frozen=True)
class Window:
    """Some tokens of a document; those before `start` are context, which an earlier window has counted."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Batch:
    """Windows side by side, shorter ones padded on the right."""

    ids: Tensor  # (B, T)
    real: Tensor  # (B, T) bool: no padding
    counted: Tensor  # (B, T) bool: tokens of documents that no other batch counts


class Corpus:
    """Documents, and how they are to be cut.

    Args:
        tokenizer: of Hugging Face. Special tokens that it puts around a text are put around each window, and not
            counted.
        documents: texts (str) and files (Path). A long document is tokenized in pieces that end where a line does.
        window: tokens of a window, special ones included.
        overlap: how many tokens a window shares with the one before, as context.
        at_once: tokens of a batch, padding included, or one window.
    """

    def __init__(
        self, tokenizer: Any, documents: Iterable[Document], *, window: int, overlap: int, at_once: int
    ) -> None:
        self._tokenizer, self._documents = tokenizer, documents
        self._before, self._after = _special_tokens(tokenizer)
        self._length = window - len(self._before) - len(self._after)
        self._overlap, self._at_once = overlap, at_once
        if not 0 <= overlap < self._length:
            special = f" of which {window - self._length} are special" if self._length < window else ""
            raise ModelError(
                f"windows of {window} tokens{special} that overlap by {overlap}: expected 0 <= overlap < tokens."
            )
        self._digest = hashlib.sha256()
        self.nbytes = _nbytes(documents)  # of all documents, as far as known
        self._bytes = self._tokens = self._given = 0  # read so far, and tokens that batches so far count

    @property
    def digest(self) -> str:
        """Of all batches so far."""
        return self._digest.hexdigest()

    @property
    def done(self) -> int:
        """How many bytes of text the tokens are that batches so far count."""
        return self._bytes * self._given // max(1, self._tokens)

    def batches(self) -> Iterator[Batch]:
        """All windows, each once. Raises ModelError for a document that is no text, or cannot be read."""
        pool: list[Window] = []
        enough = POOL * max(1, self._at_once // self._length) * self._length
        for window in self._windows():
            pool.append(window)
            if sum(len(one.ids) for one in pool) >= enough:
                yield from self._of_pool(pool)
                pool = []
        yield from self._of_pool(pool)

    def _of_pool(self, pool: list[Window]) -> Iterator[Batch]:
        """The longest first; those of one length stay in order."""
        group: list[Window] = []
        for window in sorted(pool, key=lambda one: -len(one.ids)):
            if group and self._width(group[0]) * (len(group) + 1) > self._at_once:
                yield self._batch(group)
                group = []
            group.append(window)
        if group:
            yield self._batch(group)

    def _width(self, window: Window) -> int:
        return len(self._before) + len(window.ids) + len(self._after)

    def _batch(self, group: list[Window]) -> Batch:
        shape = len(group), self._width(group[0])
        pad = getattr(self._tokenizer, "pad_token_id", None)
        ids = torch.full(shape, 0 if pad is None else pad, dtype=torch.long)
        real, counted = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for n, window in enumerate(group):
            ids[n, : self._width(window)] = torch.tensor([*self._before, *window.ids, *self._after])
            real[n, : self._width(window)] = True
            counted[n, len(self._before) + window.start : len(self._before) + len(window.ids)] = True
        self._given += int(counted.sum())
        for part in (torch.tensor(shape), ids, real, counted):
            self._digest.update(part.numpy().tobytes())
        return Batch(ids, real, counted)

    def _windows(self) -> Iterator[Window]:
        for n, document in enumerate(self._documents):
            yield from windows_of(self._ids(n, document), self._length, self._overlap)

    def _ids(self, n: int, document: Document) -> Iterator[list[int]]:
        """The token ids of a document, piece by piece."""
        name = name_of(n, document)
        found = False
        for piece in _at_line_ends(_blocks(name, document)):
            nbytes = _size(name, piece)
            ids = list(self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
            self._bytes, self._tokens = self._bytes + nbytes, self._tokens + len(ids)
            found |= bool(ids) and not piece.isspace()
            yield ids
        if not found:
            raise ModelError(f"{name} is empty: there is nothing to attend to. Leave it out.")


def windows_of(tokens: Iterable[list[int]], length: int, overlap: int) -> Iterator[Window]:
    """Windows of `length` tokens, the last as long as it comes out; each token is counted once, where it comes first.

    >>> [(one.ids, one.start) for one in windows_of([[0, 1, 2], [3, 4, 5, 6]], 4, 2)]
    [([0, 1, 2, 3], 0), ([2, 3, 4, 5], 2), ([4, 5, 6], 2)]
    """
    held: list[int] = []
    start = 0  # of those that are held, so many are context
    for some in tokens:
        held += some
        at = 0
        while len(held) - at > length:  # more: the last window is told by the end
            yield Window(held[at : at + length], start)
            at, start = at + length - overlap, overlap
        held = held[at:]
    if len(held) > start:
        yield Window(held, start)


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    if not callable(tokenizer):
        raise ModelError(
            f"atlas(model, tokenizer, …): expected a Hugging Face tokenizer, got {type(tokenizer).__name__}."
        )
    bare, whole = (
        list(tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"]) for special in (False, True)
    )
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []


# --- reading ----------------------------------------------------------------------------------------------------------


def name_of(n: int, document: object) -> str:
    """What to call a document in an error."""
    return str(document) if isinstance(document, Path) else f"document {n}"


def check_documents(documents: Sequence[object]) -> None:
    """Refuse what can be told to be no text before anything is computed. Raises ModelError, which names it."""
    if not documents:
        raise ModelError("atlas: there are no documents. Give texts (str) or files (Path).")
    for n, document in enumerate(documents):
        if isinstance(document, Path):
            _first_block(document)
        elif not isinstance(document, str):
            kind = type(document).__name__
            raise ModelError(f"atlas: document {n} is a {kind}; expected a text (str) or a file (pathlib.Path).")
        elif not document.strip():
            raise ModelError(f"document {n} is empty: there is nothing to attend to. Leave it out.")


def _first_block(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
            empty = path.is_file() and not head.removeprefix(codecs.BOM_UTF8).strip() and not file.read(1)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}.") from error
    if empty:
        raise ModelError(f"{path} is empty: there is nothing to attend to. Leave it out.")
    if b"\0" in head:
        raise ModelError(f"{path} is not text: byte {head.index(0)} is zero.")


def _nbytes(documents: Iterable[Document]) -> int:
    """Bytes of text, where all documents are there at once; 0 where they are made one by one."""
    if not isinstance(documents, Sequence):
        return 0
    return sum(
        os.path.getsize(one) if isinstance(one, Path) else len(one.encode("utf-8", "ignore")) for one in documents
    )


def _size(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ModelError(f"{name} holds half a character (a lone surrogate): decode it as UTF-8 first.") from None


def _blocks(name: str, document: Document) -> Iterator[str]:
    """The text in parts of about a million characters."""
    if isinstance(document, Path):
        yield from _blocks_of_file(document)
    elif not isinstance(document, str):
        raise ModelError(
            f"atlas: {name} is a {type(document).__name__}; expected a text (str) or a file (pathlib.Path)."
        )
    else:
        for start in range(0, len(document), PIECE):
            yield document[start : start + PIECE]


def _blocks_of_file(path: Path) -> Iterator[str]:
    decoder, before = codecs.getincrementaldecoder("utf-8-sig")(), 0
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(PIECE)
                pending = len(decoder.getstate()[0])
                if 0 in block:
                    raise ModelError(f"{path} is not text: byte {before + block.index(0)} is zero.")
                yield decoder.decode(block, final=not block)
                before += len(block)
                if not block:
                    return
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text: byte {before - pending + error.start} is not UTF-8.") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}. What was computed before is kept.") from error


def _at_line_ends(blocks: Iterable[str]) -> Iterator[str]:
    """The same text, cut where a line begins with a letter, or else before a space: there tokens end."""
    held = ""
    for block in blocks:
        held += block
        if len(held) < PIECE:
            continue
        at = _cut(held)
        yield held[:at]
        held = held[at:]
    if held:
        yield held


def _cut(text: str) -> int:
    at = text.rfind("\n", 1, -1)
    while at > 0:
        if not text[at + 1].isspace():
            return at + 1
        at = text.rfind("\n", 1, at)
    space = text.rfind(" ", 1)
    return space if space > 0 else len(text)
