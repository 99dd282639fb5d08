"""Heads whose behaviour is known get the scores that it implies, beside the right baselines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import DenseMap, DTypeError, ModelError, ShapeError, SoftmaxMap, masks, record
from clearhead.heads import Pairs, Parse, Tokens, aligned, relation_score, scoring

# Olsson et al. 2022: 25 random tokens, four times, after BOS.
PART = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:25] + 1
REPEATED = Tokens(torch.cat([torch.zeros(1, dtype=torch.long), PART.repeat(4)]))
N = 101
T, S = torch.arange(N)[:, None], torch.arange(N)


def pointing(to: Tensor) -> Tensor:
    """Weights (n, n) of a head that looks at one key."""
    return torch.nn.functional.one_hot(to, len(to)).double()


EVEN = (S <= T).double() / (T + 1)
HEADS = {
    "previous": pointing((S - 1).clamp(min=0)),
    "induction": pointing(torch.where(S > 25, S - 24, 0)),
    "uniform": EVEN,
    "window": ((S <= T) & (T - S < 4)).double() / torch.arange(1, N + 1).clamp(max=4)[:, None],
    "duplicate": pointing(torch.where(S > 25, S - 25, 0)),
}


ALL = DenseMap(torch.stack(list(HEADS.values())))


def scores(pairs: Pairs) -> dict[str, float]:
    """The mass of each head."""
    return dict(zip(HEADS, relation_score([(ALL, pairs)]).mass.tolist(), strict=True))


def exactly(found: dict[str, float], **expected: float) -> None:
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12), name


def test_synthetic_heads_get_exactly_the_expected_scores() -> None:
    first = 1 / 100  # of the second token, for heads that look at the first one until something repeats
    window = (1 / 2 + 1 / 3 + 98 / 4) / 100
    exactly(scores(REPEATED.previous()), previous=1, induction=first, duplicate=first, window=window)
    # Of the query at position t > 25 in copy c, the keys after c - 1 earlier copies: (t - 1) // 25 of t + 1 keys.
    even = sum((t - 1) // 25 / (t + 1) for t in range(26, N)) / 75
    exactly(scores(REPEATED.induction()), induction=1, previous=0, duplicate=0, uniform=even)
    exactly(scores(REPEATED.same_token()), duplicate=1, induction=0, previous=0, uniform=even)
    exactly(scores(REPEATED.same_token(nearest=True)), duplicate=1, previous=0)
    exactly(scores(REPEATED.window(4)), window=1, previous=1, induction=4 / N)
    exactly(scores(REPEATED.first()), induction=25 / 100, previous=1 / 100)
    exactly(scores(REPEATED.itself()), uniform=sum(1 / n for n in range(1, N + 1)) / N)


def test_the_baselines_stand_beside_the_score() -> None:
    same = torch.zeros(1, 5, N, 1, dtype=torch.float64)
    seen = SoftmaxMap(same, same, bias=ALL.to_dense().log().clamp(min=-800)[None], mask=masks.causal())  # those weights
    found = relation_score([(seen, REPEATED.induction())])
    even = sum((t - 1) // 25 / (t + 1) for t in range(26, N)) / 75
    assert found.uniform.tolist() == pytest.approx([even] * 5, abs=1e-12)
    assert found.chance.tolist() == pytest.approx([even] * 5, abs=1e-12)
    assert (found.offset, found.by_offset) == (-24, 1.0)
    assert found.queries.tolist() == [75] * 5
    assert found.accuracy[:2].tolist() == [0, 1]
    assert found.mass_error.isnan().all()
    assert repr(found) == "RelationScore('induction': most mass in H1, 1.000, uniform 0.031, offset -24 1.000)"


def test_a_random_head_scores_as_its_dense_weights_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_AT_ONCE", 8 * 4 * 30 * 7)  # some pairs, and seven queries, at once
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 6, (30,), generator=g)
    q, k = (torch.randn(1, heads, 30, 8, generator=g, dtype=torch.float64) for heads in (4, 2))
    attn, text = SoftmaxMap(q, k, mask=masks.causal()), Tokens(ids)
    for pairs in (text.same_token(), text.induction(), text.next(), text.window(5)):
        _, t, s = pairs.tokens()
        expected = torch.zeros(30, 30, dtype=torch.bool)
        expected[t, s] = True
        expected &= torch.ones(30, 30, dtype=torch.bool).tril()
        rows = expected.any(-1)
        dense = attn[0].to_dense()
        found = relation_score([(attn, pairs)])
        assert found.queries.tolist() == [int(rows.sum())] * 4
        if not rows.any():  # of the next token under a causal mask
            assert found.mass.isnan().all()
            assert found.offset is None
            continue
        mass = (dense * expected).sum(-1)[:, rows].mean(-1)
        hits = expected[torch.arange(30), dense.argmax(-1)][:, rows].double().mean(-1)
        torch.testing.assert_close(found.mass, mass, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.accuracy, hits, rtol=0, atol=1e-12)


def test_to_a_word_is_summed_and_from_a_word_averaged_and_special_tokens_predict_nothing() -> None:
    """[CLS] do ##n't go [SEP]: the word do ##n't looks at go with (.2 + .4) / 2, though most of it is on [CLS]."""
    weights = torch.tensor(
        [
            [1.0, 0.0, 0.0, 0.0, 0.0],
            [0.6, 0.1, 0.1, 0.2, 0.0],
            [0.4, 0.1, 0.0, 0.4, 0.1],
            [0.1, 0.3, 0.2, 0.35, 0.05],
            [0.2, 0.2, 0.2, 0.2, 0.2],
        ],
        dtype=torch.float64,
    )
    tokens = Tokens([101, 1, 2, 3, 102], words=[None, 0, 0, 1, None])
    parse = Parse(("don't", "go"), (1, None), ("aux", "root"))
    found = relation_score([(DenseMap(weights[None]), parse.pairs(tokens))])
    assert found.mass.item() == pytest.approx(0.3, abs=1e-12)
    assert found.accuracy.item() == 1
    assert found.offset == 1
    back = relation_score([(DenseMap(weights[None]), parse.pairs(tokens, to_dependents=True))])
    assert back.mass.item() == pytest.approx(0.5, abs=1e-12)
    assert back.accuracy.item() == 1  # .3 + .2 on the word against .35
    assert back.chance.item() == pytest.approx(2 / 3)


