"""The solutions of the exercises are right: equal to the reference in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead import reference
from clearhead.learn.exercises import NAMES, exercises_of

HALVES = (slice(0, 2), slice(2, 5))
EXERCISES = {e.name: e for lesson in NAMES for e in exercises_of(lesson)}


def _projected(layer: Any, x: Tensor) -> list[Tensor]:
    return [layer.W_query(x), layer.W_key(x), layer.W_value(x)]


def test_solutions_equal_the_reference() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 4, generator=draw, dtype=torch.float64)
    solve = {name: exercise.solution for name, exercise in EXERCISES.items()}
    out, shares = solve["attention"](q[0, 0], k[0, 0], v[0, 0])
    torch.testing.assert_close(shares, reference.weights(q, k)[0, 0])
    torch.testing.assert_close(out, reference.attention(q, k, v)[0, 0])
    torch.testing.assert_close(solve["scaled_weights"](q[0, 0], k[0, 0]), reference.weights(q, k)[0, 0])
    mask = reference.causal(5, 5)
    scores = reference.scores(q, k)[0, 0]
    torch.testing.assert_close(solve["causal_weights"](scores), reference.weights(q, k, mask=mask)[0, 0])
    torch.testing.assert_close(solve["softmax"](scores), reference.weights(q, k)[0, 0])
    torch.testing.assert_close(solve["context_vectors"](q[0, 0]), reference.attention(q, q, q, scale=1.0)[0, 0])


def test_solutions_of_lessons_1_6_and_7_equal_the_reference() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 5, 4, generator=draw, dtype=torch.float64)
    W, U, score = (torch.randn(*size, generator=draw, dtype=torch.float64) for size in ((4, 3), (4, 3), (3,)))
    solve = {name: exercise.solution for name, exercise in EXERCISES.items()}
    scores = torch.stack([solve["additive_scores"](s, k, W, U, score) for s in q])
    torch.testing.assert_close(scores, reference.additive_scores(q, k, W, U, score))
    torch.testing.assert_close(
        solve["cross_attention"](q, k[:3], W, U, U), reference.attention(q @ W, k[:3] @ U, k[:3] @ U)
    )
    real = torch.tensor([[True, True, False, True, False]])
    torch.testing.assert_close(
        solve["padded_weights"](scores[None], real), reference.softmax(scores[None], real[:, None])
    )
    near = reference.sliding_window(5, 5, 2)
    torch.testing.assert_close(solve["window_weights"](scores, 2), reference.softmax(scores, near))
    parts = [(reference.attention(q, k[part], v[part]), reference.scores(q, k[part]).logsumexp(-1)) for part in HALVES]
    torch.testing.assert_close(solve["merge_parts"](*parts[0], *parts[1]), reference.attention(q, k, v))
    want = reference.linear_weights(q, k, mask=reference.causal(5, 5)) @ v
    torch.testing.assert_close(solve["linear_attention"](q, k, v), want)


def test_layers_equal_the_reference() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    layer = EXERCISES["MultiHeadAttention"].solution(7, 6, 3).double()
    q, k, v = (whole.view(2, 5, 3, 2).transpose(1, 2) for whole in _projected(layer, x))
    each = reference.attention(q, k, v, mask=reference.causal(5, 5))
    torch.testing.assert_close(layer(x), layer.out_proj(torch.cat(list(each.unbind(1)), dim=-1)))
    layer = EXERCISES["CausalAttention"].solution(7, 6, 0.5).double().eval()
    torch.testing.assert_close(layer(x), reference.attention(*_projected(layer, x), mask=reference.causal(5, 5)))
    additive = EXERCISES["AdditiveAttention"].solution(7, 6, 4).double()
    keys = torch.randn(3, 6, dtype=torch.float64)
    W, U, score = additive.W_query.weight.T, additive.W_key.weight.T, additive.score.weight[0]
    shares = reference.softmax(reference.additive_scores(x[0], keys, W, U, score))
    torch.testing.assert_close(additive(x[0], keys), shares @ keys)
    layer = EXERCISES["SelfAttention"].solution(7, 6).double()
    torch.testing.assert_close(layer(x[0]), reference.attention(*_projected(layer, x[0])))
