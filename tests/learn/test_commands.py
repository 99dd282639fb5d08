"""clearhead learn and clearhead check, as a learner meets them: wrong things first."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("jupytext")

from typer.testing import CliRunner

import clearhead.cli as cli
from clearhead.learn import Outcome, check, folder, lessons, running

HALF = (
    "def double(x):\n    return 2 * x\n\nclass Doubler:\n    def forward(self, x):\n        raise NotImplementedError\n"
)
UNREAD = "def double(x)\n    return x\n"
FOLDER = lessons._folder
LIGHT_COMMAND = """
from clearhead.learn import checking, lessons
lessons.NAMES[2] = ("double",)
checking.module_of = lambda lesson: "light_exercises"
from clearhead.__main__ import main
main()
"""


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, judge_here: Callable[..., Outcome]) -> None:
    """Run the learner's code here."""

    def run(module: str, names: Sequence[str], file: Path, seed: int) -> Iterator[Outcome]:
        for exercise in importlib.import_module(module).EXERCISES:
            outcome = judge_here(exercise, file, seed)
            yield outcome
            if not outcome.loaded:
                return

    monkeypatch.setattr(running, "run", run)


@pytest.fixture
def clearhead_(here: Path, in_this_process: None) -> Callable[..., Any]:
    """Run the command, all in this process."""
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


def files(folder: Path | str = "clearhead-lesson-7") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


# -- learn


def test_the_list_shows_how_far_one_is(clearhead_: Any, answer: Any, right: str) -> None:
    before = clearhead_("learn").stdout.splitlines()
    assert before[0] == " 7  Doubling  0 of 2 exercises  ○ ○"
    assert before[1] == " 8  Reading   no exercises"
    answer(HALF)
    assert clearhead_("check", "7").exit_code == 1
    assert clearhead_("learn").stdout.startswith(" 7  Doubling  1 of 2 exercises  ✓ ○\n")
    answer(right)
    assert clearhead_("check", "7").exit_code == 0
    answer(UNREAD)
    clearhead_("check", "7")
    after = clearhead_("learn").stdout
    assert after.startswith(" 7  Doubling  2 of 2 exercises  ✓ ✓\n")
    assert "✓ has passed once; that stays counted, whatever the file holds now." in after


def test_a_lesson_comes_as_notebook_script_and_exercises(clearhead_: Any) -> None:
    done = clearhead_("learn", "7")
    assert done.exit_code == 0, done.output
    assert files() == ["07_doubling.ipynb", "07_doubling.py", "exercises.py"]
    lesson = Path("clearhead-lesson-7")
    cells = json.loads((lesson / "07_doubling.ipynb").read_text())["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code"]
    assert "".join(cells[1]["source"]) == "print(1 + 1)"
    script = subprocess.run([sys.executable, lesson / "07_doubling.py"], capture_output=True, text=True, check=True)
    assert script.stdout == "2\n"
    for name in files():
        assert f"clearhead-lesson-7/{name}\n" in done.stdout
    assert re.search(r"clearhead check 7$", done.stdout.strip())


def test_exercises_are_stubs_that_python_can_read(clearhead_: Any) -> None:
    clearhead_("learn", "7")
    text = Path("clearhead-lesson-7/exercises.py").read_text()
    assert text.startswith('"""Exercises of lesson 7: Doubling.\n')
    assert f"\n    {folder.program('clearhead')} check 7\n" in text
    assert text.count("raise NotImplementedError  # your code here") == 2
    assert "x + x" not in text
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    assert {"double", "Doubler", "torch", "F", "nn", "Tensor", "math", "clearhead"} <= set(namespace)


def test_nothing_of_the_learners_is_overwritten(clearhead_: Any, answer: Any) -> None:
    file = answer("mine = 1\n")
    done = clearhead_("learn", "7")
    assert done.exit_code == 0
    assert file.read_text() == "mine = 1\n"
    assert "exercises.py   was there and is left as it is" in done.stdout
    assert "07_doubling.py\n" in done.stdout
    kept = {name: (file.parent / name).read_bytes() for name in files()}
    assert clearhead_("learn", "7").stdout.count("was there and is left as it is") == 3
    assert kept == {name: (file.parent / name).read_bytes() for name in files()}


