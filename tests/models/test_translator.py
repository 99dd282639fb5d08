"""A translator: it learns pairs by heart, counts what it guesses, and shows what it looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clearhead import ModelError
from clearhead.models import Checkpoints, Seq2Seq, Translator

PAIRS = [
    ("Es ist kalt.", "It is cold."),
    ("Es ist spät.", "It is late."),
    ("Ich weiß es nicht.", "I do not know."),
    ("Wer ist da?", "Who is there?"),
]


@pytest.fixture(scope="module")
def translator() -> Translator:
    torch.manual_seed(0)
    learned = Translator(Seq2Seq.attentive, PAIRS, width=32, dropout=0.0)
    learned.fit(PAIRS, steps=60, batch=8, rate=1e-2)
    return learned


def test_it_learns_to_translate(translator: Translator) -> None:
    for source, target in PAIRS:
        assert translator.translate(source).replace(" ", "") == target.lower().replace(" ", "")
    assert translator.translate_all([source for source, _ in PAIRS]) == [translator.translate(s) for s, _ in PAIRS]
    assert translator.translate_all([]) == []
    assert translator.translate("Es ist kalt.", max_words=2) == "it is"
    assert translator.model.training


def test_hits_count_words_and_the_end(translator: Translator) -> None:
    assert translator.hits(PAIRS) == [(5, 5), (5, 5), (6, 6), (5, 5)]
    assert translator.hits([("Es ist kalt.", "It is late."), ("Wer ist da?", "Who is Anna?")]) == [(4, 5), (4, 5)]


def test_an_unknown_word_is_no_hit_even_if_it_is_guessed(translator: Translator) -> None:
    before = translator.model.decoder.out.bias.detach().clone()
    with torch.no_grad():
        translator.model.decoder.out.bias[3] += 1e3
    assert translator.hits([("Wer ist da?", "Who Anna there?")]) == [(0, 5)]
    with torch.no_grad():
        translator.model.decoder.out.bias.copy_(before)


def test_it_shows_what_it_looked_at(translator: Translator) -> None:
    source, target, (attn,) = translator.attend("Es ist kalt.")
    assert (source, target) == (["es", "ist", "kalt", "."], ["it", "is", "cold", ".", "∎"])
    assert attn.shape == (1, 1, 5, 4)
    _, given, _ = translator.attend("Es ist kalt.", "It is late.")
    assert given == ["it", "is", "late", ".", "∎"]


def test_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    def made() -> Translator:
        torch.manual_seed(1)
        return Translator(Seq2Seq.bottleneck, PAIRS, width=8)

    whole = made().fit(PAIRS, steps=6, batch=2)
    made().fit(PAIRS, steps=3, batch=2, checkpoints=Checkpoints(tmp_path))
    assert made().fit(PAIRS, steps=6, batch=2, checkpoints=Checkpoints(tmp_path)) == whole


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "there are none"),
        ([("Ja.", "Yes."), ("Nein.", "")], r"pair 1 is \('Nein.', ''\); expected \(source, target\)"),
        ([("Ja.", "Yes.", "Oui.")], "pair 0"),
        (["Ja"], "pair 0 is 'Ja'"),
        (zip(["Ja."], ["Yes."], strict=True), "got zip: expected a list"),
    ],
)
def test_what_are_no_pairs_is_named(pairs: list[tuple[str, str]], message: str, translator: Translator) -> None:
    with pytest.raises(ModelError, match=message):
        Translator(Seq2Seq.attentive, pairs)
    with pytest.raises(ModelError, match=message):
        translator.fit(pairs, steps=1)
