"""The standard probes, on a model of the tests: what is read, how texts are pooled, and what the command gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

from typer.testing import CliRunner

import clearhead.cli as cli
from clearhead import ModelError, SoftmaxMap, masks, record, zoo
from clearhead.heads import Head, HeadTable, pooled, probe, repeated_tokens, score_layer, score_recording
from clearhead.heads.commands import _HEADINGS, _print


@pytest.fixture
def loaded(tiny: Path, empty_cache: Path) -> Any:
    return zoo.load(str(tiny))


def test_random_tokens_come_again_after_the_token_that_begins_a_text(wordpieces: Any) -> None:
    one, other = repeated_tokens(wordpieces, 2)
    assert one.shape == (101,)
    assert one[0] == wordpieces.cls_token_id
    assert torch.equal(one[1:26].repeat(4), one[1:])
    assert one[1:26].unique().numel() == 25
    assert not set(one[1:].tolist()) & set(wordpieces.all_special_ids)
    assert not torch.equal(one, other)
    assert torch.equal(one, next(repeated_tokens(wordpieces, 1)))


def test_texts_are_pooled_query_by_query() -> None:
    """Two texts give the mean over all their queries, not that of their means."""
    g = torch.Generator().manual_seed(0)
    texts = []
    for n in (20, 50):
        q, ids = torch.randn(2, n, 8, generator=g), torch.randint(0, 7, (n,), generator=g)
        texts.append(score_layer(SoftmaxMap(q, q, mask=masks.causal()), ids))
    both = pooled(texts)
    for h in range(2):
        for name, score in both.scores[h].items():
            parts = [(text.scores[h][name], text.queries[h][name]) for text in texts]
            assert score == pytest.approx(sum(mean * n for mean, n in parts if n) / sum(n for _, n in parts))
    assert both.queries[0]["entropy"] == 70
    assert both.entropy[0] == pytest.approx((20 * texts[0].entropy[0] + 50 * texts[1].entropy[0]) / 70)
    assert pooled(texts[:1]).scores == texts[0].scores


def test_a_probe_reads_the_texts_and_the_random_tokens(loaded: Any) -> None:
    model, tokenizer = loaded
    steps: list[tuple[str, int, int]] = []
    table = probe(model, tokenizer, ["he the the"], repeats=2, on_progress=lambda *step: steps.append(step))
    assert steps == [("texts", n, 3) for n in range(4)]
    inputs = tokenizer("he the the", return_tensors="pt")
    with record(model) as recording, torch.no_grad():
        model(**inputs)
    alone = score_recording(recording, inputs["input_ids"][0])
    assert [head.scores for head in table] == [scores for layer in alone for scores in layer.scores]
    assert all(head.probe["induction"] is not None for head in table)
    with pytest.raises(ModelError, match="there is no text"):
        probe(model, tokenizer, [])
    with pytest.raises(ModelError, match="the text is one token for the model"):
        probe(model, tokenizer, ["he"])
    with pytest.raises(ModelError, match="text 2 of 2 is one token for the model"):
        probe(model, tokenizer, ["he the", "he"])


def test_a_model_of_two_texts_is_refused(translator: Any, wordpieces: Any) -> None:
    with pytest.raises(ModelError, match="MarianMTModel does not read one text"):
        probe(translator, wordpieces, ["the cat"])


def test_the_command_lists_every_role_and_writes_all_heads(tiny: Path, empty_cache: Path, tmp_path: Path) -> None:
    text, target = tmp_path / "text.txt", tmp_path / "heads.json"
    text.write_text("he the the the he the")
    options = [str(text), "--model", str(tiny), "--json", str(target), "--strongest", "1"]
    done = CliRunner().invoke(cli.app, ["heads", *options])
    assert done.exit_code == 0, done.output
    assert f"{tiny}: 2 layers, 8 heads, on 1 text" in done.stdout
    assert done.stdout.splitlines()[1].split() == [*_HEADINGS[:-1]], "nothing stands in the last column"
    found = json.loads(target.read_text())
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [(n, h) for n in range(2) for h in range(4)]
    assert set(found["heads"][0]["scores"]) == set(found["heads"][0]["baselines"]) == set(found["heads"][0]["probe"])
    missing = CliRunner().invoke(cli.app, ["heads", "--json", str(tmp_path / "not" / "here.json")])
    assert missing.exit_code == 2
    assert "there is no folder" in missing.stderr


@pytest.mark.parametrize("detail", ["offset -3", "delimiter", "a relation of one's own"])
def test_all_headings_can_be_read_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: Any, detail: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    score = {"previous": 0.5}
    head = Head(29, 31, "previous", score, score, 1.0, 1.0, detail, 0.5, {}, {"induction": 0.1})
    _print(HeadTable([head] * 9999), "smollm2", 1, 5)
    shown = capsys.readouterr().out
    assert all(heading in " ".join(shown.split()) for heading in _HEADINGS)
    assert all(word in shown for word in detail.split())
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_a_table_becomes_a_figure_and_says_what_a_data_frame_needs(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    table = probe(*loaded, ["he the the"], repeats=0)
    (ax,) = table.plot().axes
    assert [patch.get_gid() for patch in ax.patches] == [head.label for head in table]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        table.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", type("pandas", (), {"DataFrame": list}))
    rows: Any = HeadTable(table[:2]).to_pandas()
    assert rows[1]["head"] == 1
    assert rows[0]["uniform_previous"] == table[0].baselines["previous"]
