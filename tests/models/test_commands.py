"""`clearhead train`: what it prints and keeps, that it goes on where it stopped, and what it says to bad input."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from rich.console import Console

from clearhead import terminal
from clearhead.models import Checkpoints, loading

from .conftest import TEXT, run


def losses(folder: Path) -> list[float]:
    return Checkpoints(folder).losses


def test_it_tells_of_loss_and_speed_and_what_to_do_next(text_file: Path, tmp_path: Path):
    done = run("train", text_file, text_file, "--out", tmp_path / "a b", "--size", "tiny", "--steps", 3)
    tokens = 2 * len(TEXT.encode()) + 1
    assert f"114,752 parameters, {tokens:,} tokens of text, 128 read at once" in done.stdout.replace("\n", " ")
    assert "After 3 steps the loss is 5." in done.stdout
    assert f"clearhead look --model '{tmp_path / 'a b'}' --checkpoints" in done.stdout
    assert "step 3 of 3: loss 5." in done.stderr
    assert done.stderr.splitlines()[-1].endswith("tokens/s")


def test_on_a_terminal_it_tells_of_them_beside_a_bar():
    out = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with terminal.training(2, 9, out) as report:
        report(4, "loss 5.123, 8,000 tokens/s")
    assert re.search(r"loss 5\.123, 8,000 tokens/s .*4/9", out.file.getvalue())


def test_it_goes_on_where_it_stopped_with_the_same_losses(trained: Path, text_file: Path, tmp_path: Path):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    for file in [folder / "training.safetensors", *folder.glob("step-00000[1-9]*")]:  # as it began
        file.unlink()
    first = run("train", text_file, "--out", folder, "--size", "tiny", "--steps", 3)
    again = run("train", text_file, "--out", folder, "--size", "tiny", "--steps", 5, "--every", 2)
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert losses(folder) == losses(trained)
    assert (folder / "step-000005.safetensors").read_bytes() == (trained / "step-000005.safetensors").read_bytes()
    done = run("train", text_file, "--out", folder, "--size", "tiny", "--steps", 4)
    assert "has had 5 steps already: give more, --steps N, to go on" in done.stdout.replace("\n", " ")


def test_another_seed_learns_other_weights(trained: Path, text_file: Path, tmp_path: Path):
    run("train", text_file, "--out", tmp_path / "run", "--size", "tiny", "--steps", 2, "--seed", 1)
    assert losses(tmp_path / "run") != losses(trained)[:2]


def test_more_tokens_are_learned_from_the_text(text_file: Path, tmp_path: Path):
    done = run("train", text_file, "--out", tmp_path / "run", "--size", "tiny", "--steps", 1, "--vocab", 270)
    assert done.exit_code == 0, done.output
    model, tokenizer = loading.load(tmp_path / "run")
    assert model.config.vocab_size == len(tokenizer) == 270
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) < len(TEXT)
    assert tokenizer.decode(ids) == TEXT


def test_an_interruption_says_what_is_kept(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save = Checkpoints.save

    def interrupted(self: Checkpoints, model: Any, optimizer: Any, losses: list[float]) -> None:
        save(self, model, optimizer, losses)
        if len(losses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", interrupted)
    done = run("train", text_file, "--out", tmp_path / "run", "--size", "tiny", "--steps", 4, "--every", 2)
    assert done.exit_code == 130
    assert "holds what 2 steps have taught; the same command goes on" in done.stdout.replace("\n", " ")


# -- bad input


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"too short", "the text has 9 tokens, and this model reads 128 and foretells one more"),
        (b"x" * 128, "the text has 128 tokens"),
        (b"", "the text has 0 tokens"),
        (b"\xff\xfe\x00picture", "is not text: byte 0 is not UTF-8"),
        (b"zero \0 byte", "is not text: it has a zero byte at character 5"),
        (None, "cannot read"),
    ],
)
def test_texts_that_cannot_be_learned_from(tmp_path: Path, content: bytes | None, said: str):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    done = run("train", file, "--out", tmp_path / "run", "--size", "tiny")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


def test_other_settings_than_those_of_the_run(trained: Path, text_file: Path, tmp_path: Path):
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    for option, value, said in [
        ("--seed", 1, "holds a run with seed=0, and this one has seed=1"),
        ("--size", "small", "holds a model of other sizes than --size small"),
        ("--vocab", 300, "holds a run with vocab=256, and this one has vocab=300"),
    ]:
        done = run("train", text_file, "--out", trained, "--size", "tiny", option, value)
        assert done.exit_code == 2
        assert said in done.stderr
    (tmp_path / "other.txt").write_text(TEXT + "more")
    assert "holds a run with text=" in run("train", tmp_path / "other.txt", "--out", trained, "--size", "tiny").stderr
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before


def test_folders_that_are_something_else(text_file: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    for out, said in [("mine", "is there already"), ("nowhere/run", "there is no folder"), ("mine/file", "already")]:
        done = run("train", text_file, "--out", tmp_path / out, "--size", "tiny")
        assert done.exit_code == 2
        assert said in done.stderr
    assert (
        "--size huge: there is tiny, small, medium." in run("train", text_file, "--out", "x", "--size", "huge").stderr
    )


@pytest.mark.parametrize("config", [b"{", b"\xff\xfe\0", None])
def test_a_run_whose_config_is_damaged_is_not_to_be_removed(
    text_file: Path, tmp_path: Path, trained: Path, config: bytes | None
):
    shutil.copytree(trained, tmp_path / "run")
    place = tmp_path / "run" / "config.json"
    place.unlink() if config is None else place.write_bytes(config)
    said = run("train", text_file, "--out", tmp_path / "run", "--size", "tiny").stderr
    assert "holds weights that were trained" in said
    assert "remove" not in said


def test_a_seed_and_a_temperature_at_their_ends(trained: Path):
    assert run("generate", trained, "a", "--seed", 10**22).exit_code == 2
    coldest = run("generate", trained, "a", "--tokens", 5, "--temperature", 1e-300)
    assert coldest.exit_code == 0
    assert coldest.stdout == run("generate", trained, "a", "--tokens", 5, "--temperature", 0).stdout


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_full_disk_loses_nothing(
    text_file: Path, tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, after: int
):
    """Of the files that are written, tokenizer, config, weights and state first, all from the given number on fail."""
    replace, written = os.replace, list[str]()

    def full(source: str, target: str) -> None:
        if len(written) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)
        written.append(Path(target).name)

    command = ("train", text_file, "--out", tmp_path / "run", "--size", "tiny", "--steps", 5, "--every", 2)
    with monkeypatch.context() as patched:
        patched.setattr("clearhead._files.os.replace", full)
        done = run(*command)
    assert (done.exit_code, done.stderr.count("No space left")) == (2, 1), done.output
    kept = [] if after == 1 else sorted(set(written))  # a tokenizer without a config is no model
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == kept
    again = run(*command)
    assert again.exit_code == 0, again.output
    assert losses(tmp_path / "run") == losses(trained)
    assert torch.equal(*(loading.load(folder)[0].tokens.weight for folder in (tmp_path / "run", trained)))
