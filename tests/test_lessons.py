"""The lessons run as they are handed out, headless, and what they say in numbers is so."""

from __future__ import annotations

import ast
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import DenseMap, ModelError, heads, models, zoo
from clearhead.learn import Lesson
from clearhead.learn.exercises import NAMES
from clearhead.models import Translator, pairs

plt = pytest.importorskip("matplotlib.pyplot")

ROOT = Path(__file__).parents[1]
LESSONS = {int(path.name[:2]): path for path in sorted((ROOT / "lessons").glob("*.py"))}
DATA = ROOT / "tests" / "data"
CH03 = json.loads((DATA / "ch03.json").read_text())["entries"]
SEEDS = json.loads((DATA / "seeds.json").read_text())

TRAIN = {1, 6, 10}  # they take minutes, and run with all their steps in a test that is `full`
FEW = 2  # steps in the others

# Runs lessons as scripts in one process, which loads the model once.
SCRIPTS = """
import functools, runpy, sys
import clearhead, torch
clearhead.zoo.load = functools.cache(clearhead.zoo.load)
for path in sys.argv[1:]:
    torch.manual_seed(0)
    runpy.run_path(path, run_name="__main__")
"""


BACKWARDS = "five seven four six seven eight four zero six"


def shortly(*args: Any, fit: Callable[..., list[float]], steps: int, **how: Any) -> list[float]:
    """A few of the steps of a training."""
    return fit(*args, steps=min(steps, FEW), **how)


@dataclass
class Run:
    """What a lesson has written, printed and computed."""

    folder: Path
    said: str
    values: dict[str, Any]


@pytest.fixture(scope="module")
def without_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Run]:
    """Run a lesson, once and in this process, to which the real model is missing."""

    def missing(name: str) -> None:
        raise ModelError(f"{name} is not here")

    @cache
    def run(number: int) -> Run:
        folder, said = tmp_path_factory.mktemp("lesson"), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), plt.rc_context({"backend": "agg"}):
            patch.setattr(zoo, "load", missing)
            patch.setattr(Translator, "fit", partialmethod(shortly, fit=Translator.fit))
            patch.setattr(models, "fit", partial(shortly, fit=models.fit))
            patch.setattr(pairs, "DING", (Path("nowhere"),))
            patch.chdir(folder)
            torch.manual_seed(0)
            values = runpy.run_path(str(LESSONS[number]), run_name="__main__")
        plt.close("all")
        return Run(folder, said.getvalue(), values)

    return run


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