def test_errors_over_sequences_are_those_of_the_mean() -> None:
    g = torch.Generator().manual_seed(4)
    texts = [torch.rand(2, 9, 9, generator=g, dtype=torch.float64).softmax(-1) for _ in range(6)]
    found = relation_score([(DenseMap(weights), Tokens(range(9)).previous()) for weights in texts])
    means = torch.stack([weights.diagonal(-1, 1, 2).mean(-1) for weights in texts])
    torch.testing.assert_close(found.mass, means.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.mass_error, means.std(0) / math.sqrt(6), rtol=0, atol=1e-12)


def test_cross_attention_and_layers_and_what_does_not_fit() -> None:
    weights = torch.zeros(2, 3, 4, dtype=torch.float64)
    weights[0, torch.arange(3), torch.tensor([2, 0, 3])] = 1
    weights[1] = 0.25
    pairs = aligned([(0, 2), (1, 0), (2, 3)], Tokens(range(3)), Tokens(range(4)))
    found = relation_score([([DenseMap(weights), DenseMap(weights.flip(0))], pairs)])
    assert found.mass.tolist() == [[1, 0.25], [0.25, 1]]
    assert repr(found).startswith("RelationScore('aligned': most mass in L0H0, 1.000")
    with pytest.raises(ShapeError, match="expected at least one"):
        relation_score([])
    with pytest.raises(ShapeError, match=r"of one sequence with as many queries and keys; index the batch"):
        relation_score([(DenseMap(weights), Tokens(range(4)).previous())])
    with pytest.raises(ShapeError, match=r"with \(layers, heads\) \(2, 2\), \(1, 2\); expected the same model"):
        relation_score([([DenseMap(weights)] * 2, pairs), ([DenseMap(weights)], pairs)])
    with pytest.raises(DTypeError, match=r"sequence 0 is \(DenseMap .*, list\); expected \[\(maps, pairs\), …\]"):
        relation_score([(DenseMap(weights), [(1, 0)])])  # type: ignore[list-item]
    weights[0, 1, 0] = math.nan
    with pytest.raises(ModelError, match="its weights are not finite"):
        relation_score([(DenseMap(weights), pairs)])


def test_a_sequence_without_pairs_counts_for_nothing() -> None:
    weights = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64).softmax(-1)
    one, none = Tokens(range(5)).previous(), Tokens(range(5)).pairs([])
    found = relation_score([(DenseMap(weights), none), (DenseMap(weights), one)])
    alone = relation_score([(DenseMap(weights), one)])
    assert torch.equal(found.mass, alone.mass)
    assert torch.equal(found.queries, alone.queries)
    nothing = relation_score([(DenseMap(weights), none)])
    assert nothing.queries.tolist() == [0, 0]
    assert bool(nothing.mass.isnan().all())


def test_smollm2_has_an_induction_head_and_a_previous_token_head(smollm2: Any) -> None:
    model, _ = smollm2
    with torch.no_grad(), record(model) as recording:
        model(REPEATED.ids[None])
    found = relation_score([(recording, REPEATED.induction())])
    assert found.mass.shape == (30, 9)
    assert found.mass.max() > 0.6
    assert relation_score([(recording, REPEATED.previous())]).mass.max() > 0.6
