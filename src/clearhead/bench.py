"""What looking costs on this machine: ways to compute attention and to look at it, on the same tensors or model.

The command `clearhead bench` and the scripts in benchmarks/ measure these ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead._format import size
from clearhead._measuring import Timing, alternate, machine, peak_of_child
from clearhead._progress import Progress, silent
from clearhead.errors import ModelError, ShapeError
from clearhead.kernels.path import force
from clearhead.looking.runs import writes_a_second_text
from clearhead.maps import SoftmaxMap
from clearhead.masks import causal
from clearhead.recording import record
from clearhead.zoo import context_length, load
from clearhead.zoo.loading import frugal

__all__ = ["Bench", "bench", "dense_statistics", "draw_tensors", "model_ways", "tensor_ways"]

HEADS, WIDTH = 9, 64
LARGEST = 4_000_000_000  # bytes of dense weights: what takes more is not tried
FUSED, DENSE = "one fused attention call", "every weight, and their statistics"
FORWARD, RECORDED, LOOKED, EAGER = (
    "the forward pass",
    "recorded",
    "recorded, all statistics",
    "eager, output_attentions",
)

Ways: TypeAlias = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        what: the tensors, or the model and its text
        rows: of each way its name, its time beside the first way's, and the bytes it takes above what was there
            before, None where nobody counts them
        notes: what was left out, and why
        machine: on which
    """

    what: str
    rows: tuple[tuple[str, Timing, int | None], ...]
    notes: tuple[str, ...]
    machine: str

    @property
    def rounds(self) -> int:
        """How often each way was timed."""
        return len(self.rows[0][1].seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        rows = [
            {"name": name, "seconds": timing.median, "ratio": timing.ratio, "least": timing.least, "bytes": peak}
            for name, timing, peak in self.rows
        ]
        return {"what": self.what, "rounds": self.rounds, "notes": self.notes, "machine": self.machine, "rows": rows}


def bench(
    model: str | None = None, tokens: int | None = None, *, seconds: float = 20.0, on_progress: Progress | None = None
) -> Bench:
    """Measure what looking costs: beside one attention call on random tensors, or beside a model's forward pass.

    Args:
        model: a name that `clearhead.zoo.load` takes; random tensors, 9 heads of width 64, if None.
        tokens: how many; 4,096 by default, of a model 1,024 or as many as it reads.
        seconds: after which no new round begins.
        on_progress: called as (stage, done, total), with stages "time" and "memory".

    Raises: ShapeError, ModelError.
    """
    report = on_progress or silent
    if tokens is not None and tokens < 1:
        raise ShapeError(f"bench(tokens={tokens}): expected at least 1.")
    if model is None:
        tokens = tokens or 4096
        ways, prepare = tensor_ways(*draw_tensors(tokens)), partial(_tensor_way, tokens)
        what, dense = f"Random tensors, {HEADS} heads of width {WIDTH}, {tokens:,} tokens, causal, float32", DENSE
    else:
        loaded = load(model, on_progress=on_progress)[0]
        tokens = _length(loaded, model, tokens)
        ways, prepare = model_ways(loaded, _ids(loaded, tokens)), partial(_model_way, model, tokens)
        what, dense = f"{model}, {tokens:,} tokens", EAGER if _has_eager(loaded) else FORWARD
    report("time", 0, 1)
    times = alternate(ways, seconds=seconds)
    peaks: list[int | None] = []
    for name in times:
        report("memory", len(peaks), len(times))
        peaks.append(peak_of_child(prepare, name))
    left_out = () if dense in ways else (f"{dense}: left out, the weights alone take more than {size(LARGEST)}",)
    return Bench(what, tuple(zip(times, times.values(), peaks, strict=True)), left_out, machine())


# --- tensors ------------------------------------------------------------------------------------------------------


def draw_tensors(
    tokens: int, *, heads: int = HEADS, groups: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (1, H, T, 64), k and v (1, G, T, 64), the same at each call."""
    dice = torch.Generator().manual_seed(0)
    counts = (heads, groups or heads, groups or heads)
    try:
        q, k, v = (torch.randn(1, n, tokens, WIDTH, generator=dice) for n in counts)
    except RuntimeError as error:
        need = size(4 * sum(counts) * tokens * WIDTH)
        raise ShapeError(f"{tokens:,} tokens: q, k and v alone take {need}, more than there is.") from error
    return q.to(dtype), k.to(dtype), v.to(dtype)


def tensor_ways(q: Tensor, k: Tensor, v: Tensor) -> Ways:
    """PyTorch's fused causal attention, and ways to look at its weights, with nothing known of them before."""
    tokens = q.shape[-2]

    def fused() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def attn() -> SoftmaxMap:
        return SoftmaxMap(q, k, mask=causal())

    ways: Ways = {
        FUSED: fused,
        "all statistics": lambda: attn().statistics(),
        "a picture, 512 x 512": lambda: attn().pool_max((min(tokens, 512), min(tokens, 512))),
        "one row of one head": lambda: attn()[0, 0, tokens // 2],
    }
    if 3 * attn().dense_nbytes < LARGEST:
        ways[DENSE] = lambda: dense_statistics(q, k)
    return ways


def dense_statistics(q: Tensor, k: Tensor, *, visible: Tensor | None = None) -> dict[str, Tensor]:
    """All fields of `Statistics` from a (…, T, S) tensor of weights, in q's dtype or float32; causal by default."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(wide), k.repeat_interleave(q.shape[1] // k.shape[1], 1).to(wide)
    at = torch.arange(q.shape[2], device=q.device)
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    weights = torch.softmax(scores.masked_fill_(at > at[:, None] if visible is None else ~visible, -torch.inf), -1)
    return {
        "entropy": torch.special.entr(weights).sum(-1),
        "distance": (weights * (at[:, None] - at).abs()).sum(-1),
        "to_first": weights[..., 0],
        "to_self": weights.diagonal(dim1=-2, dim2=-1),
        "peak": weights.amax(-1),
        "received": weights.sum(-2),
        "received_peak": weights.amax(-2),
    }


def load_loops() -> None:
    """Load the compiled loops, which stay: they are no part of what a call takes."""
    x = torch.ones(1, 1, 8, 8)
    with force("cpu"):
        SoftmaxMap(x, x).statistics()


def _tensor_way(tokens: int, name: str) -> Callable[[], object]:
    load_loops()
    return tensor_ways(*draw_tensors(tokens))[name]


# --- models -------------------------------------------------------------------------------------------------------


def model_ways(model: nn.Module, ids: Tensor, *, most: int = LARGEST) -> Ways:
    """A model's forward pass, without the logits that nobody reads, and ways to look at its attention beside it.

    Args:
        ids: (1, T).
        most: bytes that the weights of all layers may take, which eager attention returns; else it is left out.
    """
    config: Any = model.config
    settings = frugal(model)

    @torch.no_grad()
    def forward(**more: bool) -> Any:
        return model(ids, **settings, **more)

    def recorded() -> object:
        with record(model) as recording:
            forward()
        return recording

    def looked() -> object:
        with record(model, keep=lambda _, attn: attn.statistics()) as recording:
            forward()
        return recording.results

    def eager() -> object:
        before = config._attn_implementation
        model.set_attn_implementation("eager")  # type: ignore[operator]
        try:
            return forward(output_attentions=True).attentions
        finally:
            model.set_attn_implementation(before)  # type: ignore[operator]

    ways: Ways = {FORWARD: forward, RECORDED: recorded, LOOKED: looked}
    if _has_eager(model) and _eager_nbytes(config, ids.shape[1]) < most:
        ways[EAGER] = eager
    return ways


def _has_eager(model: nn.Module) -> bool:
    """Whether it is a transformers model, which can compute all weights; a GPT of ours cannot."""
    return hasattr(model, "set_attn_implementation")


def _eager_nbytes(config: Any, tokens: int) -> int:
    """Bytes of all weights of all layers in float32."""
    return int(4 * config.num_hidden_layers * config.num_attention_heads * tokens**2)


def load_weights(model: nn.Module) -> None:
    """Read every weight once: those of a file that is mapped into memory come when they are first read."""
    for weights in model.parameters():
        weights.detach().sum()


def _model_way(model: str, tokens: int, name: str) -> Callable[[], object]:
    loaded = load(model)[0]
    load_weights(loaded)
    load_loops()
    return model_ways(loaded, _ids(loaded, tokens))[name]


def _length(model: nn.Module, name: str, tokens: int | None) -> int:
    if writes_a_second_text(model):
        raise ModelError(f"bench({name!r}): the model reads one text and writes another, which bench does not run.")
    longest = context_length(model)
    if longest is not None and tokens is not None and tokens > longest:
        raise ModelError(f"bench({name!r}, tokens={tokens}): the model reads at most {longest:,} tokens.")
    return tokens or min(1024, longest or 1024)


def _ids(model: Any, tokens: int) -> Tensor:
    """Random tokens: what they are changes no time."""
    return torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
