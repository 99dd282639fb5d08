"""What a language model loses without its heads: the numbers, the progress file, and what bad input is told."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import clearhead
from clearhead.errors import DTypeError, ModelError, ShapeError
from clearhead.heads import Importance, effect, head_means, importance, in_context_score

H, L = 4, 2


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"n_layer": L, "n_head": H, "n_embd": 16, "vocab_size": 50, "initializer_range": 0.5}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_positions=600)).eval()


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def losses(model: Any, one: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(one[None]).logits[0].double()
    return F.cross_entropy(logits[:-1], one[1:], reduction="none")


def test_changes_are_those_of_the_mean_loss_over_all_tokens(model: Any) -> None:
    texts = [ids(7, seed=1), ids(2, 5, seed=2)]
    found = importance(model, None, texts, length=5)
    windows = [texts[0][:5], texts[0][5:], *texts[1]]
    whole = torch.cat([losses(model, one) for one in windows])
    assert (len(found), found.tokens, found.windows) == (L * H, len(whole), 4)
    assert found.whole.loss == pytest.approx(float(whole.mean()), rel=1e-5)
    for head in (found[0], found[-1]):
        with clearhead.knockout(model, {(head.layer, head.head): "zero"}):
            without = torch.cat([losses(model, one) for one in windows])
        assert head.loss == pytest.approx(float(without.mean()), rel=1e-5)
        assert head.change == pytest.approx(float((without - whole).mean()), abs=1e-5)
    assert found.mean == pytest.approx(sum(head.change for head in found) / len(found))
    assert found.strongest(2)[0].change == max(head.change for head in found)


def test_the_error_is_that_of_the_mean_over_windows(model: Any) -> None:
    found = effect(model, None, ids(6, 9), [(0, 3)], draws=0).without
    with clearhead.knockout(model, {(0, 3): "zero"}):
        without = torch.stack([losses(model, one).mean() for one in ids(6, 9)])
    changes = without - torch.stack([losses(model, one).mean() for one in ids(6, 9)])
    assert found.error == pytest.approx(float(changes.std() / math.sqrt(6)), rel=1e-3)
    assert effect(model, None, ids(9), [(0, 3)], draws=0).without.error is None


def test_what_is_skipped_is_the_first_predictions(model: Any) -> None:
    found = effect(model, None, ids(12), [(0, 0)], draws=0, skip=8)
    assert found.whole.loss == pytest.approx(float(losses(model, ids(12))[8:].mean()), rel=1e-5)


def test_the_size_of_batches_changes_nothing(model: Any) -> None:
    one, other = (effect(model, None, ids(5, 10), [(0, 0)], draws=1, batch=n) for n in (1, 5))
    assert [one.change, one.random_mean] == pytest.approx([other.change, other.random_mean], abs=1e-5)


class Stopped(Exception):
    """As a kill, between two heads."""


def stop_at(last: int) -> Callable[[str, int, int], None]:
    def report(stage: str, done: int, total: int) -> None:
        if done == last:
            raise Stopped

    return report


def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(model: Any, tmp_path: Path) -> None:
    file, counted = tmp_path / "progress.json", list[int]()
    whole = importance(model, None, ids(3, 10)).as_dict()
    with pytest.raises(Stopped):
        importance(model, None, ids(3, 10), progress=file, on_progress=stop_at(5))
    assert len(json.loads(file.read_text())["done"]) == 5
    again = importance(
        model, None, ids(3, 10), progress=file, on_progress=lambda stage, done, total: counted.append(done)
    )
    assert again.as_dict() == whole
    assert counted == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"how": "uniform"}, "other how"),
        ({"texts": ids(3, 9)}, "other texts"),
        ({"length": 5}, "other texts"),
        ({"skip": 1}, "other skip"),
    ],
)
def test_the_progress_of_another_run_is_refused(model: Any, tmp_path: Path, other: Any, said: str) -> None:
    file = tmp_path / "progress.json"
    importance(model, None, ids(3, 10), progress=file)
    with pytest.raises(ModelError, match=said):
        importance(model, None, other.pop("texts", ids(3, 10)), progress=file, **other)


def test_damaged_progress_is_said_and_left_alone(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "progress.json"
    importance(model, None, ids(3, 10), progress=file)
    whole = file.read_text()
    content = json.loads(whole)
    changed = json.dumps({**content, "done": {**content["done"], "L0H0": [1, 2, 3, None]}})
    for damaged in ("", "[]", whole[:100], changed, json.dumps({"about": content["about"]})):
        file.write_text(damaged)
        with pytest.raises(ModelError, match="no progress of such a run, or damaged"):
            importance(model, None, ids(3, 10), progress=file)
        assert file.read_text() == damaged


def test_the_progress_of_other_weights_is_refused(model: Any, tmp_path: Path) -> None:
    importance(model, None, ids(3, 10), progress=tmp_path / "progress")
    weight = model.transformer.ln_f.weight
    before = weight.detach().clone()
    try:
        weight.data *= 1.1
        with pytest.raises(ModelError, match="other loss"):
            importance(model, None, ids(3, 10), progress=tmp_path / "progress")
    finally:
        weight.data.copy_(before)


def test_heads_together_stand_beside_as_many_others(model: Any) -> None:
    chosen = [(1, 2), (0, 0)]
    found = effect(model, None, ids(3, 10), chosen, draws=6)
    with clearhead.knockout(model, dict.fromkeys(chosen, "zero")):
        without = torch.cat([losses(model, one) for one in ids(3, 10)])
    assert found.without.loss == pytest.approx(float(without.mean()), rel=1e-5)
    assert found.heads == ((0, 0), (1, 2))
    changes = torch.tensor([one.change for one in found.random], dtype=torch.float64)
    assert len(changes) == 6
    assert len(set(changes.tolist())) > 1
    assert (found.random_mean, found.random_std) == pytest.approx((float(changes.mean()), float(changes.std())))
    assert effect(model, None, ids(3, 10), chosen, draws=6) == found
    assert effect(model, None, ids(3, 10), chosen, draws=6, seed=1).random != found.random
    assert not effect(model, None, ids(3, 10), chosen, draws=0).random


def test_mean_outputs_can_take_the_place_of_heads(model: Any) -> None:
    means = head_means(model, [ids(1, 10)])
    found = effect(model, None, ids(3, 10), [(0, 1)], how="mean", means=means, draws=0)
    with clearhead.knockout(model, {(0, 1): "mean"}, means=means):
        without = torch.cat([losses(model, one) for one in ids(3, 10)])
    assert found.without.loss == pytest.approx(float(without.mean()), rel=1e-5)


def test_the_score_of_in_context_learning_compares_late_tokens_with_early_ones(model: Any) -> None:
    texts = [ids(520, seed=5), ids(30, seed=6)]
    own = losses(model, texts[0])  # own[n] is the loss of token n + 1
    expected = float(own[489:510].mean() - own[39:60].mean())
    assert in_context_score(model, None, texts, length=520) == pytest.approx(expected, rel=1e-4)
    found = effect(model, None, texts, [(0, 0)], draws=2, length=520)
    assert found.whole.icl == pytest.approx(expected, rel=1e-4)
    with clearhead.knockout(model, {(0, 0): "zero"}):
        assert found.without.icl == pytest.approx(in_context_score(model, None, texts, length=520), rel=1e-6)


def test_everything_can_be_written_as_json(model: Any) -> None:
    found = importance(model, None, ids(10))
    for one in (found, effect(model, None, ids(10), [(0, 0)], draws=1)):
        assert json.loads(json.dumps(one.as_dict(), allow_nan=False)) == one.as_dict()


def test_a_table_for_pandas_has_a_row_a_head(model: Any, pandas_rows: Any) -> None:
    rows = importance(model, None, ids(10)).to_pandas()
    assert [(row["layer"], row["head"]) for row in rows] == [(n // H, n % H) for n in range(L * H)]
    assert set(rows[0]) == {"layer", "head", "loss", "change", "error", "icl"}


def told(call: Callable[[], object]) -> str:
    with pytest.raises((ModelError, ShapeError, DTypeError, ValueError)) as error:
        call()
    return str(error.value)


def test_bad_input_is_told(model: Any, minilm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none has a token to predict" in told(lambda: importance(model, None, ids(1)))
    assert "at least 10 tokens" in told(lambda: importance(model, None, ids(9), skip=8))
    assert "expected a str, or token ids" in told(lambda: importance(model, None, [torch.zeros(3)]))
    assert "Hugging Face tokenizer" in told(lambda: importance(model, None, "words"))
    assert "a text is int" in told(lambda: importance(model, None, 5))
    assert "a token id is -" in told(lambda: importance(model, None, ids(9) - 50))
    assert "expected (layer, head) pairs" in told(lambda: effect(model, None, ids(9), [3]))
    assert "beyond the 50" in told(lambda: importance(model, None, ids(9) + 42))
    assert "cannot be 'nought'" in told(lambda: importance(model, None, ids(9), how="nought"))
    assert "means=" in told(lambda: importance(model, None, ids(9), how="mean"))
    assert "length=1" in told(lambda: importance(model, None, ids(9), length=1))
    assert "no head L0H4" in told(lambda: effect(model, None, ids(9), [(0, 4)]))
    assert "layers 0 to 1" in told(lambda: effect(model, None, ids(9), [(2, 0)]))
    assert "at least one" in told(lambda: effect(model, None, ids(9), []))
    assert "cannot be drawn" in told(lambda: effect(model, None, ids(9), [(0, n) for n in range(H)] + [(1, 0)]))
    assert "longest window has 510 tokens" in told(lambda: in_context_score(model, None, ids(520), length=510))
    assert "gives no logits" in told(lambda: importance(minilm[0], minilm[1], "some words"))
    monkeypatch.setattr(model, "training", True)
    assert "model.eval()" in told(lambda: importance(model, None, ids(9)))


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    both_ways = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=50, initializer_range=0.5))
    assert "no causal" in told(lambda: importance(both_ways.eval(), None, ids(9)))
    for weight in both_ways.parameters():
        weight.data *= 0.01  # its logits hardly move with what comes later
    assert "no causal" in told(lambda: importance(both_ways, None, ids(9)))


def test_what_reads_no_text_or_two_is_refused(painter: Any, translator: Any) -> None:
    assert "ViTModel reads no text" in told(lambda: importance(painter, None, ids(9)))
    assert "MarianMTModel reads two texts" in told(lambda: importance(translator, None, ids(9)))
    assert "MarianMTModel reads two texts" in told(lambda: in_context_score(translator, None, ids(600)))


def test_numbers_that_are_not_finite_are_said(model: Any) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.transformer.ln_f.weight[0] = math.nan
    assert "what GPT2LMHeadModel predicts is not finite" in told(lambda: importance(broken, None, ids(9)))
    unseen = copy.deepcopy(model)  # beyond the few tokens that are tried
    with torch.no_grad():
        unseen.transformer.wpe.weight[20] = math.inf
    assert "the loss of GPT2LMHeadModel is not finite" in told(lambda: importance(unseen, None, ids(30)))


def test_repr_says_what_matters(model: Any) -> None:
    found = importance(model, None, ids(10))
    assert isinstance(found, Importance)
    assert repr(found).startswith(f"Importance({L * H} heads, zero; loss ")
    assert "2 heads" in repr(effect(model, None, ids(10), [(0, 0), (0, 1)], draws=2))
