"""Pairs of texts: read from two columns or a dictionary, and as numbers; files that are neither are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from clearhead import ModelError
from clearhead.models import Vocabulary, ding_pairs, read_pairs

DING = """# Version :: devel
A {n}; Ais {n} [mus.] | A-Dur {n} :: A; A sharp | A major
Abend {m} | Guten Abend zusammen! | Es war Abend. :: evening | Good evening, everybody! | It was evening.
kalt {adj} | Es ist [heute] sehr kalt.; Es friert. | Es ist kalt. :: cold | It’s (very) cold today.; Brr. | Cold.
schenken {vt} (jdm. etw.) | Er gibt jdm. etw. | Das Geld/die Zeit fehlt. :: give | He gives sb. sth. | It is not there.
sehen | Ich sehe es. :: see | I can see it. | one too many
"""


def written(folder: Path, content: str | bytes) -> Path:
    file = folder / "pairs.tsv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_two_columns_are_pairs(tmp_path: Path) -> None:
    file = written(tmp_path, "\ufeffEs ist kalt.\t It is cold. \r\n\nJa.\tYes.\n")
    assert read_pairs(file) == [("Es ist kalt.", "It is cold."), ("Ja.", "Yes.")]
    assert read_pairs(str(file)) == read_pairs(file)


BAD = {
    "one column": ("Ja.\tYes.\nNein. No.\n", "line 2: 1 column; expected two texts with a tab between"),
    "three columns": ("Ja.\tYes.\t1\n", "line 1: 3 columns"),
    "an empty column": ("Ja.\tYes.\nNein.\t \n", "line 2: the second column is empty"),
    "the other empty": ("\tYes.\n", "line 1: the first column is empty"),
    "no pair": ("\n\n", "holds no pairs"),
    "Latin-1": ("Tür.\tDoor.".encode("latin-1"), r"is not text in UTF-8 \(byte 1\)"),
    "an image": (b"\x89PNG\r\n\x1a\n", "is not text in UTF-8"),
    "zero bytes": (b"a\tb\n\0\0", "is not text: it holds zero bytes"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_file_of_two_columns_is_named(what: str, tmp_path: Path) -> None:
    content, message = BAD[what]
    with pytest.raises(ModelError, match=message):
        read_pairs(written(tmp_path, content))


def test_a_file_that_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none.tsv: No such file"):
        read_pairs(tmp_path / "none.tsv")
    with pytest.raises(ModelError, match="Is a directory"):
        read_pairs(tmp_path)


def test_a_dictionarys_whole_sentences_are_pairs(tmp_path: Path) -> None:
    file = written(tmp_path, DING)
    assert ding_pairs(file) == [
        ("Guten Abend zusammen!", "Good evening, everybody!"),
        ("Es war Abend.", "It was evening."),
        ("Es ist sehr kalt.", "It's cold today."),
    ]


def test_where_the_dictionary_is_not_there_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"none.*apt install trans-de-en.*read_pairs"):
        ding_pairs("none")
    with pytest.raises(ModelError, match="is not the Ding dictionary"):
        ding_pairs(written(tmp_path, "Ja.\tYes.\n"))
    Path("de-en").write_text(DING)
    assert len(ding_pairs()) == 3


def test_words_have_numbers_and_rare_ones_share_one() -> None:
    vocabulary = Vocabulary(["Ja, ja.", "Nein."], least=2)
    assert vocabulary.words[4:] == ["ja", "."]
    assert vocabulary.encode("Nein, JA!") == [3, 3, 4, 3]
    assert vocabulary.sources(["ja.", "", "nein"]).tolist() == [[4, 5], [3, 0], [3, 0]]
    assert vocabulary.targets(["ja.", "ja"]).tolist() == [[1, 4, 5, 2], [1, 4, 2, 0]]
    assert vocabulary.decode([4, 3, 5, 2, 4]) == ["ja", "?", "."]
