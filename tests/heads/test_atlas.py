"""The atlas of a corpus: each token once, whatever windows, batches and processes, and however often it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import clearhead
from clearhead import ModelError, RecordingError
from clearhead._files import checksum
from clearhead.heads import Atlas, atlas
from clearhead.heads.atlas_progress import Part, together
from clearhead.heads.corpus import Corpus
from clearhead.heads.tally import MEASURES

from .letters import LONG, SETTINGS, SIZES, Letters, llama

module: Any = import_module("clearhead.heads.atlas")  # the name in the package is the function's
TEXTS = ["the cat sat on the mat " * 9, "hello you", "x", "abc def ghi" * 3]


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, initializer_range=0.5, **SIZES)
    return transformers.BertForMaskedLM(config).double().eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def made(model: Any, documents: Any = TEXTS, **how: Any) -> Atlas:
    return atlas(model, Letters(vocabulary=64), documents, **SETTINGS | how)


@pytest.fixture(scope="module")
def plain(model: Any) -> Atlas:
    return made(model)


# --- what is counted --------------------------------------------------------------------------------------------------


def test_of_one_window_it_is_what_the_dense_weights_say(model: Any) -> None:
    text = "the cat sat on the mat"
    found = made(model, [text], window=64)
    with clearhead.record(model) as recording, torch.no_grad():
        model(torch.tensor([[ord(letter) % 64 for letter in text]]))
    weights = torch.stack([attn.to_dense()[0] for attn in recording])  # (L, H, T, T)
    t = torch.arange(len(text)).double()
    expected = {
        "entropy": -torch.xlogy(weights, weights).sum(-1),
        "distance": (weights * (t[:, None] - t).abs()).sum(-1),
        "first": weights[..., 0],
        "self": weights.diagonal(dim1=-2, dim2=-1),
        "previous": weights.diagonal(-1, -2, -1),
        "peak": weights.amax(-1),
    }
    assert list(expected) == list(MEASURES)
    for name, rows in expected.items():
        assert (found.count(name) == rows.shape[-1]).all()
        torch.testing.assert_close(found.mean(name), rows.mean(-1), rtol=1e-12, atol=0)
        torch.testing.assert_close(found.least(name), rows.amin(-1), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(found.most(name), rows.amax(-1), rtol=1e-12, atol=0)
        assert (found.histogram(name).sum(-1) == rows.shape[-1]).all()


def test_trap_27_the_uniform_head_is_beside_every_mean(model: Any) -> None:
    n = torch.arange(1, 23).double()  # keys that each query sees
    found = made(model, ["the cat sat on the mat"], window=64)
    share = (1 / n).mean()
    expected = {"entropy": n.log().mean(), "distance": ((n - 1) / 2).mean(), "previous": (1 / n[1:]).mean()}
    for name in MEASURES:
        torch.testing.assert_close(
            found.baseline(name), expected.get(name, share).expand(2, 4), rtol=1e-12, atol=0, check_stride=False
        )


def test_the_uniform_head_of_each_layer_is_that_of_its_mask() -> None:
    """A window of three keys in every second layer."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        head_dim=8,
        num_key_value_heads=2,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **SIZES | {"num_hidden_layers": 4},
    )
    found = made(transformers.Gemma3ForCausalLM(config).double().eval(), ["the cat sat on the mat"], window=64)
    n = torch.arange(1, 23)
    expected = torch.stack([(1 / keys.double()).mean() for keys in (n.clamp(max=3), n)])
    torch.testing.assert_close(found.baseline("peak")[:, 0], expected.repeat(2), rtol=1e-12, atol=0)


