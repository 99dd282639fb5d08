"""A corpus in windows: every token once, with its context; and what is no text is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead import ModelError
from clearhead.heads import corpus
from clearhead.heads.corpus import Batch, Corpus, check_documents, windows_of

from .letters import Letters


@given(st.lists(st.integers(0, 30), max_size=5), st.integers(1, 9), st.data())
def test_windows_count_every_token_once_and_give_it_context(sizes: list[int], length: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, length - 1))
    tokens = iter(range(sum(sizes)))
    parts = [[next(tokens) for _ in range(n)] for n in sizes]
    windows = list(windows_of(parts, length, overlap))
    assert [t for one in windows for t in one.ids[one.start :]] == list(range(sum(sizes)))
    assert all(len(one.ids) == length for one in windows[:-1])
    assert all(one.start == (overlap if n else 0) for n, one in enumerate(windows))
    assert all(one.ids == list(range(one.ids[0], one.ids[-1] + 1)) for one in windows)


def counted(batches: Iterator[Batch]) -> list[int]:
    return sorted(int(i) for batch in batches for i in batch.ids[batch.counted])


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_batches_hold_every_token_of_every_document_once(sizes: list[int], at_once: int) -> None:
    texts = ["".join(chr(97 + (n + i) % 26) for i in range(size)) for n, size in enumerate(sizes)]
    cut = Corpus(Letters(before=[1], after=[2]), texts, window=10, overlap=3, at_once=at_once)
    batches = list(cut.batches())
    assert counted(iter(batches)) == sorted(ord(letter) for text in texts for letter in text)
    for batch in batches:
        B, T = batch.ids.shape
        assert B == 1 or at_once >= B * T
        lengths = batch.real.sum(1)
        assert (batch.ids[:, 0] == 1).all()
        assert all(row[n - 1] == 2 for row, n in zip(batch.ids, lengths, strict=True))
        assert not (batch.counted & ~batch.real).any()


def test_special_tokens_are_in_every_window_and_counted_in_none() -> None:
    (batch,) = Corpus(Letters(before=[1], after=[2]), ["abcdef"], window=5, overlap=1, at_once=99).batches()
    assert batch.ids.tolist() == [[1, 97, 98, 99, 2], [1, 99, 100, 101, 2], [1, 101, 102, 2, 0]]
    assert batch.counted.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 0]]


def test_the_digest_tells_one_corpus_from_another() -> None:
    def digest(texts: list[str]) -> str:
        cut = Corpus(Letters(), texts, window=4, overlap=1, at_once=8)
        list(cut.batches())
        return cut.digest

    assert digest(["abcdefgh"]) == digest(["abcdefgh"])
    assert len({digest(texts) for texts in (["abcdefgh"], ["abcdefgi"], ["abcd", "efgh"], ["abcdefgh", "i"])}) == 4


def test_memory_holds_a_piece_of_a_long_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 16)
    tokenizer = Letters()
    text = "ab cd\nef gh\n" * 50
    cut = Corpus(tokenizer, [text], window=8, overlap=2, at_once=8)
    assert counted(cut.batches()) == sorted(map(ord, text))
    assert max(map(len, tokenizer.seen)) <= 32
    assert all(piece[-1] == "\n" and not piece[0].isspace() for piece in tokenizer.seen[1:-1])


@pytest.mark.parametrize("text", ["a" * 100, "a b " * 25, "\n" * 99 + "a", "\n  a" * 25, "ä€𝄞" * 30])
def test_files_are_read_as_they_are_wherever_they_can_be_cut(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE", 7)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig", newline="")
    tokenizer = Letters()
    list(Corpus(tokenizer, [tmp_path / "a.txt"], window=8, overlap=2, at_once=8).batches())
    assert "".join(tokenizer.seen) == text


# --- what is no text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.txt is empty: there is nothing to attend to"),
        (b"\xef\xbb\xbf\n \t", r"a\.txt is empty: there is nothing to attend to"),
        (b"abc\0d", r"a\.txt is not text: byte 3 is zero"),
    ],
)
def test_files_are_looked_at_before_anything_runs(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        check_documents(["good", tmp_path / "a.txt"])


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "there are no documents"),
        (["a", " \n"], "document 1 is empty"),
        (["a", 3], r"document 1 is a int; expected a text \(str\) or a file"),
        ([Path("nowhere.txt")], r"cannot read nowhere\.txt: No such file"),
        ([Path()], r"cannot read \.: Is a directory"),
    ],
)
def test_what_cannot_be_a_corpus_is_refused(documents: list[object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_documents(documents)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good text \xff and more", r"a\.txt is not text: byte 10 is not UTF-8"),
        (b"good text, cut short: \xc3", r"a\.txt is not text: byte 22 is not UTF-8"),
        (b"good text, then \0", r"a\.txt is not text: byte 16 is zero"),
    ],
)
def test_what_is_found_on_the_way_is_said_with_its_place(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE", 7)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        list(Corpus(Letters(), [tmp_path / "a.txt"], window=4, overlap=1, at_once=8).batches())


def test_documents_made_one_by_one_are_checked_when_they_come() -> None:
    def texts(bad: object) -> Iterator[object]:
        yield "good"
        yield bad

    for bad, message in (
        (7, "document 1 is a int"),
        ("", "document 1 is empty"),
        ("\n \xa0", "document 1 is empty"),
        ("a\ud800", "lone surrogate"),
    ):
        with pytest.raises(ModelError, match=message):
            list(Corpus(Letters(), texts(bad), window=4, overlap=1, at_once=8).batches())


@pytest.mark.parametrize(("window", "overlap"), [(8, 8), (8, -1), (2, 0), (8, 6)])
def test_windows_that_would_not_move_on_are_refused(window: int, overlap: int) -> None:
    with pytest.raises(ModelError, match=rf"windows of {window} tokens of which 2 are special that overlap by"):
        Corpus(Letters(before=[1], after=[2]), ["abc"], window=window, overlap=overlap, at_once=8)
