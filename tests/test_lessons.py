"""The lessons run as they are handed out, headless, and what they say in numbers is so."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import zoo
from clearhead.learn.exercises import NAMES

pytest.importorskip("matplotlib")

LESSONS = {int(path.name[:2]): path for path in sorted((Path(__file__).parents[1] / "lessons").glob("*.py"))}
DATA = Path(__file__).parent / "data"
CH03 = json.loads((DATA / "ch03.json").read_text())["entries"]
SEEDS = json.loads((DATA / "seeds.json").read_text())

# Runs lessons as scripts, each in a folder of its own, and writes what they have computed there as JSON.
DRIVER = """
import contextlib, io, json, os, runpy, sys, warnings
import torch
def keep(value):
    return value.tolist() if isinstance(value, torch.Tensor) and value.numel() < 1000 else repr(value)
def run(path, folder):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    torch.manual_seed(0)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = runpy.run_path(path, run_name="__main__")
    values = {name: keep(value) for name, value in found.items() if name[0] != "_"}
    with open("found.json", "w") as file:
        json.dump({"values": values, "answers": found["answers"], "said": said.getvalue()}, file)
"""
WITHOUT_MODEL = """
import clearhead
def missing(name):
    raise clearhead.ModelError(f"{name} is not here")
clearhead.zoo.load = missing
"""


def in_python(code: str, *arguments: str) -> None:
    env = os.environ | {"MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=env)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def without_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a lesson, all run in one process to which the real model is missing."""
    folder = tmp_path_factory.mktemp("lessons")
    code = f"{DRIVER}{WITHOUT_MODEL}\nfor place, path in zip(sys.argv[1::2], sys.argv[2::2]):\n    run(path, place)"
    in_python(code, *(part for number, path in LESSONS.items() for part in (str(folder / str(number)), str(path))))
    return folder


def found(folder: Path, number: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / str(number) / "found.json").read_text())
    return result


@cache
def source(number: int) -> str:
    return LESSONS[number].read_text(encoding="utf-8")


def cells(number: int, kind: str) -> list[str]:
    """The cells of one kind, "markdown" or "code", as jupytext splits them."""
    parts = re.split(r"^# %%", source(number), flags=re.M)[1:]
    return [part for part in parts if part.startswith(" [markdown]") == (kind == "markdown")]


# --- what stands in them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_is_short_and_has_its_parts(number: int) -> None:
    text = "".join(cells(number, "markdown"))
    assert len(source(number).splitlines()) <= 150
    assert text.startswith(f" [markdown]\n# # Lesson {number}: ")
    assert "$$" in text
    assert f"`clearhead check {number}`" in text
    assert 2 <= len(NAMES[number]) <= 4
    assert all(f"`{name}`" in text for name in NAMES[number])
    assert f'view.save("lesson{number}.html")' in source(number)


@pytest.mark.parametrize("number", LESSONS)
def test_every_question_of_the_quiz_is_answered_by_a_computation(number: int) -> None:
    quiz = next(cell for cell in cells(number, "markdown") if "## Quiz" in cell).partition("## Quiz")[2]
    questions = re.findall(r"^# (\d+)\. .*?\?", quiz, flags=re.M | re.S)
    tree = ast.parse(source(number))
    (answers,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "answers"
        and isinstance(node.value, ast.Dict)
    ]
    assert [ast.literal_eval(key) for key in answers.keys if key] == questions
    assert len(questions) >= 3
    for value in answers.values:  # a call of something, on what the lesson has made
        assert any(isinstance(node, ast.Call) for node in ast.walk(value)), ast.unparse(value)
        assert any(isinstance(node, ast.Name) and node.id not in ("torch", "float") for node in ast.walk(value))


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_is_a_notebook_too(number: int) -> None:
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.reads(source(number), fmt="py:percent")
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown"
    assert len([kind for kind in kinds if kind == "code"]) == len(cells(number, "code"))
    assert notebook.cells[-1].source.endswith("\nview")  # which a notebook shows
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)


