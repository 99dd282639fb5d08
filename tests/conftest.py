"""What all tests share: no network, one thread a worker, and the real models, loaded once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with two threads each would fight over two cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("here")

Loaded = tuple[Any, Any]  # (model, tokenizer)


def _load(name: str) -> Loaded:
    zoo = pytest.importorskip("clearhead.zoo")
    pytest.importorskip("transformers")
    from clearhead.errors import ModelError

    if next(entry for entry in zoo.available() if entry.name == name).status == "missing":
        pytest.skip(f"the package that holds {name} is not installed (see models.txt)")
    try:
        model, tokenizer = zoo.load(name)
    except ModelError as error:
        pytest.fail(f"{name} is installed but does not load: {error}")
    return model, tokenizer


def _fixture(name: str) -> Callable[[], Loaded]:
    def loaded() -> Loaded:
        return _load(name)

    loaded.__doc__ = f"(model, tokenizer) of {name}, loaded once; skips where it is not installed."
    return pytest.fixture(scope="session", name=name)(loaded)


smollm2 = _fixture("smollm2")
minilm = _fixture("minilm")
rxnmapper = _fixture("rxnmapper")
