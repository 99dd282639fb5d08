"""The commands: what they print and write, and what they say to bad input."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from rich.console import Console
from typer.testing import CliRunner

import clearhead.cli as cli
from clearhead import _files, terminal, zoo
from clearhead._format import size
from clearhead._version import __version__
from clearhead.errors import DTypeError, ModelError, RecordingError, ShapeError
from clearhead.heads.roles import ROLES
from clearhead.page.payload import least_nbytes

TEXT = "he the the the the the"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def clearhead_(tiny: Path, empty_cache: Path) -> Callable[..., Any]:
    """Run ``clearhead look`` on the tiny model, in this process."""

    def run(*arguments: str, model: str = str(tiny), stdin: bytes | None = None) -> Any:
        return CliRunner().invoke(cli.app, ["look", "--model", model, *arguments], input=stdin)

    return run


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


# -- what it does


def test_look_prints_the_heads_and_writes_one_page(clearhead_: Any) -> None:
    done = clearhead_(TEXT)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "6 tokens, 2 layers x 4 heads" in done.stdout
    assert lines[1].startswith("Held: ")
    assert tuple(line.split()[0] for line in lines[3:11]) == ROLES
    assert sum(int(line.split()[1]) for line in lines[3:11]) == 8
    assert files() == ["clearhead-tiny-he-the-the-the-the-the.html"]
    assert lines[-1] == f"Wrote {files()[0]}"
    assert "Converting the model (once) ..." in done.stderr


def test_the_predicted_size_is_the_size(clearhead_: Any) -> None:
    done = clearhead_(TEXT, "--save", "page.html")
    assert f"The page: {size(Path('page.html').stat().st_size)}\n" in done.stdout


def test_json_is_all_that_stdout_gets(clearhead_: Any) -> None:
    done = clearhead_(TEXT, "--json")
    found = json.loads(done.stdout)
    assert "".join(found["tokens"]) == TEXT
    assert (found["clearhead"], found["layers"], len(found["heads"])) == (__version__, [0, 1], 8)
    assert found["dense_nbytes"] == 2 * 4 * 6 * 6 * 4
    assert set(found["heads"][0]) == {"layer", "head", "role", "scores", "baselines", "entropy", "distance"}
    assert files() == []


def test_json_with_save_writes_the_page_too(clearhead_: Any) -> None:
    done = clearhead_(TEXT, "--json", "--save", "page.html")
    assert json.loads(done.stdout)["heads"]
    assert "Wrote page.html" in done.stderr
    assert files() == ["page.html"]


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_a_figure_of_all_heads_and_no_page(clearhead_: Any, kind: str) -> None:
    pytest.importorskip("matplotlib")
    done = clearhead_(TEXT, "--figure", f"heads.{kind}")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"Wrote heads.{kind}"
    assert "2 layers x 4 heads" in done.stdout
    assert files() == [f"heads.{kind}"]
    first = Path(f"heads.{kind}").read_bytes()
    clearhead_(TEXT, "--figure", f"heads.{kind}")
    assert Path(f"heads.{kind}").read_bytes() == first


def test_a_figure_beside_json_and_a_page(clearhead_: Any) -> None:
    pytest.importorskip("matplotlib")
    done = clearhead_(TEXT, "--figure", "~heads.svg", "--json", "--save", "page.html")
    assert json.loads(done.stdout)["heads"]
    assert "Wrote ~heads.svg" in done.stderr
    assert files() == ["page.html", "~heads.svg"]


def test_only_the_layers_asked_for(clearhead_: Any) -> None:
    found = json.loads(clearhead_(TEXT, "--json", "--layers", "1").stdout)
    assert (found["layers"], {head["layer"] for head in found["heads"]}) == ([1], {1})


def test_a_text_that_goes_on(clearhead_: Any) -> None:
    before = clearhead_(TEXT, "--json").stdout
    after = clearhead_(TEXT, "--json", "--generate", "3").stdout
    read, written = (json.loads(told)["tokens"] for told in (before, after))
    assert written[: len(read)] == read
    assert len(read) < len(written) <= len(read) + 3


def test_an_image(clearhead_: Any, painter: Any) -> None:
    from PIL import Image
    from transformers import ViTImageProcessorPil

    painter.save_pretrained("vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained("vit")
    Image.new("RGB", (40, 40), (200, 60, 20)).save("square.png")
    done = clearhead_("--image", "square.png", model="vit")
    assert done.exit_code == 0, done.stderr
    assert "17 tokens, 1 layers x 2 heads" in done.stdout
    assert Path("clearhead-vit-square.html").read_text("utf-8").count("data:image/jpeg;base64,") == 1
    assert "vit reads images" in clearhead_(TEXT, model="vit").stderr
    assert "reads text: leave --image out" in clearhead_("--image", "square.png").stderr
    assert "not both" in clearhead_(TEXT, "--image", "square.png", model="vit").stderr
    assert "there is no such file" in clearhead_("--image", "round.png", model="vit").stderr


def test_a_translator_and_its_target(clearhead_: Any, translator: Any, wordpieces: Any) -> None:
    translator.save_pretrained("translator")
    wordpieces.save_pretrained("translator")
    done = clearhead_("the cat", "--target", "a dog", "--json", model="translator")
    told = json.loads(done.stdout)
    assert (told["tokens"], told["sides"]) == (["[CLS]", "the", " cat", "[SEP]"], ["encoder", "decoder", "cross"])
    assert told["target"] == ["[CLS]", "[CLS]", "a", " dog"]
    own = json.loads(clearhead_("the cat", "--generate", "2", "--json", model="translator").stdout)
    assert len(own["target"]) <= 2


def test_the_text_comes_from_a_file_or_from_stdin(clearhead_: Any) -> None:
    Path("text.txt").write_bytes(b"\xef\xbb\xbfhe the")
    from_file = json.loads(clearhead_("--file", "text.txt", "--json").stdout)
    from_stdin = json.loads(clearhead_("--file", "-", "--json", stdin=b"he the").stdout)
    assert from_file["tokens"] == from_stdin["tokens"] == ["he", " the"]


def test_the_name_of_a_file_in_place_of_a_text_is_pointed_out(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("he the.txt").write_text("the the")
    for done in (clearhead_("he the.txt"), CliRunner().invoke(cli.app, ["serve", "kept", "--text", "he the.txt"])):
        bad(done, "he the.txt is a file: read it with --file 'he the.txt'; ", "standard input, with --file -")
    assert json.loads(clearhead_("--file", "-", "--json", stdin=b"he the.txt").stdout)["tokens"][:2] == ["he", " the"]
    assert clearhead_("he the.png", "--json").exit_code == 0, "no file of that name"
    assert clearhead_("he the " * 9999, "--layers", "x").stderr.startswith("clearhead: --layers"), "no name at all"


@pytest.mark.parametrize("command", ["heads", "importance"])
def test_a_text_in_place_of_the_name_of_a_file_is_told_what_to_do(command: str) -> None:
    for text in ("Anna bakes bread", "Anna " * 99):
        done = CliRunner().invoke(cli.app, [command, text])
        bad(done, f"cannot read {text}: there is no such file", "through standard input, with - for a file")


def test_heads_reads_a_text_from_stdin(tiny: Path, empty_cache: Path) -> None:
    Path("text.txt").write_text(TEXT)
    from_stdin, from_file = (
        CliRunner().invoke(cli.app, ["heads", "--model", str(tiny), name], input=TEXT).stdout
        for name in ("-", "text.txt")
    )
    assert from_stdin == from_file
    assert "2 layers, 8 heads, on 1 text\n" in from_stdin


def test_texts_and_names_are_not_markup(clearhead_: Any, tiny: Path) -> None:
    model = tiny.rename(tiny.with_name("[bold red]x[_]\x1b[31m:smile:.gguf"))
    done = clearhead_("[bold]he[_] \x1b[2J the :smile:", model=str(model))
    assert done.exit_code == 0, done.output
    assert "[bold red]x[_]\ufffd[31m:smile:: " in done.stdout.replace("\n", "")
    assert "\x1b" not in done.output
    assert files() == ["clearhead-bold-red-x-31m-smile-bold-he-2j-the-smile.html"]


@pytest.mark.parametrize(
    ("option", "terminal", "opened"),
    [(None, False, 0), (None, True, 1), ("--open", False, 1), ("--no-open", True, 0)],
)
def test_the_page_opens_on_a_terminal_or_as_told(
    clearhead_: Any, monkeypatch: pytest.MonkeyPatch, option: str | None, terminal: bool, opened: int
) -> None:
    pages: list[str] = []
    monkeypatch.setattr(cli.webbrowser, "open", pages.append)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(cli, "_on_terminal", lambda: terminal)
    clearhead_(TEXT, *([option] if option else []), "--save", "page.html")
    assert pages == [Path("page.html").resolve().as_uri()] * opened


def test_the_default_model_on_the_default_text(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "load", lambda name, on_progress: smollm2)
    done = CliRunner().invoke(cli.app, ["look", "--json"])
    found = json.loads(done.stdout)
    assert 80 <= len(found["tokens"]) <= 110
    assert len(found["heads"]) == 270
    induction = [h for h in found["heads"] if h["role"] == "induction"]
    best = max(induction, key=lambda head: head["scores"]["induction"])
    assert (best["layer"], best["head"]) == (17, 5)
    assert best["scores"]["induction"] > 5 * best["baselines"]["induction"]


def test_models_says_what_is_here_and_how_to_get_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = zoo.Entry("absent[x]", "a model", 1_500_000, "missing", "pip install --no-deps absent==1.0")
    monkeypatch.setattr(zoo, "available", lambda: [missing])
    done = CliRunner().invoke(cli.app, ["models"])
    assert done.exit_code == 0
    assert "absent[x]   1.5 MB   no     a model" in done.stdout
    assert "pip install --no-deps absent==1.0" in done.stdout


def test_tables_end_where_their_words_end(clearhead_: Any) -> None:
    for done in (clearhead_(TEXT), CliRunner().invoke(cli.app, ["models"])):
        assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_the_entropy_of_broad_heads_stands_without_the_trivial_baseline(clearhead_: Any) -> None:
    broad = next(line for line in clearhead_(TEXT).stdout.splitlines() if line.startswith("broad"))
    assert re.search(r"L\d+H\d+ [01]\.\d\d .*of the largest entropy$", broad)
    assert "/" not in broad


def test_progress_has_a_bar_only_where_there_is_a_count() -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=90)
    bar = terminal._bar(out)
    report = terminal._reporter(bar)
    seen = []
    for stage, done, total in [("", 0, 0), ("import", 0, 1), ("load", 1, 2), ("heads", 3, 30), ("page", 0, 1)]:
        if stage:
            report(stage, done, total)
        with out.capture() as drawn:
            out.print(bar.get_renderable())
        seen.append(drawn.get())
    assert seen[0].strip() == ""
    assert "Starting PyTorch" in seen[1]
    assert ["━" in line or "/" in line for line in seen] == [False, False, False, True, False]
    assert "3/30" in seen[3]


# -- bad input: a message, exit code 2, no file


def bad(done: Any, *messages: str) -> None:
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    *before, message = done.stderr.split("clearhead: ", maxsplit=1)
    assert before
    for part in messages:
        assert part in message
    assert "Traceback" not in done.stderr
    assert not list(Path().glob("*.html"))
    assert not list(Path().glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the text is empty"),
        ([" \n\t"], "the text is empty"),
        (["a", "--file", "b"], "not both"),
        (["--file", "nowhere.txt"], "cannot read nowhere.txt: No such file"),
        (["--file", "."], "cannot read .: Is a directory"),
        (["\udcff\udcfe"], "not valid UTF-8"),
        ([TEXT, "--layers", ""], "is no layer or range of layers"),
        ([TEXT, "--layers", "5-3"], "'5-3' is no layer"),
        ([TEXT, "--layers", "all"], "write, for example, 0,3-5"),
        ([TEXT, "--layers", "-1"], "'-1' is no layer"),
        ([TEXT, "--layers", "0-99999999999"], "'0-99999999999' is no layer"),
        ([TEXT, "--budget", "0"], "must be above 0"),
        ([TEXT, "--budget", "nan"], "must be above 0"),
        ([TEXT, "--budget", "1e308"], "must be above 0 and finite"),
        ([TEXT, "--budget", "0.01"], f"the page without any data takes {size(least_nbytes())}"),
        ([TEXT, "--save", "a" * 300], "at most 255 bytes"),
        ([TEXT, "--save", "a" * 300 + "/page.html"], "there is no folder"),
        ([TEXT, "--save", "nowhere/page.html"], "there is no folder nowhere"),
        ([TEXT, "--save", "."], "that is a folder"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(
    clearhead_: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(zoo, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    bad(clearhead_(*arguments), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the text is empty"),
        (b"\x89PNG\r\n\x1a\n", "is not text: byte 0 is not UTF-8"),
        ("he the".encode("utf-16"), "is not text: byte 0 is not UTF-8"),
        (b"he\0the", "is not text: it has a zero byte at character 2"),
    ],
)
def test_files_that_are_not_text(clearhead_: Any, content: bytes, message: str) -> None:
    Path("file").write_bytes(content)
    bad(clearhead_("--file", "file"), message)
    bad(clearhead_("--file", "-", stdin=content), message)


def test_a_folder_without_permission(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)  # tests may run as root, who has it
    bad(clearhead_(TEXT), "cannot write to the folder", "name a file elsewhere with --save")


def test_figures_that_cannot_be_drawn_are_refused_before_the_model_is_loaded(
    clearhead_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "load", raising(AssertionError("the model was loaded")))
    for name in ("heads.jpg", "heads", "heads.svg.gz"):
        bad(clearhead_(TEXT, "--figure", name), f"--figure {name}: the name of a figure ends in .svg, .png, .pdf")
    bad(clearhead_(TEXT, "--figure", "missing/heads.svg"), "--figure missing/heads.svg: there is no folder missing")
    Path("folder.svg").mkdir()
    bad(clearhead_(TEXT, "--figure", "folder.svg"), "that is a folder; name a file in it")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bad(clearhead_(TEXT, "--figure", "heads.svg"), '--figure needs matplotlib. Run: pip install "clearhead[plot]"')
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)
    bad(clearhead_(TEXT, "--figure", "heads.svg"), "cannot write to the folder", "elsewhere with --figure")


def test_a_figure_that_cannot_be_written(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plots = pytest.importorskip("clearhead.plots")
    monkeypatch.setattr(plots, "write_whole", raising(OSError(28, "No space left on device")))
    bad(clearhead_(TEXT, "--figure", "heads.svg"), "cannot write heads.svg: No space left on device")
    assert files() == []


def test_texts_too_long_or_too_short_for_the_model(clearhead_: Any) -> None:
    bad(clearhead_("he" + " the" * 64), "65 tokens", "at most 64")
    bad(clearhead_("he"), "the text is one token")


def test_a_budget_that_the_text_does_not_fit_into(clearhead_: Any) -> None:
    done = clearhead_(TEXT, "--budget", str((least_nbytes() + 100) / 1e6))
    bad(done, "the page itself, its text and its thumbnails take", "give a larger budget")


@pytest.mark.parametrize("kind", [DTypeError, ModelError, RecordingError, ShapeError, OSError])
def test_errors_that_say_what_to_do_are_messages(clearhead_: Any, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(zoo, "load", raising(kind("what to do")))
    bad(clearhead_(TEXT), "what to do")


def test_our_own_faults_stay_tracebacks(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "load", raising(ValueError("ours")))
    done = clearhead_(TEXT)
    assert (done.exit_code, str(done.exception)) == (1, "ours")


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_a_layer_that_is_not_there(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import clearhead.looking

    monkeypatch.setattr(clearhead.looking, "look", raising(AssertionError("the model ran")))
    bad(clearhead_(TEXT, "--layers", "0,7"), "--layers: there is no layer 7; the model has layers 0-1")


def test_models_that_are_not_there(clearhead_: Any, tmp_path: Path) -> None:
    bad(clearhead_(TEXT, model="smolm2"), "Did you mean smollm2?", "Without a network")
    bad(clearhead_(TEXT, model="nobody/nothing"), "not in the local cache")
    bad(clearhead_(TEXT, model=str(tmp_path)), "has no config.json")
    bad(clearhead_(TEXT, model="~nobody/there"), "no such file or folder")
    bad(clearhead_(TEXT, model="a" * 300), "as a Hugging Face id it is not in the local cache")


def test_a_corrupt_gguf(clearhead_: Any, tiny: Path, empty_cache: Path) -> None:
    tiny.write_bytes(tiny.read_bytes()[:-2000])
    bad(clearhead_(TEXT), "not readable as a GGUF model", "its download was cut off")
    assert list(empty_cache.iterdir()) == []


def test_a_model_that_makes_no_attention_call(clearhead_: Any, tiny: Path, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "mamba"
    config = transformers.MambaConfig(
        vocab_size=33, hidden_size=8, state_size=4, num_hidden_layers=1, expand=2, time_step_rank=2
    )
    transformers.MambaForCausalLM(config).save_pretrained(folder)
    zoo.load(str(tiny))[1].save_pretrained(folder)
    bad(clearhead_(TEXT, model=str(folder)), "no attention call was seen")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(13, "Permission denied")])
def test_a_page_that_cannot_be_written(clearhead_: Any, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    monkeypatch.setattr(_files, "write_whole", raising(error))
    done = clearhead_(TEXT)
    assert done.exit_code == 2
    assert f".html: {error.strerror}" in done.stderr.splitlines()[-1]
    assert files() == []


def test_an_interrupted_write_leaves_the_old_page(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("page.html").write_text("old")

    def interrupt(source: Any, target: Any) -> None:
        if str(target).endswith(".html"):
            raise KeyboardInterrupt
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", interrupt)
    done = clearhead_(TEXT, "--save", "page.html")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == "Interrupted."
    assert (files(), Path("page.html").read_text()) == (["page.html"], "old")


# -- as a process


@pytest.mark.parametrize(
    ("stage", "sent", "code"),
    [
        ("Converting", signal.SIGINT, 130),
        ("Converting", signal.SIGTERM, 143),
        ("Running", signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_it_cleanly(tiny: Path, empty_cache: Path, stage: str, sent: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "clearhead", "look", TEXT, "--model", str(tiny)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith(stage):
                process.send_signal(sent)
                break
        rest = process.stderr.read()
    assert process.returncode == code, (seen, rest)
    assert "Traceback" not in rest
    assert files() == []
    left = [path.name for path in empty_cache.iterdir()]
    assert not [name for name in left if name.startswith(".")]
    assert stage == "Running" or left == []


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['clearhead', '--help']\n"
        "from clearhead.__main__ import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'numba', 'rich'} & set(sys.modules)))\n"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
    assert done.stdout.splitlines()[-1] == "[]"
    assert min(times) <= 0.5


def test_the_script_and_the_module_give_the_version() -> None:
    script = shutil.which("clearhead", path=str(Path(sys.executable).parent))
    assert script, "the package is not installed beside this python"
    for command in ([script], [sys.executable, "-m", "clearhead"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"clearhead {__version__}\n"


BLOCKED = """
import sys
absent = sys.argv.pop(1)
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from clearhead.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("absent", "command"),
    [("typer", ["--help"]), ("rich", ["models"]), ("rich", ["look", "a b"]), ("platformdirs", ["look", "a b"])],
)
def test_without_its_packages_it_says_what_to_install(absent: str, command: list[str], tiny: Path) -> None:
    """Each is imported by the commands that need it, some of them in the middle."""
    environment = {name: value for name, value in os.environ.items() if name != "CLEARHEAD_CACHE"}
    model = ["--model", str(tiny)] if command[0] == "look" else []
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, absent, *command, *model],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 2
    *_, last = done.stderr.splitlines()
    assert last == f'The clearhead command needs {absent}. Run: pip install "clearhead[models]"'
    assert "Traceback" not in done.stderr


