"""Where PyTorch refuses a typical mistake, one line says what is wrong in terms of the idea."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.learn import Outcome
from clearhead.learn.exercises import NAMES, exercises_of

IMPORTS = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n"
PROJECT = "q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)\n"
SPLIT = "q, k, v = (split_heads(W(x), self.num_heads) for W in (self.W_query, self.W_key, self.W_value))\n"
ATTEND = "heads = torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v\n"
TURN = "turn the second, q @ k.T"
LAST_TWO = "Turn the last two"
CALL = "Call it like a function"
ORDER = "Each once and in this order"

# exercise -> what is written in it -> words of the sentence
SLIPS = {
    "dot_scores": {"return x @ x": TURN},
    "softmax": {"return torch.softmax(scores)": "the last dimension, dim=-1"},
    "context_vectors": {"return torch.softmax(x @ x.T, dim=-1) * x": "mixed by a product"},
    "scaled_weights": {
        "return torch.softmax(q @ k / math.sqrt(k.shape[-1]), dim=-1)": TURN,
        "return torch.softmax(q @ k.T)": "dim=-1",
    },
    "attention": {"w = torch.softmax(q @ k.T, dim=-1)\nreturn w * v, w": "weights @ v"},
    "SelfAttention": {
        "q = x @ self.W_query": CALL,
        "q = F.linear(x, self.W_query)": CALL,
        "q = x @ self.W_query.weight": "Call the layer",
        PROJECT + "return torch.softmax(q @ k, dim=-1) @ v": TURN,
        "return self.W_query(x) @ x.T": "Are both projected",
    },
    "CausalAttention": {PROJECT + "scores = q @ k": TURN, PROJECT + "scores = q @ k.T": LAST_TWO},
    "split_heads": {"return x.view(*x.shape[:2], num_heads, x.shape[-1] / num_heads)": "divide with //"},
    "MultiHeadAttention": {
        SPLIT + "scores = q @ k": TURN,
        SPLIT + "scores = q @ k.T / math.sqrt(2)": LAST_TWO,
        PROJECT + ATTEND + "return self.out_proj(merge_heads(heads))": ORDER,
        SPLIT + ATTEND + "return self.out_proj(heads)": ORDER,
        "B, T, _ = x.shape\nreturn self.W_query(x).view(B, T, self.num_heads, self.num_heads)": "Is it a projection",
    },
}
CASES = [(name, body) for name, slips in SLIPS.items() for body in slips]


def written(name: str, body: str) -> str:
    """An exercises.py in which this is the body of this exercise, and the others are solved."""
    text = IMPORTS
    for exercise in next(exercises_of(lesson) for lesson, names in NAMES.items() if name in names):
        indent = "        " if isinstance(exercise.solution, type) else "    "
        stub = exercise.stub.replace("raise NotImplementedError  # your code here", body.replace("\n", f"\n{indent}"))
        text += f"\n\n{stub if exercise.name == name else exercise.source}\n"
    return text


@pytest.mark.parametrize(("name", "body"), CASES)
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_an_error_of_pytorch_comes_with_the_idea(
    name: str, body: str, tmp_path: Path, judge_here: Callable[..., Outcome]
) -> None:
    file = tmp_path / "exercises.py"
    file.write_text(written(name, body))
    exercise = next(e for lesson in NAMES for e in exercises_of(lesson) if e.name == name)
    for seed in range(5):
        outcome = judge_here(exercise, file, seed)
        error, line, said = outcome.message.split("\n")
        assert outcome.verdict == "failed"
        assert error.startswith("Your code raised ")
        assert line.startswith("exercises.py, line ")
        assert SLIPS[name][body] in said
