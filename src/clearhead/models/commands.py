"""What `clearhead train` and `clearhead generate` do and print."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead import terminal
from clearhead._files import why_no_folder
from clearhead._plain import plain
from clearhead.errors import ModelError
from clearhead.models import loading
from clearhead.models.checkpoints import Checkpoints
from clearhead.models.gpt import GPT, GPTConfig
from clearhead.models.texts import read_texts, token_ids, tokenizer_for, windows
from clearhead.models.training import fit
from clearhead.tokens import CONTINUED

__all__ = ["SIZES", "generate", "train"]

BATCH = 8  # texts a step
CHECKPOINTS = 10  # of a run, unless it says how many steps lie between two


@dataclass(frozen=True)
class Size:
    """How large a model is, and how fast it may learn."""

    num_layers: int
    num_heads: int
    width: int
    context_length: int
    rate: float

    def config(self, vocab_size: int) -> GPTConfig:
        """As today's models are made: rotary embedding, RMSNorm, SwiGLU with as many parameters as 4 · width."""
        kind = {"bias": False, "rotary": 10_000.0, "rms_norm": True, "gated": True, "d_hidden": self.width * 8 // 3}
        sizes = {"width": self.width, "num_layers": self.num_layers, "num_heads": self.num_heads}
        return GPTConfig(vocab_size, self.context_length, **sizes, **kind)  # type: ignore[arg-type]


SIZES = {  # with single bytes: 0.1, 1 and 11 million parameters
    "tiny": Size(2, 4, 64, 128, 4e-3),
    "small": Size(5, 4, 128, 256, 3e-3),
    "medium": Size(6, 6, 384, 256, 1e-3),
}


def train(texts: Sequence[str], out: Path, *, steps: int, size: str, seed: int, vocab: int, every: int | None) -> None:
    """Train a model on the texts, or go on with the training that is in the folder."""
    if size not in SIZES:
        raise ModelError(f"--size {size}: there is {', '.join(SIZES)}.")
    chosen, text, begun = SIZES[size], read_texts(texts), loading.is_trained(out)
    why = None if begun else why_no_folder(out)
    if why is not None and any(out.glob("step-*.safetensors")):
        raise ModelError(
            f"{out} holds weights that were trained, but no config.json of clearhead that can be read: put that back "
            "to go on, or name a new folder."
        )
    if why is not None:
        raise ModelError(f"{why}. It holds no model that clearhead trained.")
    tokenizer = loading.load_tokenizer(out) if begun else tokenizer_for(text, vocab)
    ids = token_ids(tokenizer, text)
    batches, config = windows(ids, BATCH, chosen.context_length), chosen.config(len(tokenizer))
    if not begun:
        loading.save_model(out, config, tokenizer)
    elif loading.read_config(out) != config:
        raise ModelError(f"{out} holds a model of other sizes than --size {size}: give its own, or another folder.")
    told = {"text": hashlib.sha256(text.encode()).hexdigest()[:16], "size": size, "seed": seed, "vocab": vocab}
    checkpoints = Checkpoints(out, every=every or max(1, steps // CHECKPOINTS), settings=told)
    model = _new(config, seed)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(plain(f"{out}: {count:,} parameters, {len(ids):,} tokens of text, {chosen.context_length} read at once"))
    done = max(checkpoints.weights, default=0)
    with _said(checkpoints), terminal.training(done, steps) as report:
        on_step = _teller(report, BATCH * chosen.context_length)
        how = {"steps": steps, "rate": chosen.rate, "seed": seed}
        losses = fit(model, model.loss, batches, **how, checkpoints=checkpoints, on_step=on_step)  # type: ignore[arg-type]
    _conclude(out, losses, done, steps)


def _new(config: GPTConfig, seed: int) -> GPT:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return GPT(config)


def _teller(report: Callable[[int, str], None], tokens: int) -> Callable[[int, float], None]:
    """Tell of the loss and the speed after each step; the first, in which PyTorch warms up, is not timed."""
    began, first, mean = 0.0, 0, 0.0

    def on_step(step: int, loss: float) -> None:
        nonlocal began, first, mean
        if not began:
            began, first, mean = time.perf_counter(), step, loss
        mean += (loss - mean) / 20
        speed = (step - first) * tokens / max(time.perf_counter() - began, 1e-9)
        report(step, f"loss {mean:.3f}" + (f", {speed:,.0f} tokens/s" if step > first else ""))

    return on_step


@contextmanager
def _said(checkpoints: Checkpoints) -> Iterator[None]:
    """On Ctrl-C, say what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = max(checkpoints.weights, default=0)
        print(plain(f"{checkpoints.folder} holds what {kept:,} steps have taught; the same command goes on."))
        raise


def _conclude(out: Path, losses: Sequence[float], done: int, steps: int) -> None:
    if len(losses) > steps or done == steps:
        print(plain(f"{out} has had {len(losses):,} steps already: give more, --steps N, to go on."))
    if losses:
        last = losses[-50:]
        print(f"After {len(losses):,} steps the loss is {sum(last) / len(last):.3f}; it began at {losses[0]:.3f}.")
    folder = plain(shlex.quote(str(out)))
    print(f"Let it write:       clearhead generate {folder} 'Once upon a time'")
    print(f"See its heads:      clearhead look --model {folder}")
    print(f"See them learn:     clearhead look --model {folder} --checkpoints")


def generate(place: Path, prompt: str, *, tokens: int, temperature: float, top_k: int | None, seed: int | None) -> None:
    """Print the prompt and what a trained model goes on with, as it is written."""
    if not loading.is_trained(place):
        raise ModelError(f"{place} is no folder that `clearhead train` has made, nor one of its step-… files.")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in prompt):  # bytes of an argument that were not UTF-8
        raise ModelError("the prompt is not valid UTF-8")
    model, tokenizer = loading.load(place)
    ids = tokenizer(prompt or "\n", return_tensors="pt")["input_ids"]
    if seed is not None:
        torch.manual_seed(seed)
    _print(prompt)
    held: list[int] = []
    for new in model.stream(ids, tokens, temperature=temperature, top_k=top_k):
        held.append(int(new))
        letters = str(tokenizer.decode(held))
        if not letters.endswith(CONTINUED) or len(held) > 3:  # a character takes four bytes at most
            _print(letters)
            held = []
    _print(f"{tokenizer.decode(held)}\n")


def _print(text: str) -> None:
    print("\n".join(map(plain, text.split("\n"))), end="", flush=True)
