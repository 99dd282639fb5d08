"""Reading the derivation off an open page, and holding it to float64."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np

SIGNED = """(all) => all.map((math) => [...math.querySelectorAll("mn")].filter((n) => !n.closest("msub"))
    .map((n) => (n.previousElementSibling?.textContent === "−" ? "-" : "") + n.textContent.replace("−", "-")))"""
CELLS = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent.replace('−', '-')))"


def numbers(page: Any, step: str) -> list[list[Decimal]]:
    """The signed numbers of each piece of a step, indices left out."""
    pieces = page.eval_on_selector_all(f"[data-step={step}] > .eq math", SIGNED)
    return [[Decimal(number) for number in piece] for piece in pieces]


def share(text: str) -> float:
    """A weight as shown: 0.194, or 9.23×10−5."""
    return float(text.replace("×10", "e").replace("−", "-"))


def near(true: float | Decimal, shown: Decimal, units: float = 0.5) -> bool:
    """Whether a number as shown is the true one within so many units of its last digit, and float32's rounding."""
    unit = 10.0 ** int(shown.as_tuple().exponent)
    return abs(float(true) - float(shown)) <= units * unit + 1e-6 * max(1, abs(float(true)))


def _three(x: float) -> str:
    return f"{x:.2e}"


def check(page: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, query: int, key: int) -> None:
    """Every number shown for one weight is that of q (d,) and the keys it may see, k (s, d) and v (s, dv); and each
    step, done with the numbers shown, gives the next."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = scale * k @ q
    top = scores.max()
    lse = math.log(np.exp(scores - top).sum()) + top
    weight = math.exp(scores[key] - lse)
    dot = (_written if len(q) <= 4 else _told)(page, q, k[key])
    score = numbers(page, "scale")[0][-1]
    assert score.as_tuple().exponent == dot.as_tuple().exponent <= -3
    assert near(scores[key], score)
    assert near(float(dot) * scale, score)
    text = "".join(page.locator("[data-step=softmax] > .eq math").all_text_contents()[-2:])
    shown = re.fullmatch(r"=e(−?[\d.]+)−(?:([\d.]+)|\((−[\d.]+)\))=(.+)", text)
    assert Decimal(shown[1].replace("−", "-")) == score
    log = Decimal((shown[2] or shown[3]).replace("−", "-"))
    assert near(lse, log)
    assert _three(share(shown[4])) == _three(weight) == _three(math.exp(score - log))
    assert page.locator("#question").inner_text().count("%") == 1
    if len(scores) > 8 or len(q) > 4:
        assert numbers(page, "row") == []
    elif numbers(page, "row"):
        _row(page, scores, key, weight)
    weights = np.exp(scores - lse)
    _mix(page, weights, v, key)
    _table(page, scores, weights, v, key)


def _written(page: Any, q: np.ndarray, k: np.ndarray) -> Decimal:
    """A comparison of few numbers, all of them in one line; returns the sum as shown."""
    pieces = numbers(page, "compare")
    factors, dot = pieces[1], pieces[-1][0]
    assert near(q @ k, dot)
    assert len(factors) == 2 * len(q)
    for x, (a, b) in enumerate(zip(factors[::2], factors[1::2], strict=True)):
        assert abs(q[x] - float(a)) < 5.1e-4
        assert abs(k[x] - float(b)) < 5.1e-4
    assert near(sum(a * b for a, b in zip(factors[::2], factors[1::2], strict=True)), dot)
    if len(q) > 1:
        assert sum(pieces[2]) == dot
        assert all(near(x, term, units=1) for x, term in zip(q * k, pieces[2], strict=True))
    return dot


def _told(page: Any, q: np.ndarray, k: np.ndarray) -> Decimal:
    """A comparison of many numbers: the largest products in a table; returns the sum as shown."""
    dot = numbers(page, "compare")[-1][0]
    assert near(q @ k, dot)
    *rows, (words, whole) = page.eval_on_selector_all(".products tr", CELLS)
    assert words == "sum, ω"
    assert Decimal(whole) == dot
    largest, others = np.argsort(-np.abs(q * k)), [row for row in rows if len(row) == 2]
    told = [row for row in rows if len(row) == 6]
    assert len(told) >= 1
    for at, (name, a, _, b, _, product) in zip(largest, told, strict=False):
        assert name == f"dim {at}"
        assert near(q[at], Decimal(a))
        assert near(k[at], Decimal(b))
        assert near(q[at] * k[at], Decimal(product), units=1)
    assert [row[0] for row in others] == ([f"{len(q) - len(told)} other dims"] if len(told) < len(q) else [])
    assert sum(Decimal(row[-1]) for row in rows) == dot
    return dot


def _row(page: Any, scores: np.ndarray, key: int, weight: float) -> None:
    """The whole row: exponentials, their sum, and the share."""
    (own, *exponents), (one, *parts), (again, whole, *_) = numbers(page, "row")
    assert own == exponents[key]
    assert one == again == parts[key]
    assert sum(parts) == whole
    assert near(np.exp(scores).sum(), whole)
    for score, exponent, part in zip(scores, exponents, parts, strict=True):
        assert near(score, exponent)
        assert near(math.exp(score), part, units=1)
        assert near(math.exp(exponent), part, units=1)
    shown = page.locator("[data-step=row] .eq math").last.text_content().split("=")[-1]
    assert _three(share(shown)) == _three(weight) == _three(float(one / whole))


def _mix(page: Any, weights: np.ndarray, v: np.ndarray, key: int) -> None:
    """z, written out for a short row of few numbers; else the length of what the key brings."""
    pieces = numbers(page, "mix")[1:]
    if len(weights) <= 8 and v.shape[1] <= 4 and len(numbers(page, "row")):
        *terms, z = pieces
        assert len(terms) == len(weights)
        for weight, value, (own, *shown) in zip(weights, v, terms, strict=True):
            assert near(weight, own, units=5)  # trailing zeros are left out
            assert all(near(x, y, units=5) for x, y in zip(value, shown, strict=True))
        for c, x in enumerate(z):
            assert near((weights @ v)[c], x)
            assert near(sum(own * shown[c] for own, *shown in terms), x), (terms, z, c)
    elif len(weights) > 8 or v.shape[1] > 4:
        text = page.locator("[data-step=mix] > .eq math").nth(1).text_content()
        a, b, c = map(share, re.fullmatch(r"‖αv\d+‖=(\S+)×([\d.]+)=(.+)", text).groups())
        assert _three(c) == _three(weights[key] * np.linalg.norm(v[key])) == _three(a * b)
        assert math.isclose(a, weights[key], rel_tol=6e-3)
        assert math.isclose(b, np.linalg.norm(v[key]), rel_tol=6e-3)


def _percent(text: str) -> Decimal:
    return Decimal(0) if text.startswith("<") else Decimal(text.rstrip("%").replace("\u202f", ""))


def _table(page: Any, scores: np.ndarray, weights: np.ndarray, v: np.ndarray, key: int) -> None:
    """What it looks at beside what it gets: both add up to 100%."""
    z = weights @ v
    shares = weights * (v @ z) / (z @ z)
    assert math.isclose(shares.sum(), 1)
    *rows, last = page.eval_on_selector_all("#looks tbody tr", CELLS)
    others = last if last[0] == "" else None
    rows = rows if others else [*rows, last]
    order = [int(row[2].replace("\u202f", "")) for row in rows]
    assert order[:-1] == np.argsort(-weights, kind="stable")[: len(rows) - 1].tolist()
    assert key in order
    for j, (rank, _, _, score, _, looks, norm, _, gets) in zip(order, rows, strict=True):
        assert int(rank) == 1 + (weights > weights[j]).sum()
        assert near(scores[j], Decimal(score))
        assert near(np.linalg.norm(v[j]), Decimal(norm))
        assert near(100 * weights[j], _percent(looks), units=0.51)
        assert near(100 * shares[j], _percent(gets), units=0.51)
    if others:
        assert int(others[1].replace("\u202f", "").split()[0]) == len(weights) - len(rows)
        for column, at in ((5, 5), (8, 8)):
            told = sum(_percent(row[column]) for row in rows)
            assert abs(told + _percent(others[at]) - 100) <= Decimal("0.1")
