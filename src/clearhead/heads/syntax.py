"""Dependency parses as relations between words: read from CoNLL-U, or from a spaCy Doc."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clearhead._checks import describe
from clearhead.errors import DTypeError, ShapeError
from clearhead.heads.pairs import Pairs, Tokens

__all__ = ["Parse"]


@dataclass(frozen=True)
class Parse:
    """One sentence: its words, of each the number of its head (None of the root), and the label of that arc."""

    words: tuple[str, ...]
    heads: tuple[int | None, ...]
    labels: tuple[str, ...]

    @classmethod
    def read(cls, conllu: str) -> list[Parse]:
        """The sentences of a text in CoNLL-U; ranges (1-2) and empty words (1.1) are left out.

        Raises: ShapeError for a line that is not CoNLL-U, words that are not numbered 1, 2, …, or a head that is none
        of them; DTypeError for what is no text.

        >>> Parse.read("1\\tdogs\\t_\\t_\\t_\\t_\\t2\\tnsubj\\t_\\t_\\n2\\tbark\\t_\\t_\\t_\\t_\\t0\\troot\\t_\\t_\\n")
        [Parse(words=('dogs', 'bark'), heads=(1, None), labels=('nsubj', 'root'))]
        """
        if not isinstance(conllu, str):
            raise DTypeError(f"Parse.read: expected the text of a CoNLL-U file as a str, got {describe(conllu)}.")
        return [cls._of_rows(rows) for rows in _sentences(conllu)]

    @classmethod
    def _of_rows(cls, rows: list[list[str]]) -> Parse:
        for n, row in enumerate(rows, 1):
            if row[0] != str(n):
                raise ShapeError(f"CoNLL-U: word {row[1]!r} is numbered {row[0]}, and is word {n} of its sentence.")
            if not re.fullmatch("[0-9]+", row[6]) or not 0 <= int(row[6]) <= len(rows) or int(row[6]) == n:
                raise ShapeError(
                    f"CoNLL-U: the head of word {n}, {row[1]!r}, is {row[6]!r}; expected another word of the"
                    f" {len(rows)} of its sentence, or 0 for the root."
                )
        heads = (int(row[6]) - 1 for row in rows)
        return cls(
            tuple(row[1] for row in rows),
            tuple(head if head >= 0 else None for head in heads),
            tuple(row[7] for row in rows),
        )

    @classmethod
    def of(cls, doc: Any) -> Parse:
        """That of a spaCy Doc; a word is its own head there if it is a root."""
        heads = (None if token.head.i == token.i else token.head.i for token in doc)
        return cls(tuple(token.text for token in doc), tuple(heads), tuple(token.dep_ for token in doc))

    def pairs(self, tokens: Tokens, label: str | None = None, *, to_dependents: bool = False) -> Pairs:
        """Each word and its head; arcs of one label only, if asked for; or each head and its dependents.

        Args:
            tokens: of the same words, numbered so: tokenizer(list(parse.words), is_split_into_words=True).
        """
        last = int(tokens.words.max()) if len(tokens) else -1
        if last != len(self.words) - 1:
            raise ShapeError(
                f"Parse.pairs: the parse has {len(self.words)} words, the tokens {last + 1}. Tokenize the words of the"
                " parse: encoding = tokenizer(list(parse.words), is_split_into_words=True), and"
                " Tokens(encoding['input_ids'], words=encoding.word_ids())."
            )
        arcs = [(word, head) for word, head in enumerate(self.heads) if head is not None]
        arcs = [arc for arc in arcs if label is None or self.labels[arc[0]] == label]
        name = label or "dependency"
        return tokens.of_words([arc[::-1] for arc in arcs] if to_dependents else arcs, name)


def _sentences(conllu: str) -> Iterator[list[list[str]]]:
    rows: list[list[str]] = []
    for line in [*conllu.removeprefix("\ufeff").split("\n"), ""]:
        fields = line.rstrip("\r").split("\t")
        if not line.strip():
            if rows:
                yield rows
            rows = []
        elif line.startswith("#"):
            continue
        elif len(fields) < 8 or not re.fullmatch(r"[0-9]+([-.][0-9]+)?", fields[0]):
            raise ShapeError(
                f"CoNLL-U: expected ten columns with tabs between them, the first the number of a word, got {line!r}."
            )
        elif fields[0].isdigit():
            rows.append(fields)
