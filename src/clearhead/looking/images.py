"""Images as a model reads them: opened, and shown again as the patches that its tokens stand for."""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._checks import describe
from clearhead.errors import ModelError
from clearhead.page.texts import Picture, Tokens

__all__ = ["as_image", "picture_of"]


def as_image(image: object) -> Any:
    """A PIL image in RGB, of one, of a file, or of an array (rows, columns, 3)."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ModelError('looking at images needs Pillow. Run: pip install "clearhead[images]"') from None
    if isinstance(image, (str, os.PathLike)):
        try:
            image = Image.open(image)
            image.load()
        except UnidentifiedImageError:
            raise ModelError(f"{image} is no image that Pillow can read.") from None
        except OSError as error:
            raise ModelError(f"cannot read the image {image}: {error.strerror or error}") from None
    elif hasattr(image, "__array_interface__") and not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        got = describe(image)
        raise ModelError(f"look(model, processor, image): expected an image, its file or an array, got {got}.")
    return image.convert("RGB")


def picture_of(model: nn.Module, processor: Any, pixels: Tensor, tokens: int) -> Tokens:
    """The tokens of an image (1, 3, height, width): special ones, then its patches, row by row."""
    patch = getattr(getattr(model, "config", None), "patch_size", None)
    if pixels.ndim != 4 or patch is None:
        raise ModelError(f"{type(model).__name__} does not read its image {describe(pixels)} in patches of one size.")
    height, width = (patch, patch) if isinstance(patch, int) else tuple(patch)[-2:]
    rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
    first = tokens - rows * columns
    if first < 0:
        raise ModelError(f"{type(model).__name__} has {tokens} tokens for {rows} × {columns} patches: not one each.")
    seen = pixels[:, :, : rows * height, : columns * width]
    special = ["[CLS]" if n == 0 else f" [REG{n}]" for n in range(first)]
    places = [f" ({row}, {column})" for row in range(rows) for column in range(columns)]
    return Tokens(special + places, torch.arange(tokens), picture=Picture(_uri(seen, processor), rows, columns, first))


def _uri(pixels: Tensor, processor: Any) -> str:
    """The pixels as the model reads them, in their own colours again, as a small JPEG."""
    from PIL import Image

    mean, std = (torch.tensor(getattr(processor, name, None) or [default] * 3) for name, default in _PLAIN.items())
    colours = pixels[0].float().cpu() * std[:, None, None] + mean[:, None, None]
    array = (colours.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    held = io.BytesIO()
    Image.fromarray(array).save(held, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode("ascii")


_PLAIN = {"image_mean": 0.0, "image_std": 1.0}
