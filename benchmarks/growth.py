"""How time and memory grow with the length of the text: nine heads of width 64, causal, float32.

Dense attention computes every weight and the statistics of them; the fused call gives the output; statistics are all of
them, with nothing known before. Slopes are those of a line through the logarithms of the last three lengths: 1 grows as
n, 2 as n².
"""

from __future__ import annotations

import math

import torch
from _report import Report
from matplotlib.figure import Figure

from clearhead import bench
from clearhead._measuring import alternate, peak_of_child

LENGTHS, DENSE_UP_TO, FITTED = (512, 1024, 2048, 4096, 8192, 16384), 4096, 3
SHOWN = {bench.FUSED: "fused call", "all statistics": "all statistics", bench.DENSE: "dense"}
Found = dict[str, dict[int, tuple[float, int]]]


def measure() -> Found:
    """Seconds and bytes by way and length."""
    found: Found = {name: {} for name in SHOWN}
    for n in LENGTHS:
        ways = {name: way for name, way in bench.tensor_ways(*bench.draw_tensors(n)).items() if name in SHOWN}
        if n > DENSE_UP_TO:
            ways.pop(bench.DENSE, None)
        for name, timing in alternate(ways, rounds=7, seconds=10).items():
            found[name][n] = timing.median, peak_of_child(bench._tensor_way, n, name) or 0
    return found


def slope(points: dict[int, float]) -> float:
    """Of a line through the logarithms of the last points."""
    last = [(math.log(n), math.log(max(value, 1e-9))) for n, value in points.items()][-FITTED:]
    x, y = (sum(column) / len(last) for column in zip(*last, strict=True))
    return sum((a - x) * (b - y) for a, b in last) / sum((a - x) ** 2 for a, _ in last)


def draw(found: Found) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, which, unit, scale in zip(figure.subplots(1, 2), (0, 1), ("s", "MB"), (1, 1e6), strict=True):
        for name, points in found.items():
            axes.loglog(list(points), [values[which] / scale for values in points.values()], "o-", label=SHOWN[name])
        axes.set(xlabel="tokens", ylabel=unit, title=("time", "memory above the inputs")[which])
        axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main() -> None:
    with Report(__file__, "Growth with the length") as report:
        found = measure()
        rows = []
        for name, points in found.items():
            cells = [f"{points[n][0] * 1e3:,.1f} / {points[n][1] / 1e6:,.0f}" if n in points else "-" for n in LENGTHS]
            slopes = [slope({n: values[which] for n, values in points.items()}) for which in (0, 1)]
            rows.append([SHOWN[name], *cells, *(f"{value:.2f}" for value in slopes)])
        report.say("Milliseconds / MB, and the slopes of time and memory.")
        report.table(["", *(f"{n:,}" for n in LENGTHS), "time ~", "memory ~"], rows)
        report.plot(draw(found), "lengths", "Time and memory by the number of tokens, both logarithmic")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
