"""Recordings in a folder: what comes back is what was written, and a folder that is not whole says so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import AdditiveMap, DenseMap, LinearMap, RecordingError, SoftmaxMap, View, masks, saving, scores
from clearhead.maps import AttentionMap, Stitched, average_heads
from clearhead.maps.composed import OneSequence
from clearhead.maps.replaced import replace_heads
from clearhead.saving import _CLASSES, FORMAT, load_folder, save_folder

safetensors = pytest.importorskip("safetensors")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = numbers(1, 4, 9, 8), numbers(1, 2, 9, 8, seed=1), numbers(1, 2, 9, 5, seed=2)
HIDDEN = numbers(9, 9, seed=3) > -0.5
EVERY_RULE = (
    (
        masks.sliding_window(4) & ~masks.strided(7)
        | masks.global_tokens([0, 5])
        | masks.first_tokens(torch.tensor([2])) & masks.block_sparse(torch.ones(3, 3, dtype=torch.int), 3)
    )
    & masks.documents(torch.tensor([[0] * 9]))
    & masks.padding(keys=torch.tensor([[0] + [1] * 8]))
    & masks.dense(HIDDEN)
)
EVERY_BIAS = scores.alibi(4) + scores.t5_bias(numbers(32, 4)) + scores.dense_bias(numbers(1, 1, 9, 9))
MAPS: dict[str, Callable[[], AttentionMap]] = {
    "causal": lambda: SoftmaxMap(Q, K, v=V, mask=masks.causal(), scale=0.3),
    "transposed views": lambda: SoftmaxMap(Q.transpose(1, 2).contiguous().transpose(1, 2), K),
    "repeated keys": lambda: SoftmaxMap(Q, K[:, :, :1].expand(-1, -1, 9, -1)),
    "every rule": lambda: SoftmaxMap(Q, K, mask=EVERY_RULE),
    "every bias": lambda: SoftmaxMap(Q, K, bias=EVERY_BIAS, softcap=2.0, sinks=numbers(4)),
    "bfloat16": lambda: SoftmaxMap(Q.bfloat16(), K.bfloat16(), v=V.bfloat16()),
    "a part": lambda: SoftmaxMap(Q, K, mask=HIDDEN)[:, 1:3, 2:],
    "one head": lambda: SoftmaxMap(Q, K, mask=HIDDEN)[0, 1],
    "uniform": lambda: SoftmaxMap(Q, K, mask=HIDDEN, bias=EVERY_BIAS).uniform(),
    "weights": lambda: DenseMap(torch.softmax(numbers(4, 9, 9), -1)),
    "weights of one sequence": lambda: OneSequence(DenseMap(torch.softmax(numbers(4, 9, 9), -1))),
    "additive": lambda: AdditiveMap(Q, K, numbers(8), mask=masks.causal()),
    "linear": lambda: LinearMap(Q, K, padding=torch.tensor([[1] * 7 + [0] * 2])),
    "a past": lambda: LinearMap(Q, K, is_causal=True, past=numbers(1, 2, 8).abs(), past_keys=3),
    "average": lambda: average_heads(SoftmaxMap(Q, K)),
    "changed heads": lambda: replace_heads(SoftmaxMap(Q, K), {0: "previous", 1: "uniform", 3: "nothing"}),
    "average of a part": lambda: average_heads(DenseMap(torch.softmax(numbers(4, 9, 9), -1)))[2:4],
    "stitched": lambda: Stitched([SoftmaxMap(Q[:, :, :5], K[:, :, :5]), SoftmaxMap(Q[:, :, 5:], K[:, :, 2:])], [0, 2]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def reopened(folder: Path, *maps: AttentionMap) -> list[Any]:
    save_folder(folder, {}, [{"map": attn} for attn in maps])
    return [layer["map"] for layer in load_folder(folder)[1]]


@pytest.mark.parametrize("name", MAPS)
def test_a_map_comes_back_to_the_bit(name: str, folder: Path) -> None:
    attn = MAPS[name]()
    (again,) = reopened(folder, attn)
    assert type(again) is type(attn)
    assert repr(again) == repr(attn)
    assert again.dtype == attn.dtype
    assert torch.equal(again.to_dense(), attn.to_dense())
    assert torch.equal(again.uniform().to_dense(), attn.uniform().to_dense())


def test_what_was_computed_once_is_not_computed_again(folder: Path) -> None:
    attn = SoftmaxMap(Q, K, mask=masks.causal())
    lse = attn.lse
    (again,) = reopened(folder, attn)
    assert torch.equal(again._lse, lse)
    assert again.mask == masks.causal()  # rules compare as before: the page knows a causal map by it


def test_a_tensor_that_maps_share_is_written_once(folder: Path) -> None:
    hidden = numbers(1, 1, 200, 200) > 0
    q = numbers(1, 1, 200, 2)
    first, second = reopened(folder, *(SoftmaxMap(q, q, mask=hidden) for _ in range(2)))
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) < 200 * 200 + 2 * 5_000
    assert first._q.data_ptr() == second._q.data_ptr() == first._k.data_ptr()
    assert torch.equal(first.to_dense(), second.to_dense())


def test_a_repeated_tensor_is_written_without_its_copies(folder: Path) -> None:
    flags = torch.ones(1, 1, 1, 300, dtype=torch.bool).expand(1, 1, 300, 300)
    (again,) = reopened(folder, SoftmaxMap(numbers(1, 1, 300, 1), numbers(1, 1, 300, 1), mask=flags))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20_000
    assert again.mask.mask.shape == (1, 1, 300, 300)


def test_tensors_are_read_when_they_are_used(folder: Path) -> None:
    (again,) = reopened(folder, SoftmaxMap(Q, K))
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("needs /proc, to see what is mapped")
    assert str(folder) in mapped.read_text()
    dense = again.to_dense()
    shutil.rmtree(folder)
    assert torch.equal(again.to_dense(), dense)  # what is mapped stays, even where the name is gone


def test_facts_come_back(folder: Path) -> None:
    facts = {"a": [1, None, True, 0.5], "b": ("\ud800 <é", {"c": slice(1, 2)}), "d": np.arange(3, dtype=np.uint16)}
    save_folder(folder, facts, [{"t": torch.zeros(0, 3)}])
    again, ((layer),) = load_folder(folder)
    assert again["a"] == facts["a"]
    assert again["b"] == facts["b"]
    assert again["d"].dtype == np.uint16
    assert again["d"].tolist() == [0, 1, 2]
    assert layer["t"].shape == (0, 3)


def test_a_function_is_no_data(folder: Path) -> None:
    class Mine(masks.MaskRule):
        def allows(self, b: Any, h: Any, q: Any, k: Any, T: int, S: int) -> Any:
            return q >= k

    with pytest.raises(RecordingError, match=r"holds .*\(Mine\) cannot be saved.*class of your own"):
        reopened(folder, SoftmaxMap(Q, K, mask=Mine()))
    assert list(folder.parent.iterdir()) == []


def test_a_name_of_ours_is_not_enough(folder: Path) -> None:
    """A reader's class that is called like one of ours is still not ours."""
    Band = type("Band", (masks.MaskRule,), {"allows": lambda self, b, h, q, k, T, S: q >= k})
    with pytest.raises(RecordingError, match="cannot be saved"):
        reopened(folder, SoftmaxMap(Q, K, mask=Band()))