def test_endless_closed_and_nameless_files(clearhead_: Any) -> None:
    bad(clearhead_("--file", "/dev/zero"), "longer than 4.0 MB")
    bad(clearhead_("--file", ""), "names no file")
    command = f"{sys.executable} -m clearhead look --file - <&-"
    closed = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert closed.returncode == 2
    assert closed.stderr == "clearhead: cannot read standard input: it is closed\n"


@pytest.mark.full
def test_an_impatient_second_interrupt_changes_nothing(tiny: Path, empty_cache: Path) -> None:
    command = [sys.executable, "-m", "clearhead", "look", TEXT, "--model", str(tiny)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("Running"))
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in rest


# -- recordings and live pages


@pytest.fixture
def served(tiny: Path, empty_cache: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a command that serves, in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, how: Sequence[str] = ("-m", "clearhead")) -> subprocess.Popen[str]:
        command = [sys.executable, *how, *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, **pipes))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    """Where the page is, from the first line that it prints."""
    found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/0/", process.stdout.readline())
    assert found, process.communicate()
    return found[0]


def test_a_recording_is_kept_and_served(clearhead_: Any, served: Any) -> None:
    pytest.importorskip("uvicorn")
    done = clearhead_(TEXT, "--save-recording", "kept")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "Wrote kept"
    assert "2 layers x 4 heads" in done.stdout
    assert files() == ["kept"]
    process = served("serve", "kept", "kept", "--no-open")
    url = address(process)
    assert re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/1/", process.stdout.readline())
    assert process.stdout.readline() == "Ctrl-C ends it.\n"
    with urllib.request.urlopen(url + "part/facts", timeout=20) as answer:
        facts = json.loads(answer.read())
    assert ("".join(facts["texts"][0]["tokens"]), facts["reading"], len(facts["heads"])) == (TEXT, 0, 8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "Stopped.\n")
    assert "Traceback" not in err


