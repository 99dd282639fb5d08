"""Errors of every path against float64, at 257, 4,096 and 65,537 tokens.

Two heads of width 64 over one key head, under a rule as mask (causal and not farther than half the text); in the second
case each query gives about 0.9 of its weight to the first key. `compiled` is the pass on the CPU, `tiles` PyTorch tile
by tile, `fused` what follows from PyTorch's fused kernels, `dense` the textbook in float32 where its weights fit. Shown
is the largest error of a field, as a part of the field's largest entry. float64 is computed 256 rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from _report import Report
from torch import Tensor

from clearhead import SoftmaxMap, bench, masks
from clearhead.kernels.path import force

LENGTHS, DENSE_UP_TO, ROWS = (257, 4096, 65_537), 4096, 256
FIELDS = ("entropy", "distance", "to_first", "to_self", "peak", "received", "received_peak")


def tensors(tokens: int, sink: bool) -> tuple[Tensor, Tensor]:
    q, k, _ = bench.draw_tensors(tokens, heads=2, groups=1)
    if sink:  # one more score for the first key: ln(9 n / 2) and what the others' variance adds to their sum
        q[..., 0], k[..., 0] = 8.0, 0.0
        k[:, :, 0] = 0.0
        k[:, :, 0, 0] = math.log(9 * tokens / 2) + 0.5
    return q, k


def rule(tokens: int) -> masks.MaskRule:
    return masks.causal() & (masks.sliding_window(tokens // 2) | masks.first_tokens(1))


def seen(rows: Tensor, keys: Tensor, tokens: int) -> Tensor:
    """The rule again, written out."""
    away = rows[:, None] - keys
    return (away >= 0) & ((away < tokens // 2) | (keys == 0))


def exactly(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Every field in float64, with no weight kept."""
    found: dict[str, list[Tensor]] = {name: [] for name in FIELDS[:5]}
    received, most = torch.zeros(2, k.shape[-2], dtype=torch.float64), torch.zeros(2, k.shape[-2], dtype=torch.float64)
    for rows, weights in blocks(q, k):
        at = torch.arange(k.shape[-2])
        found["entropy"].append(torch.special.entr(weights).sum(-1))
        found["distance"].append((weights * (rows[:, None] - at[: weights.shape[-1]])).sum(-1))
        found["to_first"].append(weights[..., 0].clone())  # a view would keep all of the block
        found["to_self"].append(weights[:, torch.arange(len(rows)), rows])
        found["peak"].append(weights.amax(-1))
        received[:, : weights.shape[-1]] += weights.sum(-2)
        most[:, : weights.shape[-1]] = torch.maximum(most[:, : weights.shape[-1]], weights.amax(-2))
    fields = {name: torch.cat(parts, -1) for name, parts in found.items()}
    return fields | {"received": received, "received_peak": most}


def blocks(q: Tensor, k: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some queries, and their weights (2, rows, keys) on the keys up to the last of them."""
    tokens = q.shape[-2]
    for start in range(0, tokens, ROWS):
        rows = torch.arange(start, min(tokens, start + ROWS))
        keys = torch.arange(int(rows[-1]) + 1)
        scores = q[0, :, rows].double() @ k[0, 0, keys].double().T / math.sqrt(q.shape[-1])
        yield rows, torch.softmax(scores.masked_fill_(~seen(rows, keys, tokens), -torch.inf), -1)


def paths(q: Tensor, k: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for kernel in ("cpu", "tiles"):
        with force(kernel):
            known = SoftmaxMap(q, k, mask=rule(q.shape[-2])).statistics()
        yield {"cpu": "compiled"}.get(kernel, kernel), {name: getattr(known, name)[0] for name in FIELDS}
    with force("fused"):
        attn = SoftmaxMap(q, k, mask=rule(q.shape[-2]))
        asked = {"entropy": attn.entropy, "distance": attn.distance, "received": attn.received}
        yield "fused", {name: ask()[0] for name, ask in asked.items() if attn.plan()[name].kernel == "fused"}
    if q.shape[-2] <= DENSE_UP_TO:
        at = torch.arange(q.shape[-2])
        found = bench.dense_statistics(q, k, visible=seen(at, at, len(at)))
        yield "dense", {name: x[0] for name, x in found.items()}


def error(found: Tensor | None, exact: Tensor) -> str:
    """The largest, as a part of the largest entry."""
    return "-" if found is None else f"{float((found - exact).abs().max() / exact.abs().max()):.1e}"


def main() -> None:
    with Report(__file__, "Errors against float64") as report:
        rows = []
        for tokens in LENGTHS:
            for sink in (False, True):
                q, k = tensors(tokens, sink)
                exact = exactly(q, k)
                what = f"{tokens:,}" + (f", {float(exact['to_first'].median()):.2f} on the first key" if sink else "")
                for path, found in paths(q, k):
                    rows.append([f"{what}, {path}", *(error(found.get(name), x) for name, x in exact.items())])
        report.table(["tokens, path", *FIELDS], rows)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
