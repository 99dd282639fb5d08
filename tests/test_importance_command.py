"""clearhead importance: what it prints, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("gguf")

from typer.testing import CliRunner

import clearhead.cli as cli


@pytest.fixture
def importance(tiny: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command on the tiny model and a text of 64 tokens, in this process."""
    text = tmp_path / "text.txt"
    text.write_text("the he cat " * 9)
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["importance", str(text), "--model", str(tiny), *arguments])

    return run


def test_it_prints_the_heads_that_matter_most_and_goes_on_where_it_was_stopped(importance: Any, tmp_path: Path) -> None:
    arguments = ("--draws", "3", "--top", "2", "--progress", str(tmp_path / "done"))
    done = importance(*arguments)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].endswith(": 64 tokens in 1 window of text, loss in nats a token that is predicted")
    assert [lines[1].split(), lines[2].split()[:2]] == [["Without", "Loss", "More"], ["no", "head"]]
    first, second = (float(line.split()[2]) for line in lines[3:5])
    assert first >= second
    assert lines[5].startswith("2 heads together")
    assert lines[6].startswith("as many at random")
    assert "over all 8" in lines[7]
    assert lines[-1].endswith("that takes 511 tokens, the longest window has 64.")
    kept = (tmp_path / "done").read_text()
    found = json.loads(importance(*arguments, "--json").stdout)
    assert (tmp_path / "done").read_text() == kept
    assert len(found["importance"]["heads"]) == 8
    assert f"{found['importance']['loss']:.4f}" in lines[2]
    assert len(found["together"]["random"]["draws"]) == 3


def test_errors_stand_there_where_there_are_any(importance: Any) -> None:
    lines = importance("--heads", "L0H1", "--draws", "1", "--length", "20").stdout.splitlines()
    assert " tokens in 4 windows of text, " in lines[0]
    assert lines[1].split() == ["Without", "Loss", "More", "Error"]
    assert len(lines[3].removeprefix("1 head together").split()) == 3


def test_heads_that_are_named_are_taken_together(importance: Any) -> None:
    found = json.loads(importance("--heads", "L0H1,L1H3", "--draws", "1", "--how", "mean", "--json").stdout)
    assert found["importance"] is None
    assert found["together"]["heads"] == [[0, 1], [1, 3]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", "L0H9"], "there is no head L0H9"),
        (["--heads", "7"], "'7' names no head"),
        (["--how", "nought"], "expected one of zero, uniform, previous, mean"),
        (["--progress", "no/such/folder"], "there is no folder"),
        (["nowhere.txt"], "cannot read nowhere.txt"),
        (["empty.txt"], "empty.txt: the text is empty"),
        (["--progress", "empty.txt"], "no progress of such a run, or damaged"),
    ],
)
def test_bad_input_is_told(importance: Any, arguments: list[str], said: str) -> None:
    done = importance(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr
