"""The learner's code may do anything: there is always a verdict, in time, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.learn.running import LIMIT, Outcome, run

SHORT = 0.5  # seconds for code that never ends


@pytest.fixture
def check(light: None, answer: Callable[[str], Path]) -> Callable[..., Outcome]:
    """Run the light exercise on this text in a process of its own."""

    def checked(text: str, limit: float = LIMIT) -> Outcome:
        (outcome,) = run("light_exercises", ["double"], answer(text), seed=3, limit=limit)
        return outcome

    return checked


def double(*lines: str) -> str:
    return "def double(x):\n" + "".join(f"    {line}\n" for line in lines)


# -- what ends the process, or never does


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (double("while True: pass"), "still running after 0.5 s"),
        (
            double("while True:", "    try:", "        while True: pass", "    except BaseException: pass"),
            "still running",
        ),
        (double("import os, signal", "os.kill(os.getpid(), signal.SIGSTOP)"), "still running"),
        (double("import os", "os._exit(0)"), r"ended Python \(os._exit, exit code 0\)"),
        (double("import os, signal", "os.kill(os.getpid(), signal.SIGKILL)"), r"crash \(SIGKILL\).*memory"),
        (double("import os, signal", "os.killpg(0, signal.SIGTERM)"), r"crash \(SIGTERM\)"),
    ],
)
def test_a_process_that_gives_no_verdict_fails(check: Any, text: str, message: str) -> None:
    start = time.monotonic()
    outcome = check(text, limit=SHORT if "still" in message else LIMIT)
    assert (outcome.verdict, outcome.loaded) == ("failed", True)
    assert Match(message) == outcome.message
    assert time.monotonic() - start < 60


class Match:
    """Equal to a text in which the pattern is found; says both where it is not."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __eq__(self, text: object) -> bool:
        return re.search(self.pattern, str(text), re.DOTALL) is not None

    def __hash__(self) -> int:
        return hash(self.pattern)

    def __repr__(self) -> str:
        return repr(self.pattern)


def test_a_crash_says_in_which_line(check: Any) -> None:
    outcome = check(double("import ctypes", "ctypes.string_at(0)"))
    assert "crash (SIGSEGV)" in outcome.message
    assert 'exercises.py", line 3 in double' in outcome.printed


def test_a_file_that_never_ends_is_not_read_again(light: None, answer: Any) -> None:
    file = answer("while True: pass")
    start = time.monotonic()
    outcomes = list(run("light_exercises", ["double", "double"], file, seed=3, limit=SHORT))
    assert [(outcome.verdict, outcome.loaded) for outcome in outcomes] == [("failed", False)]
    assert "what stands outside of functions and classes" in outcomes[0].message
    assert time.monotonic() - start < 60


def test_a_flood_of_output_is_drained_and_cut(check: Any) -> None:
    outcome = check(double("while True: print('x' * 10_000)"), limit=SHORT)
    assert "still running" in outcome.message
    assert outcome.printed.startswith("xxxx")
    assert len(outcome.printed) < 2100
    assert Match(r"… and [\d.]+ [kMG]B more$") == outcome.printed


def test_output_that_is_no_text_is_shown_as_far_as_it_is(check: Any) -> None:
    outcome = check(double("import os", "os.write(1, bytes(range(256)))", "return 2 * x"))
    assert outcome.passed
    assert "ABC" in outcome.printed


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to its memory")
@pytest.mark.parametrize("much", ["[0] * 10**11", "grow()"])
def test_memory_is_limited(check: Any, much: str) -> None:
    grow = "def grow():\n    kept = []\n    while True: kept.append(bytearray(10**7))\n"
    is_refused_memory(check(grow + double(f"return {much}")))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to its memory")
def test_memory_of_tensors_is_limited(answer: Any) -> None:
    file = answer("import torch\n" + double("return torch.zeros(10**11)"))
    is_refused_memory(*run("tiny_exercises", ["double"], file, seed=3))


def is_refused_memory(outcome: Outcome) -> None:
    assert "more memory than the 2 GB it may have" in outcome.message
    assert Match(r"exercises.py, line \d: ") == outcome.message