def test_look_live_reads_the_heads_while_it_is_open(tiny: Path, served: Any) -> None:
    pytest.importorskip("uvicorn")
    process = served("look", TEXT, "--model", str(tiny), "--live", "--no-open")
    url = address(process)
    for _ in range(200):
        with urllib.request.urlopen(url + "part/facts", timeout=20) as answer:
            facts = json.loads(answer.read())
        with urllib.request.urlopen(url + "part/heads?have=0", timeout=20) as answer:
            told = json.loads(answer.read())
        if not told["reading"]:
            break
        time.sleep(0.1)
    assert told["reading"] == 0
    assert len(told["news"]) == facts["reading"] <= 2
    assert files() == []
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_it_ends_while_heads_are_read(tiny: Path, served: Any) -> None:
    """A thread in compiled code would make the interpreter abort."""
    pytest.importorskip("uvicorn")
    code = (
        "from clearhead import cli, __main__\n"
        "import torch\n"
        "x = torch.randn(200, 200)\n"
        "cli._read = lambda views: [x @ x for _ in iter(int, 1)]\n"
        "__main__.main()\n"
    )
    process = served("look", TEXT, "--model", str(tiny), "--live", "--no-open", how=("-c", code))
    url = address(process)
    assert process.stdout.readline() == "Ctrl-C ends it.\n"
    urllib.request.urlopen(url, timeout=20).close()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "Stopped.\n")
    assert "terminate" not in err


