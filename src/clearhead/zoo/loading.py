"""`load`: from what a person writes to a model in evaluation mode and its tokenizer."""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import urllib.request
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from clearhead._progress import Progress, silent
from clearhead.errors import ModelError
from clearhead.zoo import archive, cache, catalog, conversion
from clearhead.zoo.quiet import no_stderr, quiet
from clearhead.zoo.smiles import smiles_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from clearhead.models import GPT, GPTConfig

_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def load(
    name: str = "smollm2", *, on_progress: Progress | None = None
) -> tuple[PreTrainedModel | GPT, PreTrainedTokenizerBase]:
    """The model, in evaluation mode and float32, and its tokenizer; of one that reads images, its image processor.

    Args:
        name: a name that `available` lists, a path to a model folder or a ``.gguf`` file, or a Hugging Face
            id (from the hub, or from its local cache without network or where ``HF_HUB_OFFLINE`` is set); a folder
            of ``clearhead train``, or one of the step-… files in it, gives a `clearhead.models.GPT`
        on_progress: called as ``on_progress(stage, done, total)`` with the stages ``"convert"`` (a ``.gguf``
            file or an archive in parts, on first use) and ``"load"``

    Raises:
        ModelError: nothing of that name can be had; the message says what can, and what to do.

    Cost: SmolLM2-135M 25 s on first use, about 2 s afterwards, most of it importing transformers; 540 MB.
    """
    _check_installed("load", name)
    report = on_progress or silent
    trained = _trained(name)
    if trained is not None:
        from clearhead.models import loading

        report("load", 0, 2)
        return loading.load(trained)
    folder = _locate(name, on_progress)
    source, local = (str(folder), True) if folder else (name, not _hub_reachable())
    report("load", 0, 2)
    model = _model(source, name, local=local)
    model.config.name_or_path = _title(name)
    report("load", 1, 2)
    reads_images = model.main_input_name == "pixel_values"
    tokenizer = (_processor if reads_images else _tokenizer)(source, name, local=local)
    report("load", 2, 2)
    return model, tokenizer


def config(name: str = "smollm2") -> PretrainedConfig | GPTConfig:
    """The model's config alone, for the names that `load` takes: no weights are read, nothing is converted.

    Raises: ModelError, as `load`.
    """
    _check_installed("config", name)
    trained = _trained(name)
    if trained is not None:
        from clearhead.models import loading

        return loading.read_config(trained)
    place = _find(name)
    if place is not None and place.suffix.lower() == ".gguf":
        conversion.check(place)
        entry = cache.entry_for(place)
        if not (entry / "config.json").is_file():
            return _config(str(place.parent), name, local=True, gguf_file=place.name)
        place = entry
    source, local = (str(place), True) if place else (name, not _hub_reachable())
    return _config(source, name, local=local)


def _check_installed(call: str, name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(f'{call}("{name}") needs transformers. Run: pip install "clearhead[models]"')


def known_tokens(model: Any) -> int | None:
    """How many tokens the model has embeddings for; None where it does not say."""
    table = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(table, "num_embeddings", None)


def frugal(model: Any, *, logits: bool = False) -> dict[str, Any]:
    """Arguments that leave out what nobody looks at: a KV cache, and unless asked logits (1.4 GB at 8,192 tokens)."""
    accepted = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, **({} if logits else {"logits_to_keep": 1})}
    return {name: value for name, value in wanted.items() if name in accepted}


def context_length(model: Any) -> int | None:
    """The longest text, in tokens with special ones, that the model has positions for; None without a limit.

    >>> from types import SimpleNamespace
    >>> context_length(SimpleNamespace(config=SimpleNamespace(n_positions=1024)))
    1024
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if getattr(config, "model_type", None) == "t5":  # relative positions: its n_positions limits nothing
        return None
    limit = next((int(value) for key in _LIMITS if (value := getattr(config, key, None))), None)
    return None if limit is None or limit <= 0 else limit - _reserved_positions(model)


def _reserved_positions(model: Any) -> int:
    """RoBERTa and its kin count positions from padding_idx + 1: their table is that much longer."""
    for path, module in model.named_modules() if hasattr(model, "named_modules") else ():
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


def _title(name: str) -> str:
    """What to call the model: a converted file would else be called after its cache folder."""
    packaged = catalog.find(name)
    if packaged:
        return packaged.title
    path = Path(os.path.expanduser(name))
    return (path.stem if path.is_file() else path.resolve().name) if os.path.exists(path) else name


def _locate(name: str, on_progress: Progress | None) -> Path | None:
    """The local folder to load from, converted first if need be; None if it can only be a Hugging Face id."""
    place = _find(name, on_progress)
    return conversion.converted(place, on_progress) if place is not None and place.is_file() else place


def _trained(name: str) -> Path | None:
    """The folder that `clearhead train` has made, or one of its checkpoints, if it is that."""
    place = Path(os.path.expanduser(name))
    if not os.path.exists(place):
        return None
    from clearhead.models import loading

    return place if loading.is_trained(place) else None


def _find(name: str, on_progress: Progress | None = None) -> Path | None:
    """The local folder or .gguf file of that name; None if it can only be a Hugging Face id."""
    if not name.strip():
        raise ModelError(f"load() got an empty name. {catalog.here()}.")
    packaged = catalog.find(name)
    if packaged and packaged.parts > 1:
        return archive.unpacked(packaged.paths(), on_progress)
    path = packaged.path() if packaged else Path(os.path.expanduser(name))  # leaves an unknown ~user as it is
    if os.path.isdir(path):  # no error for what cannot be a path
        return _model_folder(path)
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise ModelError(f'load("{name}") is a file: give the folder it is in, or a .gguf file')
        return path
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or len(path.parts) > 2:
        raise ModelError(f'load("{name}"): there is no such file or folder. {catalog.here()}.')
    if "/" not in name and (nearest := catalog.nearest(name, cutoff=0.75)):
        raise _unknown(name, nearest)
    return None


def _model_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    hint = f" Give the file itself: {path / ggufs[0]}" if ggufs else ""
    raise ModelError(f"the folder {path} has no config.json, so it holds no model; it has: {found}.{hint}")


def _unknown(name: str, nearest: Sequence[str]) -> ModelError:
    known = f"{catalog.here()}. See: clearhead models"
    return ModelError(f'there is no model named "{name}".{_guess(nearest)} {known}')


def _guess(nearest: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(nearest)}?" if nearest else ""


def _hub_reachable() -> bool:
    """Whether the hub can be asked: where its name does not resolve, the library would retry for 23 s."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():  # names are then resolved elsewhere
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _model(source: str, name: str, *, local: bool) -> PreTrainedModel:
    import torch

    found = _config(source, name, local=local)
    try:
        with quiet():
            model, info = _class_for(found).from_pretrained(
                source, config=found, dtype=torch.float32, local_files_only=local, output_loading_info=True
            )
    except Exception as error:  # transformers raises many kinds, and chains the telling one
        raise _failed(source, name, error, local=local) from error
    if _lacks_its_head_alone(model, info["missing_keys"]):
        model = model.base_model  # sentence encoders name the class that they were trained from
    elif info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:4])
        warnings.warn(
            f"{name} has no weights for {len(info['missing_keys'])} parameters, which are random: {some}",
            stacklevel=3,
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


def _lacks_its_head_alone(model: PreTrainedModel, missing: Collection[str]) -> bool:
    """Whether all weights are there but those of a head which attention does not need, and generating neither."""
    inside = f"{model.base_model_prefix}."
    whole = not any(key.startswith(inside) for key in missing)
    return bool(missing) and whole and model.base_model is not model and not model.can_generate()


def _config(source: str, name: str, *, local: bool, **where: str) -> PretrainedConfig:
    with quiet():
        import transformers

    try:
        with quiet(), no_stderr():
            # trust_remote_code: looking at a model must not run its author's code, nor ask whether it may.
            found: PretrainedConfig = transformers.AutoConfig.from_pretrained(
                source, local_files_only=local, trust_remote_code=False, **where
            )
    except Exception as error:  # transformers raises many kinds, and chains the telling one
        raise _failed(source, name, error, local=local) from error
    return found


def _class_for(config: Any) -> Any:
    """The class that the weights were saved from, or an automatic one where the config names none."""
    import transformers

    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        named = "".join(config.architectures or ())
        if not named or "CausalLM" in named or "LMHead" in named:
            return transformers.AutoModelForCausalLM
    return getattr(transformers, next(iter(config.architectures or ()), "AutoModel"), transformers.AutoModel)


def _tokenizer(source: str, name: str, *, local: bool) -> PreTrainedTokenizerBase:
    import transformers

    if name == "rxnmapper":
        return smiles_tokenizer(Path(source))
    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
                source, local_files_only=local, trust_remote_code=False
            )
    except Exception as error:
        raise ModelError(f'the model "{name}" is there, but its tokenizer does not load: {error}') from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what the library makes of no files at all
        raise ModelError(
            f'the model "{name}" is there, but its tokenizer has no vocabulary: every word would be unknown. Put its'
            " files (tokenizer.json, or vocab.txt, or vocab.json and merges.txt) beside config.json."
        )
    return tokenizer


def _processor(source: str, name: str, *, local: bool) -> Any:
    import transformers

    try:
        with quiet():
            return transformers.AutoImageProcessor.from_pretrained(
                source, local_files_only=local, trust_remote_code=False
            )
    except Exception as error:
        raise ModelError(f'the model "{name}" is there, but its image processor does not load: {error}') from error


def _failed(source: str, name: str, error: Exception, *, local: bool) -> ModelError:
    if "trust_remote_code" in str(error):
        return ModelError(
            f'the model "{name}" comes with code of its own, which is not run here. Load it yourself, then:'
            " clearhead.look(model, tokenizer, text)"
        )
    if os.path.isdir(source):
        return ModelError(f"the model in {source} does not load: {type(error).__name__}: {error}")
    if local:
        return ModelError(
            f'"{name}" is no name, folder or .gguf file; as a Hugging Face id it is not in the local cache, '
            f"and the hub cannot be asked (no network, or HF_HUB_OFFLINE is set)."
            f"{_guess(catalog.nearest(name))} {catalog.here()}. See: clearhead models"
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(f'"{name}" does not load from the Hugging Face hub: {first}. {catalog.here()}.')
