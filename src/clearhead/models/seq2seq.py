"""An encoder reads one text, a decoder writes another: through one vector, with attention, or as a Transformer."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead._checks import check_count, describe
from clearhead.errors import DTypeError, ShapeError
from clearhead.maps import AttentionMap
from clearhead.models.recurrent import RecurrentDecoder, RecurrentEncoder
from clearhead.models.transformer import TransformerDecoder, TransformerEncoder

__all__ = ["BEGIN", "END", "PAD", "Seq2Seq"]

PAD, BEGIN, END = 0, 1, 2  # the ids that every text shares
Encoder: TypeAlias = "RecurrentEncoder | TransformerEncoder"
Decoder: TypeAlias = "RecurrentDecoder | TransformerDecoder"


class Seq2Seq(nn.Module):
    """p(target | source) = Π_i p(y_i | y_<i, encoder(source)), one token after the other.

    One model for three decoders, which differ only in what they see of the source:

        Seq2Seq.bottleneck(…)       one vector, the encoder's last states (Cho et al. 2014; Sutskever et al. 2014)
        Seq2Seq.attentive(…)        at each step a mix of all states, weighed by the decoder's state (Bahdanau 2015)
        Seq2Seq.transformer(…)      the same in each layer, by cross-attention, and no recurrence (Vaswani 2017)

    Ids are 0 for padding, 1 before the first token of a target, 2 after its last; a source needs neither.

    >>> _ = torch.manual_seed(0)
    >>> model = Seq2Seq.attentive(source_tokens=9, target_tokens=7, width=4)
    >>> source, target = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[1, 3, 4, 2], [1, 5, 2, 0]])
    >>> logits, (alignment,) = model.attend(source, target[:, :-1])
    >>> logits.shape, alignment.shape, alignment[1, 0, 0, 2].item()
    (torch.Size([2, 3, 7]), (2, 1, 3, 3), 0.0)
    """

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    @classmethod
    def bottleneck(cls, source_tokens: int, target_tokens: int, width: int = 256, dropout: float = 0.0) -> Seq2Seq:
        """Recurrent, without attention: the decoder is given the encoder's last states, and nothing else."""
        _check_sizes("bottleneck", source_tokens=source_tokens, target_tokens=target_tokens, width=width)
        encoder = RecurrentEncoder(source_tokens, width, dropout)
        return cls(encoder, RecurrentDecoder(target_tokens, width, dropout, attends=False))

    @classmethod
    def attentive(cls, source_tokens: int, target_tokens: int, width: int = 256, dropout: float = 0.0) -> Seq2Seq:
        """Recurrent, with additive attention: the decoder's state asks all states of the encoder, at every step."""
        _check_sizes("attentive", source_tokens=source_tokens, target_tokens=target_tokens, width=width)
        encoder = RecurrentEncoder(source_tokens, width, dropout)
        return cls(encoder, RecurrentDecoder(target_tokens, width, dropout, attends=True))

    @classmethod
    def transformer(
        cls,
        source_tokens: int,
        target_tokens: int,
        width: int = 256,
        dropout: float = 0.0,
        *,
        num_heads: int = 4,
        layers: int = 2,
    ) -> Seq2Seq:
        """Attention only: self-attention on both sides, and cross-attention from the decoder to the encoder."""
        sizes = {"source_tokens": source_tokens, "target_tokens": target_tokens, "width": width, "layers": layers}
        _check_sizes("transformer", **sizes)
        encoder = TransformerEncoder(source_tokens, width, num_heads, layers, dropout)
        return cls(encoder, TransformerDecoder(target_tokens, width, num_heads, layers, dropout))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # (B, S), (B, T) -> (B, T, target_tokens)
        """The logits of the token that follows each of `target`, which begins with BEGIN."""
        return self._decode(source, target, None)

    def attend(self, source: Tensor, target: Tensor) -> tuple[Tensor, tuple[AttentionMap, ...]]:
        """The logits, and the attention from target to source, (B, H, T, S) for each layer that has one.

        Row i is what the model looked at to write the token *after* target token i.
        """
        maps: list[AttentionMap] = []
        return self._decode(source, target, maps), tuple(maps)

    def loss(self, source: Tensor, target: Tensor) -> Tensor:
        """The mean of -ln p of all real tokens of `target` (B, T + 1), which begins with BEGIN and ends with END."""
        logits = self(source, target[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)

    @torch.no_grad()
    def generate(self, source: Tensor, max_tokens: int = 50) -> Tensor:  # (B, S) -> (B, at most max_tokens)
        """The likeliest token at each step, until every text has ended; END and, after it, PAD included."""
        check_count("Seq2Seq.generate", "max_tokens", max_tokens, at_least=1)
        _check_ids("source", source, self.encoder.embedding)
        memory, written = self._begin(source, max_tokens), [torch.full_like(source[:, 0], BEGIN)]
        for _ in range(max_tokens):
            logits = self.decoder(written[-1][:, None], memory)
            ended = (written[-1] == END) | (written[-1] == PAD)
            written.append(logits[:, -1].argmax(-1).where(~ended, PAD))
            if bool((ended | (written[-1] == END)).all()):
                break
        return torch.stack(written[1:], 1)

    def _decode(self, source: Tensor, target: Tensor, maps: list[AttentionMap] | None) -> Tensor:
        _check_ids("source", source, self.encoder.embedding)
        _check_ids("target", target, self.decoder.embedding)
        if len(source) != len(target):
            raise ShapeError(f"Seq2Seq(source={describe(source)}, target={describe(target)}): expected one batch size.")
        logits: Tensor = self.decoder(target, self._begin(source), maps)
        return logits

    def _begin(self, source: Tensor, max_tokens: int | None = None) -> Any:
        real = source != PAD
        return self.decoder.begin(self.encoder(source, real), real, max_tokens)


def _check_sizes(name: str, **sizes: object) -> None:
    for size, value in sizes.items():
        check_count(f"Seq2Seq.{name}", size, value, at_least=END + 1 if size.endswith("tokens") else 1)


def _check_ids(name: str, ids: object, table: nn.Embedding) -> None:
    """Raise unless these are ids (B, n) of this table, padded at their ends, and no text is empty."""
    arrived = f"Seq2Seq({name}={describe(ids)})"
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise DTypeError(f"{arrived}: expected token ids, an int64 tensor (B, tokens).")
    if ids.ndim != 2 or 0 in ids.shape:
        raise ShapeError(f"{arrived}: expected (B, tokens), at least one text and one token; one text is ids[None].")
    known = table.num_embeddings
    if int(ids.min()) < 0 or int(ids.max()) >= known:
        raise ShapeError(
            f"{arrived}: ids from {int(ids.min())} to {int(ids.max())}; the model was made for {known} {name} tokens, 0"
            f" to {known - 1}."
        )
    real = ids != PAD
    if bool((real[:, 1:] & ~real[:, :-1]).any()) or not bool(real[:, 0].all()):
        raise ShapeError(f"{arrived}: a text begins with padding (id {PAD}) or has some inside; pad at the end.")
