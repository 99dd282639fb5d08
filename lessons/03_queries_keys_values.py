# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 3: Queries, keys, values, and why √d
# **The idea.** In lesson 2 one vector did three jobs. It asked (whose vector matches mine?), it was asked, and it was
# what the others took. But what a word looks for need not be what it is: a verb may look for its noun. So each word
# gets three vectors, one a job: its **query** is what it looks for, its **key** is what it is found by, and its
# **value** is what it gives to those who find it.
#
# Each is the word's vector times a matrix, $q_t = x_t W_Q$ and so on; for all words at once, $Q = X W_Q$, $K = X W_K$,
# $V = X W_V$. Two things share the name weights here; keep them apart. The matrices are **learned** in training and
# then stay. The attention weights are **computed** anew for every text.
# %%
import math

import matplotlib.pyplot as plt
import torch

import clearhead

words = ["Your", "journey", "starts", "with", "one", "step"]
numbers = [0.43, 0.15, 0.89, 0.55, 0.87, 0.66, 0.57, 0.85, 0.64, 0.22, 0.58, 0.33, 0.77, 0.25, 0.1, 0.05, 0.8, 0.55]
x = torch.tensor(numbers).view(6, 3)  # six words, three numbers each
torch.manual_seed(123)
W_query, W_key, W_value = torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 2)  # before training: chance
q, k, v = x @ W_query, x @ W_key, x @ W_value
print("q, k and v have the shapes", tuple(q.shape), tuple(k.shape), tuple(v.shape))
# %% [markdown]
# ## The formula
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$
#
# From the inside out: $Q K^\top$ are the scores, each query with each key. They are divided by $\sqrt{d_k}$, where
# $d_k$ is how many numbers a query has (here 2). The softmax turns each row into shares. The shares mix the values.
# Here it is for one query, *journey*; for all of them at once it is your exercise.
# %%
scores = torch.stack([torch.dot(q[1], key) for key in k])
shares = torch.softmax(scores / math.sqrt(2), dim=0)
z = sum(share * value for share, value in zip(shares, v, strict=True))
for name, vector in {"query of journey": q[1], "scores": scores, "shares": shares, "journey becomes": z}.items():
    print(f"{name}:", [round(float(number), 4) for number in vector])
