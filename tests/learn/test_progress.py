"""Progress is kept, and a file that cannot be read or written never stands in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clearhead.learn import progress as module
from clearhead.learn.progress import Record, location, progress, update


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder, which does not exist yet."""
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def passing(name: str) -> Any:
    return lambda record: record.passed.append(name)


def test_it_persists_lesson_by_lesson(data: Path) -> None:
    update(3, passing("a"))
    update(4, lambda record: setattr(record, "folder", "/somewhere"))
    update(3, lambda record: record.hints.update(b=2))
    assert progress() == {3: Record("", ["a"], {"b": 2}), 4: Record("/somewhere", [], {})}
    assert progress()[5] == Record()
    assert [path.name for path in data.iterdir()] == ["progress.json"]


def test_it_lives_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)
    assert location() == platformdirs.user_data_path("clearhead") / "progress.json"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"lessons": []}',
        b'{"lessons": {"x": {}}}',
        b'{"lessons": {"3": {"folder": 3, "passed": [], "hints": {}}}}',
        b'{"lessons": {"3": {"folder": "", "passed": "ab", "hints": {}}}}',
        b'{"lessons": {"3": {"folder": "", "passed": [[]], "hints": {}}}}',
        b'{"lessons": {"3": {"folder": "", "passed": [], "hints": {"a": "x"}}}}',
        b'{"lessons": {"3": {"folder": "", "passed": [], "hints": [], "more": 1}}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_set_aside(data: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    data.mkdir()
    (data / "progress.json").write_bytes(content)
    update(3, passing("a"))
    assert progress() == {3: Record("", ["a"], {})}
    (kept,) = data.glob("progress-damaged-*.json")
    assert kept.read_bytes() == content
    assert capsys.readouterr().err == (
        f"clearhead: the file of your progress was damaged and is now {kept}; progress starts anew\n"
    )


def test_where_nothing_can_be_written_it_says_so_and_goes_on(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data.parent.joinpath("file").touch()
    monkeypatch.setenv("CLEARHEAD_DATA", str(data.parent / "file" / "data"))
    update(3, passing("a"))
    assert progress() == {}
    assert "your progress cannot be" in capsys.readouterr().err


def test_what_cannot_be_read_now_is_not_replaced(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update(3, passing("a"))

    def refuse(*_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refuse)
        update(3, passing("b"))
    assert progress()[3].passed == ["a"]
    assert capsys.readouterr().err == (
        f"clearhead: your progress cannot be read from {data / 'progress.json'}: Permission denied\n"
    )


def test_an_interrupted_write_leaves_the_old_file(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update(3, passing("a"))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            update(3, passing("b"))
    assert progress()[3].passed == ["a"]
    assert [path.name for path in data.iterdir()] == ["progress.json"]
    assert json.loads((data / "progress.json").read_text())["lessons"]["3"]["passed"] == ["a"]
    assert module.location() == data / "progress.json"