def agree(one: Atlas, other: Atlas) -> None:
    for name in MEASURES:
        assert torch.equal(one.count(name), other.count(name))
        torch.testing.assert_close(one.mean(name), other.mean(name), rtol=1e-12, atol=0)
        torch.testing.assert_close(one.least(name), other.least(name), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(one.most(name), other.most(name), rtol=1e-12, atol=0)
        assert (one.histogram(name) - other.histogram(name)).abs().sum() <= 2  # a number on an edge


@pytest.mark.parametrize("make", [llama, bert])
def test_trap_05_padding_counts_nowhere(make: Callable[[], Any]) -> None:
    model, tokenizer = make(), Letters(before=[1], after=[2], vocabulary=64)
    alone = atlas(model, tokenizer, TEXTS, window=16, overlap=4, at_once=1)
    batched = atlas(model, tokenizer, TEXTS, window=16, overlap=4, at_once=64)
    agree(alone, batched)
    assert alone.tokens == batched.tokens == sum(map(len, TEXTS)) == int(alone.count("entropy")[0, 0])


def test_a_token_has_the_context_of_its_window(model: Any) -> None:
    """Two windows by hand: of the second only what is new counts."""
    text = "abcdefghijklmnop"
    both = made(model, [text], window=12, overlap=6)
    first = made(model, [text[:12]], window=12)
    second = made(model, [text[6:]], window=12)
    assert both.tokens == 16
    assert (both.least("first") <= torch.minimum(first.least("first"), second.least("first"))).all()
    third = made(model, [text[6:12]], window=12)  # causal: as the context alone
    total = first.mean("self") * 12 + second.mean("self") * 10 - third.mean("self") * 6
    torch.testing.assert_close(both.mean("self"), total / 16, rtol=1e-10, atol=0)


def test_the_token_before_is_asked_of_queries_that_have_one(plain: Atlas) -> None:
    assert (plain.count("previous") == plain.tokens - len(TEXTS)).all()
    assert (plain.count("self") == plain.tokens).all()


def test_the_models_output_and_mode_are_left_alone(model: Any, plain: Atlas) -> None:
    ids = torch.arange(9)[None]
    before = model(ids).logits
    assert made(model) == plain
    assert torch.equal(model(ids).logits, before)
    assert all(not module._forward_hooks for module in model.modules())


def test_documents_may_be_made_one_by_one(model: Any, plain: Atlas) -> None:
    assert made(model, iter(TEXTS)) == plain


def test_files_are_documents_too(model: Any, plain: Atlas, tmp_path: Path) -> None:
    for n, text in enumerate(TEXTS):
        (tmp_path / f"{n}.txt").write_text(text)
    assert made(model, [tmp_path / f"{n}.txt" for n in range(4)]) == plain


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_table_is_frozen_and_says_what_it_is(plain: Atlas) -> None:
    with pytest.raises(AttributeError):
        plain.tokens = 3  # type: ignore[misc]
    assert repr(plain) == "Atlas(LlamaForCausalLM: 8 heads, 250 tokens in 22 windows of 16, overlap 4)"
    assert plain.edges("self")[[0, 128, 256]].tolist() == [0, 0.5, 1]
    assert plain.edges("distance")[-1] == pytest.approx(15)
    with pytest.raises(ValueError, match="'entrophy' is no measure of an atlas; expected one of entropy, distance"):
        plain.mean("entrophy")


def test_json_keeps_every_bit(plain: Atlas, tmp_path: Path) -> None:
    plain.save(tmp_path / "a.json")
    assert Atlas.load(tmp_path / "a.json") == plain
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text()[:999])
    with pytest.raises(RecordingError, match=r"a\.json is no atlas, or damaged"):
        Atlas.load(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"format": 99, "measures": []}')
    with pytest.raises(RecordingError, match=r"b\.json is an atlas of another format"):
        Atlas.load(tmp_path / "b.json")


def test_rows_are_one_a_head(plain: Atlas) -> None:
    rows = plain.rows()
    assert [(row["layer"], row["head"]) for row in rows] == [(n, h) for n in range(2) for h in range(4)]
    assert rows[5]["previous"] == plain.mean("previous")[1, 1]
    assert rows[5]["peak_max"] == plain.most("peak")[1, 1]
    assert rows[5]["uniform_first"] == plain.baseline("first")[1, 1]


