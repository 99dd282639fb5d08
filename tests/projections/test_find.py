"""Which matrix is W_Q, and which W_O: held against models whose matrices are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead
from clearhead import SoftmaxMap
from clearhead.nn import CausalAttention, MultiHeadAttention, RawSelfAttention, SelfAttention, SimpleSelfAttention
from clearhead.projections import Projection, Watch, find, rows_of
from clearhead.projections.turning import find_turn

T, HEADS, WIDTH = 11, 4, 6


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotated(q: Tensor, width: int, neighbours: bool, size: float = 1.0) -> Tensor:
    """q (H, T, D) with its first numbers turned, as rotary embeddings do."""
    angle = torch.arange(q.shape[-2])[:, None] * 0.7 ** torch.arange(width // 2)  # (T, pairs)
    pairs = q[..., :width].unflatten(-1, (-1, 2)) if neighbours else q[..., :width].unflatten(-1, (2, -1)).mT
    x, y = pairs.unbind(-1)
    turned = torch.stack([x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin()], -1)
    first = turned.flatten(-2) if neighbours else turned.mT.flatten(-2)
    return size * torch.cat([first, q[..., width:]], -1)


class Block(nn.Module):
    """Attention whose queries and keys go through `change` after the product with their matrices."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda q: q, fused: str = "", bias: bool = True) -> None:
        super().__init__()
        self.change, self.fused = change, fused
        size = HEADS * WIDTH
        self.first = nn.Linear(size, 3 * size, bias=bias)
        self.last = nn.Linear(size, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused == "by head":
            q, k, v = self.first(x).unflatten(-1, (HEADS, 3, WIDTH)).movedim(-3, 0).unbind(-2)
        else:
            q, k, v = self.first(x).unflatten(-1, (3, HEADS, WIDTH)).movedim(-2, 0).unbind(-2)
        z = F.scaled_dot_product_attention(self.change(q)[None], self.change(k)[None], v[None], is_causal=True)
        return self.last(z[0].movedim(0, -2).flatten(-2))


def looked_at(module: nn.Module, x: Tensor) -> tuple[SoftmaxMap, Projection]:
    with clearhead.record(module) as recording, Watch(module, len(x)) as watch, torch.no_grad():
        module(x)
    attn = recording[0]
    assert isinstance(attn, SoftmaxMap)
    return attn, find(attn, module, watch, recording.paths[0])


@pytest.mark.parametrize("fused", ["in blocks", "by head"])
@pytest.mark.parametrize("bias", [True, False])
def test_one_matrix_for_q_k_and_v_is_taken_apart(fused: str, bias: bool) -> None:
    x = seeded(T, HEADS * WIDTH)
    module = Block(fused=fused, bias=bias)
    attn, found = looked_at(module, x)
    for name in "qkv":
        part, recorded = getattr(found, name), getattr(attn, name)[0]
        assert part is not None
        assert part.turn is None
        for h in range(HEADS):
            columns = part.places[h]
            torch.testing.assert_close(x @ part.matrix[:, columns] + part.bias[columns], recorded[h])
    assert found.out is not None
    z = (attn @ attn.v)[0].transpose(0, 1)
    parts = sum(z[:, h] @ found.out.matrix[found.out.places[h]] for h in range(HEADS))
    torch.testing.assert_close(parts + found.out.bias, module(x))


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize(("width", "size"), [(WIDTH, 1.0), (WIDTH, 1.3), (4, 1.0), (2, 1.0)])
def test_a_turn_by_position_is_told_from_the_queries(neighbours: bool, width: int, size: float) -> None:
    _, found = looked_at(Block(lambda q: rotated(q, width, neighbours, size)), seeded(T, HEADS * WIDTH))
    assert found.q is not None
    assert found.q.turn is not None
    partner = found.q.turn.partner
    if neighbours:
        expected = [c ^ 1 if c < width else c for c in range(WIDTH)]
    else:
        expected = [(c + width // 2) % width if c < width else c for c in range(WIDTH)]
    assert partner.tolist() == expected


def test_the_coefficients_of_a_turn_give_every_number_of_q() -> None:
    a = seeded(T, WIDTH)
    q = rotated(a[None], 4, False)[0]
    turn = find_turn(a[:, None], q[:, None])
    assert turn is not None
    rows = torch.arange(T)
    for c in range(WIDTH):
        cos, sin = turn.coefficients(a, q, torch.full((T,), c))
        torch.testing.assert_close(cos * a[:, c] + sin * a[rows, turn.partner[c]], q[:, c].double())
        angle = rows * 0.7 ** (c % 2) if c < 4 else torch.zeros(T)
        torch.testing.assert_close(cos.float(), angle.cos(), atol=1e-5, rtol=0)


def test_a_factor_before_the_comparison_is_told() -> None:
    _, found = looked_at(Block(lambda q: 0.125 * q), seeded(T, HEADS * WIDTH))
    assert found.q is not None
    assert found.q.turn is not None
    assert found.q.turn.factor == pytest.approx(0.125)
    assert found.q.turn.partner.tolist() == list(range(WIDTH))


@pytest.mark.parametrize(
    "change",
    [lambda q: F.normalize(q, dim=-1), lambda q: q**3, lambda q: q.flip(-1), lambda q: q + torch.arange(T)[:, None]],
)
def test_what_no_turn_explains_is_not_known(change: Callable[[Tensor], Tensor]) -> None:
    _, found = looked_at(Block(change), seeded(T, HEADS * WIDTH))
    assert found.q is None
    assert found.out is not None
    assert found.why == "no matrix of this layer gives its queries of its input alone"


@pytest.mark.parametrize(
    ("layer", "same"),
    [
        (SimpleSelfAttention(), {"q", "k", "v", "out"}),
        (RawSelfAttention(3, 2), {"out"}),
        (SelfAttention(3, 2, qkv_bias=True), {"out"}),
        (CausalAttention(3, 2, 6, 0.0), {"out"}),
        (MultiHeadAttention(3, 4, 6, 0.0, 2), set()),
    ],
)
def test_the_layers_of_this_package(layer: Any, same: set[str]) -> None:
    x = seeded(6, 3)
    view = clearhead.look(layer, x)
    attn = view.maps[0]
    assert isinstance(attn, SoftmaxMap)
    found = view._terms_of(0, attn).projection
    assert found.same == same
    assert (found.out is None) == ("out" in same)
    if isinstance(layer, RawSelfAttention):
        assert found.q is not None
        torch.testing.assert_close(found.q.matrix, layer.W_query.detach())


def test_weights_that_changed_after_the_run_are_not_taken_for_those_that_ran() -> None:
    layer, x = SelfAttention(3, 2), seeded(6, 3)
    view = clearhead.look(layer, x)
    with torch.no_grad():
        layer.W_query.weight += 1
    attn = view.maps[0]
    assert isinstance(attn, SoftmaxMap)
    assert view._terms_of(0, attn).projection.q is None


def test_inputs_beyond_the_limit_are_let_go() -> None:
    module, x = Block(), seeded(T, HEADS * WIDTH)
    with clearhead.record(module) as recording, Watch(module, T, limit=x.nbytes - 1) as watch, torch.no_grad():
        module(x)
    attn = recording[0]
    assert isinstance(attn, SoftmaxMap)
    found = find(attn, module, watch, "")
    assert watch.inputs == {}
    assert found.x is None
    assert "text this long" in found.why
    assert None not in (found.q, found.out)  # these are known of three rows


def test_inputs_of_what_holds_the_layers_go_first() -> None:
    module, x = nn.Sequential(nn.Sequential(Block()), nn.Identity()), seeded(T, HEADS * WIDTH)
    with clearhead.record(module) as recording, Watch(module, T, limit=x.nbytes) as watch, torch.no_grad():
        module(x)
    assert not watch.full
    assert [path for path, _ in watch.inputs] == recording.paths == ["0.0"]
    whole = Watch(module, T)
    with whole, torch.no_grad():
        module(x)
    assert {path for path, _ in whole.inputs} == {"", "0", "0.0"}
    whole.keep_only(recording.paths)
    assert [path for path, _ in whole.inputs] == ["0.0"]


def test_a_layer_that_is_called_twice_is_found_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(self.block(x))
            return y

    module, x = Twice(), seeded(T, HEADS * WIDTH)
    with clearhead.record(module) as recording, Watch(module, T) as watch, torch.no_grad():
        module(x)
    given = [find(attn, module, watch, path).x for attn, path in zip(recording, recording.paths, strict=True)]
    torch.testing.assert_close(given[0], x)
    torch.testing.assert_close(given[1], module.block(x).detach())


@pytest.mark.parametrize("alone", [True, False])
def test_watching_changes_nothing_and_leaves_nothing(alone: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    model = layer if alone else nn.Sequential(layer, nn.Linear(8, 8))
    x = seeded(1, 5, 8)
    with torch.no_grad():
        before = model(x)
        with Watch(model, 5):
            hooked = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
            assert hooked == ([] if alone else [model, model[1]])  # nothing of the layer: its fast path stays
            torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_real_models(smollm2: tuple[Any, Any], minilm: tuple[Any, Any]) -> None:
    for (model, tokenizer), turned in ((smollm2, True), (minilm, False)):
        view = clearhead.look(model, tokenizer, "The keeper lit the lamp.", layers=[0, 5])
        for n in (0, 1):
            attn = view.maps[n]
            assert isinstance(attn, SoftmaxMap)
            found = view._terms_of(n, attn).projection
            assert found.q is not None
            assert (found.q.turn is not None) == turned
            assert None not in (found.k, found.v, found.out)


def test_three_rows_of_a_short_input() -> None:
    assert rows_of(torch.arange(1)[:, None]).tolist() == [[0], [0], [0]]
    assert rows_of(torch.arange(7)[:, None]).tolist() == [[1], [3], [6]]