# %% [markdown]
# ## Why divide, and why by the root?
# A dot product adds up $d_k$ products. Say that the numbers are independent, with mean 0 and variance 1 (the average of
# their squares), as they roughly are before training. Then each product has variance 1, and variances add: the sum has
# variance $d_k$. The root of that, $\sqrt{d_k}$, is its **spread**: how far from 0 it typically is. Dividing by it
# brings the spread back to 1, for any width.
#
# Why care? The softmax blows differences up: with a spread of 30, one key gets nearly all the weight. Then training
# gets stuck, since it learns from *how weights move when scores move*. How fast weight $\alpha_i$ of a query moves with
# its score $\omega_j$ is written $\partial\alpha_i/\partial\omega_j$ (left its own score, right another one):
#
# $$\partial\alpha_i/\partial\omega_i=\alpha_i(1-\alpha_i), \qquad \partial\alpha_i/\partial\omega_j=-\alpha_i\alpha_j$$
#
# With one weight near 1 and the rest near 0, all of these are near 0: whatever is wrong, nothing moves. Measure it.
# %%
widths, measured = [1, 4, 16, 64, 256, 1024], []
for d in widths:
    count = min(2**14, 2**20 // d)
    dots = (torch.randn(count, 1, d) * torch.randn(count, 16, d)).sum(dim=-1)  # each query meets 16 keys
    plain, scaled = torch.softmax(dots, dim=-1), torch.softmax(dots / math.sqrt(d), dim=-1)
    tables = (torch.diag_embed(w) - w[..., :, None] * w[..., None, :] for w in (plain, scaled))  # all ∂α/∂ω of a query
    moves = [float(torch.linalg.matrix_norm(table).mean()) for table in tables]  # their squares, added up, and the root
    measured.append((float(dots.var()), *moves))
    print(f"d_k {d:4}: variance {dots.var():7.1f}; movement {moves[0]:.3f}, scaled {moves[1]:.3f}")
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for n, (label, color) in enumerate({"not scaled": "#B4004E", "scaled": "#00707F"}.items()):
    left.bar(range(16), (plain, scaled)[n][0].tolist(), color=color, alpha=0.6, label=label)
    right.semilogx(widths, [line[1 + n] for line in measured], "o-", color=color, label=label)
left.set(xlabel="key", xticks=range(0, 16, 5), title="weights of one query, d_k = 1024")
right.set(xlabel="d_k", ylim=(0, 0.4), title="how far weights move")
right.legend(frameon=False)
figure.savefig("lesson3-scale.png")
# %% [markdown]
# At $d_k = 4$ they move more *without* the scale. No contradiction: weights move most where a few keys share nearly
# everything, and a spread of 2 comes near to that. But then they move less and less. The root is not there to make them
# move most, but to make them move alike at any width. It is a choice, not a law: some models start from smaller
# matrices instead. And after training the numbers are not as assumed; we measure that below.
#
# In a model, a matrix that training is to change lives in an `nn.Linear`, which keeps it transposed as `.weight`. You
# call it like a function, with all rows at once:
# %%
project = torch.nn.Linear(3, 2, bias=False)  # from 3 numbers to 2; a bias would be added to the product
print(tuple(project(x).shape), "- it is x @ project.weight.T:", torch.allclose(project(x), x @ project.weight.T))
# %% [markdown]
# ## Exercises
# In `exercises.py`: `scaled_weights`, `attention` and the layer `SelfAttention`, whose matrices are such `nn.Linear`s
# (T is the number of queries, S of keys). Then `clearhead check 3`, which its first lines spell for your computer.
#
# ## Quiz: answer for yourself first
# 1. Queries and keys have 2 numbers each. Give the values 5: which shape has the output now?
# 2. Make all queries ten times as long. What is the largest share that *journey* takes then? (So far it is 22.64 %.)
# 3. Reverse the order of the words. By how much do the new vectors change, apart from their order?
# 4. Training makes a **loss** smaller, a number that says how wrong a model is. Let it be the sum of the squares of all
#    outputs. How strongly does it pull at each of the three matrices?
# %%
attend = torch.nn.functional.scaled_dot_product_attention  # PyTorch's own
matrices = [W.clone().requires_grad_() for W in (W_query, W_key, W_value)]
attend(*(x @ W for W in matrices)).square().sum().backward()
answers = {
    "1": tuple(attend(q, k, x @ torch.rand(3, 5)).shape),
    "2": round(float(torch.softmax(10 * scores / math.sqrt(2), dim=0).max()), 4),
    "3": float((attend(q.flip(0), k.flip(0), v.flip(0)).flip(0) - attend(q, k, v)).abs().max()),
    "4": [round(float(W.grad.norm()), 3) for W in matrices],
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: One row a query, as wide as a value: not always the shape of the input. 2: Length sharpens. 3: Only rounding:
# attention knows no order; models add positions for that. 4: The pull is the **gradient**, how fast the loss changes
# with each number of a matrix (here again the root of the sum of squares). All three have one, so all can be learned.
# It is 20 times as strong at the values: they go straight into the output, where queries and keys only shift shares.
#
# ## The same in a real model
# In SmolLM2, the small language model of lesson 2, queries have 64 numbers. We take the raw scores q·k of the last
# word in all 270 heads, and ask how far they spread and what the softmax would make of them without the scale.
# %%
try:
    model, tokenizer = clearhead.zoo.load("smollm2")
    with clearhead.record(model) as recording, torch.no_grad():
        model(**tokenizer("Your journey starts with one step. Your journey", return_tensors="pt"))
    last = torch.stack([layer[0, h].q[-1] @ layer[0, h].k.T for layer in recording for h in range(9)])  # raw scores
    spread, scale = last.std(dim=-1), recording[0].scale
    top, bare = (torch.softmax(last * s, dim=-1).max(dim=-1).values.mean() for s in (scale, 1))
    print(f"spread of q·k in {len(last)} heads: {spread.min():.1f} to {spread.max():.1f}; chance would give √64 = 8")
    print(f"largest weight, on average over heads: {top:.2f}; without the scale it would be {bare:.2f}")
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# ## Your own layer, opened
# `clearhead.SoftmaxMap` makes the weights from q and k, the root included. Under the text of the page, *Derivation*
# writes out the arithmetic of the weight that you select, as in the last line. To see your own `SelfAttention`, import
# it from `exercises`, make a `layer = SelfAttention(3, 2)`, and take `layer.W_query(x)` and so on in `attend`. The page
# does clearhead's own arithmetic on your q, k and v; `clearhead check 3` has shown that it equals yours.
# %%
class Mine(torch.nn.Module):
    def attend(self, x):
        q, k, v = x @ W_query, x @ W_key, x @ W_value
        attn = clearhead.SoftmaxMap(q, k, v=v)
        return attn @ v, attn


theirs = clearhead.nn.RawSelfAttention(3, 2)
theirs.W_query.data, theirs.W_key.data, theirs.W_value.data = W_query, W_key, W_value
print("clearhead's own layer agrees:", torch.allclose(Mine().attend(x)[0], theirs(x)))
view = clearhead.look(Mine(), x, tokens=words)
print("saved:", view.save("lesson3.html"))
top, *all_six = (math.exp(float(q[5] @ key) / math.sqrt(2)) for key in (k[1], *k))
print(f"step → journey by hand: {top:.4f} / {sum(all_six):.4f} = {top / sum(all_six):.2%}; the page has the same")
view