def test_pandas_gets_the_rows_where_it_is_there(plain: Atlas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        plain.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", type("pandas", (), {"DataFrame": list}))
    assert plain.to_pandas() == plain.rows()


def test_atlases_of_two_corpora_add_up(model: Any, plain: Atlas) -> None:
    one, two, three = (made(model, texts) for texts in (TEXTS[:1], TEXTS[1:3], TEXTS[3:]))
    assert (one + two) + three == three + (two + one)
    agree(one + two + three, plain)
    with pytest.raises(RecordingError, match="expected atlases of one model, with the same windows and overlap"):
        plain + made(model, ["abcd"], overlap=3)


# --- progress ---------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What no code of ours catches."""


def killed(after: int) -> Callable[[str, int, int], None]:
    calls = iter(range(1000))

    def report(stage: str, done: int, total: int) -> None:
        assert total == sum(map(len, TEXTS))
        if next(calls) + 1 == after:
            raise Killed

    return report


def test_a_run_that_was_stopped_goes_on_to_the_same_table(model: Any, plain: Atlas, tmp_path: Path) -> None:
    folder = tmp_path / "atlas"
    with pytest.raises(Killed):
        made(model, out=folder, on_progress=killed(2))
    assert not (folder / "atlas.json").exists()
    with pytest.raises(Killed):
        made(model, resume=folder, on_progress=killed(4))
    stages: list[str] = []
    assert made(model, resume=folder, on_progress=lambda stage, *_: stages.append(stage)) == plain
    assert stages == ["skip"] * 4 + ["atlas"] * (len(stages) - 4)
    assert Atlas.load(folder / "atlas.json") == plain
    assert made(model, resume=folder) == plain  # there is nothing left to do


def test_every_state_on_the_disk_is_whole(model: Any, plain: Atlas, tmp_path: Path, monkeypatch: Any) -> None:
    """Written after each batch; whichever write is the last, the next run ends in the same table."""
    monkeypatch.setattr(module, "SAVED", -1.0)
    folder = tmp_path / "atlas"
    assert made(model, out=folder) == plain
    (part,) = folder.glob("part-*.json")
    assert json.loads(part.read_text())["part"]["tokens"] == 250
    assert not list(folder.glob(".clearhead-*"))


def test_processes_share_the_batches(model: Any, plain: Atlas) -> None:
    parts = []
    for rank in range(3):
        corpus = Corpus(Letters(vocabulary=64), TEXTS, **SETTINGS)
        run = module._Run(model, corpus, 16, Part(3, rank), None, lambda *_: None)
        total = run.all()
        parts.append(run.part)
    assert [part.batches for part in parts] == [len(range(rank, total, 3)) for rank in range(3)]
    assert together(parts).layers == together(parts[::-1]).layers == plain.layers
    assert together(parts).uniform == plain.uniform


def test_what_three_processes_began_one_can_end(model: Any, plain: Atlas, tmp_path: Path) -> None:
    folder = tmp_path / "atlas"
    with pytest.raises(Killed):
        made(model, out=folder, on_progress=killed(1))
    (path,) = folder.glob("part-*.json")
    told = json.loads(path.read_text())
    told["part"]["step"] = 3  # as if two others had been killed before their first batch
    path.write_text(json.dumps(told | {"check": checksum(told["part"])}))
    assert made(model, resume=folder) == plain


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(model: Any, tmp_path: Path) -> Path:
    with pytest.raises(Killed):
        made(model, out=tmp_path / "begun", on_progress=killed(2))
    return tmp_path / "begun"


def test_progress_of_something_else_is_refused_and_left_alone(model: Any, plain: Atlas, begun: Path) -> None:
    before = {path: path.read_bytes() for path in begun.iterdir()}
    with pytest.raises(RecordingError, match=r"begun holds the progress of another atlas \(model '\w+' there, '\w+' h"):
        made(llama(1), resume=begun)
    with pytest.raises(RecordingError, match=r"another atlas \(overlap 4 there, 5 here, window 16 there, 17 here\)"):
        made(model, resume=begun, window=17, overlap=5)
    with pytest.raises(RecordingError, match="the documents are not those that this folder's progress was made of"):
        made(model, ["tha" + TEXTS[0][3:], *TEXTS[1:]], resume=begun)
    with pytest.raises(RecordingError, match="the documents are not those"):
        made(model, TEXTS[1:2], resume=begun)
    assert {path: path.read_bytes() for path in begun.iterdir()} == before
    assert made(model, resume=begun) == plain


def test_progress_of_another_version_is_refused(model: Any, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__version__", "9.9")
    with pytest.raises(RecordingError, match=r"another atlas \(clearhead '0.*' there, '9.9' here\)"):
        made(model, resume=begun)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:200],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"step":1', '"step":0'),
        lambda text: text.replace('"tokens":', '"tokens":1'),  # a number more than there was
    ],
)
def test_damaged_progress_is_said(model: Any, begun: Path, damage: Callable[[str], str]) -> None:
    (part,) = begun.glob("part-*.json")
    whole = part.read_text()
    part.write_text(damage(whole))
    assert part.read_text() != whole
    with pytest.raises(RecordingError, match=r"part-0001-0000\.json is no progress of an atlas, or damaged"):
        made(model, resume=begun)
    assert part.read_text() == damage(whole)


