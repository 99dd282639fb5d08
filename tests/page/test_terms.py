"""The products behind q and behind the output: those that the page shows, and their sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import SoftmaxMap
from clearhead.nn import MultiHeadAttention, RawSelfAttention
from clearhead.page.terms import TOLD, Terms
from clearhead.view import View

X = torch.tensor([[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64], [0.22, 0.58, 0.33]])


def terms_of(view: View, n: int) -> Terms:
    attn = view.maps[n]
    assert isinstance(attn, SoftmaxMap)
    return view._terms_of(n, attn)


def opened(raw: bytes) -> tuple[dict[str, Any], np.ndarray]:
    """The facts and the numbers, from what `pack` gives."""
    line, planes = raw.split(b"\n", 1)
    return json.loads(line), np.frombuffer(planes, np.uint8).reshape(4, -1).T.copy().view("<f4").reshape(-1)


@pytest.fixture(scope="module")
def real(smollm2: tuple[Any, Any]) -> tuple[nn.Module, View]:
    model, tokenizer = smollm2
    return model, clearhead.look(model, tokenizer, "The keeper lit the lamp, and the lamp lit the sea.", layers=[0, 17])


@pytest.mark.parametrize(("n", "h"), [(0, 2), (1, 5), (1, 8)])
def test_a_number_of_q_in_a_real_model(real: tuple[nn.Module, View], n: int, h: int) -> None:
    model, view = real
    attention = model.model.layers[view.layers[n]].self_attn
    terms, T = terms_of(view, n), len(view.tokens)
    facts, numbers = opened(terms.pack(h))
    assert facts["project"]["turn"] == "turn"
    assert facts["project"]["inputs"] == 576
    of_q = numbers[: T * 16].reshape(T, 7 + 3 * TOLD)
    x = terms.projection.x
    a = attention.q_proj(x).detach().unflatten(-1, (9, 64))[:, h].numpy()
    q = view.maps[n].q[0, h].numpy()
    for t, (place, product, other, its, cos, sin, bias, *told) in enumerate(of_q):
        c, p = int(place), int(other)
        assert abs(c - p) == 32
        assert (product, its) == pytest.approx((a[t, c], a[t, p]), abs=2e-5)
        assert cos * product + sin * its == pytest.approx(q[t, c], abs=2e-5)
        assert cos**2 + sin**2 == pytest.approx(1, abs=1e-4)
        assert bias == 0
        products = x[t].numpy() * attention.q_proj.weight.detach().numpy()[64 * h + c]
        largest = np.argsort(-np.abs(products))[:TOLD]
        assert [int(m) for m in told[::3]] == largest.tolist()
        assert [a * b for a, b in zip(told[1::3], told[2::3], strict=True)] == pytest.approx(products[largest])


@pytest.mark.parametrize(("n", "h"), [(0, 2), (1, 5)])
def test_a_number_of_the_output_in_a_real_model(real: tuple[nn.Module, View], n: int, h: int) -> None:
    model, view = real
    attention = model.model.layers[view.layers[n]].self_attn
    T = len(view.tokens)
    facts, numbers = opened(terms_of(view, n).pack(h))
    assert facts["output"] == {"width": 576, "places": 1, "products": 3, "bias": False}
    attn = view.maps[n]
    z = (attn @ attn.v)[0]
    whole = attention.o_proj(z.transpose(0, 1).flatten(1)).detach()
    weight = attention.o_proj.weight.detach()[:, 64 * h : 64 * h + 64]  # (576, 64)
    mine = z[h] @ weight.T
    for t, (place, added, others, bias, total, *told) in enumerate(numbers[T * 16 :].reshape(T, 5 + 3 * TOLD)):
        m = int(place)
        assert m == int(mine[t].abs().argmax())
        assert added == pytest.approx(float(mine[t, m]), abs=1e-5)
        assert total == pytest.approx(float(whole[t, m]), abs=1e-5)
        assert added + others + bias == pytest.approx(total, abs=1e-5)
        products = (z[h, t] * weight[m]).numpy()
        largest = np.argsort(-np.abs(products))[:TOLD]
        assert [int(c) for c in told[::3]] == largest.tolist()
        assert [a * b for a, b in zip(told[1::3], told[2::3], strict=True)] == pytest.approx(products[largest])


def whole_layer(layer: Any) -> tuple[View, dict[str, Any], np.ndarray]:
    view = clearhead.look(layer, X)
    return view, *opened(terms_of(view, 0).pack(0))


def test_a_layer_small_enough_to_write_out_has_every_product() -> None:
    torch.manual_seed(123)
    layer = RawSelfAttention(3, 2)
    view, facts, numbers = whole_layer(layer)
    assert facts == {
        "project": {"of": ["q", "k", "v"], "same": [], "inputs": 3, "places": {"q": 2, "k": 2, "v": 2}}
        | {"products": 3, "turn": "", "bias": False},
        "output": {"same": True},
    }
    parts = numbers.reshape(3, 4, 2, 16)  # q k v, token, place
    for part, name in zip(parts, ("W_query", "W_key", "W_value"), strict=True):
        weight = getattr(layer, name).detach().numpy()
        np.testing.assert_allclose(part[..., 1], X.numpy() @ weight, atol=1e-6)
        for c in range(2):
            assert (part[:, c, 0] == c).all()
            np.testing.assert_array_equal(part[:, c, 7::3], np.tile([0, 1, 2], (4, 1)))
            np.testing.assert_array_equal(part[:, c, 8::3], X.numpy())
            np.testing.assert_array_equal(part[:, c, 9::3], np.tile(weight[:, c], (4, 1)))
    assert view.maps[0].q.shape == (1, 1, 4, 2)


def test_heads_and_a_bias_add_up_to_the_output() -> None:
    torch.manual_seed(123)
    layer = MultiHeadAttention(3, 4, 6, 0.0, 2)
    view = clearhead.look(layer, X)
    out = layer(X).detach().numpy()
    for h in (0, 1):
        facts, numbers = opened(terms_of(view, 0).pack(h))
        assert facts["output"] == {"width": 4, "places": 4, "products": 2, "bias": True}
        of_out = numbers[-4 * 4 * 11 :].reshape(4, 4, 11)  # token, place
        np.testing.assert_allclose(of_out[..., 4], out, atol=1e-6)
        np.testing.assert_allclose(of_out[..., 1:4].sum(-1), out, atol=1e-6)
        np.testing.assert_allclose((of_out[..., 6::3] * of_out[..., 7::3]).sum(-1), of_out[..., 1], atol=1e-6)


def test_one_query_and_one_key_are_those_of_all(real: tuple[nn.Module, View]) -> None:
    terms, T = terms_of(real[1], 1), len(real[1].tokens)
    everything = terms.of(5)
    one = terms.of(5, torch.tensor([7]), torch.tensor([3]))
    expected = torch.cat([everything[: T * 16].view(T, 16)[7], everything[T * 16 :].view(T, 14)[7]])
    torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)


def test_what_is_not_known_is_said() -> None:
    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = nn.functional.normalize(x, dim=-1)
            return nn.functional.scaled_dot_product_attention(q, q, x) ** 2

    _, facts, numbers = whole_layer(Normed())
    assert facts["project"] == {"why": "no matrix of this layer gives its queries of its input alone"}
    assert facts["output"] == {"why": "no matrix of this layer gives its output of its heads alone"}
    assert len(numbers) == 0


def test_of_a_recording_without_its_layer_nothing_was_searched(tmp_path: Path) -> None:
    view = clearhead.look(RawSelfAttention(3, 2), X)
    opened_again = View.open(view.save_recording(tmp_path / "kept"))
    facts, _ = opened(terms_of(opened_again, 0).pack(0))
    assert facts["project"] == facts["output"] == {"why": "the layer itself is not at hand"}
