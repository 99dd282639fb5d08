"""`clearhead heads` with a folder: an atlas of the files, and what is said to bad input."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

import clearhead.cli as cli
from clearhead import terminal, zoo
from clearhead.heads import Atlas, atlas

TEXT = "he the the he the the the he " * 20


@pytest.fixture
def heads(tiny: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run ``clearhead heads`` on the tiny model, beside a.txt and b.txt."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(TEXT)
    Path("white.txt").write_text("\ufeff \n\t\n")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["heads", "--model", str(tiny), *arguments])

    return run


def test_the_command_makes_an_atlas(heads: Any, tiny: Path) -> None:
    done = heads(
        "a.txt",
        "b.txt",
        "--out",
        "atlas",
        "--window",
        "32",
        "--overlap",
        "8",
        "--json",
        "found.json",
        "--strongest",
        "2",
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny: 2 layers, 8 heads"
    assert [line.split()[0] for line in lines[3:15:2]] == ["entropy", "distance", "first", "self", "previous", "peak"]
    assert lines[15:] == ["Wrote found.json", "Wrote atlas"]
    found = Atlas.load("found.json")
    assert found == Atlas.load("atlas/atlas.json")
    assert found == atlas(*zoo.load(str(tiny)), [Path("a.txt"), Path("b.txt")], window=32, overlap=8)
    assert lines[1] == f"{found.tokens} tokens in {found.windows} windows of 32, overlap 8"
    top = int(found.mean("peak").argmax())
    assert lines[13].split() == [
        "peak",
        "share",
        f"{found.mean('peak').mean():.2f}",
        f"{found.baseline('peak').mean():.2f}",
        f"L{top // 4}H{top % 4}",
        f"{found.mean('peak').max():.2f}",
    ]
    again = heads("a.txt", "b.txt", "--resume", "atlas", "--window", "32", "--overlap", "8", "--strongest", "0")
    assert again.stdout.splitlines()[:2] == lines[:2]
    assert len(again.stdout.splitlines()) == 10
    assert "Finding the place where it ended ..." in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out atlas", "an atlas is of a corpus: name its FILES"),
        ("a.txt --out .", "the folder . is not empty: go on with resume='.'"),
        ("a.txt --resume nowhere", "there is no progress of an atlas in nowhere: begin with out='nowhere'"),
        ("a.txt nothing.txt --out atlas", "cannot read nothing.txt: No such file or directory"),
        ("a.txt --out a.txt", "cannot make the folder a.txt: a.txt is a file"),
        ("a.txt --out a.txt/atlas", "a.txt is a file. Name another."),
        ("a.txt white.txt --out atlas", "white.txt is empty: there is nothing to attend to"),
        ("a.txt --window 8", "--workers, --window and --overlap are of an atlas: name its folder"),
        ("a.txt --out atlas --window 999", "reads 64 tokens at most"),
        ("a.txt --out atlas --json nowhere/a.json", "--json nowhere/a.json: there is no folder"),
    ],
)
def test_bad_input_ends_in_one_line(heads: Any, arguments: str, message: str) -> None:
    done = heads(*arguments.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
    assert not Path("atlas").exists()


def test_a_folder_that_cannot_be_written_to_is_told_before_the_model_runs(
    heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: mode == os.R_OK)
    done = heads("a.txt", "--out", "atlas")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("clearhead: cannot write to the folder ")
    assert not Path("atlas").exists()


def test_progress_tells_how_far_it_is_and_how_long_it_takes() -> None:
    out = Console(width=120, force_terminal=True, file=io.StringIO())
    with terminal._bar(out) as bar:
        report = terminal._reporter(bar)
        report("skip", 500, 1000)
        report("atlas", 600, 1000)
        (task,) = bar.tasks
        assert (task.completed, task.total) == (600, 1000)
        assert not task.speed  # what was done before counts for nothing
        with out.capture() as shown:
            out.print(bar.make_tasks_table(bar.tasks))
    assert "Reading the corpus" in shown.get()
    assert " 60%" in shown.get()
    assert "-:--:--" in shown.get()
