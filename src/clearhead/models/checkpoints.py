"""The files of a training run: weights at every so many steps, and what it takes to go on from the last of them.

    folder/step-000500.safetensors     the weights after 500 steps
    folder/training.safetensors        the optimizer's state and all losses after the last of these, and what was asked
                                       for, as JSON in its header

Each file appears whole or not at all, the weights first: whenever a run is killed, training.safetensors belongs to
weights that are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead._checks import check_count
from clearhead._files import write_whole
from clearhead.errors import ModelError

__all__ = ["Checkpoints", "load_weights"]

_STATE = "training.safetensors"
_HINT = 'checkpoints need safetensors: pip install "clearhead[models]"'


class Checkpoints:
    """Where a run is kept: see the module.

    Args:
        folder: made if it is not there. every: how many steps lie between two of them; the last step has one anyhow.
        settings: what makes the run, such as its seed and its sizes (what JSON holds): a run with others cannot go on.
    """

    def __init__(self, folder: Path | str, *, every: int = 100, settings: Mapping[str, Any] | None = None) -> None:
        check_count("Checkpoints", "every", every, at_least=1)
        self.folder, self.every, self.settings = Path(folder), every, dict(settings or {})

    @property
    def weights(self) -> dict[int, Path]:
        """The files of weights that are there, by the number of steps, in order."""
        names = ((re.fullmatch(r"step-(\d+)\.safetensors", path.name), path) for path in self.folder.glob("step-*"))
        return dict(sorted((int(match[1]), path) for match, path in names if match))

    @property
    def losses(self) -> list[float]:
        """The loss of every step that was kept. Raises ModelError where there is no run in the folder."""
        return self._state()[0]

    def is_due(self, step: int, steps: int) -> bool:
        """Whether there is to be a checkpoint after `step` steps of so many."""
        return step % self.every == 0 or step == steps

    def save(self, model: nn.Module, optimizer: Optimizer, losses: list[float]) -> None:
        """Keep the weights, the optimizer's state and the losses; ModelError where the disk does not take them."""
        state = {
            f"{n}.{name}": tensor
            for n, numbers in optimizer.state_dict()["state"].items()
            for name, tensor in numbers.items()
        }
        state["losses"] = torch.tensor(losses, dtype=torch.float64)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / _name(len(losses)), model.state_dict(), {})
            _write(self.folder / _STATE, state, self.settings)
        except OSError as error:
            raise ModelError(
                f"the checkpoint of step {len(losses)} cannot be written to {self.folder}: {error.strerror or error}."
                f" {self._kept()} Make room, and start the same run again."
            ) from error

    def resume(self, model: nn.Module, optimizer: Optimizer) -> list[float]:
        """Put the last checkpoint into model and optimizer: the losses so far. Without one, keep the first weights."""
        for part in self.folder.glob(".clearhead-*"):  # what a run left that was killed while it wrote
            part.unlink(missing_ok=True)
        if not (self.folder / _STATE).exists():
            self._begin(model, optimizer)
            return []
        losses, state, settings = self._state()
        self._check(settings)
        load_weights(model, self.folder / _name(len(losses)))
        kept: dict[int, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            n, _, name = key.partition(".")
            kept.setdefault(int(n), {})[name] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})
        return losses

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        if max(self.weights, default=0) > 0:
            raise ModelError(
                f"{self.folder} holds weights of {max(self.weights):,} steps, and no {_STATE}, without which a run"
                " cannot go on. Copy it here again, or train into another folder."
            )
        self.save(model, optimizer, [])

    def _state(self) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
        """The losses so far, the optimizer's state by "parameter.name", and the settings."""
        state, settings = _read(self.folder / _STATE)
        if "losses" not in state:
            raise ModelError(f"{self.folder / _STATE} is not of a training run. Train into another folder.")
        return state.pop("losses").tolist(), state, settings

    def _check(self, settings: Mapping[str, Any]) -> None:
        names = [name for name in {**settings, **self.settings} if settings.get(name) != self.settings.get(name)]
        if names:
            then, now = (", ".join(f"{name}={told.get(name)}" for name in names) for told in (settings, self.settings))
            raise ModelError(
                f"{self.folder} holds a run with {then}, and this one has {now}. Give the same settings to go on with"
                " it, or another folder."
            )

    def _kept(self) -> str:
        """What is there still, as a sentence."""
        if not (self.folder / _STATE).exists():
            return "There is none before it."
        return f"That of step {len(self.losses)} is there, as it was."


def load_weights(model: nn.Module, file: Path) -> None:
    """Put the weights of a file into the model; ModelError where they are cut short or of another shape."""
    weights, _ = _read(file)
    own = model.state_dict()
    wrong = sorted(name for name in {**own, **weights} if _shape(own, name) != _shape(weights, name))
    if wrong:
        name, more = wrong[0], f" and {len(wrong) - 1} more" if wrong[1:] else ""
        raise ModelError(
            f"{file} holds weights of another model: {name}{more}; it has {_shape(weights, name)}, the model"
            f" {_shape(own, name)}."
        )
    model.load_state_dict(weights)


def _shape(weights: Mapping[str, Tensor], name: str) -> str:
    return str(tuple(weights[name].shape)) if name in weights else "none of that name"


def _name(step: int) -> str:
    return f"step-{step:06}.safetensors"


def _write(file: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    try:
        from safetensors.torch import save
    except ImportError:
        raise ImportError(_HINT) from None
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(file, save(whole, {"settings": json.dumps(settings)}))


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(_HINT) from None
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
            settings: dict[str, Any] = json.loads((opened.metadata() or {}).get("settings", "{}"))
    except FileNotFoundError:
        raise ModelError(f"there is no {file}, which the run needs. Copy it here again, or begin anew.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file} is cut short or damaged ({error}). Copy it here again; the weights of earlier steps, beside it,"
            " load as before."
        ) from error
    return tensors, settings
