"""README and docs are run, not believed: every Python block, every command, every link."""

from __future__ import annotations

import doctest
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\.venv/bin/)?(clearhead|make|pip)(?: .*)?$")
GENERATED = {"docs/notation.md", "docs/results.md", "docs/changelog.md"}  # from elsewhere, by docs/site_hooks.py
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def fences(page: str) -> list[tuple[str, str]]:
    """(language, content) of each block, dedented."""
    return [(found[2], dedent(found[3])) for found in FENCE.finditer(PAGES[page].read_text("utf-8"))]


def lines(page: str) -> Iterator[str]:
    """The commands of a page: in blocks called bash, and of the README in indented lines; comments and prose apart."""
    text = "\n".join(content for language, content in fences(page) if language == "bash")
    if page == "README.md":
        text += "\n".join(re.findall(r"^    (.*)$", FENCE.sub("", README), re.MULTILINE))
    for line in text.splitlines():
        if COMMAND.match(line.strip()):
            yield line.strip().removeprefix(".venv/bin/")


COMMANDS = sorted({(page, line) for page in PAGES for line in lines(page)})
PYTHON = [page for page in PAGES if any(language == "python" for language, _ in fences(page))]


# --- Python --------------------------------------------------------------------------------------------------------


@pytest.fixture
def zoo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded once for all tests."""
    pytest.importorskip("transformers")
    from clearhead import zoo

    original = zoo.load

    def load(name: str = "smollm2", **more: Any) -> Any:
        if name not in ("smollm2", "minilm"):
            return original(name, **more)
        with pytest.MonkeyPatch.context() as real:
            real.setattr(zoo, "load", original)
            return request.getfixturevalue(name)

    monkeypatch.setattr(zoo, "load", load)


def run(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page in one namespace; what one prints is what the text block after it says."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = [*fences(page), ("", "")]
    for (language, content), (after, want) in pairwise(blocks):
        if language == "python":
            with redirect_stdout(io.StringIO()) as said:
                exec(compile(content, page, "exec"), namespace)
            if after == "text":
                assert doctest.OutputChecker().check_output(want, said.getvalue(), SAME), said.getvalue()
    return namespace


def test_only_what_needs_other_tools_is_not_run() -> None:
    left_out = {page: content for page in PAGES for language, content in fences(page) if language == "py"}
    assert set(left_out) == {"docs/coming-from.md"}
    assert {language for page in PAGES for language, _ in fences(page)} == {"python", "py", "text", "bash"}


@pytest.mark.parametrize("page", [page for page in PYTHON if page != "README.md"])
def test_code_in_docs_runs_and_prints_what_it_says(
    page: str, zoo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)


def test_readme_code_runs(zoo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = run("README.md")
    assert (tmp_path / "cat.html").stat().st_size > 10_000
    assert len(namespace["view"].heads()) == 270


# --- commands ------------------------------------------------------------------------------------------------------

NEVER = re.compile(r"serve|--live|bench|importance(?!.*--heads)")  # they wait for Ctrl-C, or take minutes
CHEAP = re.compile(r"clearhead (?:models|learn|check|cost|--|[a-z]+ --help)")


def test_there_are_commands_and_code() -> None:
    assert len(PYTHON) >= 10
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_in_the_docs_exists(page: str, line: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        assert all(re.search(rf"^{name}:", makefile, re.M) for name in arguments if "=" not in name)
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", line)
        project = (ROOT / "pyproject.toml").read_text("utf-8")
        assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in ",".join(extras).split(",") if extra)
    else:
        parse(arguments)


def parse(arguments: list[str]) -> Any:
    """The context of a command whose arguments are read and which is not run."""
    pytest.importorskip("typer")
    from typer.main import get_command

    from clearhead.cli import app

    group = get_command(app)
    name, *rest = arguments
    if name.startswith("-"):
        return None
    assert name in group.commands, name
    return None if "--help" in rest else group.commands[name].make_context(name, rest)


@pytest.mark.full
@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_commands_of_a_page_run(page: str, zoo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from clearhead.cli import app

    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    for name in ("long.txt", "yours.txt", "play.txt"):
        (tmp_path / name).write_text("A river runs through the town. " * 100)
    for line in lines(page):
        program, *arguments = shlex.split(line, comments=True)
        arguments += ["--size", "tiny", "--steps", "4"] * (arguments[0] == "train")
        if program == "clearhead" and not NEVER.search(line):
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == (arguments[0] == "check"), (line, done.output)  # nothing is solved yet


# --- links ---------------------------------------------------------------------------------------------------------


def headings(page: Path) -> set[str]:
    """The anchors of a page, as the site makes them."""
    text = FENCE.sub("", page.read_text("utf-8"))
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE) + re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w\s.-]", "", heading.lower()) for heading in found]
    return {re.sub(r"[\s-]+", "-", heading.replace(".", "")) for heading in words} | set(found)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = PAGES[page]
    for link, anchor in re.findall(r"\]\(([^)#: ]*)(?:#([^)]+))?\)", FENCE.sub("", here.read_text("utf-8"))):
        target = (here.parent / link).resolve() if link else here
        name = str(target.relative_to(ROOT))
        lesson = re.fullmatch(r"docs/lessons/(\d\d_\w+)\.md", name)
        if lesson:
            assert (ROOT / "lessons" / f"{lesson[1]}.py").exists(), link
        elif name not in GENERATED:
            assert target.exists(), link
        if anchor and target.suffix == ".md" and target.exists():
            assert anchor in headings(target), (link, anchor)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_every_page_is_in_the_navigation() -> None:
    yaml = pytest.importorskip("yaml")
    text = re.sub(r"^(?:hooks|theme):.*", "", (ROOT / "mkdocs.yml").read_text("utf-8"), flags=re.MULTILINE)
    nav = re.search(r"^nav:\n((?: .*\n)+)", text, re.MULTILINE)
    assert nav
    named: set[str] = set()

    def walk(entry: Any) -> None:
        if isinstance(entry, str):
            named.add(f"docs/{entry}")
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:
                walk(each)

    walk(yaml.safe_load(nav[0])["nav"])
    assert named == {page for page in PAGES if page != "README.md"} | GENERATED


def test_every_public_name_is_in_the_reference() -> None:
    import clearhead

    text = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: clearhead\.([\w.]+)$", text, re.MULTILINE))
    homes = {"errors": ("DTypeError", "LessonError", "ModelError", "RecordingError", "ShapeError")}
    homes |= {"functional": ("scaled_dot_product_attention",), "heads": ("compare", "knockout")}
    shown |= {name for home in shown for name in homes.get(home, ())}
    assert set(clearhead.__all__) - shown == {"__version__"}


# --- the site ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; lessons as they are, unless they were rendered before."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))  # strict: a warning raises
    return folder


@pytest.mark.full
def test_the_site_builds_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?\s(?:src|href)=[\"']?(https?:[^\"' >]*)", text)
        assert not loaded, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s+)[\"']?https?:", sheet.read_text("utf-8")), sheet


@pytest.mark.full
@pytest.mark.browser
def test_the_site_can_be_searched_from_a_file(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip("there is no chromium command")
    with playwright.sync_playwright() as made:
        browser = made.chromium.launch(executable_path=str(chromium), args=["--no-sandbox"])
        page, asked = browser.new_page(), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").first.fill("entropy")
        page.locator(".md-search-result__item").first.wait_for(timeout=20_000)
        browser.close()
    assert not [url for url in asked if url.startswith("http")]
