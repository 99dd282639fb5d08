"""Encoder, decoder, or cross-attention between them: told by where a module stands in the model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

__all__ = ["Side", "is_cross", "side_of", "sides_of"]

Side: TypeAlias = Literal["encoder", "decoder", "cross"]

_CROSS = ("cross", "encdec", "encoder_attn", "encoder_decoder")  # in the name of a cross-attention module


def is_cross(path: str, paths: Collection[str] = ()) -> bool:
    """Whether a module attends to another sequence, by its name or its parent's.

    nn.TransformerDecoderLayer calls it `multihead_attn`, beside `self_attn`: `paths` are those of the other modules.
    """
    parent, _, name = path.rpartition(".")
    names = ".".join(path.lower().split(".")[-2:])
    beside = f"{parent}.self_attn" if parent else "self_attn"
    return any(part in names for part in _CROSS) or (name == "multihead_attn" and beside in paths)


def sides_of(paths: Collection[str]) -> list[str]:
    """The side of each module of an encoder-decoder model; "" for all of a model, or of layers, of one side alone.

    >>> sides_of(["encoder.0.self_attn", "decoder.0.self_attn", "decoder.0.encoder_attn"])
    ['encoder', 'decoder', 'cross']
    """
    sides: list[str] = [side_of(path, paths) or "" for path in paths]
    return sides if "cross" in sides or {"encoder", "decoder"} <= set(sides) else [""] * len(sides)


def side_of(path: str, paths: Collection[str] = ()) -> Side | None:
    """The side on which a module stands: that which its path names first; None in a model of one side."""
    if is_cross(path, paths):
        return "cross"
    named = (part for part in path.lower().split(".") if part in ("encoder", "decoder"))
    side = next(named, None)
    return "encoder" if side == "encoder" else "decoder" if side == "decoder" else None
