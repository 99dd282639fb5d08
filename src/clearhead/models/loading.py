"""The folder of a trained GPT: its config and tokenizer, and the weights of each checkpoint.

folder/config.json, tokenizer.json                         what the model is
folder/step-000500.safetensors, …, training.safetensors    see `checkpoints`
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._files import write_whole
from clearhead.errors import DTypeError, ModelError, ShapeError
from clearhead.models.checkpoints import Checkpoints, load_weights
from clearhead.models.gpt import GPT, GPTConfig
from clearhead.models.texts import wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["checkpoints", "is_trained", "load", "load_tokenizer", "read_config", "save_model"]

_CONFIG, _TOKENIZER, _ENDING, _TYPE = "config.json", "tokenizer.json", ".safetensors", "clearhead-gpt"


def is_trained(place: Path | str) -> bool:
    """Whether this is a folder of a GPT that was trained here, or the weights of a step in one."""
    try:
        told = json.loads((_folder(place) / _CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("model_type") == _TYPE


def save_model(folder: Path, config: GPTConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write what the model is, the config last: it makes a model's folder of it. Raises ModelError."""
    try:
        folder.mkdir(exist_ok=True)
        write_whole(folder / _TOKENIZER, tokenizer.backend_tokenizer.to_str())
        write_whole(folder / _CONFIG, json.dumps({"model_type": _TYPE, **asdict(config)}, indent=2))
    except OSError as error:
        (folder / _TOKENIZER).unlink(missing_ok=True)
        raise ModelError(f"the model cannot be written to {folder}: {error.strerror or error}.") from error


def read_config(place: Path | str) -> GPTConfig:
    """The config in a folder, called as the folder is. Raises ModelError where it was changed into none."""
    folder = _folder(place)
    try:
        told: dict[str, Any] = json.loads((folder / _CONFIG).read_text("utf-8"))
        told.pop("model_type")
        config = GPTConfig(**told)
    except (OSError, ValueError, KeyError, TypeError, ShapeError, DTypeError) as error:
        raise ModelError(f"{folder / _CONFIG} is damaged, or of another version: {error}.") from error
    return replace(config, name=folder.resolve().name)


def load_tokenizer(place: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder. Raises ModelError where there is none that can be read."""
    from tokenizers import Tokenizer

    file = _folder(place) / _TOKENIZER
    try:
        return wrapped(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises nothing more telling
        raise ModelError(f"the tokenizer {file} is damaged or gone: {error}.") from error


def checkpoints(place: Path | str) -> dict[int, Path]:
    """The files of weights in a folder, by the number of steps. Raises ModelError where there are none."""
    if not is_trained(place):
        raise ModelError(f"{place} is no folder that `clearhead train` has made: it has no checkpoints.")
    found = Checkpoints(_folder(place)).weights
    if not found:
        raise ModelError(f"{place} holds no weights: its training ended before the first checkpoint. Start it again.")
    return found


def load(place: Path | str) -> tuple[GPT, PreTrainedTokenizerFast]:
    """The model, in evaluation mode, and its tokenizer.

    Args:
        place: a folder of `clearhead train`, for the weights after its last checkpoint, or one of its step-… files.

    Raises: ModelError where something is missing, cut short or of another model.
    """
    place, config = Path(place), read_config(place)
    if place.suffix == _ENDING:
        file, config = place, replace(config, name=f"{config.name}, {place.stem}")
    else:
        file = list(checkpoints(place).values())[-1]
    model = GPT(config)
    load_weights(model, file)
    return model.eval(), load_tokenizer(place)


def _folder(place: Path | str) -> Path:
    place = Path(place)
    return place.parent if place.suffix == _ENDING else place
