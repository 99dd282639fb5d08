"""The support table: every architecture, under every implementation it has, against its own weights."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.errors import RecordingError
from clearhead.recording import record
from clearhead.recording.calls import Call

from .architectures import ARCHITECTURES, build, measure
from .measuring import Measured, compare, handed_out
from .support_table import BOUND, render

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensor")
flex = pytest.mark.filterwarnings("ignore")  # FlexAttention and what compiles it have many

TABLE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<=\| )(?:0|\de-\d+)(?= \|)")


def check(name: str, implementation: str) -> None:
    measured = measure(name, implementation)
    assert measured.difference == 0
    assert measured.kinds == {ARCHITECTURES[name].kind}
    assert measured.excess <= 1
    assert measured.error <= BOUND


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trap02_every_architecture_has_its_own_weights_and_the_output_stays(name):
    check(name, ARCHITECTURES[name].runs[0])


@flex
@pytest.mark.full
@pytest.mark.parametrize(("name", "one"), [(name, one) for name, row in ARCHITECTURES.items() for one in row.runs[1:]])
def test_every_other_implementation_too(name, one):
    check(name, one)


@flex
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "one"),
    [(name, one) for name, row in ARCHITECTURES.items() for one in row.refused if row.group == "transformers"],
)
def test_what_the_table_leaves_out_does_not_run_unobserved_either(name, one):
    row = ARCHITECTURES[name]
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError, IndexError), match=row.refused[one]):
        build(name, one)(**row.inputs(True))


@flex
@pytest.mark.full
def test_a_single_sequence_is_recorded_where_a_batch_fails():
    inputs = {name: x[:1] for name, x in ARCHITECTURES["T5"].inputs(False).items()}
    with torch.no_grad():
        measured = compare(build("T5", "flex_attention"), inputs, handed_out(build("T5"), inputs))
    assert measured.difference == 0
    assert measured.excess <= 1


def test_longformer_whose_weights_are_bands_is_not_seen_and_that_is_said():
    import transformers

    config = transformers.LongformerConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, attention_window=4
    )
    model = transformers.LongformerModel(config).eval()
    with pytest.raises(RecordingError, match="no attention call was seen"), record(model):
        model(**ARCHITECTURES["BERT"].inputs(True))


def test_the_table_has_these_rows_and_numbers_within_its_bound():
    anything = Measured(1e-7, 0, 0, frozenset())
    rows = {
        (name, one): replace(anything, kinds=frozenset({row.kind}))
        for name, row in ARCHITECTURES.items()
        for one in row.runs
    }
    assert NUMBER.sub("#", render(rows)) == NUMBER.sub("#", TABLE)
    numbers = [float(number) for number in NUMBER.findall(TABLE)]
    assert len(numbers) == len(rows) + len(ARCHITECTURES)
    assert max(numbers) <= BOUND
    assert all(NUMBER.findall(line)[-1] == "0" for line in TABLE.splitlines() if "Map |" in line)


# --- the measure can fail -----------------------------------------------------------------------------------

BROKEN = {
    "a scale": lambda call: replace(call, scale=1.01 * call.scale),
    "no mask": lambda call: replace(call, masks=(), biases=()),
    "heads in another order": lambda call: replace(call, q=call.q.flip(1)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_map_of_something_else_is_off(monkeypatch, broken):
    to_map = Call.to_map
    monkeypatch.setattr(Call, "to_map", lambda call, padding=None: to_map(BROKEN[broken](call), padding))
    measured = measure("Llama", "sdpa")
    assert measured.error > 1e-3
    assert measured.excess > 1000


def test_another_output_shows():
    model, inputs, calls = build("Llama"), ARCHITECTURES["Llama"].inputs(True), []

    def drift(module: Any, args: Any, out: Any) -> None:
        calls.append(1)
        out.logits[0, 0, 0] += 1e-3 * len(calls)

    with torch.no_grad():
        expected = handed_out(model, inputs)
        model.register_forward_hook(drift)
        assert compare(model, inputs, expected).difference == pytest.approx(1e-3, rel=0.01)