def test_a_folder_is_new_or_gone_on_with(model: Any, begun: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"begun is not empty: go on with resume="):
        made(model, out=begun)
    with pytest.raises(RecordingError, match=r"there is no progress of an atlas in .*nowhere: begin with out="):
        made(model, resume=tmp_path / "nowhere")
    with pytest.raises(RecordingError, match="give one of the two"):
        made(model, out=begun, resume=begun)


def test_two_runs_in_one_folder_are_found_out(model: Any, begun: Path) -> None:
    (part,) = begun.glob("part-*.json")
    part.with_name("part-0001-0001.json").write_text(part.read_text())
    with pytest.raises(RecordingError, match="two runs have worked in it at once"):
        made(model, resume=begun)


def test_a_file_that_vanished_can_be_put_back(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("clearhead.heads.corpus"), "POOL", 1)  # read on only when it is needed
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in files:
        path.write_text(TEXTS[0])
    whole = made(model, files)

    def remove(stage: str, done: int, total: int) -> None:
        files[1].unlink(missing_ok=True)

    with pytest.raises(ModelError, match=r"cannot read .*b\.txt: No such file or directory\. What was computed before"):
        made(model, files, out=tmp_path / "atlas", on_progress=remove)
    with pytest.raises(ModelError, match=r"cannot read .*b\.txt: No such file"):
        made(model, files, resume=tmp_path / "atlas")
    files[1].write_text(TEXTS[0])
    stages: list[str] = []
    assert made(model, files, resume=tmp_path / "atlas", on_progress=lambda stage, *_: stages.append(stage)) == whole
    assert stages[0] == "skip"


def test_one_token_is_no_corpus(model: Any) -> None:
    with pytest.raises(ModelError, match="the documents are one token together"):
        made(model, ["x"])


