"""Measuring: turns, ratios and peaks are what they say, and all ways look at the same attention."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from typer.testing import CliRunner

from clearhead import _measuring, bench, cli, zoo
from clearhead._measuring import Timing, alternate, peak_of_child
from clearhead.errors import ModelError, ShapeError
from clearhead.maps import DenseMap, SoftmaxMap
from clearhead.masks import causal
from clearhead.testing import assert_close

MB = 1_000_000


# -- measuring


def test_ratios_are_of_the_same_round_and_least_is_of_the_shortest() -> None:
    timing = Timing((4.0, 2.0, 9.0), beside=(2.0, 4.0, 3.0))
    assert (timing.median, timing.best, timing.ratio, timing.least) == (4.0, 2.0, 2.0, 1.0)


def test_ways_take_turns_there_and_back() -> None:
    calls: list[str] = []
    found = alternate({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "abc" + "abc" + "cba"
    assert [len(timing.seconds) for timing in found.values()] == [2, 2, 2]
    assert found["a"].seconds == found["b"].beside


def test_rounds_end_with_the_time_but_not_before_three() -> None:
    calls: list[int] = []
    alternate({"a": lambda: calls.append(0)}, rounds=50, seconds=0, warm=False)
    assert len(calls) == 3


PEAK = """
from clearhead import _measuring