def test_the_format_names_every_attribute() -> None:
    """Whoever changes what these classes hold raises FORMAT, and writes the new names here."""
    assert FORMAT == 3
    softmax = {"mask", "bias", "scale", "softcap", "sinks", "_v", "_q", "_k", "_lse", "_axes", "_b", "_h", "_t"}
    softmax |= {"_all_queries", "_bound", "_made_from"}
    names = {type(attn).__name__: set(vars(attn)) for attn in (make() for make in reversed(MAPS.values()))}
    assert names == {
        "SoftmaxMap": softmax,
        "AdditiveMap": softmax - {"bias", "scale", "softcap", "sinks", "_v"} | {"_score"},
        "LinearMap": {"mask", "padding", "_is_causal", "_past", "_past_keys", "_norm", "_q", "_k", "_axes", "_b", "_h"}
        | {"_t", "_all_queries", "_bound", "_made_from"},
        "DenseMap": {"_layers", "_stacked", "v"},
        "HeadAverage": {"_attn"},
        "OneSequence": {"_attn"},
        "Replaced": {"_attn", "_heads", "_others"},
        "Selection": {"_attn", "_lead", "_rows"},
        "Stitched": {"_parts"},
    }


# --- folders that are not whole -----------------------------------------------------------------------------------


@pytest.fixture
def written(folder: Path) -> Path:
    save_folder(folder, {"name": "x"}, [{"map": SoftmaxMap(Q, K)}, {"map": SoftmaxMap(K, K)}])
    return folder


