# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 4: No looking ahead
# **The idea.** A language model learns by guessing the next word, at every place of a text at once: after *Your* it
# should say *journey*, after *Your journey* it should say *starts*. That is only a test if nobody can peek. With the
# attention of lesson 3 *Your* may take from *journey*, and the guess becomes a copy. So each word may see itself and
# what came before, and nothing after. The weights of later words must be 0, and the rest of the row must still add up
# to 1. This is called **causal** attention.
# %%
import math

import matplotlib.pyplot as plt
import torch

import clearhead

words = ["Your", "journey", "starts", "with", "one", "step"]
numbers = [0.43, 0.15, 0.89, 0.55, 0.87, 0.66, 0.57, 0.85, 0.64, 0.22, 0.58, 0.33, 0.77, 0.25, 0.1, 0.05, 0.8, 0.55]
x = torch.tensor(numbers).view(6, 3)  # six words, three numbers each
torch.manual_seed(789)
W_query, W_key, W_value = (torch.nn.Linear(3, 2, bias=False).weight.detach().T for _ in range(3))
q, k, v = x @ W_query, x @ W_key, x @ W_value
scores = q @ k.T / math.sqrt(2)  # as in lesson 3
full = torch.softmax(scores, dim=-1)
print("journey takes", [round(float(share), 4) for share in full[1]], "- the last four are the future")
# %% [markdown]
# ## Two ways to hide the future
# **After the softmax**: set the weights above the diagonal to 0 and divide each row by what is left. **Before the
# softmax**: set those scores to $-\infty$; since $e^{-\infty} = 0$, the softmax leaves them nothing. On paper it is the
# same, as the sum of the whole row cancels:
#
# $$\alpha_{ts} = \frac{e^{\omega_{ts}} / Z}{\sum_{i \le t} e^{\omega_{ti}} / Z} = \frac{e^{\omega_{ts}}}{\sum_{i \le t}
# e^{\omega_{ti}}} \qquad \text{with } Z = \sum_j e^{\omega_{tj}}$$
# %%
later = torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(diagonal=1)  # True above the diagonal, where x is


def hide_after(scores):
    weights = torch.softmax(scores, dim=-1).masked_fill(later, 0.0)
    return weights / weights.sum(dim=-1, keepdim=True)


def hide_before(scores):
    return torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)


weights = hide_before(scores)
print("journey takes", [round(float(share), 4) for share in weights[1]])
print(f"largest difference between the two ways: {(hide_after(scores) - weights).abs().max():.0e}")
# %% [markdown]
# ## Where the first way breaks
# A computer's numbers end: in float32, $e^{-104}$ is 0. Let a later word score 200 more than those that may be seen. In
# the whole softmax it takes everything, and the visible words get exactly 0. There is nothing left to divide: 0 / 0 is
# NaN, "not a number", and one NaN ruins a whole training. The second way never lets the hidden score in.
# %%
extreme = scores.clone()
extreme[0, 3] += 200  # the first word would love to see the fourth
print("hidden after: ", hide_after(extreme)[0].tolist())
print("hidden before:", hide_before(extreme)[0].tolist())
# %% [markdown]
# ## Dropout
# While a model is trained, it helps to take away a random part of the weights, so that it does not lean on any single
# one. Each weight is set to 0 with probability $p$; the others are multiplied by $1 / (1 - p)$, so that on average
# nothing changes. This is for training only: afterwards, in evaluation, nothing is dropped.
# %%
torch.manual_seed(0)
dropped = torch.nn.functional.dropout(weights, 0.5, training=True)
sums = torch.stack([torch.nn.functional.dropout(weights, 0.5).sum(dim=-1) for _ in range(4000)])
draws = ", ".join(f"{float(total):.2f}" for total in sums[:4, 5])
print(f"after dropout the last row adds up to {draws}, …; over 4,000 draws to {sums[:, 5].mean():.3f} on average")
figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
titles = ["lesson 3: everybody sees all", "causal: no looking ahead", "in training, with dropout 0.5"]
for panel, picture, title in zip(axes, [full, weights, dropped], titles, strict=True):
    panel.imshow(picture.numpy(), cmap="Blues", vmin=0, vmax=1.2)
    panel.set(xticks=range(6), xticklabels=words, yticks=range(6), yticklabels=words, title=title)
    for t, s in torch.cartesian_prod(torch.arange(6), torch.arange(6)).tolist():
        share, ink = float(picture[t, s]), "white" if picture[t, s] > 0.7 else "black"
        panel.text(s, t, f"{share:.2f}" if share else "·", ha="center", va="center", fontsize=8, color=ink)
