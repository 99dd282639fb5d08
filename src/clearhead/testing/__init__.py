"""For those who write a map: the contract it must pass, the error budgets, and inputs that break things.

>>> import torch
>>> from clearhead.maps import DenseMap
>>> from clearhead.testing import Subject, failures
>>> weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
>>> failures(Subject(lambda: DenseMap(weights), exact=weights.double(), plain=weights))
{}
"""

from clearhead.testing.budgets import assert_close, budget
from clearhead.testing.cases import Case, build_case
from clearhead.testing.contract import CHECKS, Subject, failures, verify
from clearhead.testing.memory import Allocations
from clearhead.testing.pairwise import pairwise
from clearhead.testing.subjects import SUBJECTS, subject

__all__ = [
    "CHECKS",
    "SUBJECTS",
    "Allocations",
    "Case",
    "Subject",
    "assert_close",
    "budget",
    "build_case",
    "failures",
    "pairwise",
    "subject",
    "verify",
]