# --- what they do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_runs_as_a_script_with_a_real_model(number: int, tmp_path: Path) -> None:
    in_python(DRIVER + "\nrun(*sys.argv[1:])", str(LESSONS[number]), str(tmp_path / str(number)))
    missing = next(entry for entry in zoo.available() if entry.name == "smollm2").status == "missing"
    said = found(tmp_path, number)["said"]
    assert ("This part is left out" in said) == missing
    assert "own layer agrees: True" in said
    check_files(tmp_path / str(number), number)


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_goes_on_where_the_model_is_not_installed(number: int, without_model: Path) -> None:
    assert "This part is left out, since the model is not installed" in found(without_model, number)["said"]
    check_files(without_model / str(number), number)


def check_files(folder: Path, number: int) -> None:
    from matplotlib.image import imread

    figures = list(folder.glob(f"lesson{number}-*.png"))
    assert figures
    assert all(imread(figure)[..., :3].std() > 0.03 for figure in figures)  # not an empty sheet
    assert "journey" in (folder / f"lesson{number}.html").read_text(encoding="utf-8")


def equal(values: dict[str, Any], name: str, entry: str) -> None:
    torch.testing.assert_close(torch.tensor(values[name]), torch.tensor(CH03[entry]["values"]))


def test_lesson_2_weighs_words_by_dot_products(without_model: Path) -> None:
    run = found(without_model, 2)
    equal(run["values"], "scores", "simple.omega_2")
    equal(run["values"], "shares", "simple.alpha_2_softmax")
    equal(run["values"], "weights", "simple.alpha_all")
    equal(run["values"], "z", "simple.z_all")
    assert float(run["values"]["slow"]) > float(run["values"]["fast"])
    assert "with prefers journey" in run["answers"]["1"]
    assert run["answers"]["2"] < 1e-5
    assert run["answers"]["3"] == 0


def test_lesson_3_measures_what_the_root_is_for(without_model: Path) -> None:
    run = found(without_model, 3)
    torch.testing.assert_close(torch.tensor(run["values"]["q"][1]), torch.tensor(CH03["trainable.q_2"]["values"]))
    equal(run["values"], "scores", "trainable.omega_2")
    equal(run["values"], "shares", "trainable.alpha_2")
    equal(run["values"], "z", "trainable.z_2")
    measured = dict(zip((1, 4, 16, 64, 256, 1024), ast.literal_eval(run["values"]["measured"]), strict=True))
    assert all(abs(variance / width - 1) < 0.03 for width, (variance, _, _) in measured.items())
    for width in (64, 256, 1024):  # the size of the softmax's Jacobian with 16 keys
        known = SEEDS["sqrt_dk"][str(width)]
        assert measured[width][1:] == pytest.approx((known["unscaled_jac_norm"], known["scaled_jac_norm"]), abs=0.012)
    shape, sharpest, moved, pulls = (run["answers"][number] for number in "1234")
    assert shape == [6, 5]
    assert sharpest > 2 * max(run["values"]["shares"])
    assert moved < 1e-6
    assert all(pull > 0 for pull in pulls)


def test_lesson_4_hides_the_future_in_two_ways_and_breaks_one(without_model: Path) -> None:
    run = found(without_model, 4)
    equal(run["values"], "full", "SelfAttention_v2.weights")
    equal(run["values"], "weights", "causal.softmax_of_masked")
    hidden_after = re.search(r"hidden after: *\[(.*)\]", run["said"])
    hidden_before = re.search(r"hidden before: *\[(.*)\]", run["said"])
    assert hidden_after is not None
    assert hidden_after[1].split(", ") == ["nan"] * 6
    assert hidden_before is not None
    assert hidden_before[1].split(", ") == ["1.0"] + ["0.0"] * 5
    assert run["answers"]["1"] == 0.0
    assert run["answers"]["2"] == [5, 1]
    assert all(map(math.isnan, run["answers"]["3"][0]))
    assert run["answers"]["3"][1] == [0.0] * 6


def test_lesson_5_splits_what_was_stacked(without_model: Path) -> None:
    run = found(without_model, 5)
    equal(run["values"], "stacked", "MultiHeadAttentionWrapper.out")
    equal(run["values"], "merged", "MultiHeadAttentionWrapper.out")
    assert run["answers"]["1"] < 1e-5
    assert run["answers"]["2"] > 0.1
    assert run["answers"]["3"] == [2360064, 2360064]