def test_the_folder_may_be_another(clearhead_: Any, here: Path) -> None:
    assert clearhead_("learn", "7", "--folder", "my [bold]lesson").exit_code == 0
    assert files(here / "my [bold]lesson") == ["07_doubling.ipynb", "07_doubling.py", "exercises.py"]
    assert clearhead_("learn", "8", "--folder", ".").exit_code == 0
    assert {"08_reading.py", "08_reading.ipynb"} <= set(files("."))


@pytest.mark.parametrize("own", ["clearhead-lesson-7", "mine"])
def test_inside_its_folder_a_lesson_is_written_there(
    clearhead_: Any, here: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    clearhead_("learn", "7", "--folder", own)
    monkeypatch.chdir(here / own)
    file = Path("exercises.py")
    file.write_text(file.read_text() + "mine = 1\n")
    Path("07_doubling.py").unlink()
    done = clearhead_("learn", "7")
    assert f"\nYou are in its folder, {here / own}:\n" in done.stdout
    assert "\n  exercises.py   was there and is left as it is\n" in done.stdout
    assert "cd " not in done.stdout
    assert files(".") == ["07_doubling.ipynb", "07_doubling.py", "exercises.py"], "nothing nested"
    assert file.read_text().endswith("mine = 1\n")
    assert f"Checking {here / own / 'exercises.py'} " in clearhead_("check", "7").stdout


def test_inside_its_folder_a_lesson_nested_before_is_not_checked(
    clearhead_: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clearhead_("learn", "7")
    monkeypatch.chdir(here / "clearhead-lesson-7")
    clearhead_("learn", "7", "--folder", "clearhead-lesson-7")
    assert f"Checking {here / 'clearhead-lesson-7' / 'exercises.py'} " in clearhead_("check", "7").stdout


# -- bad input: a message and exit code 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learn", "9"], "there is no lesson 9; there are 7, 8"),
        (["learn", "-1"], "No such option"),
        (["learn", "seven"], "should be a valid integer"),
        (["learn", "--folder", "x"], "--folder needs the number of a lesson"),
        (["learn", "7", "--folder", "no/where"], "there is no folder no to make where in"),
        (["learn", "7", "--folder", "file"], "file is a file: name a folder"),
        (["check"], "Missing argument"),
        (["check", "9"], "there is no lesson 9; there are 7, 8"),
        (["check", "8"], "lesson 8 has no exercises"),
        (["check", "8", "--reset"], "lesson 8 has no exercises"),
        (["check", "7", "--hint", "--reset"], "give one of --hint, --solution and --reset"),
        (["check", "7", "--seed", "-1"], "greater than or equal to 0"),
        (
            ["check", "7"],
            r"there is no file \S*clearhead-lesson-7.exercises.py. The check reads exercises.py and nothing",
        ),
        (["check", "7", "--folder", "nowhere"], r"there is no file \S*nowhere.exercises.py.*clearhead learn 7"),
        (["check", "7", "--folder", "file"], "file is a file: name its folder"),
        (["check", "7", "--reset"], "there is no file"),
    ],
)
def test_bad_input_is_a_message(clearhead_: Any, here: Path, arguments: list[str], message: str) -> None:
    (here / "file").touch()
    done = clearhead_(*arguments)
    assert done.exit_code == 2, done.output
    assert re.search(message, " ".join(done.output.split()))
    assert "Traceback" not in done.output
    assert files(".") == ["file"]


def test_a_folder_that_cannot_be_written_to(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(folder, "write_whole", refuse)
    done = clearhead_("learn", "7")
    assert done.exit_code == 2
    assert done.stderr == "clearhead: cannot write to the folder clearhead-lesson-7: Permission denied\n"


def test_lessons_that_are_not_installed(clearhead_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "_folder", FOLDER)
    monkeypatch.setattr(lessons, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "lessons.py"))
    done = clearhead_("learn")
    assert done.exit_code == 2
    assert "install clearhead again" in done.stderr


# -- check