@pytest.mark.full
def test_live_beside_json_and_a_recording(tiny: Path, served: Any) -> None:
    pytest.importorskip("uvicorn")
    process = served("look", TEXT, "--model", str(tiny), "--live", "--json", "--save-recording", "kept", "--no-open")
    assert len(json.loads(process.stdout.readline())["heads"]) == 8
    assert files() == ["kept"]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "Nor is there a recording in a folder of that name."),
        (["./nowhere/kept/"], "there is no such file or folder"),
        (["folder"], "has no config.json, so it holds no model"),
        (["damaged"], "the recording {here}/damaged is damaged: recording.json is cut short or was changed"),
        (["damaged", "--port", "65536"], "Invalid value for '--port'"),
        (["damaged", "--file", "nothing.txt"], "cannot read nothing.txt"),
    ],
)
def test_what_cannot_be_served(arguments: list[str], said: str, empty_cache: Path) -> None:
    pytest.importorskip("uvicorn")
    Path("folder").mkdir()
    Path("damaged").mkdir()
    Path("damaged/recording.json").write_text('{"format": 1, ')
    done = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert done.exit_code == 2
    assert said.format(here=Path.cwd()) in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.output


def test_a_port_in_use_is_told_before_anything_is_loaded(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(zoo, "load", lambda *args, **kwargs: pytest.fail("loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = clearhead_(TEXT, "--live", "--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2
    assert "Address already in use. Without a number, a free one is taken." in done.stderr


def test_a_recording_is_not_written_over(clearhead_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "load", lambda *args, **kwargs: pytest.fail("loaded"))
    Path("kept").mkdir()
    Path("kept/mine").write_text("")
    done = clearhead_(TEXT, "--save-recording", "kept")
    assert (done.exit_code, files()) == (2, ["kept"])
    assert "--save-recording: kept is there already: name a new folder" in done.stderr
    assert "there is no folder" in clearhead_(TEXT, "--save-recording", "nowhere/kept").stderr


def test_a_disk_that_fills_up_is_told_with_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    class View:
        def save_recording(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(cli.typer.Exit):
        cli._keep(View(), Path("kept"), lambda *at: None)
    assert capsys.readouterr().err == "clearhead: cannot write kept: No space left on device\n"


@pytest.mark.parametrize("command", [["look", "--live"], ["serve", "kept"]])
def test_without_a_web_server_it_says_what_to_install(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "uvicorn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "clearhead.page.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 2
    assert 'a live page needs uvicorn: pip install "clearhead[page]"' in done.stderr
