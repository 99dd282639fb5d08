"""What scores add up to: the thresholds of roles, each against what a uniform head gets in a text of that length.

Two kinds of roles behave differently as a text grows (measured on SmolLM2 from 128 to 7,658 tokens).

- Who looks at one place, or at copies, goes on to do so: the share of previous-token, local, self, duplicate-token and
  induction heads hardly moves, and a fixed one is the right threshold, but for short texts, where a uniform head gets
  near it.
- A sink is what a head rests on when nothing else calls, and each further token is one more that may call: at a fixed
  preference for the sink its share falls as the text grows, and so does that of a uniform head. So a sink is judged in
  nats, as a part of the way from the uniform head to one that rests there always: ln(score/uniform) against
  ln(1/uniform). Three quarters of the way are 50 % of the attention at 80 tokens and 17 % at 8,000.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CROSS", "ROLES", "Judgement", "judge", "role_of"]

ROLES = ("sink", "previous", "induction", "duplicate", "self", "local", "broad", "other")
CROSS = ("sink", "aligned", "broad", "other")  # of heads whose keys are another text
SPECIFIC = ("previous", "induction", "duplicate", "self", "local", "aligned")
SHARE, ABOVE = 0.25, 1.25  # of the attention; and so many times that of a uniform head
WAY = 0.75  # of the way from the uniform head to a perfect one, in nats
EVEN = 0.6  # of the largest entropy
RESTS = 2.0  # a head that gives its sink twice what it gives to the rest of its behaviour is a sink

Scores = Mapping[str, float | None]


@dataclass(frozen=True)
class Judgement:
    """A role, what it is more exactly, and how clear it is: 0 at the edge to another role, towards 1 far from it."""

    role: str
    detail: str
    confidence: float


def judge(scores: Scores, baselines: Scores) -> Judgement:
    """The role that a head's scores, beside a uniform head's, add up to.

    A head has one of the roles previous, induction, duplicate, self, local and aligned if its score is at least .25 and
    1.25 times the uniform head's; of several, that furthest above it. It is a sink instead if it is one, by the next
    sentence, and gives that twice as much. Else it is a sink if ln(score / uniform) >= ¾ ln(1 / uniform), or broad if
    its entropy is .6 of the largest there is, whichever is further above, or other.

    confidence: 1 - (threshold, or the next role's measure in its threshold) / (its own), of "other" 1 - (the largest).

    detail: "offset -3" where half of the attention to the tokens around is there; "delimiter" where as much of it as a
    sink needs is on punctuation and special tokens; the relation given by the user that it follows, if any.

    >>> judge({"previous": 0.4, "sink": 0.5}, {"previous": 0.1, "sink": 0.02})
    Judgement(role='previous', detail='', confidence=0.16...)
    """
    passed = {name: _measure(name, scores, baselines) for name in (*SPECIFIC, "sink", "broad")}
    role = _role(passed, scores, baselines)
    others = max(value for name, value in passed.items() if name != role)
    confidence = 1 - others if role == "other" else 1 - max(1.0, min(others, passed[role])) / passed[role]
    return Judgement(role, _detail(role, scores, baselines), confidence)


def role_of(scores: Scores, baselines: Scores) -> str:
    """The role alone of what `judge` says.

    >>> role_of({"local": 0.6, "sink": 0.8}, {"local": 0.6})
    'sink'
    """
    return judge(scores, baselines).role


def threshold(name: str, baseline: float | None) -> float:
    """The score from which on a head may have a role, beside what a uniform head gets.

    >>> [round(threshold("sink", uniform), 2) for uniform in (0.06, 0.0012)]  # at 80 tokens, at 7,658
    [0.49, 0.19]
    """
    if name == "broad":
        return EVEN
    if name in ("sink", "delimiter"):
        return math.pow(baseline, 1 - WAY) if baseline else 0.5
    return max(SHARE, ABOVE * (baseline or 0.0))


def _measure(name: str, scores: Scores, baselines: Scores) -> float:
    """The score in its threshold: 1 and more passes."""
    return (scores.get(name) or 0.0) / threshold(name, baselines.get(name))


def _above_uniform(name: str, scores: Scores, baselines: Scores) -> float:
    return (scores.get(name) or 0.0) - (baselines.get(name) or 0.0)


def _role(passed: Mapping[str, float], scores: Scores, baselines: Scores) -> str:
    specific = [name for name in SPECIFIC if passed[name] >= 1]
    if specific:
        best = max(specific, key=lambda name: _above_uniform(name, scores, baselines))
        rests = passed["sink"] >= 1 and (scores.get("sink") or 0.0) >= RESTS * (scores.get(best) or 0.0)
        return "sink" if rests else best
    best = max(("sink", "broad"), key=lambda name: passed[name])
    return best if passed[best] >= 1 else "other"


def _detail(role: str, scores: Scores, baselines: Scores) -> str:
    given = [name for name in scores if name not in _KNOWN and not name.startswith("offset ")]
    given = [name for name in given if _measure(name, scores, baselines) >= 1]
    if given:
        return max(given, key=lambda name: _above_uniform(name, scores, baselines))
    if role in ("sink", "broad", "other") and _measure("delimiter", scores, baselines) >= 1:
        return "delimiter"
    around = {name: scores[name] or 0.0 for name in scores if name.startswith("offset ")}
    best = max(around, key=lambda name: around[name], default="")
    clear = best and around[best] >= max(threshold(best, baselines.get(best)), sum(around.values()) / 2)
    return best if clear and role in ("local", "other") else ""


_KNOWN = {*ROLES, *CROSS, "first", "delimiter"}
