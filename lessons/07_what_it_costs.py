# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 7: What it costs
# **The idea.** Every word meets every word: n words are n² pairs. Twice the text is four times the work, and four times
# the memory for whoever stores the weights. For n words and heads of d numbers, two products of matrices make
#
# $$\text{operations} = 4\, n^2 d \qquad\qquad \text{bytes of the weights} = n^2 \cdot \text{bytes of a number}$$
#
# a head: each score is d multiplications and d additions, and mixing values costs as much again. There are ways around:
# not storing weights (flash), fewer pairs (sparse), another formula (linear), keeping what was computed (the cache).
# %%
import math
import timeit

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import clearhead
from clearhead.cost import Cost

torch.manual_seed(0)


def draw(n):
    return torch.randn(3, 1, 1, n, 64)  # q, k and v, each (1, 1, n, 64): one text, one head


def dense(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v
# %% [markdown]
# ## Flash: tile by tile
# A softmax needs a whole row: its largest score, and the sum. But both can be kept up to date while the keys go by,
# block after block. `top` is the largest score so far, `total` the sum of exp(score − top), `out` the mix so far, not
# yet divided. A new block may bring a larger top; then total and out shrink by $e^{\mathrm{old} - \mathrm{new}}$. There
# never is more than a tile of scores. Every operation is still done: flash saves memory, not arithmetic. (PyTorch has a
# fast one, which models call.) The logarithm of the sum, `lse`, is enough to have any weight again: exp(score − lse).
# %%
def flash(q, k, v, tile=128):
    scale, outs, sums = 1 / math.sqrt(q.shape[-1]), [], []
    for rows in q.split(tile, dim=-2):
        total, out = torch.zeros_like(rows[..., :1]), torch.zeros_like(rows)
        top = total - math.inf
        for keys, values in zip(k.split(tile, dim=-2), v.split(tile, dim=-2), strict=True):
            scores = rows @ keys.mT * scale  # one tile
            higher = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
            shrink, e = torch.exp(top - higher), torch.exp(scores - higher)
            total, out, top = total * shrink + e.sum(dim=-1, keepdim=True), out * shrink + e @ values, higher
        outs.append(out / total)
        sums.append(top + total.log())
    return torch.cat(outs, dim=-2), torch.cat(sums, dim=-2)[..., 0]


q, k, v = draw(1000)
out, lse = flash(q, k, v)
weight, stored = torch.exp(q[0, 0, 3] @ k[0, 0, 5] / 8 - lse[0, 0, 3]), torch.softmax(q @ k.mT / 8, dim=-1)[0, 0, 3, 5]
print(f"{(out - dense(q, k, v)).abs().max():.0e} from the formula; word 3 → 5 by lse {weight:.6f}, stored {stored:.6f}")
# %% [markdown]
# ## Sparse and linear
# **Sparse**: each word sees its `window` last words only: n · window pairs. Farther ones arrive through other layers.
# **Linear**: without the softmax the brackets may be moved. With a positive φ (here elu + 1),
# $(\varphi(Q)\,\varphi(K)^\top)\, V = \varphi(Q)\,(\varphi(K)^\top V)$, and the right bracket is a d × d table, however
# long the text. Read from left to right it is **recurrent**, as in lesson 1: a state of fixed size, to which each word
# adds. (Each output is divided by the sum of its weights.) These are *other functions*, and a model has to be trained
# with them; flash is the same function.
# %%
state, steps, (queries, keys, values) = torch.zeros(64, 65), [], draw(300)[:, 0, 0]
for q1, k1, v1 in zip(F.elu(queries) + 1, F.elu(keys) + 1, values, strict=True):
    state += torch.outer(k1, torch.cat([v1, torch.ones(1)]))  # the last column adds up the keys, to divide by
    steps.append((q1 @ state)[:-1] / (q1 @ state)[-1])
at_once = clearhead.functional.linear_attention(queries, keys, values, is_causal=True)[0]
print(f"word by word, at once: {(torch.stack(steps) - at_once).abs().max():.0e} apart; state: {state.numel()} numbers")
window, lengths = clearhead.masks.sliding_window(128), (256, 512, 1024, 2048)
ways = {
    "dense": dense,
    "flash, ours": lambda q, k, v: flash(q, k, v)[0],
    "PyTorch's flash": F.scaled_dot_product_attention,
    "window of 128": lambda q, k, v: clearhead.scaled_dot_product_attention(q, k, v, window)[0],
    "linear": lambda q, k, v: clearhead.functional.linear_attention(q, k, v, is_causal=True)[0],
}
times = {name: [] for name in ways}
for name, way in ways.items():
    for inputs in map(draw, lengths):  # the quickest of some tries: a computer is busy with other things now and then
        times[name].append(min(timeit.repeat(lambda way=way, inputs=inputs: way(*inputs), number=1, repeat=7)))
    growth = math.log2(times[name][-1] / times[name][-2])
    print(f"{name:16}", *(f"{1e3 * t:7.1f} ms" for t in times[name]), f"  at last as n^{growth:.1f}")
costs = [Cost(tokens=n, head_dim=64, dtype="float32") for n in lengths]
memory = {"weights": [c.dense.weights for c in costs], "lse": [c.tiled.weights for c in costs]}
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for panel, found, title in zip(axes, (times, memory), ("seconds, measured", "bytes, counted"), strict=True):
    for name, row in found.items():
        panel.loglog(lengths, row, "o-", label=name)
    panel.set(xlabel="words", title=f"one head: {title}")
    panel.legend(frameon=False)
figure.savefig("lesson7-cost.png")
# %% [markdown]
# ## Exercises
# In `exercises.py`: `window_weights`, `merge_parts` (what flash does, for two blocks) and `linear_attention`. Then
# `clearhead check 7`, which the file's first lines spell for your computer.
#
# ## Quiz: answer for yourself first
# 1. A model of 32 layers with 32 heads reads 131,072 words. How large are all its weights, 2 bytes each? And the lse?
# 2. How large are the keys and values that it has to keep to write the next word? (d = 128.) And with 8 key heads?
# 3. From how many words on does attention cost more than the four matrices around it, if the model is 4,096 wide?
# %%
sizes = {"tokens": 131_072, "heads": 32, "layers": 32, "head_dim": 128, "dtype": "float16"}
large, grouped = Cost(**sizes), Cost(**sizes, kv_heads=8)
answers = {
    "1": f"{round(large.dense.weights / 2**40)} TiB, {round(large.tiled.weights / 2**30, 1)} GiB",
    "2": f"{large.kv_cache(131_072) / 2**30:.0f} GiB, {grouped.kv_cache(131_072) / 2**30:.0f} GiB",
    "3": round(large.crossover),
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: 131,072² · 2 bytes are 32 GiB a head, times 1,024 heads. 2: It grows with n, not n². 3: Below, others cost more.
#
# ## The same in a real model
# A model that writes word by word would read the whole text again for each. But keys and values of earlier words never
# change (lesson 4), so it keeps them: the **KV cache**. Then a new word costs one row of scores, and not n.
# %%
try:
    model, tokenizer = clearhead.zoo.load("smollm2")
    given = tokenizer("Your journey starts with one step. " * 8, return_tensors="pt") | {"do_sample": False}
    for name, cached in {"without": False, "with": True}.items():
        start = timeit.default_timer()
        model.generate(**given, max_new_tokens=6, use_cache=cached)
        print(f"6 words after {given['input_ids'].shape[1]} {name} the cache: {timeit.default_timer() - start:.2f} s")
    whole = clearhead.cost.from_config(model.config, tokens=8192, dtype="float32")
    print(f"8,192 words: cache {whole.kv_cache(8192) / 1e6:.0f} MB, all weights {whole.dense.weights / 1e9:.0f} GB")
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# ## Your own layer, opened
# `flash` gives the output, and the map any weight. Put your own code in its place, and look again.
# %%
class Mine(torch.nn.Module):
    def attend(self, x):
        return flash(x, x, x, tile=4)[0], clearhead.SoftmaxMap(x, x, v=x)


x = torch.randn(6, 8)
theirs, _ = clearhead.functional.flash_attention(x, x, x)
print("clearhead's own layer agrees:", torch.allclose(Mine().attend(x)[0], theirs, atol=1e-6))
view = clearhead.look(Mine(), x, tokens=["Your", "journey", "starts", "with", "one", "step"])
print("saved:", view.save("lesson7.html"))
view
