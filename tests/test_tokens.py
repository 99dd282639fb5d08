"""The text cut at the tokens: nothing of it is lost, and markup stays text."""

from __future__ import annotations

from typing import Any

import pytest

from clearhead import ModelError
from clearhead.tokens import encode

TEXT = "Zoë said: <b>“hi”</b> 👩‍🚀!\n\n\tשלום  end "


def test_pieces_add_up_to_the_text(smollm2: tuple[Any, Any]) -> None:
    inputs, found = encode(smollm2[1], TEXT)
    assert len(found) == inputs["input_ids"].shape[1]
    assert "".join(piece for piece in found if piece != "\N{REPLACEMENT CHARACTER}") == TEXT


def test_special_tokens_are_named_and_words_keep_their_case(minilm: tuple[Any, Any]) -> None:
    _, found = encode(minilm[1], "The dog chased the cat")
    assert found == ["[CLS]", "The", " dog", " chased", " the", " cat", "[SEP]"]


def test_reactions(rxnmapper: tuple[Any, Any]) -> None:
    _, found = encode(rxnmapper[1], "CC(=O)O>>CCO")
    assert found[0] == "[CLS]"
    assert "".join(found[1:-1]) == "CC(=O)O>>CCO"


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_empty_text(smollm2: tuple[Any, Any], text: str) -> None:
    with pytest.raises(ModelError, match="the text is empty"):
        encode(smollm2[1], text)


def test_what_is_no_text_and_what_is_no_tokenizer(smollm2: tuple[Any, Any]) -> None:
    with pytest.raises(ModelError, match="expected the text as a str, got list"):
        encode(smollm2[1], ["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="expected a Hugging Face tokenizer, got int"):
        encode(3, "a")
