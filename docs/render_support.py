"""Measure every model of the tests' registry, and write docs/models.md: about ten minutes, FlexAttention compiles."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from transformers.utils import logging

from recording.architectures import ARCHITECTURES, measure
from recording.support_table import render


def main() -> int:
    """Measure, say what was measured, write."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 1000  # or the later models' FlexAttention would run uncompiled
    results = {}
    for name, row in ARCHITECTURES.items():
        for one in row.runs:
            results[name, one] = measure(name, one)
            print(name, one, results[name, one])
    Path(__file__).with_name("models.md").write_text(render(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
