"""A model whose archive is cut into several packages: put together once, whole or not at all."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import zoo
from clearhead.errors import ModelError
from clearhead.zoo import archive, catalog

transformers = pytest.importorskip("transformers")

CUT = catalog.Packaged("cut", "Cut: an encoder", "cut-part-{}==1.0", "cut-part_{}", "in/cut.zip.{}", 1, "once", parts=3)


def _encoder(folder: Path) -> Any:
    """A tiny encoder, saved without the head that its config names, as sentence encoders are; with a vocabulary."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(folder)
    words = {word: n for n, word in enumerate(["[UNK]", "the", "cat", "sat", "down"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return model


@pytest.fixture
def cut(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The encoder, zipped, cut in three, each piece in a package of its own."""
    model = _encoder(tmp_path / "encoder")
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as pack:
        for file in (tmp_path / "encoder").iterdir():
            pack.write(file, f"encoder/{file.name}")
        pack.writestr("encoder/1_Pooling/config.json", "{}")  # not the model's
    third = len(whole.getvalue()) // 3 + 1
    for n in range(3):
        piece = tmp_path / "packages" / CUT.module.format(f"{n + 1:03}") / CUT.inside.format(f"{n + 1:03}")
        piece.parent.mkdir(parents=True)
        (piece.parents[1] / "__init__.py").touch()
        piece.write_bytes(whole.getvalue()[n * third : (n + 1) * third])
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(catalog, "PACKAGED", (CUT,))
    return model


def test_an_archive_in_parts_is_unpacked_once(cut: Any, empty_cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    assert zoo.available()[0].status == "installed"
    model, tokenizer = zoo.load("cut", on_progress=lambda *step: told.append(step))
    assert torch.equal(model.embeddings.word_embeddings.weight, cut.embeddings.word_embeddings.weight)
    assert tokenizer.get_vocab()["cat"] == 2
    assert [step for step in told if step[0] == "convert"] == [("convert", n, 4) for n in range(5)]
    (entry,) = empty_cache.iterdir()
    assert not {"joined.zip", "1_Pooling"} & {path.name for path in entry.iterdir()}
    assert zoo.available()[0].status == "ready"
    made = (entry / "clearhead.json").stat().st_ino
    assert zoo.config("cut").hidden_size == 8
    assert archive.unpacked(CUT.paths()) == entry
    assert (entry / "clearhead.json").stat().st_ino == made


def test_a_head_without_weights_goes_and_nothing_is_random(cut: Any) -> None:
    model, _ = zoo.load("cut")  # a warning would fail the test
    assert type(model).__name__ == "BertModel"
    assert model.config.name_or_path == "Cut"


def _remove(piece: Path) -> None:
    piece.unlink()


def _shorten(piece: Path) -> None:
    piece.write_bytes(piece.read_bytes()[:-100])


def _spoil(piece: Path) -> None:
    content = bytearray(piece.read_bytes())
    content[len(content) // 2] ^= 1
    piece.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            _remove,
            r"has no in/cut\.zip\.002\. Run: pip install .*cut-part-001==1\.0 cut-part-002==1\.0 cut-part-003==1\.0",
        ),
        (_shorten, r"3 parts of cut\.zip cannot be unpacked.*--force-reinstall"),
        (_spoil, r"3 parts of cut\.zip cannot be unpacked.*--force-reinstall"),
    ],
)
def test_a_part_that_is_missing_or_damaged(
    cut: Any, empty_cache: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(CUT.paths()[1])
    with pytest.raises(ModelError, match=message):
        zoo.load("cut")
    assert not empty_cache.exists() or list(empty_cache.iterdir()) == []


def test_an_interruption_leaves_nothing(cut: Any, empty_cache: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo.load("cut", on_progress=interrupt)
    assert list(empty_cache.iterdir()) == []


def test_no_space_says_so(cut: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_unpack", _full)
    with pytest.raises(ModelError, match=r"cannot be unpacked to .*No space.*set CLEARHEAD_CACHE"):
        zoo.load("cut")
    assert list(empty_cache.iterdir()) == []


def _full(*given: Any) -> None:
    raise OSError(28, "No space left on device")
