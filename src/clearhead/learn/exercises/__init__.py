"""The exercises of the lessons. What is where is known here without importing any of them, since they need torch."""

from __future__ import annotations

import importlib

from clearhead.learn.exercise import Exercise

# Lesson -> the names of its exercises, in order; they are in the module lesson<N>, as EXERCISES.
NAMES: dict[int, tuple[str, ...]] = {
    1: ("sentence_vector", "additive_scores", "AdditiveAttention"),
    2: ("dot_scores", "softmax", "context_vectors"),
    3: ("scaled_weights", "attention", "SelfAttention"),
    4: ("causal_weights", "drop_weights", "CausalAttention"),
    5: ("split_heads", "merge_heads", "MultiHeadAttention"),
    6: ("cross_attention", "padded_weights", "alignment_share"),
    7: ("window_weights", "merge_parts", "linear_attention"),
    8: ("previous_score", "induction_score", "without_sink"),
    9: ("without_head", "brought", "rollout"),
    10: ("block", "next_losses", "next_shares"),
}


def module_of(lesson: int) -> str:
    """The module that holds the exercises of a lesson."""
    return f"{__name__}.lesson{lesson}"


def exercises_of(lesson: int) -> tuple[Exercise, ...]:
    """The exercises of a lesson, in order; none for a lesson without."""
    if not NAMES.get(lesson):
        return ()
    found: tuple[Exercise, ...] = importlib.import_module(module_of(lesson)).EXERCISES
    return found
