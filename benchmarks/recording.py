"""What recording costs where nobody looks: a model's forward pass inside `clearhead.record` against the pass alone.

The overhead is the median over rounds of recorded over plain, less 1; "least" compares the shortest. The recorded time
includes entering and leaving the block. Every recorded output is held to the plain one, bit for bit. "kB a token" is
what the recording keeps: q, k and v of every layer, by reference.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from _report import Report
from torch import Tensor, nn

from clearhead import record, zoo
from clearhead._measuring import alternate
from clearhead.recording import Recording
from clearhead.testing.memory import Allocations

TOKENS, ROUNDS, SECONDS = (32, 512, 4096), 41, 12.0
PROMPT, NEW = 512, 128


def gpt2() -> nn.Module:
    """Of GPT-2's size; its time does not depend on its weights."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()


def models() -> dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]]:
    """Each a function that makes the model, an implementation, and numbers of tokens."""
    smollm2, minilm = (lambda: zoo.load("smollm2")[0]), (lambda: zoo.load("minilm")[0])
    return {
        "SmolLM2": (smollm2, "sdpa", TOKENS),
        "SmolLM2, eager": (smollm2, "eager", TOKENS[:2]),
        "GPT-2's size": (gpt2, "sdpa", TOKENS[:2]),
        "MiniLM": (minilm, "sdpa", TOKENS[:2]),
    }


def ids(model: Any, tokens: int) -> Tensor:
    return torch.randint(1000, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))


def passes(name: str, model: Any, tokens: int) -> list[str]:
    """A row of the table."""
    inputs = ids(model, tokens)

    def recorded() -> tuple[Any, Recording]:
        with record(model) as recording:
            out = model(input_ids=inputs)
        return out, recording

    out, recording = recorded()
    if not torch.equal(out[0], model(input_ids=inputs)[0]):
        raise SystemExit(f"{name}: recording changes the output")
    held = recording.nbytes / tokens
    del out, recording
    ways = {"plain": lambda: model(input_ids=inputs), "recorded": recorded}
    found = alternate(ways, rounds=ROUNDS, seconds=SECONDS, warm=False)  # both have just run
    plain, with_it = found["plain"], found["recorded"]
    more = statistics.median(b - a for a, b in zip(plain.seconds, with_it.seconds, strict=True))
    times = [f"{plain.median * 1e3:,.1f}", f"{more * 1e3:,.1f}", f"{with_it.ratio - 1:.1%}", f"{with_it.least - 1:.1%}"]
    return [name, f"{tokens:,}", *times, f"{held / 1e3:.1f}"]


def generation(model: Any) -> str:
    """How much more memory a generation takes that is recorded."""
    prompt = ids(model, PROMPT)
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    with Allocations() as alone:
        plain = model.generate(**given, **settings)
    with Allocations() as together, record(model) as recording:
        same = model.generate(**given, **settings)
    if not torch.equal(plain, same):
        raise SystemExit("recording changes the text")
    return (
        f"SmolLM2, {PROMPT} + {NEW} generated tokens: the recording holds {recording.nbytes / 1e6:.1f} MB, and the peak"
        f" is {(together.peak - alone.peak) / 1e6:.1f} MB higher."
    )


@torch.no_grad()
def main() -> None:
    with Report(__file__, "Recording without looking") as report:
        rows = []
        for name, (make, implementation, sizes) in models().items():
            model: Any = make()
            model.set_attn_implementation(implementation)
            rows += [passes(name, model, min(tokens, model.config.max_position_embeddings)) for tokens in sizes]
        report.table(["", "tokens", "plain ms", "more ms", "overhead", "least", "kB a token"], rows)
        model = zoo.load("smollm2")[0]
        model.set_attn_implementation("sdpa")
        report.say(generation(model))


if __name__ == "__main__":
    main()