def prepare(n):
    there = bytes(bytearray(n // 2))

    def run():
        bytes(bytearray(n))  # freed again, and counted all the same
        return there[:1]

    return run

print(_measuring._peak(prepare, (60_000_000,)))
"""


def test_the_peak_is_what_a_call_takes_above_what_was_there() -> None:
    """In a process of its own, as peaks are measured: here other tests have left memory that it would be given."""
    found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout.strip()
    if found == "None":
        pytest.skip("nobody counts memory here")
    assert 60 * MB <= int(found) < 150 * MB  # a bytearray, and the bytes made of it


@pytest.mark.full  # a process that imports torch
def test_a_child_measures_what_is_prepared_there() -> None:
    found = peak_of_child(bench._tensor_way, 1024, bench.DENSE)
    assert found is None or found > 2 * 9 * 1024**2 * 4


def test_the_machine_is_named_with_versions() -> None:
    assert f"torch {torch.__version__}" in _measuring.machine()
    assert _measuring.version_of("no-such-library") is None


# -- ways


def test_all_statistics_are_those_of_the_weights() -> None:
    q, k, v = bench.draw_tensors(64, groups=3)
    ways, visible = bench.tensor_ways(q, k, v), torch.ones(64, 64, dtype=torch.bool).tril()
    found, dense = ways["all statistics"](), ways[bench.DENSE]()
    exact = bench.dense_statistics(q.double(), k.double(), visible=visible)
    assert set(exact) == set(dense)
    for name, field in exact.items():
        assert_close(getattr(found, name), field, dense[name], terms=64, what=name)


def test_tensors_are_the_same_at_each_call() -> None:
    for one, other in zip(bench.draw_tensors(8), bench.draw_tensors(8), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert bench.draw_tensors(8, groups=3, dtype=torch.bfloat16)[1].shape == (1, 3, 8, 64)


@pytest.fixture
def tiny_model(tiny: Path, empty_cache: Path) -> Any:
    return zoo.load(str(tiny))[0]


def test_a_model_is_looked_at_and_left_as_it_was(tiny_model: Any) -> None:
    before = tiny_model.config._attn_implementation
    ways = bench.model_ways(tiny_model, bench._ids(tiny_model, 20))
    looked, weights = ways["recorded, all statistics"](), ways[bench.EAGER]()
    assert tiny_model.config._attn_implementation == before != "eager"
    for statistics, dense in zip(looked.values(), weights, strict=True):
        exact = DenseMap(dense.double()).statistics()
        for name in ("entropy", "received", "peak"):
            wide = getattr(exact, name)
            assert_close(getattr(statistics, name), wide, wide.float(), terms=20, size=3, what=name)


def test_what_would_take_too_much_memory_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LARGEST", 1000)
    monkeypatch.setattr(bench, "peak_of_child", lambda *_: None)
    found = bench.bench(tokens=16, seconds=0)
    assert bench.DENSE not in [name for name, *_ in found.rows]
    assert found.notes == (f"{bench.DENSE}: left out, the weights alone take more than 1.0 kB",)


@pytest.mark.parametrize("tokens", [0, -3])
def test_no_tokens_are_refused(tokens: int) -> None:
    with pytest.raises(ShapeError, match=rf"bench\(tokens={tokens}\): expected at least 1"):
        bench.bench(tokens=tokens)


def test_more_tokens_than_there_is_memory_for_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"1,000,000,000,000,000 tokens: q, k and v alone take 6\.9 \w+"):
        bench.bench(tokens=10**15)


def test_more_tokens_than_a_model_reads_are_refused(tiny: Path, empty_cache: Path) -> None:
    with pytest.raises(ModelError, match=r"tokens=65\): the model reads at most 64 tokens"):
        bench.bench(str(tiny), 65)


# -- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run ``clearhead bench`` in this process, with few rounds and without processes for memory."""
    monkeypatch.setattr(bench, "peak_of_child", lambda *_: 12 * MB)
    monkeypatch.setattr(bench, "alternate", lambda ways, **_: alternate(ways, rounds=1, warm=False))
    return lambda *arguments: CliRunner().invoke(cli.app, ["bench", *arguments])


def test_a_table_of_time_ratio_and_memory(command: Callable[..., Any]) -> None:
    done = command("--tokens", "32")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "Random tensors, 9 heads of width 64, 32 tokens, causal, float32, 1 round"
    assert lines[1].split() == ["Time", "Ratio", "Memory"]
    assert lines[2].startswith(bench.FUSED)
    assert lines[2].split()[-3:] == ["1.00", "12.0", "MB"]
    assert lines[-1] == _measuring.machine()


def test_a_model_as_json(command: Callable[..., Any], tiny: Path, empty_cache: Path) -> None:
    done = command("--model", str(tiny), "--tokens", "16", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    names = [row["name"] for row in found["rows"]]
    assert names == [bench.FORWARD, "recorded", "recorded, all statistics", bench.EAGER]
    assert (found["rows"][0]["ratio"], found["rows"][0]["bytes"]) == (1, 12 * MB)


def test_bad_input_is_a_message(command: Callable[..., Any], tiny: Path, empty_cache: Path) -> None:
    done = command("--model", str(tiny), "--tokens", "65")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the model reads at most 64 tokens" in done.stderr
    assert command("--tokens", "0").exit_code == 2
    assert "no-such-model" in command("--model", "no-such-model").stderr


def test_a_fresh_process_prepares_the_way_with_its_inputs(tiny: Path, empty_cache: Path) -> None:
    assert bench._model_way(str(tiny), 8, bench.FORWARD)().logits.shape[-2] == 1
    found = bench._tensor_way(8, "all statistics")()
    exact = SoftmaxMap(*bench.draw_tensors(8)[:2], mask=causal()).statistics()
    torch.testing.assert_close(found.entropy, exact.entropy)


# -- the scripts


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The benchmarks' report and their peers, writing elsewhere."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import _peers
    import _report

    for name, path in {
        "HERE": tmp_path / "b",
        "RESULTS": tmp_path / "b" / "r.md",
        "PLOTS": tmp_path / "b" / "p",
    }.items():
        monkeypatch.setattr(_report, name, path)
    (tmp_path / "b").mkdir()
    return _report, _peers


def script(folder: Path, name: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(f'"""What {name} asks."""')
    return str(path)


def test_a_report_replaces_its_own_section_and_an_error_leaves_all_as_it_was(scripts: Any, tmp_path: Path) -> None:
    report = scripts[0]
    for name, cell in (("second", "1"), ("first", "2"), ("second", "3")):
        with report.Report(script(tmp_path, name), f"Title of {name}") as made:
            made.table(["", "ms"], [["ours", cell]])
    text = report.RESULTS.read_text()
    assert [line for line in text.splitlines() if line.startswith(("<!--", "##", "| ours"))] == [
        *("<!-- first.py -->", "## Title of first", "| ours |  2 |"),
        *("<!-- second.py -->", "## Title of second", "| ours |  3 |"),
    ]
    assert "What first asks." in text
    with pytest.raises(KeyError), report.Report(script(tmp_path, "first"), "Another"):
        raise KeyError
    assert report.RESULTS.read_text() == text


def test_a_plot_is_an_svg_beside_the_results(scripts: Any, tmp_path: Path) -> None:
    report, figure = scripts[0], pytest.importorskip("matplotlib.figure").Figure()
    with report.Report(script(tmp_path, "first"), "Title") as made:
        made.plot(figure, "shape", "a shape")
    assert "![a shape](plots/first-shape.svg)" in report.RESULTS.read_text()
    assert "<svg" in (report.PLOTS / "first-shape.svg").read_text()


def test_a_peer_that_is_not_there_is_left_out_and_said(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = scripts[1]
    monkeypatch.setattr(module, "PYTHON", "/no/python")
    with module.peers({"theirs": ("torchlens", "folder", 5)}) as (ready, missing):
        assert (ready, missing) == ({}, {"theirs": "/no/python: No such file or directory"})
