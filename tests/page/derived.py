"""Reading the derivation off an open page, and holding it to float64."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np

SIGNED = """(all) => all.map((math) => [...math.querySelectorAll("mn")].filter((n) => !n.closest("msub"))
    .map((n) => (n.previousElementSibling?.textContent === "−" ? "-" : "") + n.textContent.replace("−", "-")))"""


def numbers(page: Any, step: str) -> list[list[Decimal]]:
    """The signed numbers of each piece of a step, indices left out."""
    pieces = page.eval_on_selector_all(f"[data-step={step}] .eq math", SIGNED)
    return [[Decimal(number) for number in piece] for piece in pieces]


def _share(text: str) -> float:
    """A weight as shown: 0.194, or 9.23×10−5."""
    return float(text.replace("×10", "e").replace("−", "-"))


def _near(true: float | Decimal, shown: Decimal, units: float = 0.5) -> bool:
    """Whether a number as shown is the true one within so many units of its last digit, and float32's rounding."""
    unit = 10.0 ** int(shown.as_tuple().exponent)
    return abs(float(true) - float(shown)) <= units * unit + 1e-6 * max(1, abs(float(true)))


def _three(x: float) -> str:
    return f"{x:.2e}"


def check(page: Any, q: np.ndarray, k: np.ndarray, scale: float, query: int, key: int) -> None:
    """Every number shown for one weight is that of q (d,) and the keys it may see, k (s, d); and each step, done with
    the numbers shown, gives the next."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    scores = scale * k @ q
    top = scores.max()
    lse = math.log(np.exp(scores - top).sum()) + top
    weight = math.exp(scores[key] - lse)
    dot = _compare(page, q, k[key])
    score = numbers(page, "scale")[0][-1]
    assert score.as_tuple().exponent == dot.as_tuple().exponent <= -3
    assert _near(scores[key], score)
    assert _near(float(dot) * scale, score)
    text = page.locator("[data-step=softmax] .eq math").last.text_content()
    shown = re.fullmatch(r"=e(−?[\d.]+)−(?:([\d.]+)|\((−[\d.]+)\))=(.+)", text)
    assert Decimal(shown[1].replace("−", "-")) == score
    log = Decimal((shown[2] or shown[3]).replace("−", "-"))
    assert _near(lse, log)
    assert _three(_share(shown[4])) == _three(weight) == _three(math.exp(score - log))
    assert page.locator("#question").inner_text().count("%") == 1
    if len(scores) > 8:
        assert numbers(page, "row") == []
    elif numbers(page, "row"):
        _row(page, scores, key, weight)


def _compare(page: Any, q: np.ndarray, k: np.ndarray) -> Decimal:
    """Products and their sum; returns the sum as shown."""
    d = len(q)
    told = list(range(d)) if d <= 4 else [0, 1, 2, d - 1]
    pieces = numbers(page, "compare")
    factors, dot = pieces[1], pieces[-1][0]
    assert _near(q @ k, dot)
    assert len(factors) == 2 * len(told)
    for x, a, b in zip(told, factors[::2], factors[1::2], strict=True):
        assert abs(q[x] - float(a)) < 5.1e-4
        assert abs(k[x] - float(b)) < 5.1e-4
    if d <= 4:
        assert _near(sum(a * b for a, b in zip(factors[::2], factors[1::2], strict=True)), dot)
    if d > 1:
        terms, true = pieces[2], [q[x] * k[x] for x in told]
        if d > 4:
            true.insert(3, q @ k - sum(true))
            hint = page.locator("[data-step=compare] h4").get_attribute("title")
            assert hint.endswith(f"⋯ is the other {d - 4}: {terms[3]}".replace("-", "−"))
        assert sum(terms) == dot
        assert all(_near(x, term, units=1) for x, term in zip(true, terms, strict=True))
    return dot


def _row(page: Any, scores: np.ndarray, key: int, weight: float) -> None:
    """The whole row: exponentials, their sum, and the share."""
    (own, *exponents), (one, *parts), (again, whole, *_) = numbers(page, "row")
    assert own == exponents[key]
    assert one == again == parts[key]
    assert sum(parts) == whole
    assert _near(np.exp(scores).sum(), whole)
    for score, exponent, part in zip(scores, exponents, parts, strict=True):
        assert _near(score, exponent)
        assert _near(math.exp(score), part, units=1)
        assert _near(math.exp(exponent), part, units=1)
    shown = page.locator("[data-step=row] .eq math").last.text_content().split("=")[-1]
    assert _three(_share(shown)) == _three(weight) == _three(float(one / whole))