@pytest.mark.parametrize(
    ("documents", "how", "message"),
    [
        ("a text", {}, r"expected a list of texts and files, \['a text'\]"),
        ([], {}, "there are no documents"),
        (["ab"], {"window": 65}, r"window=65\): LlamaForCausalLM reads 64 tokens at most"),
        (["ab"], {"overlap": 16}, "windows of 16 tokens that overlap by 16"),
        (["ab"], {"workers": 0}, "workers=0.*at least one process"),
        (["ab"], {"workers": 2.0}, r"workers=2\.0.*at least one process"),
        (["ab"], {"window": 8.5}, r"window=8\.5.*a whole number of tokens"),
        (["ab"], {"overlap": "1"}, "overlap='1'.*a whole number of tokens"),
        (None, {}, r"atlas\(model, tokenizer, NoneType\): expected texts"),
    ],
)
def test_what_makes_no_sense_is_refused(model: Any, documents: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        made(model, documents, **how)


def test_models_that_read_two_texts_are_refused(translator: Any) -> None:
    with pytest.raises(ModelError, match="MarianMTModel reads two texts"):
        made(translator)


def test_what_reads_no_text_is_refused(painter: Any) -> None:
    with pytest.raises(ModelError, match="ViTModel reads no text"):
        made(painter)
    with pytest.raises(ModelError, match=r"atlas\('smollm2', …\): expected a torch.nn.Module"):
        made("smollm2")


def test_models_that_draw_dropout_are_refused() -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM is in training mode.*call model\.eval\(\)"):
        made(llama().train())


def test_weights_that_are_not_finite_are_said() -> None:
    broken = llama()
    broken.model.layers[1].self_attn.q_proj.weight.data.fill_(torch.nan)
    with pytest.raises(RecordingError, match=r"L1.*its attention weights are not finite"):
        made(broken)


# --- processes --------------------------------------------------------------------------------------------------------


def started(folder: Path, *arguments: str, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("letters.py")
    command = [sys.executable, *launcher, str(script), *arguments]
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, cwd=folder, **pipes)


def ended(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    with process:
        out, errors = process.communicate()
    return out.splitlines(), errors


def test_a_worker_that_is_ended_for_another_keeps_what_it_has_done(
    model: Any, plain: Atlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("clearhead.heads.atlas_workers"), "_spawned", True)

    def end(stage: str, done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        made(model, out=tmp_path / "atlas", on_progress=end)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(list((tmp_path / "atlas").glob("part-*.json"))) == 1
    assert made(model, resume=tmp_path / "atlas") == plain


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_killed_process_goes_on_to_the_same_table(model: Any, tmp_path: Path) -> None:
    with started(tmp_path, "1", "out", "atlas", "found.json") as process:
        assert process.stdout is not None
        for n, line in enumerate(process.stdout):
            assert line.startswith("atlas ")
            if n == 10:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    again = started(tmp_path, "1", "resume", "atlas", "found.json")
    lines, errors = ended(again)
    assert again.returncode == 0, errors
    assert sum(line.startswith("skip") for line in lines) >= 10
    assert Atlas.load(tmp_path / "found.json") == made(model, LONG)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["workers", "torchrun"])
def test_two_processes_make_the_same_table(model: Any, tmp_path: Path, how: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    given = ("2", ()) if how == "workers" else ("1", torchrun)
    process = started(tmp_path, given[0], "out", "atlas", "found.json", launcher=given[1])
    _, errors = ended(process)
    assert process.returncode == 0, errors
    whole = made(model, LONG)
    agree(Atlas.load(tmp_path / "found.json"), whole)
    assert len(list((tmp_path / "atlas").glob("part-*.json"))) == 2
    agree(made(model, LONG, resume=tmp_path / "atlas"), whole)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_error_in_a_worker_is_that_error(tmp_path: Path) -> None:
    """And the other one, which would wait for it, is ended; what was done is there."""
    (tmp_path / "a.txt").write_text(LONG[0])
    (tmp_path / "b.txt").write_bytes(b"good text " + b"\xff")
    process = started(tmp_path, "2", "out", "atlas", "found.json", "a.txt", "b.txt")
    _, errors = ended(process)
    assert process.returncode == 1
    assert "ModelError: b.txt is not text: byte 10 is not UTF-8" in errors.splitlines()[-1]
    assert list((tmp_path / "atlas").glob("part-*.json"))
