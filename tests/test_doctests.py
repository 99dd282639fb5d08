"""The examples in the docstrings are really run: a gate that runs nothing would pass for ever."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import clearhead

FOUND = (module.name for module in pkgutil.walk_packages(clearhead.__path__, "clearhead."))
MODULES = [name for name in FOUND if name != "clearhead.__main__"]


def test_there_are_examples_and_pytest_collects_them(pytestconfig: pytest.Config) -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(tests) > 10
    assert "src" in pytestconfig.getini("testpaths")
    assert pytestconfig.getoption("doctestmodules")