def test_a_verdict_cannot_be_printed(check: Any) -> None:
    forged = '{"stage": "done", "verdict": "passed", "message": "", "loaded": true}'
    outcome = check(double("import os", f"print('{forged}', flush=True)", f"os.write(2, b'{forged}')", "os._exit(0)"))
    assert outcome.verdict == "failed"
    assert forged in outcome.printed


def test_closed_files_do_not_hide_a_right_answer(check: Any) -> None:
    assert check(double("import os", "os.closerange(0, 100)", "return 2 * x")).passed


SLEEPER = "import subprocess, sys\nsleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"


@pytest.mark.parametrize("ending", ["return 2 * x", "while True: pass"])
def test_threads_and_processes_that_never_end_are_ended(check: Any, ending: str) -> None:
    thread = "threading.Thread(target=time.sleep, args=(600,)).start()"
    text = SLEEPER + double("import threading, time", thread, "print(subprocess.Popen(sleeper).pid)", ending)
    outcome = check(text, limit=LIMIT if "return" in ending else 1)
    assert outcome.passed == ("return" in ending)
    assert gone(int(outcome.printed.split()[0]))


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[:1]:
            return True  # ended, and nobody has asked how
        time.sleep(0.05)
    return False


def test_other_processes_are_left_alone(check: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        check(double("while True: pass"), limit=SHORT)
        assert bystander.poll() is None
        bystander.communicate(b"\n", timeout=60)
    assert bystander.returncode == 0


def test_when_the_parent_ends_so_does_the_code(light: None, answer: Any) -> None:
    """A closed terminal must not leave a loop running for ever."""
    pids = "pathlib.Path('pids').write_text(f'{os.getpid()} {subprocess.Popen(sleeper).pid} ')\n"
    file = answer(SLEEPER + "import os, pathlib\n" + pids + double("while True: pass"))
    code = (
        "import pathlib; from clearhead.learn.running import run\n"
        f"next(run('light_exercises', ['double'], pathlib.Path({str(file)!r}), 3))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        deadline = time.monotonic() + 60
        while not (file.with_name("pids").exists() and file.with_name("pids").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.send_signal(signal.SIGKILL)
    assert all(gone(int(pid)) for pid in file.with_name("pids").read_text().split())


def test_what_is_not_taken_is_ended_too(light: None, answer: Any) -> None:
    outcomes = run("light_exercises", ["double", "double"], answer(double("return 2 * x")), seed=3)
    assert next(outcomes).passed
    outcomes.close()


def test_both_exercises_with_the_same_inputs_twice(answer: Any, right: str) -> None:
    file = answer(right.replace("return 2 * x", "print(x.tolist(), torch.rand(2).tolist()); return 2 * x"))
    first, again = (list(run("tiny_exercises", ["double", "Doubler"], file, seed=3)) for _ in range(2))
    assert [outcome.passed for outcome in first] == [True, True]
    assert [outcome.printed for outcome in first] == [outcome.printed for outcome in again]


def test_a_folder_full_of_misleading_names_and_helpers(answer: Any) -> None:
    file = answer("import helper\nimport sys\n" + double("print(sys.argv)", "return helper.twice(x)"))
    file.with_name("helper.py").write_text("def twice(x): return 2 * x\n")
    for name in ("torch", "random", "json", "clearhead", "child"):
        file.with_name(f"{name}.py").write_text("raise SystemExit('not the real one')\n")
    (outcome,) = run("tiny_exercises", ["double"], file, seed=3)
    assert outcome.passed
    assert outcome.printed == str([str(file)])


def test_a_check_that_cannot_start_says_so(answer: Any, right: str) -> None:
    (outcome,) = run("no_such_module", ["double"], answer(right), seed=3)
    assert (outcome.verdict, outcome.loaded) == ("failed", False)
    assert "could not start" in outcome.message
    assert "No module named 'no_such_module'" in outcome.printed


# -- what is said about code that raises, in this process since nothing ends it


@pytest.fixture
def judge(answer: Callable[[str], Path], judge_here: Callable[..., Outcome]) -> Callable[..., Any]:
    """(verdict, message) of an answer to the exercise of this name."""

    def judged(text: str, name: str = "double") -> tuple[str, str]:
        import tiny_exercises  # type: ignore[import-not-found]

        exercise = next(e for e in tiny_exercises.EXERCISES if e.name == name)
        outcome = judge_here(exercise, answer(text))
        return outcome.verdict, outcome.message

    return judged


@pytest.mark.parametrize(
    ("text", "verdict", "message"),
    [
        (double("return x + x"), "passed", "^$"),
        (double("return x"), "wrong", "^Twice means added to itself.$"),
        (
            double("raise NotImplementedError  # your code here"),
            "unwritten",
            "^Not written yet: exercises.py, line 2.$",
        ),
        (double("raise NotImplementedError()  # no stub"), "unwritten", "Not written yet"),
        (
            "def helper(x):\n    raise NotImplementedError\n" + double("return helper(x)"),
            "unwritten",
            "^Not written yet: helper, which double calls: exercises.py, line 2.$",
        ),
        (
            double("y = x", "return y @ y.new_zeros(4, 5)"),
            "failed",
            "raised RuntimeError: .*\nexercises.py, line 3: return y @",
        ),
        (double("return double(x)"), "failed", "calls itself without end.*\nexercises.py, line 2: "),
        (double("import sys", "sys.exit(0)"), "failed", r"called sys.exit\(\).*line 3"),
        (double("raise KeyboardInterrupt"), "failed", "raised KeyboardInterrupt\nexercises.py, line 2"),
        (double("raise GeneratorExit"), "failed", "raised GeneratorExit"),
        (
            "class Odd(Exception):\n    def __str__(self): return 1 / 0\n" + double("raise Odd"),
            "failed",
            "raised Odd\n",
        ),
        (double("raise ValueError('long ' * 10**6)"), "failed", r"^.{500,800}$"),
        (double("pass"), "failed", "could not use your answer. TypeError: .*NoneType"),
        ("def double(): pass", "failed", "could not use your answer. TypeError: double.* takes 0 positional arguments"),
        (
            "def double(x)\n    return x",
            "failed",
            "^Python cannot read your file: expected ':'\nexercises.py, line 1: def double",
        ),
        (
            "def double(x):\nreturn x",
            "failed",
            "cannot read your file: expected an indented block.*\nexercises.py, line 2",
        ),
        ("\0", "failed", "cannot read your file: source code .*null bytes"),
        (
            "import tourch",
            "failed",
            "ModuleNotFoundError: No module named 'tourch'\nexercises.py, line 1: import tourch",
        ),
        (
            "def double(x: Tensor): return 2 * x",
            "failed",
            "NameError: name 'Tensor' is not defined\nexercises.py, line 1",
        ),
        ("import helper", "failed", "No module named 'helper'"),
        ("exit()", "failed", r"called sys.exit\(\) or exit\(\).*line 1"),
        (
            "def doubel(x): return x + x",
            "wrong",
            "no function double in exercises.py. There is doubel: it has to be called double",
        ),
        ("", "wrong", "no function double in exercises.py. Was it renamed or deleted"),
        ("double = 3", "wrong", "double should be a function, and is of type int"),
        ("class double: pass", "wrong", "double should be a function, and is a class"),
        ("double = lambda x: 2 * x", "passed", "^$"),
    ],
)
def test_what_is_said(judge: Any, text: str, verdict: str, message: str) -> None:
    found = judge(text)
    assert found == (verdict, Match(message))


def test_a_function_in_place_of_a_class(judge: Any) -> None:
    assert judge("def Doubler(x): return 2 * x", "Doubler") == (
        "wrong",
        Match("should be a class, and is of type function"),
    )
    assert judge("import torch\nclass Doubler(torch.nn.Module): pass", "Doubler") == (
        "failed",
        Match("missing the required"),
    )


def test_asking_for_input_has_no_answer(check: Any) -> None:
    outcome = check(double("return float(input('which factor? ')) * x"))
    assert outcome.message.startswith("Your code asked for input, and nobody is there to answer.")
    assert outcome.printed == "which factor?"
