"""The loop that trains, and the files from which it goes on: killed and resumed, the losses are the same numbers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import ModelError
from clearhead.models import Checkpoints, fit, rate_at


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, 1))


def drawn(n: int) -> Tensor:
    return torch.randn(16, 4)


def run(model: nn.Module, steps: int, **how: object) -> list[float]:
    return fit(model, lambda x: (model(x) - x.sum(-1, True)).square().mean(), drawn, steps=steps, **how)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_the_loss_falls_and_the_callers_generator_is_as_it_was():
    model = net().eval()
    before = torch.get_rng_state()
    losses = run(model, 60, rate=3e-2, warmup=1)
    assert sum(losses[-9:]) < 0.5 * sum(losses[:9])
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training


def test_every_step_and_every_seed_draws_anew():
    seen: list[float] = []

    def batches(n: int) -> Tensor:
        seen.append(drawn(n)[0, 0].item())
        return drawn(n)

    for seed in (0, 1):
        fit(model := net(), lambda x: model(x).square().mean(), batches, steps=5, seed=seed)
    assert len(set(seen)) == 10


def test_a_resumed_run_has_the_losses_and_weights_of_one_that_was_never_stopped(tmp_path: Path):
    whole, resumed = net(), net()
    losses = run(whole, 25)
    run(resumed, 13, checkpoints=Checkpoints(tmp_path, every=5))
    again = net(8)
    nn.init.zeros_(again[0].weight)  # whatever the new process begins with
    assert run(again, 25, checkpoints=Checkpoints(tmp_path, every=5)) == losses
    assert same(again, whole)
    assert list(Checkpoints(tmp_path).weights) == [0, 5, 10, 13, 15, 20, 25]
    assert Checkpoints(tmp_path).losses == losses


KILLED = """
import sys, torch
from torch import nn
from clearhead.models import Checkpoints, fit
torch.set_num_threads(1)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
fit(model, lambda x: (model(x) - x.sum(-1, True)).square().mean(), lambda n: torch.randn(16, 4), steps=10**9,
    checkpoints=Checkpoints(sys.argv[1], every=3), on_step=lambda n, loss: print(n, flush=True))
"""


@pytest.mark.full
def test_a_killed_process_loses_at_most_what_came_after_the_last_checkpoint(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(Path(clearhead.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        done = next(int(line) for line in process.stdout if int(line) >= 40)
        process.send_signal(signal.SIGKILL)
    kept = max(Checkpoints(tmp_path).weights)
    assert kept >= done - done % 3
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert run(net(), kept + 20, checkpoints=Checkpoints(tmp_path, every=3)) == run(net(), kept + 20)
    torch.set_num_threads(threads)


def test_a_full_disk_is_said_and_the_checkpoint_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(net(), 5, checkpoints=Checkpoints(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("clearhead._files.os.replace", full)
    with pytest.raises(ModelError, match=r"step 9 cannot be written.*No space left.*step 5 is there.*Make room"):
        run(net(), 9, checkpoints=Checkpoints(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_run_left_that_was_killed_while_writing_is_swept_away(tmp_path: Path):
    (tmp_path / ".clearhead-0123").write_bytes(b"half")
    run(net(), 1, checkpoints=Checkpoints(tmp_path))
    assert not (tmp_path / ".clearhead-0123").exists()


@pytest.mark.parametrize("name", ["training.safetensors", "step-000005.safetensors"])
def test_a_file_cut_short_or_gone_is_said(tmp_path: Path, name: str):
    run(net(), 5, checkpoints=Checkpoints(tmp_path))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-9])
    with pytest.raises(ModelError, match=rf"{name} is cut short or damaged"):
        run(net(), 9, checkpoints=Checkpoints(tmp_path))
    (tmp_path / name).write_bytes(whole)
    (tmp_path / "step-000005.safetensors").unlink()
    with pytest.raises(ModelError, match=r"there is no .*step-000005"):
        run(net(), 9, checkpoints=Checkpoints(tmp_path))


def test_weights_of_another_shape_and_other_settings_are_refused(tmp_path: Path):
    run(net(), 2, checkpoints=Checkpoints(tmp_path, settings={"seed": 0, "size": "small"}))
    with pytest.raises(ModelError, match=r"0\.bias and 2 more; it has \(8,\), the model \(9,\)"):
        run(net(9), 3, checkpoints=Checkpoints(tmp_path, settings={"seed": 0, "size": "small"}))
    with pytest.raises(ModelError, match=r"a run with seed=0, and this one has seed=1"):
        run(net(), 3, checkpoints=Checkpoints(tmp_path, settings={"seed": 1, "size": "small"}))
    (tmp_path / "training.safetensors").write_bytes((tmp_path / "step-000002.safetensors").read_bytes())
    with pytest.raises(ModelError, match="is not of a training run"):
        run(net(), 3, checkpoints=Checkpoints(tmp_path))
    (tmp_path / "training.safetensors").unlink()
    with pytest.raises(ModelError, match=r"weights of 2 steps, and no training\.safetensors"):
        run(net(), 3, checkpoints=Checkpoints(tmp_path))


def test_a_loss_that_is_not_finite_ends_the_run():
    with pytest.raises(ModelError, match=r"loss of step 1 is nan.*rate is too high"):
        fit(model := net(), lambda x: model(x).sum() * torch.nan, drawn, steps=3)


def test_the_rate_does_not_hang_on_how_many_steps_there_will_be():
    rates = [rate_at(n, 1.0, 10) for n in range(1000)]
    assert max(rates) == rates[9] == 1.0
    assert rates[999] == pytest.approx(0.1)
    assert rates[4] == 0.5
