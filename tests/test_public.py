"""The public surface is a test: the names, their order, and what they call home."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import clearhead

MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(clearhead.__path__, "clearhead.")
    if not any(part.startswith("_") for part in name.split("."))
)


def test_names_are_sorted_and_few() -> None:
    assert clearhead.__all__ == sorted(clearhead.__all__)
    assert len(set(clearhead.__all__)) == len(clearhead.__all__) <= 30
    assert dir(clearhead) == clearhead.__all__


@pytest.mark.parametrize("name", clearhead.__all__)
def test_every_name_resolves_and_its_source_can_be_read(name: str) -> None:
    """A student reads the source with `??`: so classes keep their own module, where inspect finds them."""
    thing = getattr(clearhead, name)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        assert thing.__module__ == "clearhead"  # as a traceback names it
    elif inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__doc__
        assert thing.__doc__[:40] in inspect.getsource(thing)
    else:
        assert isinstance(thing, (ModuleType, str))


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        clearhead.atention  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_names_of_modules_are_sorted_and_exist(name: str) -> None:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        return
    # Constants, classes, functions: the order in which ruff sorts them.
    kinds = sorted(names, key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n))
    assert list(names) in (sorted(names), kinds)
    assert all(hasattr(module, n) for n in names)
    assert not any(n.startswith("_") for n in names)


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_say_what_they_are_for(name: str) -> None:
    assert importlib.import_module(name).__doc__
