"""A compiled loop over (query, key) pairs: one dot product each, once every row's log-sum-exp is known.

This file imports numba, and is imported where it is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.kernels.cpu_tile import _entry
from clearhead.kernels.workers import together


@_entry
def _gather(
    q: Any, k: Any, lse: Any, sees: Any, keys: Any, spans: Any, but: Any, rows: Any, before: Any, mass: Any, got: Any
) -> None:
    """Add exp(q·k - lse) of every expected pair that may be seen to the query and to the key.

    q (H, T, D) times the scale, k (G, S, D), lse (H, T), sees (2, T), keys (M,), spans (2, S), but (n,), rows (m,).
    """
    per_group = q.shape[0] // k.shape[0]
    width = q.shape[2]
    for t in rows:
        for n in range(spans[0, t + before], spans[1, t + before]):
            s = keys[n]
            wanted = sees[0, t] <= s < sees[1, t]
            for offset in but:
                wanted = wanted and s - t - before != offset
            if not wanted:
                continue
            for h in range(q.shape[0]):
                g = h // per_group
                dot = np.float32(0)
                for d in range(width):
                    dot += q[h, t, d] * k[g, s, d]
                weight = np.exp(min(np.float64(dot) - lse[h, t], 0.0))
                mass[h, t] += weight
                got[h, s] += weight


class Gather:
    """Sums over expected pairs of one map.

    Args: q (H, T, D) times the scale, k (G, S, D), lse (H, T); of each query the first key that it sees, and the one
        after the last.
    """

    def __init__(self, q: Tensor, k: Tensor, lse: Tensor, sees: tuple[Tensor, Tensor]) -> None:
        tensors = (q.float(), k.float(), lse.double(), torch.stack(sees))
        self._arrays = [x.detach().contiguous().numpy() for x in tensors]
        self._size = q.shape[0], q.shape[1], k.shape[1]

    def __call__(
        self, keys: Tensor, start: Tensor, stop: Tensor, but: tuple[int, ...], threads: int
    ) -> tuple[Tensor, Tensor]:
        """What each query gives to keys[start : stop], (H, T), and what each key gets so, (H, S), both float64.

        start, stop: (T,), or (S,) where the queries are the last of S.
        """
        H, T, S = self._size
        workers = max(1, min(threads, T))
        mass, gots = np.zeros((H, T)), [np.zeros((H, S)) for _ in range(workers)]
        spans, offsets = torch.stack([start, stop]).numpy(), np.array(but, np.int64)

        def run(worker: int) -> None:  # rows are dealt out in turn: the last of a causal map have most pairs
            rows = np.arange(worker, T, workers)
            _gather(*self._arrays, keys.contiguous().numpy(), spans, offsets, rows, len(start) - T, mass, gots[worker])

        together([partial(run, worker) for worker in range(workers)])
        return torch.from_numpy(mass), torch.from_numpy(sum(gots))
