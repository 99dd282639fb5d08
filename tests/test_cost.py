"""The calculator: closed formulas against counts, and the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clearhead import DTypeError, ShapeError, masks, reference
from clearhead.cost import ITEMSIZE, LARGEST, Cost

DATA = Path(__file__).parent / "data"
SEEDS = json.loads((DATA / "seeds.json").read_text())
DEFS = json.loads((DATA / "defs.json").read_text())


# --- the numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [128_000, 131_072])
def test_requirement_33_a_head_at_128k_tokens(tokens: int) -> None:
    expected = SEEDS["memory"][f"n={tokens}"]
    for dtype, nbytes in (("float8", 1), ("float16", 2), ("float32", 4)):
        head = Cost(tokens=tokens, dtype=dtype).dense
        assert head.pairs == expected["entries"]
        assert head.weights == expected[f"{nbytes}B"]["bytes"]
        assert head.weights / 1e9 == expected[f"{nbytes}B"]["GB"]
        assert head.weights / 2**30 == expected[f"{nbytes}B"]["GiB"]
    assert Cost(tokens=tokens).tiled.pairs * 2 / 1e9 == expected["causal_half_2B_GB"]
    whole = Cost(tokens=tokens, heads=32, layers=32, head_dim=128)
    assert whole.dense.weights / 2**40 == expected["heads32_layers32_2B_TiB"]
    assert whole.dense_head == expected["2B"]["bytes"]


@pytest.mark.parametrize(("dtype", "name"), [("float16", "fp16"), ("float32", "fp32")])
def test_requirement_33_how_many_tokens_fill_16_gib(dtype: str, name: str) -> None:
    longest = SEEDS["memory"][f"n_for_16GiB_{name}_one_head"]
    assert (
        Cost(tokens=longest, dtype=dtype).dense.weights <= 2**34 < Cost(tokens=longest + 1, dtype=dtype).dense.weights
    )


def test_requirement_32_operations() -> None:
    expected = SEEDS["flops_1024_64"]
    head = Cost(tokens=1024, head_dim=64)
    assert head.dense.flops == expected["total"] == expected["QK"] + expected["AV"] == 4 * 1024**2 * 64
    layer = Cost(tokens=1024, heads=12, head_dim=64)
    assert layer.projections == expected["projections_qkvo_d768"] == 8 * 1024 * 768**2
    assert layer.crossover == 2 * 768
    even = Cost(tokens=2 * 768, heads=12, head_dim=64)
    assert even.dense.flops == even.projections


def test_requirement_32_operations_are_those_that_pytorch_counts() -> None:
    n, heads, groups, d, width = 24, 6, 2, 8, 40
    cost = Cost(tokens=n, heads=heads, kv_heads=groups, head_dim=d, width=width)
    x, q, k = torch.ones(n, width), torch.ones(heads, n, d), torch.ones(heads, n, d)
    with FlopCounterMode(display=False) as counter:
        (q @ k.mT) @ k
    assert counter.get_total_flops() == cost.dense.flops
    with FlopCounterMode(display=False) as counter:
        for out in (heads, groups, groups):
            x @ torch.ones(width, out * d)
        torch.ones(n, heads * d) @ torch.ones(heads * d, width)
    assert counter.get_total_flops() == cost.projections
    with FlopCounterMode(display=False) as counter:
        for _ in range(n):
            state = torch.ones(groups, d, 1) @ torch.ones(groups, 1, d + 1)  # φ(k) [v | 1]ᵀ
            torch.ones(heads, 1, d) @ state.repeat_interleave(heads // groups, 0)
    assert counter.get_total_flops() == cost.linear.flops
    assert cost.linear.cache == state.numel() * 2


@pytest.mark.parametrize("name", DEFS["window"]["causal_nnz"])
def test_pairs_in_a_window(name: str) -> None:
    n, w = (int(part.partition("=")[2]) for part in name.split(","))
    cost = Cost(tokens=n, window=w)
    assert cost.windowed.pairs == DEFS["window"]["causal_nnz"][name] == int(reference.sliding_window(n, n, w).sum())
    assert cost.windowed.flops == 4 * cost.windowed.pairs * 64
    assert cost.windowed.cache == cost.kv_cache(w)


@pytest.mark.parametrize("name", DEFS["window"]["symmetric_nnz"])
def test_pairs_in_a_window_to_both_sides(name: str) -> None:
    n, w = (int(part.partition("=")[2]) for part in name.split(","))
    assert Cost(tokens=n, window=w, causal=False).windowed.pairs == DEFS["window"]["symmetric_nnz"][name]


@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("window", [1, 2, 3, 9, 50])
def test_pairs_are_those_that_the_mask_shows(tokens: int, window: int) -> None:
    def shown(rule: masks.MaskRule) -> int:
        return rule.draw(tokens, tokens).count("■")

    one_way, both = (Cost(tokens=tokens, window=window, causal=causal) for causal in (True, False))
    assert one_way.tiled.pairs == shown(masks.causal())
    assert one_way.windowed.pairs == shown(masks.sliding_window(window))
    assert both.windowed.pairs == shown(masks.symmetric_window(window))
    assert both.tiled.pairs == both.dense.pairs == tokens**2


def test_any_rule_has_a_price() -> None:
    cost = Cost(tokens=131_072, window=1024)
    assert cost.sparse(masks.sliding_window(1024).bind(131_072, 131_072).count(), kept=1024) == cost.windowed
    sinks = masks.sliding_window(1024) | masks.causal() & masks.first_tokens(4)
    more = cost.sparse(sinks.bind(131_072, 131_072).count(), kept=1028)
    assert more.pairs - cost.windowed.pairs == sum(min(4, t - 1023) for t in range(1024, 131_072))
    assert more.cache == cost.kv_cache(1028)


def test_the_cache_is_that_of_the_shared_heads() -> None:
    for name, groups in (("llama2_7b_4096_fp16_MHA", 32), ("mistral7b_4096_fp16_G8", 8)):
        cost = Cost(tokens=4096, heads=32, kv_heads=groups, layers=32, head_dim=128)
        assert cost.dense.cache == cost.tiled.cache == cost.windowed.cache == DEFS["gqa"][name]


def test_memory_grows_with_the_square_only_where_weights_are_stored() -> None:
    one, two = (Cost(tokens=n, window=512) for n in (8192, 16384))
    assert two.dense.weights == 4 * one.dense.weights
    assert two.tiled.weights == 2 * one.tiled.weights == 16384 * 4
    assert two.windowed.cache == one.windowed.cache
    assert two.linear.cache == one.linear.cache
    assert two.linear.flops == 2 * one.linear.flops


@pytest.mark.parametrize("dtype", [name for name in ITEMSIZE if name != "float8"])
def test_dtypes_are_as_large_as_pytorchs(dtype: str) -> None:
    assert ITEMSIZE[dtype] == getattr(torch, dtype).itemsize


def test_what_does_not_generate_keeps_nothing() -> None:
    cost = Cost(tokens=512, causal=False)
    assert {price.cache for price in (cost.dense, cost.tiled, cost.windowed, cost.linear)} == {0}


# --- bad numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens", "heads", "kv_heads", "layers", "head_dim", "window", "width"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True, "8", 10**12 + 1])
def test_sizes_are_positive_integers(name: str, value: object) -> None:
    with pytest.raises(ShapeError, match=rf"Cost\({name}={value!r}\): expected an integer from 1 to 1,000,000,000,000"):
        Cost(**{"tokens": 8, name: value})  # type: ignore[arg-type]


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"Cost\(heads=6, kv_heads=4\): the number of heads must be a multiple"):
        Cost(tokens=8, heads=6, kv_heads=4)


@pytest.mark.parametrize("dtype", ["int4", None, 1, [1], {"a": 1}, torch.float16])
def test_dtypes_are_names(dtype: object) -> None:
    with pytest.raises(DTypeError, match=r"dtype=.*: expected one of float64, float32, float16, bfloat16.*a string"):
        Cost(tokens=8, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", ["no", 0, 1, None, [True]])
def test_causal_is_true_or_false(causal: object) -> None:
    with pytest.raises(DTypeError, match=r"Cost\(causal=.*\): expected True or False"):
        Cost(tokens=8, causal=causal)  # type: ignore[arg-type]


@pytest.mark.parametrize("pairs", [-1, 65, 2.0, True, "3", None])
def test_pairs_are_those_of_the_text(pairs: Any) -> None:
    cost = Cost(tokens=8)
    with pytest.raises(ShapeError, match=r"sparse\(pairs=.*\): expected an integer from 0 to 64"):
        cost.sparse(pairs)
    assert cost.sparse(0).flops == 0
    assert cost.sparse(64).flops == cost.dense.flops


@pytest.mark.parametrize("tokens", [-1, 2.0, True, "3", None])
def test_a_cache_holds_0_tokens_or_more(tokens: Any) -> None:
    cost = Cost(tokens=8)
    with pytest.raises(ShapeError, match=r"kv_cache\(tokens=.*\): expected an integer from 0 to"):
        cost.kv_cache(tokens)
    assert cost.kv_cache(0) == 0


def test_integers_of_numpy_count_as_integers_and_do_not_overflow() -> None:
    large = {"tokens": 2**20, "heads": 2**7, "kv_heads": 2**3, "layers": 2**7, "head_dim": 2**10, "window": 2**12}
    cost = Cost(**{name: np.int32(value) for name, value in large.items()})  # type: ignore[arg-type]
    assert cost == Cost(**large)
    assert cost.dense.flops == 4 * 2 ** (40 + 7 + 7 + 10)
    assert cost.sparse(np.int64(5)) == cost.sparse(5)  # type: ignore[arg-type]
    assert json.loads(json.dumps(cost.as_dict()))["dense"]["flops"] == cost.dense.flops


# --- the command -----------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    import clearhead.cli as cli

    return CliRunner().invoke(cli.app, ["cost", *arguments])


def test_the_command_prints_a_table() -> None:
    done = run("--tokens", "131072", "--heads", "32", "--kv-heads", "8", "--layers", "32", "--head-dim", "128")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "131,072 tokens, 32 layers x 32 heads of width 128, 8 key/value heads, float16, causal"
    assert [line.split() for line in lines[1:6]] == [
        ["Time", "Weights", "Cache"],
        ["dense", "9.0", "PFLOP", "35.2", "TB", "17.2", "GB"],
        ["tiled", "4.5", "PFLOP", "537", "MB", "17.2", "GB"],
        ["sparse,", "window", "4,096", "277", "TFLOP", "537", "MB", "537", "MB"],
        ["linear", "5.5", "TFLOP", "-", "8.5", "MB"],
    ]
    assert "of one head of one layer, dense, 34.4 GB" in done.stdout
    assert "dense attention takes longer from 5,120 tokens on" in done.stdout
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_the_largest_numbers_are_readable(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    names = ("tokens", "heads", "layers", "head-dim")
    done = run(*(f"--{name}={LARGEST}" for name in names), f"--window={LARGEST - 1}")
    assert done.exit_code == 0, done.output
    assert "…" not in done.stdout
    assert max(map(len, re.findall(r"[0-9]+", done.stdout))) <= 3  # by thousands, or as a power of ten
    if columns != "40":
        assert " ".join(done.stdout.splitlines()[2].split()) == "dense 4.0e+60 FLOP 2.0e+48 B 4.0e+48 B"
    assert "takes longer from 2.0e+24 tokens on" in done.stdout


def test_json_has_the_same_numbers() -> None:
    found = json.loads(run("--tokens", "1000", "--no-causal", "--dtype", "float32", "--json").stdout)
    cost = Cost(tokens=1000, causal=False, dtype="float32")
    assert found["dense"]["weights"] == cost.dense.weights == 4_000_000
    assert (found["tokens"], found["kv_heads"], found["projections"]) == (1000, 1, cost.projections)
    assert set(found) >= {"clearhead", "model", "dense", "tiled", "windowed", "linear"}


def test_of_a_model_by_its_config_alone(tiny: Path, empty_cache: Path) -> None:
    done = run(str(tiny))
    assert done.exit_code == 0, done.output
    assert "64 tokens, 2 layers x 4 heads of width 8, 2 key/value heads, float16, causal" in done.stdout
    assert "window" not in done.stdout  # 4,096 is wider than the text
    assert not empty_cache.exists()  # nothing was converted


def test_of_smollm2(smollm2: Any) -> None:
    found = json.loads(run("smollm2", "--tokens", "8192", "--json").stdout)
    config = smollm2[0].config
    assert (found["layers"], found["heads"], found["kv_heads"], found["head_dim"]) == (30, 9, 3, config.head_dim)
    assert found["tiled"]["cache"] == 2 * 30 * 8192 * 3 * 64 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --tokens N, or the name of a model"),
        (["--heads", "2"], "give --tokens N"),
        (["--tokens", "0"], "Cost(tokens=0): expected an integer from 1"),
        (["--tokens", "9" * 400], "expected an integer from 1"),
        (["--tokens", "5", "--heads", "6", "--kv-heads", "4"], "must be a multiple"),
        (["--tokens", "5", "--dtype", "float12"], "expected one of float64"),
        (["--tokens", "5", "--head-dim", "0"], "Cost(head_dim=0): expected an integer from 1"),
        (["there/is/no/such"], "there is no such file or folder"),
        (["smollm", "--tokens", "5"], "Did you mean smollm2?"),
    ],
)
def test_bad_numbers_are_a_message(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "clearhead: " in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def folder(path: Path, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def refusal(*arguments: str) -> str:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return str(done.stderr)


def test_of_two_models_in_one_it_says_to_leave_the_model_out(tmp_path: Path) -> None:
    message = refusal(folder(tmp_path, model_type="t5"), "--tokens", "512", "--heads", "8", "--layers", "6")
    assert "this model has an encoder and a decoder" in message
    assert "Leave the model out and give numbers, as in" in message
    assert "clearhead cost --tokens 512 --heads 8 --layers 6" in message
    assert run("--tokens", "512", "--heads", "8", "--layers", "6").exit_code == 0


def test_of_a_model_without_a_longest_text_it_says_to_give_tokens(tmp_path: Path) -> None:
    model = folder(tmp_path, model_type="xlnet")
    assert "max_position_embeddings=-1, which is no size: give tokens (--tokens N)" in refusal(model)
    assert run(model, "--tokens", "512").exit_code == 0


def test_of_heads_that_do_not_fit_the_models_it_says_what_to_give_too(tiny: Path) -> None:
    message = refusal(str(tiny), "--heads", "5")
    assert "heads=5 with kv_heads=2" in message
    assert "kv_heads=2 is the model's. Give kv_heads (--kv-heads N) too" in message
    assert run(str(tiny), "--heads", "5", "--kv-heads", "5").exit_code == 0
    assert "heads=4 is the model's. Give heads (--heads N) too" in refusal(str(tiny), "--kv-heads", "3")
    assert "must be a multiple" in refusal(str(tiny), "--heads", "5", "--kv-heads", "3")


def test_numbers_alone_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "sys.argv[1:] = ['cost', '--tokens', '9'];"
        "from clearhead.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("9 tokens, 1 layer x 1 head of width 64")
