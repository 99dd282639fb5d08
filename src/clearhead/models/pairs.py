"""Pairs of texts to learn translating from: a file of two columns, or the sentences of a dictionary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from clearhead._checks import check_count
from clearhead.errors import ModelError
from clearhead.models.seq2seq import BEGIN, END, PAD

__all__ = ["Pair", "Vocabulary", "ding_pairs", "read_pairs", "words_of"]

Pair: TypeAlias = "tuple[str, str]"  # source, target

DING = (Path("de-en"), Path("/usr/share/trans/de-en"))  # where Debian's package trans-de-en puts it
_ASIDE = re.compile(r"\{[^}]*\}|\[[^]]*\]|\([^)]*\)|<[^>]*>")  # grammar, fields, remarks, references
_SENTENCE = re.compile(r"""(?!.*\b(?:etw|jd[mns]?|sb|sth)\b)[A-ZÄÖÜ][^/|"…]*[.!?]""")  # "etw." stands for any thing
_WORD = re.compile(r"\w+(?:'\w+)?|[^\w\s]")


def read_pairs(file: str | PathLike[str]) -> list[Pair]:
    """The pairs of a UTF-8 file: a line each, source and target with a tab between; empty lines are skipped.

    Raises: ModelError, naming the line, where one has another number of columns or an empty one, and where the file is
    missing, holds no pair or is not text.
    """
    pairs = []
    for number, line in enumerate(_text(Path(file)).splitlines(), 1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 2:
            count = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
            raise ModelError(
                f"{file}, line {number}: {count}; expected two texts with a tab between, source and target."
            )
        if not all(columns):
            empty = "first" if not columns[0] else "second"
            raise ModelError(
                f"{file}, line {number}: the {empty} column is empty. Give both texts, or remove the line."
            )
        pairs.append((columns[0], columns[1]))
    if not pairs:
        raise ModelError(f"{file} holds no pairs: expected lines of two texts with a tab between, source and target.")
    return pairs


def ding_pairs(file: str | PathLike[str] | None = None, *, words: tuple[int, int] = (3, 12)) -> list[Pair]:
    """German sentences and their English translations of `words` (least, most) words each, from the Ding dictionary.

    The dictionary (GPL-2+) is no part of clearhead: on Debian, Ubuntu and Colab ``apt install trans-de-en`` brings it.
    Of about 390,000 entries those are taken that are whole sentences on both sides, each German one once.

    Args:
        file: the dictionary; by default `de-en` in the current folder, or where Debian's package puts it.

    Raises: ModelError where it is not there, or is another file.
    """
    places = DING if file is None else (Path(file),)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ModelError(
            f"the Ding dictionary is not here ({' nor '.join(map(str, places))}). On Debian, Ubuntu and Colab: apt"
            " install trans-de-en; elsewhere put its file de-en into this folder. For pairs of your own: read_pairs."
        )
    pairs = {}
    for line in _text(found).splitlines():
        german, middle, english = line.partition(" :: ")
        sides = [[_cleaned(entry) for entry in side.split(" | ")] for side in (german, english)]
        if not line.startswith("#") and middle and len(sides[0]) == len(sides[1]):
            pairs.update({de: en for de, en in zip(*sides, strict=True) if _is_pair(de, en, words)})
    if not pairs:
        raise ModelError(f"{found} is not the Ding dictionary: it has no lines such as 'Es ist kalt. :: It is cold.'")
    return list(pairs.items())


def words_of(text: str) -> list[str]:
    """Words and punctuation marks, in small letters.

    >>> words_of("Wie geht's, Anna?")
    ['wie', "geht's", ',', 'anna', '?']
    """
    return _WORD.findall(text.lower())


class Vocabulary:
    """A number for each word: 0 to 2 as for `Seq2Seq`, 3 for every word that is not known, then the others.

    Args:
        texts: whose words it knows. least: how often a word has to come.

    >>> vocabulary = Vocabulary(["Es ist kalt.", "Es ist Zeit."], least=2)
    >>> len(vocabulary), vocabulary.encode("Es ist warm."), vocabulary.decode([4, 5, 3, 6, 2, 0])
    (7, [4, 5, 3, 6], ['es', 'ist', '?', '.'])
    """

    UNKNOWN = 3

    def __init__(self, texts: Iterable[str], *, least: int = 1) -> None:
        check_count("Vocabulary", "least", least, at_least=1)
        counts = Counter(word for text in texts for word in words_of(text))
        self.words = ["", "", "", "?", *(word for word, count in counts.most_common() if count >= least)]
        self._ids = {word: n for n, word in enumerate(self.words) if n > self.UNKNOWN}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """The number of each word."""
        return [self._ids.get(word, self.UNKNOWN) for word in words_of(text)]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The words up to the end of the text."""
        words = []
        for n in ids:
            if n in (PAD, END):
                break
            words.append(self.words[n])
        return words

    def sources(self, texts: Sequence[str]) -> Tensor:  # (B, S)
        """Ids for an encoder, padded; a text without a word is one unknown word."""
        return _padded([self.encode(text) or [self.UNKNOWN] for text in texts])

    def targets(self, texts: Sequence[str]) -> Tensor:  # (B, T + 2)
        """Ids for a decoder, padded, with BEGIN before and END after them."""
        return _padded([[BEGIN, *self.encode(text), END] for text in texts])


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def _text(file: Path) -> str:
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{file} is not text in UTF-8 (byte {error.start:,}): save it as UTF-8, and try again."
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    if "\0" in text:
        raise ModelError(f"{file} is not text: it holds zero bytes.")
    return text


def _cleaned(entry: str) -> str:
    """An entry without remarks, the first where several are given."""
    return " ".join(_ASIDE.sub(" ", entry).partition(";")[0].replace("’", "'").split())


def _is_pair(german: str, english: str, words: tuple[int, int]) -> bool:
    """Whether both are sentences of so many words, written out."""
    return all(_SENTENCE.fullmatch(side) and words[0] <= len(side.split()) <= words[1] for side in (german, english))