def test_a_folder_that_vanished(written: Path) -> None:
    shutil.rmtree(written)
    with pytest.raises(RecordingError, match=r"there is no recording .*recording: no such folder"):
        load_folder(written)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"is no recording: there is no recording\.json in it"):
        load_folder(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
@pytest.mark.parametrize("name", ["recording.json", "layer-0001.safetensors"])
def test_a_file_that_is_cut_short(name: str, keep: int, written: Path) -> None:
    content = (written / name).read_bytes()
    (written / name).write_bytes(content[:keep])
    with pytest.raises(RecordingError, match=rf"recording is damaged: {name}.*Copy the folder again"):
        load_folder(written)


def test_a_missing_layer(written: Path) -> None:
    (written / "layer-0001.safetensors").unlink()
    with pytest.raises(RecordingError, match=r"damaged: layer-0001\.safetensors is missing"):
        load_folder(written)


def test_a_file_of_the_right_size_with_other_content(written: Path) -> None:
    path = written / "layer-0000.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(RecordingError, match=r"damaged: layer-0000\.safetensors: "):
        load_folder(written, check=False)


@pytest.mark.parametrize("byte", [-1, -100, 200])
def test_a_bit_that_flipped(byte: int, written: Path) -> None:
    path = written / "layer-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)
    for check in (None, True):
        with pytest.raises(RecordingError, match=r"in layer-0001\.safetensors are not those that were written"):
            load_folder(written, check=check)


def test_what_is_very_large_is_compared_with_its_checksum_on_request(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(saving, "_checksum", lambda path: read.append(path.name) or 0)
    size = sum(file.stat().st_size for file in written.glob("*.safetensors"))
    for most, check in ((size - 1, None), (size, False)):
        monkeypatch.setattr(saving, "CHECKED", most)
        load_folder(written, check=check)
    assert read == []
    for most, check in ((size, None), (0, True)):
        monkeypatch.setattr(saving, "CHECKED", most)
        with pytest.raises(RecordingError, match="are not those that were written"):
            load_folder(written, check=check)
    assert read == ["layer-0000.safetensors"] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": [{"dict": {"map": {"os.system": "id"}}}]}, "damaged: its parts do not fit together"),
        ({"layers": [{"dict": {"map": {"tensor": ["9.9", [1], []]}}}]}, "damaged: its parts do not fit together"),
        ({"layers": [{"dict": {"map": {"tensor": ["0.0", [7, 7], []]}}}]}, "damaged: its parts do not fit together"),
        ({"layers": [{"dict": {"map": {"tensor": ["-1.0", [1], []]}}}]}, "damaged: its parts do not fit together"),
        ({"files": {"../elsewhere.safetensors": 3}}, "names files that no recording has"),
        ({"files": {"/dev/null": 0}}, "names files that no recording has"),
        ({"files": {"layer-0000.safetensors": ["many", 0]}}, "damaged: its parts do not fit together"),
        ({"files": {"layer-0000.safetensors": 3}}, "damaged: its parts do not fit together"),
        ({"files": None}, "damaged: its parts do not fit together"),
    ],
)
def test_an_index_that_somebody_made(change: dict[str, Any], said: str, written: Path) -> None:
    index = written / "recording.json"
    made = json.loads(index.read_text())
    made["told"] |= change
    index.write_text(json.dumps(made | {"sha256": saving._digest(made["told"])}))
    with pytest.raises(RecordingError, match=said):
        load_folder(written)


@pytest.mark.parametrize(("version", "said"), [(FORMAT + 1, "a newer clearhead: update this one"), ("1", "another")])
def test_an_index_of_another_version(version: object, said: str, written: Path) -> None:
    index = written / "recording.json"
    index.write_text(json.dumps({"format": version, "anything": 1}))
    with pytest.raises(
        RecordingError, match=f"format {version!r}, this clearhead reads {FORMAT}. It was written by {said}"
    ):
        load_folder(written)


