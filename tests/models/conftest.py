"""A language model of 0.1 M parameters, trained for a few steps by the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer — né, 𝒳 —\n" * 40


def run(*arguments: object) -> Any:
    """A command of clearhead's, in this process."""
    pytest.importorskip("transformers")
    from typer.testing import CliRunner

    import clearhead.cli as cli

    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "hamlet.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A folder with the weights after 0, 2, 4 and 5 steps; a test that changes it copies it first."""
    folder = tmp_path_factory.mktemp("run") / "hamlet"
    done = run("train", text_file, "--out", folder, "--size", "tiny", "--steps", 5, "--every", 2)
    assert done.exit_code == 0, done.output
    return folder
