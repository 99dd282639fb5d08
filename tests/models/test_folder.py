"""The folder that `clearhead train` makes is a model to everything else, and its checkpoints are a slider."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead import Views, cost, masks, zoo
from clearhead.errors import ModelError
from clearhead.models import GPT, loading

from .conftest import TEXT, run

pytest.importorskip("transformers")


def test_the_zoo_gives_the_model_after_its_last_step_and_its_tokenizer(trained: Path):
    model, tokenizer = zoo.load(str(trained))
    last, _ = zoo.load(str(trained / "step-000005.safetensors"))
    first, _ = zoo.load(str(trained / "step-000000.safetensors"))
    assert isinstance(model, GPT)
    assert not model.training
    assert [one.config.name for one in (model, last)] == ["hamlet", "hamlet, step-000005"]
    assert torch.equal(model.tokens.weight, last.tokens.weight)
    assert not torch.equal(model.tokens.weight, first.tokens.weight)
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert zoo.context_length(model) == 128


def test_its_heads_are_looked_at(trained: Path):
    model, tokenizer = zoo.load(str(trained))
    view = clearhead.look(model, tokenizer, "to be — né")
    assert "".join(token for token in view.tokens if token != "\ufffd") == "to be — né"
    assert len(view.heads()) == 8
    assert all(attn.mask == masks.causal() for attn in view.maps)
    with torch.no_grad():
        x = model.tokens(view.texts[0].ids[None])
        attn = model.blocks[0].attention.attend(model.blocks[0].norm1(x))[1]
    torch.testing.assert_close(view.maps[0].to_dense(), attn.to_dense())
    written = clearhead.look(model, tokenizer, "to be", generate=7)
    assert len(written.tokens) <= 12
    assert written.texts[0].prompt == 5


def test_the_page_finds_the_matrices_behind_a_head(trained: Path):
    model, tokenizer = zoo.load(str(trained))
    view = clearhead.look(model, tokenizer, "to be or not to be")
    found = view._finders[1](view.maps[1])
    attention = model.blocks[1].attention
    parts = [found.q, found.k, found.v, found.out]
    owners = [attention.W_query, attention.W_key, attention.W_value, attention.out_proj]
    for part, linear in zip(parts, owners, strict=True):
        assert torch.equal(part.matrix, linear.weight.mT)


def test_the_cost_is_counted_of_its_config(trained: Path):
    counted = cost.from_config(zoo.config(str(trained)))
    assert (counted.layers, counted.heads, counted.head_dim, counted.tokens, counted.causal) == (2, 4, 16, 128, True)


def test_look_shows_its_checkpoints_as_steps(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Views] = []
    keep = Views.__init__
    monkeypatch.setattr(Views, "__init__", lambda self, *given: (keep(self, *given), made.append(self))[0])
    done = run("look", "to be", "--model", trained, "--checkpoints", "--save", tmp_path / "steps.html")
    assert done.exit_code == 0, done.output
    assert made[0].labels == [0, 2, 4, 5]
    assert [view.name for view in made[0]][:2] == ["hamlet, step-000000", "hamlet, step-000002"]
    assert "hamlet, step-000005: 5 tokens, 2 layers x 4 heads" in done.stdout
    assert (tmp_path / "steps.html").stat().st_size > 100_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--checkpoints", "--json", "--target", "not to be"],
            "--checkpoints makes a page of several views: leave --json, --target out",
        ),
        (["--checkpoints", "--model", "smollm2"], "smollm2 is no folder that `clearhead train` has made"),
    ],
)
def test_checkpoints_that_cannot_be_shown(options: list[str], said: str):
    done = run("look", "to be", *options)
    assert done.exit_code == 2
    assert said in done.stderr.replace("\n", " ")


def test_the_built_in_text_is_cut_to_what_the_model_reads(trained: Path):
    found = json.loads(run("look", "--model", trained, "--json").stdout)
    assert "".join(found["tokens"]).endswith("every evening.")


def test_look_shows_its_checkpoints_live(trained: Path, monkeypatch: pytest.MonkeyPatch):
    server = pytest.importorskip("clearhead.page.server")
    told: list[dict[str, object]] = []

    def run_once(self: object) -> None:
        told.extend(json.loads(answers.part("facts")) for answers in self._pages)  # type: ignore[attr-defined]
        assert self._pages[0].part("3.thumbs") == self._pages[3].part("thumbs")  # type: ignore[attr-defined]

    monkeypatch.setattr(server.Server, "run", run_once)
    monkeypatch.setattr("clearhead.cli._read", lambda views: None)  # a thread, which would outlive the run
    done = run("look", "to be", "--model", trained, "--checkpoints", "--live", "--no-open")
    assert done.exit_code == 0, done.output
    assert [(facts["pages"], facts["page"]) for facts in told] == [([0, 2, 4, 5], n) for n in range(4)]
    assert done.stdout.count("http://") == 1


def test_what_it_writes_begins_with_the_prompt(trained: Path):
    first, again, other = (run("generate", trained, "to bé ", "--tokens", 60, "--seed", n) for n in (1, 1, 2))
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("to bé ")
    assert first.stdout == again.stdout != other.stdout
    assert all(letter.isprintable() or letter == "\n" for letter in first.stdout)
    greedy = run("generate", trained / "step-000002.safetensors", "--tokens", 3, "--temperature", 0)
    model, tokenizer = loading.load(trained / "step-000002.safetensors")
    assert greedy.stdout == tokenizer.decode(model.generate(torch.tensor([[10]]), 3)[0, 1:]) + "\n"


# -- what is damaged


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_a_config_and_a_tokenizer_that_are_damaged(copied: Path):
    told = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**told, "with": 64}))
    with pytest.raises(ModelError, match=r"config\.json is damaged, or of another version"):
        zoo.load(str(copied))
    (copied / "config.json").write_text(json.dumps(told))
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged or gone"):
        zoo.load(str(copied))


def test_weights_of_another_size_cut_short_or_gone(copied: Path):
    told = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**told, "width": 32}))
    with pytest.raises(ModelError, match=r"step-000005\.safetensors holds weights of another model"):
        zoo.load(str(copied))
    (copied / "config.json").write_text(json.dumps(told))
    (copied / "step-000005.safetensors").write_bytes(b"half")
    with pytest.raises(ModelError, match=r"step-000005\.safetensors is cut short or damaged"):
        zoo.load(str(copied))
    assert zoo.load(str(copied / "step-000004.safetensors"))
    for file in copied.glob("step-*"):
        file.unlink()
    with pytest.raises(ModelError, match="ended before the first checkpoint"):
        zoo.load(str(copied))


def test_writing_needs_a_trained_folder(tmp_path: Path):
    done = run("generate", tmp_path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "is no folder that `clearhead train` has made" in done.stderr


def test_a_prompt_that_is_no_text(trained: Path):
    assert "the prompt is not valid UTF-8" in run("generate", trained, "\udcff").stderr
