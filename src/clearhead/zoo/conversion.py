"""A ``.gguf`` file -> a Hugging Face folder in the cache, once."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

from clearhead._progress import Progress, silent
from clearhead.errors import ModelError
from clearhead.zoo import cache
from clearhead.zoo.quiet import no_stderr, quiet

_STEPS = 4  # metadata and tokenizer, weights, writing, checking


def converted(file: Path, on_progress: Progress | None = None) -> Path:
    """The folder with this file's model in float32, converted now if it was not before or if it was damaged.

    Raises:
        ModelError: the file is not a whole GGUF file, its architecture is not known to transformers, or the
            cache folder cannot be written to. Nothing is left behind then, nor after an interruption.

    Cost: SmolLM2-135M (98 MB) takes about 25 s and 540 MB of disk; afterwards 0.2 s, the time of checking it.
    """
    check(file)
    entry = cache.entry_for(file)
    if cache.intact(entry):
        return entry
    report = on_progress or silent
    with cache.workspace() as work:
        report("convert", 0, _STEPS)
        tokenizer = _read(file, "AutoTokenizer")
        report("convert", 1, _STEPS)
        model = _read(file, "AutoModelForCausalLM")
        report("convert", 2, _STEPS)
        _write(file, model, tokenizer, work)
        report("convert", 3, _STEPS)
        cache.publish(work, entry)
        report("convert", 4, _STEPS)
    return entry


def check(file: Path) -> None:
    """`ModelError` unless this is a GGUF file and what reads it is installed."""
    try:
        with file.open("rb") as handle:
            magic = handle.read(4)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{file} is not a GGUF file: it begins with {magic!r}, not with b'GGUF'")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f'reading {file.name} needs {" and ".join(missing)}. Run: pip install "clearhead[models]"')


def _read(file: Path, auto_class: str) -> Any:
    import torch

    with quiet():
        import transformers

    wanted = {"dtype": torch.float32} if auto_class != "AutoTokenizer" else {}
    try:
        with quiet(), no_stderr():
            reader = getattr(transformers, auto_class)
            return reader.from_pretrained(file.parent, gguf_file=file.name, **wanted)
    except Exception as error:  # the reader raises whatever its parsing stumbles over
        raise ModelError(
            f"{file} ({file.stat().st_size:,} bytes) is not readable as a GGUF model: {error}. Causes: (a) "
            "it is damaged or its download was cut off; (b) transformers does not know this architecture."
        ) from error


def _write(file: Path, model: Any, tokenizer: Any, work: Path) -> None:
    """Save as an ordinary model: as read, it counts as quantised, which `save_pretrained` refuses."""
    import torch
    from safetensors import SafetensorError

    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):  # no second copy of the weights: `assign` below shares those of the model
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    cache.require_space(sum(p.numel() * p.element_size() for p in model.parameters()))
    try:
        with quiet():
            plain.save_pretrained(work)
            tokenizer.save_pretrained(work)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the conversion of {file.name} cannot be written to {cache.root()}: {error}. "
            "Make room, or set CLEARHEAD_CACHE to another folder."
        ) from error