def test_an_index_that_was_changed(written: Path) -> None:
    """A number that became another would show wrong weights."""
    index = written / "recording.json"
    index.write_text(index.read_text().replace('"scale":', '"scale":1', 1))
    with pytest.raises(RecordingError, match=r"damaged: recording\.json is cut short or was changed"):
        load_folder(written)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"format":1,"told":' + '{"a":' * 100_000, "null", "[1]"])
def test_an_index_of_something_else(content: str, written: Path) -> None:
    (written / "recording.json").write_text(content)
    with pytest.raises(RecordingError, match=r"damaged: recording\.json is cut short or was changed"):
        load_folder(written)


def test_an_index_that_tells_nothing(written: Path) -> None:
    index = {"format": FORMAT, "sha256": saving._digest([1]), "told": [1]}
    (written / "recording.json").write_text(json.dumps(index))
    with pytest.raises(RecordingError, match="damaged"):
        load_folder(written)


def test_nothing_is_written_over(written: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in written.iterdir()}
    with pytest.raises(RecordingError, match="is there already"):
        save_folder(written, {}, [])
    assert {file.name: file.read_bytes() for file in written.iterdir()} == before
    with pytest.raises(RecordingError, match="there is no folder"):
        save_folder(tmp_path / "nowhere" / "recording", {}, [])


def test_writing_is_all_or_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        save_folder(folder, {}, [{"map": SoftmaxMap(Q, K)}])
    assert list(folder.parent.iterdir()) == []


def test_a_recording_has_the_rights_of_any_new_file(folder: Path) -> None:
    save_folder(folder, {}, [{"map": SoftmaxMap(Q, K)}])
    folder.with_name("file").touch()
    expected = folder.with_name("file").stat().st_mode
    assert {file.stat().st_mode for file in folder.iterdir()} == {expected}


def test_an_empty_folder_is_taken(folder: Path) -> None:
    folder.mkdir()
    before = folder.stat().st_ino
    save_folder(folder, {}, [{"n": 1}])
    assert load_folder(folder) == ({}, [{"n": 1}])
    assert folder.stat().st_ino == before  # itself: it may be a disk of its own
    assert sorted(file.name for file in folder.iterdir()) == ["layer-0000.safetensors", "recording.json"]


def test_a_link_to_an_empty_folder_is_followed(folder: Path) -> None:
    folder.mkdir()
    link = folder.with_name("link")
    link.symlink_to(folder)
    save_folder(link, {}, [])
    assert link.is_symlink()
    assert load_folder(folder) == ({}, [])


def test_the_folder_in_which_one_stands_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    monkeypatch.chdir(folder)
    save_folder(Path("."), {}, [])
    assert load_folder(Path(".")) == ({}, [])


@pytest.mark.parametrize("last", ["layer-0000.safetensors", "recording.json"])
def test_an_empty_folder_stays_empty_where_writing_ends_early(
    last: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        replace(source, target)
        if target.name == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_folder(folder, {}, [{"n": 1}])
    assert list(folder.iterdir()) == []


# --- views --------------------------------------------------------------------------------------------------------


class Mine(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_a_view_is_opened_without_its_model(folder: Path) -> None:
    words = ["the", "keeper", "lit", "the", "lamp", "and", "the", "keeper", "wrote"]
    view = clearhead.look(Mine(), numbers(9, 4), tokens=words, name="a layer")
    assert view.save_recording(folder) == folder
    again = View.open(folder)
    assert repr(again) == repr(view)
    assert again.tokens == view.tokens
    assert list(again.heads()) == list(view.heads())
    assert torch.equal(again.maps[0].to_dense(), view.maps[0].to_dense())
    assert (again.nbytes, again.dense_nbytes) == (view.nbytes, view.dense_nbytes)
    page, first = again.page(), view.page()
    assert [one for one in page.elements if 'data-blob="p.' not in one] == [
        one for one in first.elements if 'data-blob="p.' not in one
    ]  # all but the matrices of the layer, which is not at hand
    assert repr(View.open(again.save_recording(folder.with_name("again")))) == repr(view)


@pytest.mark.parametrize("change", [{"layers": {"list": [0, 1]}}, {"name": "x", "texts": None}, {"sides": 3}])
def test_a_view_that_somebody_made(change: dict[str, Any], folder: Path) -> None:
    clearhead.look(Mine(), numbers(3, 4)).save_recording(folder)
    index = folder / "recording.json"
    made = json.loads(index.read_text())
    made["told"]["facts"]["dict"] |= change
    index.write_text(json.dumps(made | {"sha256": saving._digest(made["told"])}))
    with pytest.raises(RecordingError, match="damaged: its parts do not fit together"):
        View.open(folder)


def test_nothing_is_written_before_a_view_is_whole(folder: Path) -> None:
    view = clearhead.look(Mine(), torch.full((3, 2), torch.nan))
    with pytest.raises(clearhead.ModelError, match="not finite"):
        view.save_recording(folder)
    assert list(folder.parent.iterdir()) == []


def test_every_class_is_tried() -> None:
    """What is written and put back, by name, is in one of the maps above."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        if type(value) in _CLASSES.values():
            found.add(type(value).__name__)
            for one in vars(value).values():
                walk(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one)

    for make in MAPS.values():
        attn = make()
        walk(attn)
        walk(attn.uniform())
    assert found == set(_CLASSES)