def test_a_newcomers_way(clearhead_: Any, here: Path) -> None:
    """Unwritten, a typing error, a wrong answer, a hint, another, the solution, and right at last."""
    clearhead_("learn", "7")
    file = here / "clearhead-lesson-7" / "exercises.py"
    done = clearhead_("check", "7")
    assert done.exit_code == 1
    assert done.stdout.startswith(f"Checking {file.resolve()} ...\n○ double\n    Not written yet: exercises.py, line ")
    assert "\n○ Doubler\n" in done.stdout
    assert "\n0 of 2 exercises pass.\n" in done.stdout
    assert done.stdout.endswith("check 7 --hint   (or --solution)\n")

    stubs = file.read_text()
    file.write_text(stubs.replace("def double(x: Tensor) -> Tensor:", "def double(x: Tensor) -> Tensor"))
    done = clearhead_("check", "7", "--hint")
    assert done.exit_code == 1
    assert "✗ double\n    Python cannot read your file: expected ':'\n    exercises.py, line " in done.stdout
    assert "Doubler" not in done.stdout, "one message is enough for a file that cannot be read"
    assert done.stdout.endswith("A hint comes once Python can read the file.\n")

    file.write_text(stubs.replace("raise NotImplementedError", "return x", 1))
    for count in (1, 2, 2):
        done = clearhead_("check", "7", "--hint")
        assert "✗ double\n    Twice means added to itself.\n" in done.stdout
        assert re.findall(r"^Hint (\d) of 2 for double: ", done.stdout, re.M) == ["1", "2"][:count]
        assert ("There are no more hints." in done.stdout) == (count == 2)

    done = clearhead_("check", "7", "--solution")
    assert done.exit_code == 1
    assert done.stdout.endswith(
        'One way to write double:\n\ndef double(x: Tensor) -> Tensor:\n    """Twice x."""\n    return x + x\n'
    )

    file.write_text(stubs.replace("raise NotImplementedError", "print('mine', x.shape); return x + x"))
    done = clearhead_("check", "7")
    assert done.exit_code == 0
    assert "✓ double\n    It printed:\n      mine torch.Size([3])\n✓ Doubler\n" in done.stdout
    assert "All 2 exercises of lesson 7 pass.\n" in done.stdout
    assert done.stdout.rstrip().endswith("learn 8   Reading")
    assert "nothing left to hint at" in clearhead_("check", "7", "--hint").stdout
    assert clearhead_("check", "7", "--solution").stdout.count("One way to write") == 2


def test_reset_keeps_what_was_written(clearhead_: Any, answer: Any, right: str) -> None:
    file = answer(right)
    clearhead_("check", "7")
    for number in (1, 2):
        file.write_text(right)
        done = clearhead_("check", "7", "--reset")
        assert done.exit_code == 0
        assert f"kept as exercises-old-{number}.py beside it" in done.stdout
    assert clearhead_("check", "7", "--reset").stdout.endswith("nothing of lesson 7 counts as done.\n")
    assert files() == ["exercises-old-1.py", "exercises-old-2.py", "exercises.py"], "nothing to keep the third time"
    assert file.with_name("exercises-old-1.py").read_text() == right
    assert "raise NotImplementedError" in file.read_text()
    assert clearhead_("learn").stdout.startswith(" 7  Doubling  0 of 2")


def test_a_seed_repeats_the_inputs(clearhead_: Any, answer: Any) -> None:
    answer("def double(x):\n    print(x.tolist())\n    return x\n")

    def printed(*arguments: str) -> tuple[str, str]:
        out = clearhead_("check", "7", *arguments).stdout
        return re.search(r"\[.*\]", out)[0], re.search(r"--seed (\d+)", out)[1]  # type: ignore[index]

    first, seed = printed()
    assert printed("--seed", seed) == (first, seed)
    assert printed()[0] != first


