"""What recording costs where nobody looks: a model's forward pass inside `clearhead.record` against the pass alone.

Passes take turns, there and back, so that whatever else the machine does meets both alike; the overhead is the median
over rounds of recorded over plain, less 1. The recorded time includes entering and leaving the block. Every recorded
output is held to the plain one, bit for bit. Held is what the recording keeps: q, k and v of every layer, by reference.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn

from clearhead import record, zoo
from clearhead.recording import Recording
from clearhead.testing.memory import Allocations

TOKENS, ROUNDS, SECONDS = (32, 512, 4096), 31, 60.0  # at most so long for each line, but at least FEWEST rounds
FEWEST, PROMPT, NEW = 15, 512, 128


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


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(plain: Callable[[], Any], recorded: Callable[[], Any]) -> list[tuple[float, float]]:
    """Seconds of both in each round."""
    rounds: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(rounds) < ROUNDS and (len(rounds) < FEWEST or time.perf_counter() - start < SECONDS):
        if len(rounds) % 2:
            after, before = timed(recorded), timed(plain)
        else:
            before, after = timed(plain), timed(recorded)
        rounds.append((before, after))
    return rounds


def passes(name: str, model: Any, tokens: int) -> str:
    """A line of the table."""
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
    rounds = in_turns(lambda: model(input_ids=inputs), recorded)
    plain, extra = (statistics.median(column) for column in zip(*((a, b - a) for a, b in rounds), strict=True))
    overhead = statistics.median(after / before for before, after in rounds) - 1
    return f"{name:16}{tokens:7}{plain * 1e3:10.1f}{extra * 1e3:10.1f}{overhead:10.1%}{held / 1e3:12.1f}"


def generation(model: Any) -> None:
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
    print(
        f"\n{PROMPT} + {NEW} generated tokens: the recording holds {recording.nbytes / 1e6:.1f} MB, and the peak is"
        f" {(together.peak - alone.peak) / 1e6:.1f} MB higher, {recording!r}"
    )


@torch.no_grad()
def main() -> None:
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, Python"
        f" {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    print(f"{'':16}{'tokens':>7}{'plain ms':>10}{'more ms':>10}{'overhead':>10}{'kB a token':>12}")
    for name, (make, implementation, sizes) in models().items():
        model: Any = make()
        model.set_attn_implementation(implementation)
        for tokens in sizes:
            print(passes(name, model, min(tokens, model.config.max_position_embeddings)), flush=True)
    model = zoo.load("smollm2")[0]
    model.set_attn_implementation("sdpa")
    generation(model)


if __name__ == "__main__":
    main()
