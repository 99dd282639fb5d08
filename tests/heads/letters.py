"""A tokenizer whose tokens are letters, with the special tokens that a test wants."""

from __future__ import annotations

from collections.abc import Sequence


class Letters:
    """Called as those of Hugging Face are; `seen` are the texts that it was given without special tokens."""

    pad_token_id = None

    def __init__(self, *, before: Sequence[int] = (), after: Sequence[int] = (), vocabulary: int = 1 << 21) -> None:
        self.before, self.after, self.vocabulary = list(before), list(after), vocabulary
        self.seen: list[str] = []

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        ids = [ord(letter) % self.vocabulary for letter in text]
        if add_special_tokens:
            return {"input_ids": [*self.before, *ids, *self.after]}
        if text != "a":
            self.seen.append(text)
        return {"input_ids": ids}