def test_lessons_run_as_scripts_with_a_real_model(tmp_path: Path) -> None:
    run_as_scripts(sorted({*LESSONS} - TRAIN), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", sorted(TRAIN))
def test_lessons_that_train_run_with_all_their_steps(number: int, tmp_path: Path) -> None:
    said = run_as_scripts([number], tmp_path)
    if number == 10:
        check_induction(said)
    elif number == 1:
        plain, attentive = (list(map(int, re.findall(r"(\d+)%", line))) for line in said.splitlines()[1:3])
        assert plain[0] > 90 > 85 > plain[-1]  # of words guessed, in the shortest number words and in the longest
        assert min(attentive) > 85
    else:
        guessed = re.search(r"(\d+)% guessed", said)
        assert guessed is not None
        assert int(guessed[1]) > 90
        *heads, even = map(int, re.findall(r"(\d+)%", said.partition("layer 1, ")[2].splitlines()[0]))
        assert min(heads) > 2 * even  # on the line that a person would draw


def check_induction(said: str) -> None:
    """What lesson 10 says of its heads: taken out together or where the circuit begins, all of it is gone."""
    numbers = [list(map(float, re.findall(r"\d\.\d+", line))) for line in said.splitlines() if "without" in line]
    *alone, both = [loss for loss, *_ in numbers]
    assert min(alone) < 0.5
    assert max(alone[:2]) > 3 < both  # of layer 0, one of the two
    assert min(map(max, (scores for _, *scores in numbers[:2]))) < 0.4 < 0.8 < max(numbers[2][1:] + numbers[3][1:])
    assert "the same in transformers: True" in said or "This part is left out" in said


def run_as_scripts(numbers: list[int], folder: Path) -> str:
    """What the lessons print; they run with the real model, where it is installed."""
    env = os.environ | {"MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", SCRIPTS, *(str(LESSONS[number]) for number in numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    missing = next(entry for entry in zoo.available() if entry.name == "smollm2").status == "missing"
    assert done.stdout.count("This part is left out") == missing * len(numbers)
    assert done.stdout.count("own layer agrees: True") == len(numbers)
    for number in numbers:
        check_files(folder, number)
    return done.stdout


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_goes_on_where_the_model_is_not_installed(number: int, without_model: Any) -> None:
    run = without_model(number)
    assert "This part is left out, since the model is not installed" in run.said
    check_files(run.folder, number)


def check_files(folder: Path, number: int) -> None:
    figures = list(folder.glob(f"lesson{number}-*.png"))
    assert figures
    assert all(plt.imread(figure)[..., :3].std() > 0.03 for figure in figures)  # not an empty sheet
    assert "journey" in (folder / f"lesson{number}.html").read_text(encoding="utf-8")


def equal(value: Tensor, entry: str) -> None:
    torch.testing.assert_close(value.detach(), torch.tensor(CH03[entry]["values"]))


def test_lesson_1_says_where_the_real_sentences_come_from_and_what_one_vector_holds(without_model: Any) -> None:
    run = without_model(1)
    assert "On with number words, since the real sentences are not here: the Ding dictionary" in run.said
    assert "apt install trans-de-en" in run.said
    assert run.values["train"][0] == ("sechs null vier acht sieben sechs vier sieben fünf", BACKWARDS)
    assert run.values["answers"]["2"] == {"one vector": [128, 128], "attention": [384, 1536]}
    assert 0 < run.values["answers"]["3"] < 20
    assert run.values["alignment"].shape[1:2] == (1,)


def test_lesson_6_reads_where_a_person_would_draw_a_line(without_model: Any) -> None:
    run = without_model(6)
    assert run.values["weights"].shape == (6, 5)
    assert run.values["table"].shape == (2, 4)
    even = sum(run.values["even"]) / len(run.values["even"])
    torch.testing.assert_close(run.values["table"], torch.full((2, 4), even), atol=0.05, rtol=0)  # not trained yet
    assert run.values["panels"]["what a person would draw"].nonzero().tolist() == [[t, 5 - t] for t in range(6)]
    assert run.values["answers"]["1"] == 6
    assert run.values["answers"]["2"] < 1e-6
    assert run.values["answers"]["3"] < 1e-6


def test_lesson_7_counts_and_measures_what_attention_costs(without_model: Any) -> None:
    run = without_model(7)
    q, k, v = run.values["q"], run.values["k"], run.values["v"]
    torch.testing.assert_close(run.values["out"], torch.nn.functional.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(run.values["lse"], (q @ k.mT / 8).logsumexp(-1))
    torch.testing.assert_close(torch.stack(run.values["steps"]), run.values["at_once"])
    assert run.values["times"]["linear"][-1] < run.values["times"]["dense"][-1]
    assert run.values["answers"] == {"1": "32 TiB, 0.5 GiB", "2": "64 GiB, 16 GiB", "3": 8192}


def test_lesson_2_weighs_words_by_dot_products(without_model: Any) -> None:
    run = without_model(2)
    equal(run.values["scores"], "simple.omega_2")
    equal(run.values["shares"], "simple.alpha_2_softmax")
    equal(run.values["weights"], "simple.alpha_all")
    equal(run.values["z"], "simple.z_all")
    assert run.values["slow"] > run.values["fast"]
    assert "with prefers journey" in run.values["answers"]["1"]
    assert run.values["answers"]["2"] < 1e-5
    assert run.values["answers"]["3"] == 0


def test_lesson_3_measures_what_the_root_is_for(without_model: Any) -> None:
    run = without_model(3)
    equal(run.values["q"][1], "trainable.q_2")
    equal(run.values["scores"], "trainable.omega_2")
    equal(run.values["shares"], "trainable.alpha_2")
    equal(run.values["z"], "trainable.z_2")
    measured = dict(zip((1, 4, 16, 64, 256, 1024), run.values["measured"], strict=True))
    assert all(abs(variance / width - 1) < 0.03 for width, (variance, _, _) in measured.items())
    for width in (64, 256, 1024):  # the size of the softmax's Jacobian with 16 keys
        known = SEEDS["sqrt_dk"][str(width)]
        assert measured[width][1:] == pytest.approx((known["unscaled_jac_norm"], known["scaled_jac_norm"]), abs=0.012)
    shape, sharpest, moved, pulls = (run.values["answers"][number] for number in "1234")
    assert shape == (6, 5)
    assert sharpest > 2 * max(run.values["shares"])
    assert moved < 1e-6
    assert all(pull > 0 for pull in pulls)


def test_lesson_4_hides_the_future_in_two_ways_and_breaks_one(without_model: Any) -> None:
    run = without_model(4)
    equal(run.values["full"], "SelfAttention_v2.weights")
    equal(run.values["weights"], "causal.softmax_of_masked")
    hidden_after = re.search(r"hidden after: *\[(.*)\]", run.said)
    hidden_before = re.search(r"hidden before: *\[(.*)\]", run.said)
    assert hidden_after is not None
    assert hidden_after[1].split(", ") == ["nan"] * 6
    assert hidden_before is not None
    assert hidden_before[1].split(", ") == ["1.0"] + ["0.0"] * 5
    assert run.values["answers"]["1"] == 0.0
    assert run.values["answers"]["2"] == (5, 1)
    assert all(map(math.isnan, run.values["answers"]["3"][0]))
    assert run.values["answers"]["3"][1] == [0.0] * 6


def test_lesson_5_splits_what_was_stacked(without_model: Any) -> None:
    run = without_model(5)
    equal(run.values["stacked"], "MultiHeadAttentionWrapper.out")
    equal(run.values["merged"], "MultiHeadAttentionWrapper.out")
    assert run.values["answers"]["1"] < 1e-5
    assert run.values["answers"]["2"] > 0.1
    assert run.values["answers"]["3"] == [2360064, 2360064]


def test_lesson_8_builds_an_induction_head_of_two_and_measures_it(without_model: Any) -> None:
    run = without_model(8)
    weigh, score = run.values["weigh"], run.values["score"]
    first, second = weigh(run.values["q1"], run.values["k1"]), weigh(run.values["q2"], run.values["k2"])
    tokens = heads.Tokens(run.values["ids"])
    for related, expected in ((tokens.previous(), "previous"), (tokens.induction(), "after_copy")):
        found = heads.relation_score([(DenseMap(torch.stack([first, second])), related)])
        by_hand = [score(weights, run.values[expected]) for weights in (first, second)]
        assert found.mass.tolist() == pytest.approx(by_hand, abs=1e-6)
        assert found.uniform[0].item() == pytest.approx(score(run.values["even"], run.values[expected]), abs=1e-6)
    assert [by_hand[1] > 0.99, bool((second[1:7, 0] > 0.99).all())] == [True, True]
    assert run.values["answers"] == {"1": [0.1429] * 7, "2": 2, "3": pytest.approx(0, abs=0.02)}
    sink, first_your, *_ = run.values["unaware"].T  # what the third answer says of every word
    ties = run.values["ids"] == run.values["ids"][1]
    torch.testing.assert_close(sink[ties], first_your[ties])
    assert sink[~ties].min() > 0.85


def test_lesson_9_tells_weight_from_what_it_does(without_model: Any) -> None:
    run = without_model(9)
    assert "both heads: 5 of 5 right" in run.said
    assert "the first looks everywhere: 0 of 5 right" in run.said
    assert run.values["row"].sum() == pytest.approx(1)
    assert run.values["answers"]["1"] == [1.0]
    assert run.values["answers"]["2"] < 1e-6
    assert run.values["answers"]["3"] == pytest.approx(1 - 0.75**30, abs=1e-4)


def test_lesson_10_builds_a_gpt_and_measures_as_it_learns(without_model: Any) -> None:
    run = without_model(10)
    assert list(run.values["seen"]) == [0]
    loss, after, *scores = run.values["seen"][0]
    assert [loss, after] == pytest.approx([math.log(32)] * 2, abs=0.5)
    even = sum(1 / (t + 1) for t in range(1, 16)) / 15
    assert scores[:2] == pytest.approx([even] * 2, abs=0.06)
    test = run.values["test"]
    assert torch.equal(test[:, :17], test[:, 16:])
    assert run.values["answers"]["1"] == round(math.log(32), 2)
    assert run.values["answers"]["3"] == [124_439_808, 163_037_184]


# --- how they are rendered -----------------------------------------------------------------------------------------


def test_a_rendered_page_has_its_formulas_drawn_and_loads_nothing() -> None:
    for package in ("nbconvert", "latex2mathml"):
        pytest.importorskip(package)
    from nbformat import v4

    text = r"Divide by $\sqrt{d}$: $$\frac{1}{2}$$ In code `$x$` stays."
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell(text), v4.new_code_cell("1 + 1")])
    page = runpy.run_path(str(ROOT / "docs" / "render_lessons.py"))["page"](notebook, "Halves")
    assert "<title>Halves</title>" in page
    assert page.count("<math") == 2
    assert all(drawn in page for drawn in ("<msqrt>", "<mfrac>", "<code>$x$</code>"))
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=.http", page)
    assert re.search(r"@media \(prefers-color-scheme: dark\) \{[^}]*--jp-layout-color0: #1", page)
    assert notebook.cells[0].source == text


@pytest.mark.full
def test_lines_printed_one_after_another_are_one_output(tmp_path: Path) -> None:
    for package in ("nbconvert", "ipykernel", "jupytext", "latex2mathml"):
        pytest.importorskip(package)
    script = tmp_path / "01_slow.py"
    code = "import time\n\nfor n in range(3):\n    print(n)\n    time.sleep(0.5)\n"
    script.write_text(f"# %% [markdown]\n# # Slow\n# %%\n{code}")
    assert runpy.run_path(str(ROOT / "docs" / "render_lessons.py"))["render"](Lesson(1, script), tmp_path)
    (_, cell) = json.loads(script.with_suffix(".ipynb").read_text())["cells"]
    assert ["".join(output["text"]) for output in cell["outputs"]] == ["0\n1\n2\n"]
