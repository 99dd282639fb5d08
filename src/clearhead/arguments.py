"""What is given to the commands, checked before any of their work begins."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from clearhead._files import FIGURES, why_no_folder
from clearhead._format import size
from clearhead._plain import plain

__all__ = [
    "DEFAULT_TEXT",
    "Model",
    "beginning",
    "budget_of",
    "check_alone",
    "check_figure",
    "check_file",
    "check_recording",
    "image_of",
    "layer_numbers",
    "stop",
    "target_of",
    "text_of",
    "texts_of",
]

Model = Annotated[  # the option --model, the same in every command
    str, typer.Option(metavar="M", help="Name (see clearhead models), Hugging Face id, folder or .gguf.")
]
_LONGEST = 4_000_000  # bytes of a text: far more than the longest context that can be looked at
DEFAULT_TEXT = (
    "The keeper of the lighthouse at Morrow Point wrote one line in her log every evening. "
    "The storm had not come, she wrote, and the lamp was lit. "
    "When the storm came at last, the keeper of the lighthouse at Morrow Point wrote nothing. "
    "Mara Quill climbed the stair, counted the ships, and lit the lamp again. "
    "In the morning Mara Quill opened the log: the storm had come, she wrote, and the lamp was lit."
)


def text_of(text: str | None, file: str | None) -> str:
    """The text to look at, given as an argument or in a file."""
    if text is not None and file is not None:
        stop("give the text either as an argument or with --file, not both")
    if text is not None and os.path.isfile(text):
        read = f"read it with --file {shlex.quote(text)}"
        stop(f"{text} is a file: {read}; give these words themselves through standard input, with --file -")
    if file is not None:
        text = _decoded(file)
    if text is None:
        return DEFAULT_TEXT
    if not text.strip():
        stop(f"{'' if file in (None, '-') else f'{file}: '}the text is empty: there is nothing to attend to")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):  # bytes of an argument that were not UTF-8
        stop("the text is not valid UTF-8")
    return text


def texts_of(files: Sequence[str | Path]) -> list[str]:
    """The texts in these files, of which - is standard input."""
    for file in map(str, files):
        if file != "-" and not os.path.exists(file):
            how = "give a text itself through standard input, with - for a file"
            stop(f"cannot read {file}: there is no such file. Names of files are expected; {how}")
    return [text_of(None, str(file)) for file in files]


def beginning(text: str, longest: int | None, count: Callable[[str], int]) -> str:
    """Of the built-in text, as many sentences as have so many tokens; any other text as it is.

    >>> beginning(DEFAULT_TEXT, 100, len)
    'The keeper of the lighthouse at Morrow Point wrote one line in her log every evening.'
    """
    if text != DEFAULT_TEXT or longest is None:
        return text
    while count(text) > longest and ". " in text:
        text = text[: text.rindex(". ") + 1]
    return text


def check_alone(option: str, beside: Mapping[str, object]) -> None:
    """Refuse what was given beside an option that does not go with it."""
    given = [name for name, value in beside.items() if value]
    if given:
        stop(f"{option} makes a page of several views: leave {', '.join(given)} out")


def image_of(image: Path, text: str | None, file: str | None, target: str | None, generate: int) -> str:
    """The file of an image to look at; a text beside it is refused."""
    if text is not None or file is not None or target is not None or generate:
        stop("give a text or --image, not both: --file, --target and --generate are for texts")
    if not image.is_file():
        stop(f"--image {image}: there is no such file")
    return str(image)


def _decoded(file: str) -> str:
    name = "standard input" if file == "-" else file
    if not file:
        stop("--file '' names no file")
    if file == "-" and sys.stdin is None:
        stop("cannot read standard input: it is closed")
    try:
        with sys.stdin.buffer if file == "-" else Path(file).open("rb") as source:
            content = source.read(_LONGEST + 1)
    except OSError as error:
        stop(f"cannot read {name}: {error.strerror}")
    if len(content) > _LONGEST:
        stop(f"{name} is longer than {size(_LONGEST)}, which is more than a model reads: give a part of it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        stop(f"{name} is not text: byte {error.start} is not UTF-8")
    if "\0" in text:
        stop(f"{name} is not text: it has a zero byte at character {text.index(chr(0))}")
    return text


def layer_numbers(layers: str | None) -> list[int] | None:
    """The numbers that ``0,3-5`` means, each once, in order.

    >>> layer_numbers("0,3-5,4")
    [0, 3, 4, 5]
    """
    if layers is None:
        return None
    numbers: set[int] = set()
    for part in layers.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            stop(f"--layers {layers!r}: {part!r} is no layer or range of layers; write, for example, 0,3-5")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def budget_of(megabytes: float | None) -> int | None:
    """The size of the page in bytes; None where none is given."""
    if megabytes is None:
        return None
    if not 0 < megabytes * 1e6 < math.inf:
        stop(f"--budget {megabytes:g}: the size of the page in MB must be above 0 and finite")
    from clearhead.page.payload import least_nbytes

    limit, least = int(megabytes * 1e6), least_nbytes()
    if limit <= least:
        stop(f"--budget {megabytes:g}: the page without any data takes {size(least)}; the budget is in MB")
    return limit


def target_of(save: Path | None, model: str, text: str, *, wanted: bool) -> Path | None:
    """Where the page goes, checked before the model is loaded: a minute's work is not to end in an error."""
    if not wanted:
        return None
    name = f"clearhead-{_slug(Path(model).stem, 24)}-{_slug(text, 40)}.html"
    target = save if save is not None else Path(name)
    _check_place(target, "--save")
    return target


def check_recording(folder: Path | None) -> None:
    """Refuse a folder that could not be written, before the model is loaded."""
    if folder is None:
        return
    why = why_no_folder(folder)
    if why is not None:
        stop(f"--save-recording: {why}")


def check_figure(figure: Path | None) -> None:
    """Refuse a figure that could not be drawn or written, before the model is loaded."""
    if figure is None:
        return
    if figure.suffix.lower() not in FIGURES:
        stop(f"--figure {figure}: the name of a figure ends in {', '.join(FIGURES)}")
    _check_place(figure, "--figure")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        stop('--figure needs matplotlib. Run: pip install "clearhead[plot]"')


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that could not be written, before the model is loaded."""
    if file is not None:
        _check_place(file, option)


def _check_place(target: Path, option: str) -> None:
    folder = target.parent
    if os.path.isdir(target):
        stop(f"{option} {target}: that is a folder; name a file in it")
    if not os.path.isdir(folder):
        stop(f"{option} {target}: there is no folder {folder}")
    if len(os.fsencode(target.name)) > 255:
        stop(f"{option} {target}: the name of a file has at most 255 bytes")
    if not os.access(folder, os.W_OK | os.X_OK):
        stop(f"cannot write to the folder {folder.resolve()}: name a file elsewhere with {option}")


def _slug(text: str, longest: int) -> str:
    """Whole words of the text that make a file name.

    >>> _slug("The keeper of the lighthouse at Morrow Point", 24), _slug("???", 24)
    ('the-keeper-of-the', 'text')
    """
    words = re.findall(r"[^\W_]+", text[:200].lower())
    while len(words) > 1 and len("-".join(words)) > longest:
        words.pop()
    return "-".join(words)[:longest] or "text"


def stop(message: str) -> NoReturn:
    """End the command with a message and exit code 2."""
    lines = "\n".join(map(plain, message.split("\n")))
    print(f"clearhead: {lines}", file=sys.stderr)
    raise typer.Exit(2)