figure.savefig("lesson4-mask.png")
# %% [markdown]
# Some libraries hand out the weights *after* dropout while they train, PyTorch's `nn.MultiheadAttention` for one. Their
# rows do not add up to 1. clearhead always reports those before.
#
# ## Exercises
# In `exercises.py`: `causal_weights`, `drop_weights` and the layer `CausalAttention`, which takes a batch of texts at
# once. Then `clearhead check 4`, which the file's first lines spell for your computer.
#
# ## Quiz: answer for yourself first
# 1. Change the last word to something else. By how much do the new vectors of the other five change?
# 2. A chat model has read 5 words and adds queries one at a time: one query, five keys. How many keys should it see?
#    And how many would it see with the same triangle, cut to 1 × 5, its corner at the first key?
# 3. A row in which everything is hidden (it happens with padding): what does PyTorch's softmax make of it, and what
#    clearhead?
# %%
other = torch.cat([x[:5], torch.tensor([[9.0, -9.0, 9.0]])])
moved = hide_before((other @ W_query) @ (other @ W_key).T / math.sqrt(2)) @ (other @ W_value) - weights @ v
nothing = clearhead.SoftmaxMap(q[:1], k, mask=torch.zeros(1, 6, dtype=torch.bool))
answers = {
    "1": float(moved[:5].abs().max()),
    "2": (int(clearhead.masks.causal().bind(1, 5).count()), int(torch.ones(1, 5).tril().sum())),
    "3": (torch.softmax(torch.full((6,), -math.inf), dim=0).tolist(), nothing[0].tolist()),
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: Not at all, exactly. 2: All five: the newest word is the last row of the triangle, so the triangle is lined up at
# its lower right corner. A fixed square mask gets this wrong. (And it is only training and reading the prompt that
# handle all places at once: writing goes word by word.) 3: 0 / 0 again; a query with nothing to see should take
# nothing.
#
# ## The same in a real model
# SmolLM2 reads two texts that differ in the last word. If no head looks ahead, nothing before that word can differ.
# %%
try:
    model, tokenizer = clearhead.zoo.load("smollm2")
    recordings = []
    for text in ("Your journey starts with one step", "Your journey starts with one banana"):
        with clearhead.record(model) as recording, torch.no_grad():
            model(**tokenizer(text, return_tensors="pt"))
        recordings.append(torch.stack([layer.to_dense()[0] for layer in recording]))  # (layers, heads, T, T)
    first, second = (weights[..., :5, :5] for weights in recordings)
    print(f"largest weight on a later word, in {math.prod(first.shape[:2])} heads: {recordings[0].triu(1).max():.1f}")
    print(f"step or banana, the five words before do not notice: they change by {(first - second).abs().max():.0e}")
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# ## Your own layer, opened
# The map gets the mask as a rule, and the page leaves the future empty. Under the text, *Derivation* writes out the
# arithmetic of the weight that you select: the sum has only the words so far. To see your own `CausalAttention`, take
# q, k and v from its `W_query`, `W_key` and `W_value`. The page does clearhead's own arithmetic on them, without
# dropout; `clearhead check 4` has shown that it equals yours.
# %%
class Mine(torch.nn.Module):
    def attend(self, x):
        q, k, v = x @ W_query, x @ W_key, x @ W_value
        return hide_before(q @ k.T / math.sqrt(2)) @ v, clearhead.SoftmaxMap(q, k, v=v, mask=clearhead.masks.causal())


theirs = clearhead.nn.CausalAttention(3, 2, context_length=6, dropout=0.0)
theirs.load_state_dict({"W_query.weight": W_query.T, "W_key.weight": W_key.T, "W_value.weight": W_value.T})
print("clearhead's own layer agrees:", torch.allclose(Mine().attend(x)[0], theirs(x)))
view = clearhead.look(Mine(), x, tokens=words)
print("saved:", view.save("lesson4.html"))
first, second = (math.exp(scores[1, s]) for s in (0, 1))
print(f"journey → Your by hand: {first:.4f} / ({first:.4f} + {second:.4f}) = {first / (first + second):.2%}")
view
