"""What the rows and the columns of maps stand for: the pieces of a text, the patches of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Picture", "Tokens"]


@dataclass(frozen=True)
class Picture:
    """An image that is read in patches, row by row, of which the first is token number `first`; uri: data:image/…"""

    uri: str
    rows: int
    columns: int
    first: int


@dataclass(frozen=True)
class Tokens:
    """What the rows or the columns of a map stand for.

    Attributes: pieces: of the text, one a token. ids: (n,), equal for equal tokens. name: "source" or "target" of an
    encoder-decoder model. prompt: how many tokens were given, where a model wrote the rest. picture: whose patches
    the tokens are, where they are no text.
    """

    pieces: list[str]
    ids: Tensor
    name: str = ""
    prompt: int | None = None
    picture: Picture | None = None

    def __len__(self) -> int:
        return len(self.pieces)
