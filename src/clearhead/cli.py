"""The commands. torch, transformers and rich are imported by the commands that need them."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from clearhead._format import finite, size
from clearhead._plain import plain
from clearhead._progress import Progress
from clearhead._version import __version__
from clearhead.arguments import (
    Model,
    beginning,
    budget_of,
    check_alone,
    check_figure,
    check_recording,
    image_of,
    layer_numbers,
    stop,
    target_of,
    text_of,
)
from clearhead.importance_command import importance

if TYPE_CHECKING:
    from clearhead.cost import Cost
    from clearhead.page.payload import Payload
    from clearhead.page.server import Server
    from clearhead.view import View
    from clearhead.views import Views

app = typer.Typer(
    name="clearhead",
    help="See and measure what the attention heads of a language model do.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_M_MMAP_THRESHOLD = -3  # mallopt's name for it
_SEEDS = 2**64 - 1  # the largest that PyTorch takes


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clearhead {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a letter shows "?" instead of a traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@app.command()
def models() -> None:
    """List the models that can be had here."""
    from clearhead import terminal, zoo

    with _clear_errors():
        terminal.show_models(zoo.available())


_Show = Annotated[
    bool | None, typer.Option("--open/--no-open", help="Open the page in a browser; by default on a terminal only.")
]
_Port = Annotated[
    int,
    typer.Option(metavar="N", min=0, max=65535, help="Of the live page; a free one if left out.", show_default=False),
]


@app.command()
def look(
    text: Annotated[str | None, typer.Argument(help="The text; a short built-in one if left out.")] = None,
    file: Annotated[
        str | None, typer.Option(metavar="F", help="Read the text from file F, or from stdin for -.")
    ] = None,
    model: Model = "smollm2",
    image: Annotated[
        Path | None, typer.Option(metavar="F", help="Look at an image, with a model that reads it in patches.")
    ] = None,
    second: Annotated[
        str | None,
        typer.Option("--target", metavar="T", help="What an encoder-decoder model is to write; its own if left out."),
    ] = None,
    generate: Annotated[
        int, typer.Option(metavar="N", min=0, help="Let the model write up to N tokens more.", show_default=False)
    ] = 0,
    save: Annotated[Path | None, typer.Option(metavar="HTML", help="Where to write the page.")] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="F", help="Draw all heads into F: .svg, .png, .pdf; no page unless --save.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the heads as JSON; no page unless --save.")] = False,
    recording: Annotated[
        Path | None,
        typer.Option(
            "--save-recording", metavar="DIR", help="Keep all in a new folder, for serve; no page unless --save."
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show the page live, as serve does; no file unless --save.")
    ] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Of a model that train made, all checkpoints: the page has a slider.")
    ] = False,
    port: _Port = 0,
    show: _Show = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N,N-N", help="Only these layers, from 0, such as 0,3-5.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="MB", help="Largest size of the page; 2, 10 or 25 MB by default.")
    ] = None,
) -> None:
    """Show what every attention head does on a text, or on an image.

    The strongest heads of each role are listed in the terminal; all heads go into one HTML file.
    """
    from clearhead import terminal

    with _clear_errors(), ExitStack() as stack:
        if checkpoints:
            files = {"--figure": figure, "--json": as_json, "--save-recording": recording}
            check_alone("--checkpoints", {**files, "--image": image, "--target": second, "--generate": generate})
        chosen = text_of(text, file) if image is None else image_of(image, text, file, second, generate)
        numbers = layer_numbers(layers)
        title = chosen if image is None else image.stem
        target = target_of(save, model, title, wanted=save is not None or not (as_json or figure or recording or live))
        check_figure(figure)
        check_recording(recording)
        limit, say = budget_of(budget), sys.stderr if as_json else sys.stdout
        with terminal.progress() as report:
            server = stack.enter_context(_server(port, report)) if live else None
            steps = _steps(model, chosen, numbers, report) if checkpoints else None
            view = (
                steps[-1] if steps else _view(model, chosen, numbers, report, second, generate, image=image is not None)
            )
            if not live or target or figure or recording or as_json:
                for one in steps or [view]:
                    one.heads()  # computed here, where progress is shown; a live page hears of them one by one
            page = None if target is None else _page(steps or view, limit, report)
            if figure is not None:
                _draw(view, figure, report)
            if recording is not None:
                _keep(view, recording, report)
        if as_json:
            print(json.dumps(_as_json(view), allow_nan=False))
        elif not live:
            terminal.show_view(view)
        if page is not None and target is not None:
            _write(page, target, say=say)
            if _should_open(show) and not live:
                webbrowser.open(target.resolve().as_uri())
        for made in filter(None, (figure, recording)):
            print(f"Wrote {plain(str(made))}", file=say)
        if server is not None:
            _serve(server, steps or [view], show, say=say, labels=steps.labels if steps else None)


@app.command()
def heads(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES...]", help="Texts, - is stdin; a short built-in one if left out."),
    ] = None,
    model: Model = "smollm2",
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write every head with all its numbers into F.")
    ] = None,
    strongest: Annotated[
        int, typer.Option("--strongest", metavar="N", min=0, help="How many heads of each role to list.")
    ] = 5,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Make an atlas over a corpus, in this new folder.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with an atlas that was ended.")] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Of an atlas: processes.")] = 1,
    window: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of an atlas: tokens read together; 1024, or the model's.")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Of an atlas: tokens of it read before; a quarter.")
    ] = None,
) -> None:
    """Say what each head of a model does, on texts and on repeated random tokens.

    With --out or --resume: what it does over a corpus of any size, every token of FILES counted once.
    """
    with _clear_errors():
        if out is not None or resume is not None:
            from clearhead.heads import atlas_commands

            atlas_commands.show_atlas(
                model,
                files or [],
                out=out,
                resume=resume,
                workers=workers,
                window=window,
                overlap=overlap,
                as_json=as_json,
                strongest=strongest,
            )
            return
        if workers > 1 or window is not None or overlap is not None:
            stop("--workers, --window and --overlap are of an atlas: name its folder, --out DIR or --resume DIR")
        from clearhead.heads import commands

        commands.show_heads(model, files or [], as_json=as_json, strongest=strongest)


@app.command()
def serve(
    sources: Annotated[
        list[str], typer.Argument(metavar="WHAT...", help="Folders of look --save-recording, or models.")
    ],
    text: Annotated[
        str | None, typer.Option(metavar="T", help="What models read; a short built-in text if left out.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="F", help="Read the text from file F, or from stdin for -.")
    ] = None,
    port: _Port = 0,
    show: _Show = None,
) -> None:
    """Show recordings, or models on a text, as a live page.

    Nothing is left out, however long the text: what the page shows is computed when it is shown. Only this computer can
    open it, by the address that is printed. Ctrl-C ends it.
    """
    from clearhead import terminal

    with _clear_errors(), ExitStack() as stack:
        chosen = text_of(text, file)
        with terminal.progress() as report:
            server = stack.enter_context(_server(port, report))
            views = [_opened(source, chosen, report) for source in sources]
        _serve(server, views, show, say=sys.stdout)


_LearnersFolder = Annotated[Path | None, typer.Option("--folder", metavar="F", help="The lesson's folder.")]


@app.command()
def learn(
    lesson: Annotated[int | None, typer.Argument(help="Number of a lesson; the list of all if left out.")] = None,
    folder: _LearnersFolder = None,
) -> None:
    """List the lessons, or write one into a folder.

    The folder gets the lesson as a notebook and as a script, and its exercises; nothing there is overwritten.
    """
    from clearhead.learn import commands

    with _clear_errors():
        if lesson is not None:
            commands.start_lesson(lesson, folder)
        elif folder is not None:
            stop("--folder needs the number of a lesson to write there")
        else:
            commands.list_lessons()


@app.command()
def check(
    lesson: Annotated[int, typer.Argument(help="Number of the lesson.")],
    folder: _LearnersFolder = None,
    hint: Annotated[bool, typer.Option("--hint", help="Give the next hint for the first that fails.")] = False,
    solution: Annotated[bool, typer.Option("--solution", help="Show one way to write the first that fails.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Start anew; what you wrote is kept beside it.")] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=_SEEDS, help="Repeat the inputs of an earlier check.")
    ] = None,
) -> None:
    """Check the exercises of a lesson.

    They are read from exercises.py in the lesson's folder. Exit code 1 unless all pass.
    """
    from clearhead.learn import commands

    with _clear_errors():
        if hint + solution + reset > 1:
            stop("give one of --hint, --solution and --reset")
        if reset:
            commands.reset_lesson(lesson, folder)
        elif not commands.check_lesson(lesson, folder, seed=seed, hint=hint, solution=solution):
            raise typer.Exit(1)


@app.command()
def train(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Files to learn from, in UTF-8.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the model is kept; a run in it goes on.")],
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="How many in all, those before included.")] = 2000,
    size: Annotated[str, typer.Option(metavar="S", help="tiny, small or medium: 0.1, 1 or 11 M parameters.")] = "small",
    vocab: Annotated[
        int, typer.Option(metavar="N", min=256, help="Tokens: 256 are single bytes, more are learned from the text.")
    ] = 256,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=_SEEDS, help="Another seed draws other weights and batches.")
    ] = 0,
    every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps between two checkpoints; a tenth of --steps.")
    ] = None,
) -> None:
    """Train a small language model on a text.

    Whenever it is stopped, the same command goes on from the last checkpoint, with the losses that it would have had.
    """
    with _clear_errors():
        from clearhead.models import commands

        commands.train(texts, out, steps=steps, size=size, seed=seed, vocab=vocab, every=every)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of train, or one of its step-… files.")],
    prompt: Annotated[str, typer.Argument(help="How the text begins.")] = "",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="How many to write.")] = 300,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0, help="0 writes the likeliest, 1 what the model expects.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(metavar="K", min=1, help="Draw among the K likeliest only.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, max=_SEEDS, help="Draw the same text again.")] = None,
) -> None:
    """Let a model that was trained here write."""
    with _clear_errors():
        from clearhead.models import commands

        commands.generate(model, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)


@app.command()
def cost(
    model: Annotated[str | None, typer.Argument(help="A model, whose sizes to take; no weights are loaded.")] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="Length of the text; the model's longest.")] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Query heads a layer; the model's, or 1.")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", help="Key/value heads; the model's, or as many.")] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="The model's, or 1.")] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="Width of one head; the model's, or 64.")] = None,
    width: Annotated[int | None, typer.Option(metavar="N", help="Width of the model; its own, or all heads'.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="T", help="Such as float32; float16 by default.")] = None,
    window: Annotated[
        int | None, typer.Option(metavar="N", help="Of the sliding window; the model's, or 4096.")
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Whether no token sees a later one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Count what attention costs: dense, tiled, with a window, linear.

    Time in operations, memory of the weights, and the cache for generation, of a model or of any sizes.
    """
    from clearhead import terminal

    sizes = {
        "tokens": tokens,
        "heads": heads,
        "kv_heads": kv_heads,
        "layers": layers,
        "head_dim": head_dim,
        "width": width,
        "dtype": dtype,
        "window": window,
        "causal": causal,
    }
    with _clear_errors():
        found = _cost(model, {name: value for name, value in sizes.items() if value is not None})
        if as_json:
            print(json.dumps({"clearhead": __version__, "model": model, **found.as_dict()}))
        else:
            terminal.show_cost(found, model)


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Option(metavar="M", help="A model, as for look; random tensors if left out.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many: 4096; of a model 1024, or what it reads.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure what looking costs here: time and memory beside a plain attention call, or a model's forward pass."""
    from clearhead import terminal

    with _clear_errors(), terminal.progress() as report:
        report("import", 0, 1)
        from clearhead import bench as measure

        found = measure.bench(model, tokens, on_progress=report)
    if as_json:
        print(json.dumps({"clearhead": __version__, **found.as_dict()}))
    else:
        terminal.show_bench(found)


def _cost(model: str | None, given: dict[str, Any]) -> Cost:
    from clearhead.cost import Cost, from_config

    if model is not None:
        from clearhead import terminal, zoo

        with terminal.progress() as report:
            report("import", 0, 1)
            return from_config(zoo.config(model), **given)
    if "tokens" not in given:
        stop("give --tokens N, or the name of a model (see clearhead models)")
    return Cost(**given)


def _keep(view: View, folder: Path, report: Progress) -> None:
    report("recording", 0, 1)
    try:
        view.save_recording(folder.absolute())  # as it is: "~" is a letter here
    except ImportError as error:
        stop(str(error))
    except OSError as error:  # it names a file of ours, or none
        stop(f"cannot write {folder}: {error.strerror or error}")


def _server(port: int, report: Progress) -> Server:
    """The port is taken before anything is loaded."""
    report("import", 0, 1)
    try:
        from clearhead.page.server import Server
    except ImportError as error:
        stop(str(error))
    return Server(port=port)


def _opened(source: str, text: str, report: Progress) -> View:
    from clearhead.errors import ModelError
    from clearhead.saving import is_recording
    from clearhead.view import View

    if is_recording(Path(source)):
        return View.open(Path(source).absolute())
    try:
        return _view(source, text, None, report)
    except ModelError as error:
        stop(f"{str(error).rstrip('.')}. Nor is there a recording in a folder of that name.")


def _serve(
    server: Server,
    views: Sequence[View],
    show: bool | None,
    *,
    say: TextIO,
    labels: Sequence[str | int] | None = None,
) -> None:
    """Until Ctrl-C. Heads that were not read yet are read meanwhile. Of labelled pages, a slider's, one is told."""
    told = [f"{plain(view.name)}: {server.show(view.answers(), labels)}" for view in views]
    for line in told if labels is None else told[:1]:
        print(line, file=say, flush=True)
    print("Ctrl-C ends it.", file=say, flush=True)
    reader = threading.Thread(target=_read, args=(views,), daemon=True)
    reader.start()
    if _should_open(show):
        webbrowser.open(server.url)
    code: Any = 0
    try:
        server.run()
    except KeyboardInterrupt:
        print("Stopped.", file=say)
    except SystemExit as end:
        code = end.code
    if reader.is_alive():  # in compiled code, which the interpreter cannot end without an abort
        sys.stdout.flush()
        os._exit(code)
    raise typer.Exit(code)


def _read(views: Sequence[View]) -> None:
    from clearhead.errors import ModelError

    for view in views:
        with suppress(ModelError):  # the page says it
            view.heads()


def _view(
    model: str,
    text: str,
    layers: list[int] | None,
    report: Progress,
    target: str | None = None,
    generate: int = 0,
    *,
    image: bool = False,
) -> View:
    report("import", 0, 1)
    from clearhead import zoo

    loaded, tokenizer = zoo.load(model, on_progress=report)
    _check_layers(loaded.config, layers)
    if image != (getattr(loaded, "main_input_name", "") == "pixel_values"):
        stop(f"{model} reads text: leave --image out" if image else f"{model} reads images: give one, --image F")
    from clearhead.looking import look  # after the name was found, since this imports torch

    text = beginning(text, zoo.context_length(loaded), lambda part: len(tokenizer(part)["input_ids"]))

    _return_freed_blocks(4 << 20)
    view = look(loaded, tokenizer, text, target=target, generate=generate, layers=layers, on_progress=report)
    _return_freed_blocks(16 << 20)  # the tiles of a pass, 8 MB each, are made again and again
    if len(view.tokens) < 2:
        stop(f"the text is one token for {model}, which can only attend to itself: give a longer text")
    return view


def _steps(model: str, text: str, layers: list[int] | None, report: Progress) -> Views:
    """The same text after each checkpoint of a training run."""
    report("import", 0, 1)
    from clearhead.models import loading
    from clearhead.views import Views

    files = loading.checkpoints(model)
    return Views([_view(str(file), text, layers, report) for file in files.values()], list(files))


def _return_freed_blocks(smallest: int) -> None:
    """Have glibc give freed blocks of this many bytes and more back to the system at once.

    By itself it keeps those of up to 32 MB, scattered between the tensors that a recording holds: at 8,192 tokens of
    SmolLM2 the peak above the model was 1.4 to 1.9 GB from run to run, and is 1.3 GB with 4 MB while the model runs.
    With 4 MB all the time, reading the heads took 118 s instead of 77.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has none
        libc.mallopt(_M_MMAP_THRESHOLD, smallest)


def _check_layers(config: Any, layers: list[int] | None) -> None:
    """Refuse layers beyond those that the model's config counts, before the model runs."""
    count = getattr(config, "num_hidden_layers", None)
    if count is None or getattr(config, "is_encoder_decoder", False):  # which counts those of one side
        return
    unknown = [str(layer) for layer in layers or () if layer >= count]
    if unknown:
        there = "only layer 0" if count == 1 else f"layers 0-{count - 1}"
        stop(f"--layers: there is no layer {', '.join(unknown[:5])}; the model has {there}")


def _page(view: View | Views, budget: int | None, report: Progress) -> Payload:
    report("page", 0, 1)
    return view.page(budget=budget)


def _draw(view: View, figure: Path, report: Progress) -> None:
    report("figure", 0, 1)
    from clearhead import plots

    try:
        plots.save(plots.heads(view), figure.absolute())  # as it is: "~" is a letter here
    except OSError as error:
        stop(f"cannot write {figure}: {error.strerror or error}")


def _as_json(view: View) -> dict[str, Any]:
    heads = [
        {
            "layer": head.layer,
            "head": head.head,
            "role": head.role,
            "scores": _finite(head.scores),
            "baselines": _finite(head.baselines),
            "entropy": finite(head.entropy),
            "distance": finite(head.distance),
        }
        for head in view.heads()
    ]
    return {
        "clearhead": __version__,
        "model": view.name,
        "tokens": list(view.tokens),
        **({"target": view.texts[1].pieces, "sides": view.sides} if len(view.texts) > 1 else {}),
        "layers": list(view.layers),
        "nbytes": view.nbytes,
        "dense_nbytes": view.dense_nbytes,
        "heads": heads,
    }


def _finite(scores: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: finite(score) for name, score in scores.items()}


def _write(page: Payload, target: Path, *, say: TextIO) -> None:
    from clearhead._files import write_whole
    from clearhead.page.html import render

    print(f"The page: {size(page.nbytes)}", file=say, flush=True)
    try:
        write_whole(target, render(page))
    except OSError as error:
        stop(f"cannot write {target}: {error.strerror or error}")
    print(f"Wrote {plain(str(target))}", file=say)


def _should_open(wanted: bool | None) -> bool:
    """As told; else only for a person at a terminal with a screen (without, a text browser would start)."""
    if wanted is not None:
        return wanted
    screen = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return _on_terminal() and screen


def _on_terminal() -> bool:
    return sys.stdout.isatty()


@contextmanager
def _clear_errors() -> Iterator[None]:
    """What input or machine is to blame for becomes a message and exit code 2; our own faults stay tracebacks."""
    from clearhead.errors import DTypeError, LessonError, ModelError, RecordingError, ShapeError

    try:
        yield
    except BrokenPipeError:  # as in `clearhead learn | head`: click ends such a command without a word
        raise
    except (DTypeError, LessonError, ModelError, RecordingError, ShapeError, OSError) as error:
        stop(str(error))
    except ValueError as error:
        from clearhead.page.payload import BudgetError

        if not isinstance(error, BudgetError):
            raise
        stop(str(error))
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise typer.Exit(130) from None


app.command()(_clear_errors()(importance))
