"""Recurrent encoder and decoder: a bidirectional GRU reads, a GRU writes, and between them a vector or attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from clearhead.maps import AdditiveMap, AttentionMap
from clearhead.masks import padding
from clearhead.nn import AdditiveAttention

__all__ = ["RecurrentDecoder", "RecurrentEncoder"]


class RecurrentEncoder(nn.Module):
    """h_j = [→h_j; ←h_j]: what a GRU knows at word j, having read up to it from the left, and from the right."""

    def __init__(self, tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.drop = nn.Dropout(dropout)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:  # (B, S) -> (B, S, 2 width)
        """The states; a sentence's own do not depend on the padding after it."""
        x, lengths = self.drop(self.embedding(ids)), real.sum(1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=ids.shape[1])
        dropped: Tensor = self.drop(states)
        return dropped


@dataclass
class Memory:
    """What the decoder keeps between its steps."""

    state: Tensor  # (B, width): s_{i-1}
    context: Tensor | None  # (B, 2 width): the same at every step, without attention
    states: Tensor  # (B, S, 2 width)
    real: Tensor  # (B, S)
    projected: Tensor | None  # (B, S, width): U h_j, once a sentence


class RecurrentDecoder(nn.Module):
    """s_i = GRU([y_{i-1}; c_i], s_{i-1}), and from both the next token; c_i is all it knows of the source.

    With attention c_i = Σ_j α_ij h_j, α from s_{i-1}; without it, c_i is the encoder's last states at every i.
    """

    def __init__(self, tokens: int, width: int, dropout: float, *, attends: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.drop = nn.Dropout(dropout)
        self.start = nn.Linear(2 * width, width)
        self.attention = AdditiveAttention(width, 2 * width, width) if attends else None
        self.cell = nn.GRUCell(3 * width, width)
        self.readout = nn.Linear(4 * width, width)
        self.out = nn.Linear(width, tokens)

    def begin(self, states: Tensor, real: Tensor, max_tokens: int | None = None) -> Memory:
        """Before the first token: s_0 = tanh(W [→h_S; ←h_1])."""
        last = summary(states, real)
        projected = None if self.attention is None else self.attention.project_keys(states)
        fixed = last if self.attention is None else None
        return Memory(torch.tanh(self.start(last)), fixed, states, real, projected)

    def forward(self, ids: Tensor, memory: Memory, maps: list[AttentionMap] | None = None) -> Tensor:
        """The logits (B, T, tokens) of what follows each id; `memory` is then that after the last of them.

        Where `maps` are wanted, the weights of all steps are added to them as one map (B, 1, T, S).
        """
        y, asked, seen, written = self.drop(self.embedding(ids)), [], [], []
        for token in y.unbind(1):
            context = self._context(memory)
            asked.append(memory.state)  # the query is s_{i-1}
            memory.state = self.cell(torch.cat([token, context], -1), memory.state)
            seen.append(context)
            written.append(memory.state)
        joined = torch.cat([torch.stack(written, 1), torch.stack(seen, 1), y], -1)
        if maps is not None and self.attention is not None:
            maps.append(_map(self.attention, torch.stack(asked, 1), memory))
        logits: Tensor = self.out(self.drop(torch.tanh(self.readout(joined))))
        return logits

    def _context(self, memory: Memory) -> Tensor:
        if memory.context is not None:
            return memory.context
        assert self.attention is not None
        query, projected = memory.state[:, None], memory.projected
        context: Tensor = self.attention(query, memory.states, projected=projected, padding=memory.real)
        return context[:, 0]


def _map(attention: AdditiveAttention, asked: Tensor, memory: Memory) -> AdditiveMap:
    """The weights of queries (B, T, width) that came one by one, as one map (B, 1, T, S), a head as anywhere else."""
    assert memory.projected is not None
    q, k = attention.W_query(asked)[:, None], memory.projected[:, None]
    return AdditiveMap(q, k, attention.score.weight[0].clone(), mask=padding(keys=memory.real))


def summary(states: Tensor, real: Tensor) -> Tensor:
    """[→h_S; ←h_1] of states (B, S, 2d): where each direction has read the whole sentence; (B, 2d)."""
    forward, backward = states.chunk(2, -1)
    last = (real.sum(1) - 1).clamp(min=0)
    return torch.cat([forward[torch.arange(len(states)), last], backward[:, 0]], -1)
