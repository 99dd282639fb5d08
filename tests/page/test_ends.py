"""The first and the last step of a derivation: shown products give the shown sums, and those are the layer's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.nn import MultiHeadAttention, RawSelfAttention, SimpleSelfAttention
from clearhead.page import render
from clearhead.scores import Rotary

from .conftest import Opened
from .derived import near, numbers

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]
SIX = ["Your", "journey", "starts", "with", "one", "step"]
X = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.1],
        [0.05, 0.8, 0.55],
    ]
)
TABLES = """(lines) => lines.map((line) => [...line.querySelectorAll("mtable")].map((table) =>
    [...table.rows ?? table.querySelectorAll("mtr")].map((row) =>
        [...row.querySelectorAll("mn")].map((n) => n.textContent.replace("−", "-")))))"""


def matrices(page: Any, selector: str) -> list[list[list[list[Decimal]]]]:
    """The matrices of each line: rows of numbers."""
    lines = page.eval_on_selector_all(selector, TABLES)
    return [[[[Decimal(x) for x in row] for row in table] for table in line] for line in lines]


def product(row: list[list[Decimal]], rows: list[list[Decimal]]) -> list[Decimal]:
    return [sum(a * b for a, b in zip(row[0], column, strict=True)) for column in zip(*rows, strict=True)]


def same(shown: list[Decimal], computed: Any) -> bool:
    return all(near(y, x) for x, y in zip(shown, computed, strict=True))


def at(opened: Opened, head: int, query: int, key: int) -> None:
    opened.page.evaluate(f"location.hash = 'h=0.{head}&q={query}&k={key}&dir=from'")
    compared = re.compile(rf"q\s*{query}\s*·\s*k\s*{key}")
    opened.page.locator("[data-step=compare] .eq", has_text=compared).first.wait_for()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(123)


@pytest.mark.parametrize(
    "make", [lambda: RawSelfAttention(3, 2), lambda: MultiHeadAttention(3, 4, 6, 0.0, 2, qkv_bias=True)]
)
def test_a_small_layer_is_written_out_from_x_to_q_k_and_v(make: Callable[[], nn.Module], show: Show) -> None:
    view = clearhead.look(make(), X, tokens=SIX)
    opened, attn = show(render(view.page())), view.maps[0]
    for head, query, key in ((0, 3, 1), (attn.shape[1] - 1, 5, 4)):
        at(opened, head, query, key)
        lines = matrices(opened.page, "[data-step=project] .line")
        recorded = (attn.q[0, head, query], attn.k[0, head, key], attn.v[0, head, key])
        assert len(lines) == 3
        for (x, weights, *bias, result), token, true in zip(lines, (query, key, key), recorded, strict=True):
            assert same(x[0], X[token])
            added = bias[0][0] if bias else [Decimal(0)] * 2
            assert same(result[0], true)
            assert same(result[0], [a + b for a, b in zip(product(x, weights), added, strict=True)])


def test_heads_side_by_side_times_a_matrix_are_the_output(show: Show) -> None:
    layer = MultiHeadAttention(3, 4, 6, 0.0, 2)
    view = clearhead.look(layer, X, tokens=SIX)
    opened, out = show(render(view.page())), layer(X).detach()
    for head, query in ((0, 5), (1, 2)):
        at(opened, head, query, 0)
        [[z, weights, mine, again, others, bias, whole]] = matrices(opened.page, "[data-step=concatenate] > .eq")
        assert same(mine[0], product(z, weights))
        assert again == mine
        assert [sum(parts) for parts in zip(mine[0], others[0], bias[0], strict=True)] == whole[0]
        assert same(whole[0], out[query])
        assert "with the other head and the bias:" in opened.text("[data-step=concatenate]")


class Turning(nn.Module):
    """One head of four numbers, turned by position."""

    def __init__(self) -> None:
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(3, 4, bias=False) for _ in range(3))

    def attend(self, x: Tensor) -> tuple[Tensor, clearhead.SoftmaxMap]:
        q, k = (Rotary(4).rotate(W(x), torch.arange(len(x))) for W in (self.W_query, self.W_key))
        attn = clearhead.SoftmaxMap(q, k, v=self.W_value(x), mask=masks.causal())
        return attn @ attn.v, attn


def test_a_turn_by_position_is_shown_after_the_product(show: Show) -> None:
    layer = Turning()
    view = clearhead.look(layer, X, tokens=SIX)
    opened, attn = show(render(view.page())), view.maps[0]
    at(opened, 0, 4, 2)
    text = opened.text("[data-step=project]")
    assert text.count("turned:") == 2
    (x, weights, result, turned), _, of_v = matrices(opened.page, "[data-step=project] .line")
    assert same(result[0], product(x, weights))
    assert same(result[0], layer.W_query(X)[4].detach())
    assert same(turned[0], attn.q[0, 0, 4])
    assert len(of_v) == 3


@pytest.mark.parametrize(
    ("make", "project", "end"),
    [
        (SimpleSelfAttention, "q, k and v are the layer’s input x itself", "one head and no matrix after it"),
        (lambda: RawSelfAttention(3, 2), "q5=x5𝑊𝑄=", "one head and no matrix after it"),
    ],
)
def test_what_a_layer_does_not_have_is_said(make: Callable[[], nn.Module], project: str, end: str, show: Show) -> None:
    opened = show(render(clearhead.look(make(), X, tokens=SIX).page()), hash="#q=5&k=1")
    assert re.sub(r"\s", "", project) in re.sub(r"\s", "", opened.text("[data-step=project]"))
    assert end in opened.text("[data-step=concatenate]")


def test_what_is_not_known_is_said_on_the_page(show: Show) -> None:
    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = nn.functional.normalize(x, dim=-1)
            return nn.functional.scaled_dot_product_attention(q, q, x) ** 2

    opened = show(render(clearhead.look(Normed(), X, tokens=SIX).page()))
    assert opened.text("[data-step=project]").endswith("no matrix of this layer gives its queries of its input alone.")
    assert opened.text("[data-step=concatenate]").endswith(
        "no matrix of this layer gives its output of its heads alone."
    )


@pytest.mark.parametrize("bfloat", [False, True])
def test_a_head_of_a_real_model_begins_at_its_layer_s_input_and_ends_at_its_output(
    smollm2: tuple[Any, Any], show: Show, bfloat: bool
) -> None:
    model, tokenizer = smollm2
    model = copy.deepcopy(model).bfloat16() if bfloat else model
    view = clearhead.look(model, tokenizer, "The keeper lit the lamp, and the lamp lit the sea.", layers=[17])
    page, attn, attention = view.page(), view.maps[0], model.model.layers[17].self_attn
    (_, head), *_ = page.exact
    z = (attn @ attn.v)[0].transpose(0, 1).flatten(1)
    out = z.float() @ attention.o_proj.weight.detach().float().T
    opened = show(render(page), hash=f"#h=17.{head}&q=9&k=1")
    for query, key in ((9, 1), (3, 3), (0, 0)):
        opened.page.evaluate(f"location.hash = 'h=17.{head}&q={query}&k={key}&dir=from'")
        opened.page.locator("[data-step=project] .eq", has_text=re.compile(f"a\\s*{query}\\s*=")).wait_for()
        factors, terms, (cos, own, sin, its, q) = numbers(opened.page, "project")[2:]
        place = place_of(opened, "project")
        *terms, product = terms
        assert sum(terms) == product
        assert all(near(a * b, t, units=6) for a, b, t in zip(factors[::2], factors[1::2], terms, strict=False))
        assert near(float(own), product)
        assert near(cos * own + sin * its, q)
        assert near(attn.q[0, head, query, place].float(), q, units=0.5 if not bfloat else 1)
        factors, terms, sums = numbers(opened.page, "concatenate")[2:]
        place = place_of(opened, "concatenate")
        *terms, mine = terms
        assert sum(terms) == mine == sums[0]
        assert sums[0] + sums[1] == sums[2]
        assert near(out[query, place], sums[2])
        own = (
            z[query].float().unflatten(0, (9, 64))[head]
            @ attention.o_proj.weight.detach().float()[place].unflatten(0, (9, 64))[head]
        )
        assert near(own, mine, units=1)


def place_of(opened: Opened, step: str) -> int:
    """Which of many numbers a step works out."""
    return int(re.fullmatch(r"dim (\d+):", opened.text(f"[data-step={step}] .place"))[1])