def test_the_file_is_found_from_other_folders(clearhead_: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clearhead_("learn", "7")
    file = (here / "clearhead-lesson-7" / "exercises.py").resolve()
    monkeypatch.chdir(file.parent)
    assert f"Checking {file} " in clearhead_("check", "7").stdout
    monkeypatch.chdir("/")
    assert f"Checking {file} " in clearhead_("check", "7").stdout, "where it was last written"
    assert f"Checking {file} " in clearhead_("check", "7", "--folder", str(file.parent)).stdout


def test_another_lessons_folder_is_not_taken_for_this_one(clearhead_: Any, here: Path) -> None:
    (here / "exercises.py").write_text("# Check it with clearhead check 77\n")
    assert clearhead_("check", "7").exit_code == 2


def test_a_renamed_file_or_folder_is_asked_for(clearhead_: Any, here: Path) -> None:
    clearhead_("learn", "7")
    lesson = here / "clearhead-lesson-7"
    os.rename(lesson / "exercises.py", lesson / "answers.py")
    done = clearhead_("check", "7")
    assert done.exit_code == 2
    assert f"there is no file {lesson / 'exercises.py'}. The check reads exercises.py and nothing else" in done.stderr


@pytest.mark.parametrize("where", ["07_doubling.ipynb", "07_doubling.py"])
def test_an_answer_in_the_notebook_is_pointed_out(clearhead_: Any, here: Path, where: str) -> None:
    clearhead_("learn", "7")
    file = here / "clearhead-lesson-7" / where
    text = file.read_text()
    answer = "def double(x):\\n    return 2 * x" if where.endswith("ipynb") else "def double(x):\n    return 2 * x"
    file.write_text(text.replace("print(1 + 1)", answer))
    done = clearhead_("check", "7")
    assert done.stdout.count("which the check does not read: copy it into exercises.py") == 1
    assert f"There is one in {where}, which" in done.stdout


def test_from_python_the_report_shows_itself(in_this_process: None, answer: Any, right: str) -> None:
    file = answer(HALF)
    report = check(7, seed=3)
    assert (report.passed, report.first_open) == (False, "Doubler")
    assert repr(report).splitlines()[:2] == [f"Checked {file}", "✓ double"]
    assert repr(report).endswith("1 of 2 exercises pass. (The same inputs again: --seed 3, or seed=3 in Python)")
    answer(right)
    assert repr(check(7, file.parent)).endswith("All 2 exercises of lesson 7 pass.")


def test_what_is_printed_is_broken_between_words_and_cut_without_a_count(clearhead_: Any, answer: Any) -> None:
    answer("def double(x):\n    print('a longer warning ' * 20)\n    print('\\n  0.1  0.2' * 20)\n    return 2 * x\n")
    lines = clearhead_("check", "7").stdout.split("\n")
    start = lines.index("    It printed:") + 1
    assert all(len(line) <= 96 for line in lines[start : start + 4])
    assert " ".join(" ".join(lines[start : start + 4]).split()) == "a longer warning " * 19 + "a longer warning"
    assert lines[start + 4 : start + 6] == ["        0.1  0.2"] * 2
    assert lines[start + 10] == "      … and more"


def test_a_terminal_that_does_not_know_the_command_is_told_the_path(
    clearhead_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    path = Path(sys.executable).parent / "clearhead"
    assert f"{path} learn 7" in " ".join(clearhead_("check", "7").stderr.split())
    assert f"\n  {path} check 7\n" in clearhead_("learn", "7").stdout
    assert f"\n    {path} check 7\n" in Path("clearhead-lesson-7/exercises.py").read_text()


def test_what_code_says_is_not_obeyed_by_the_terminal(clearhead_: Any, answer: Any) -> None:
    answer("def double(x):\n    print('\\x1b[2J[bold]')\n    raise ValueError('\\x1b]0;title\\x07')\n")
    done = clearhead_("check", "7")
    assert "\x1b" not in done.output
    assert "[bold]" in done.stdout


def test_listing_needs_no_torch_and_is_quick(here: Path) -> None:
    code = "import sys; from clearhead.learn import commands; commands.list_lessons(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), done.stderr


def test_without_jupytext_it_says_what_to_install(here: Path) -> None:
    code = "import sys; sys.modules['jupytext'] = None; from clearhead.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "learn", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == 'The clearhead command needs jupytext. Run: pip install "clearhead[learn]"\n'


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_check_and_the_code(light: None, answer: Any, sent: signal.Signals, code: int) -> None:
    file = answer("import os, pathlib\npathlib.Path('pid').write_text(str(os.getpid()))\nwhile True: pass\n")
    command = [sys.executable, "-c", LIGHT_COMMAND, "check", "2", "--folder", str(file.parent)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (file.with_name("pid").exists() and file.with_name("pid").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(sent)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == code
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.with_name("pid").read_text()), 0)


def test_a_reader_that_leaves_is_no_error(here: Path) -> None:
    command = f"{sys.executable} -u -m clearhead learn | :"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""
