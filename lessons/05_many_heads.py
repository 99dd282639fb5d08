# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 5: Many heads
# **The idea.** One attention gives each word one mix. But a word wants several things at once: the word before it, the
# noun it belongs to, an earlier copy of itself. One set of shares cannot serve them all: what one wish takes, the
# others lose. So let several attentions work side by side, the **heads**, each with its own queries, keys and values.
# Each is narrow, so that all together cost about as much as one wide one. The mask is lesson 4's: nobody looks ahead.
# Then the results are laid side by side, which the bars stand for:
#
# $$\mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} + \mathrm{mask}\right) V_h, \qquad
# \mathrm{MultiHead}(X) = [\mathrm{head}_1 \mid \dots \mid \mathrm{head}_H]\, W_O$$
#
# B is the size of the batch (how many texts), T the number of words, H of heads, and D the width of one head.
# %%
import math

import matplotlib.pyplot as plt
import torch

import clearhead

words = ["Your", "journey", "starts", "with", "one", "step"]
numbers = [0.43, 0.15, 0.89, 0.55, 0.87, 0.66, 0.57, 0.85, 0.64, 0.22, 0.58, 0.33, 0.77, 0.25, 0.1, 0.05, 0.8, 0.55]
x = torch.tensor(numbers).view(6, 3)
batch = torch.stack([x, x])  # (B, T, 3) = (2, 6, 3): two texts, here the same one twice


def causal_attention(q, k, v):
    """Lesson 4, for any number of dimensions in front: (…, T, D) three times, and (…, T, D) comes out."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # .mT is .T for the last two dimensions
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(diagonal=1)
    return torch.softmax(scores.masked_fill(later, -math.inf), dim=-1) @ v
# %% [markdown]
# ## First way: a stack of heads
# Two heads, two numbers each. Every head has three matrices of its own; `torch.cat` lays the results side by side.
# %%
torch.manual_seed(123)
matrices = [[torch.nn.Linear(3, 2, bias=False).weight.detach().T for _ in range(3)] for _ in range(2)]
stacked = torch.cat([causal_attention(*(batch @ W for W in head)) for head in matrices], dim=-1)
print("two heads side by side:", tuple(stacked.shape), "- journey:", [round(float(n), 4) for n in stacked[0, 1]])
# %% [markdown]
# ## Second way: one product, then split
# Many small products are slow. Put the heads' matrices side by side, $W = [W_1 \mid W_2]$, and one large product makes
# the queries of all heads: of each row, the first D numbers are head 0's, the next D head 1's. Two moves follow,
# without any arithmetic: `view` cuts each row into heads, `transpose` puts heads before words.
# %%
W_query, W_key, W_value = (torch.cat([head[i] for head in matrices], dim=1) for i in range(3))  # (3, 4) each
B, T, H, D = 2, 6, 2, 2
whole = batch @ W_query
cut = whole.view(B, T, H, D)
q = cut.transpose(1, 2)
print(f"queries {tuple(whole.shape)} → view {tuple(cut.shape)} → transpose {tuple(q.shape)}")
k, v = ((batch @ W).view(B, T, H, D).transpose(1, 2) for W in (W_key, W_value))
heads = causal_attention(q, k, v)
merged = heads.transpose(1, 2).reshape(B, T, H * D)  # turn back, then lay side by side
print(f"scores {tuple((q @ k.mT).shape)} → heads {tuple(heads.shape)} → merged {tuple(merged.shape)}")
print(f"largest difference from the stack: {(merged - stacked).abs().max():.0e}")
# %% [markdown]
# ## Why not `view(B, H, T, D)` at once?
# The shape would be right, the numbers wrong. They lie in memory in a row, word after word, and `view` only cuts that
# row. `view(B, H, T, D)` gives its first half to head 0: words 0 to 2 with the numbers of both heads. In the picture
# the colour is the head that a number was made for, and the digit its word.
# %%
owner, word = torch.arange(H).repeat_interleave(D).expand(T, H * D), torch.arange(T)[:, None].expand(T, H * D)
panels = {"one row a word": (owner, word)}
panels |= {f"right: head {h}": [t.reshape(T, H, D).transpose(0, 1)[h] for t in (owner, word)] for h in range(H)}
panels |= {f"wrong: head {h}": [t.reshape(H, T, D)[h] for t in (owner, word)] for h in range(H)}
figure, axes = plt.subplots(1, 5, figsize=(11, 4), layout="constrained", width_ratios=[2, 1, 1, 1, 1])
for panel, (title, (colours, digits)) in zip(axes, panels.items(), strict=True):
    panel.imshow(colours.numpy(), cmap="PiYG", vmin=-0.6, vmax=1.6)
    for t, s in torch.cartesian_prod(torch.arange(T), torch.arange(digits.shape[1])).tolist():
        panel.text(s, t, int(digits[t, s]), ha="center", va="center")
    panel.set(title=title, xticks=[], yticks=[])
figure.savefig("lesson5-heads.png")
# %% [markdown]
# ## The heads meet
# Side by side, the heads know nothing of each other. A last matrix $W_O$ mixes what they found, into vectors as wide as
# the model works with: its first D rows meet head 0's numbers, the next D head 1's. In code it is the layer `out_proj`,
# which adds a **bias** too, a learned vector that is the same for all words.
# %%
W_out, bias = torch.randn(4, 4), torch.randn(4)  # before training: chance
out = merged @ W_out + bias
print(f"merged {tuple(merged.shape)} → W_O {tuple(out.shape)}")
# %% [markdown]
# ## Exercises
# In `exercises.py`: `split_heads`, `merge_heads` and the layer `MultiHeadAttention` (without dropout). Then
# `clearhead check 5`, which the file's first lines spell for your computer.
#
# ## Quiz: answer for yourself first
# 1. Multiply each head with its own D rows of $W_O$ and add up, the bias too. How far is that from `out`?
# 2. Split with the wrong view, the rest as above: how far are the merged heads from the right ones?
# 3. How many **parameters** (learned numbers) has such a layer of 768 numbers a word and 12 heads? And with 24 heads?
# %%
wrong = causal_attention(*((batch @ W).view(B, H, T, D) for W in (W_query, W_key, W_value)))
parts = [heads[:, h] @ W_out[h * D : (h + 1) * D] for h in range(H)]
layers = [clearhead.nn.MultiHeadAttention(768, 768, 1024, dropout=0.0, num_heads=n) for n in (12, 24)]  # 1024 words
answers = {
    "1": float((sum(parts) + bias - out).abs().max()),
    "2": float((wrong.transpose(1, 2).reshape(B, T, H * D) - merged).abs().max()),
    "3": [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers],
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: Only rounding: side by side and then $W_O$ is a *sum* over heads. 2: Wrong, without an error. 3: The same number.
#
# ## The same in a real model
# SmolLM2 has 9 heads of 64 numbers in each of its 30 layers (three heads share keys and values, which saves memory). Do
# they do different things? Below are the heads of this text that look most at the word before (*previous*), at earlier
# copies of the word (*duplicate*), and at what came after such a copy (*induction*: it guesses that the text repeats).
# The dark first column is where heads rest that find nothing.
# %%
try:
    model, tokenizer = clearhead.zoo.load("smollm2")
    seen = clearhead.look(model, tokenizer, "Your journey starts with one step. Your journey")
    best = [seen.heads().strongest(role)[0] for role in ("previous", "duplicate", "induction")]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for panel, head in zip(axes, best, strict=True):
        panel.imshow(seen.maps[head.layer][0, head.head].to_dense().numpy(), cmap="Blues", vmin=0, vmax=1)
        panel.set_title(f"{head.label}: {head.role} {head.strength:.0%}")
        panel.set_xticks(range(len(seen.tokens)), seen.tokens, rotation=60)
        panel.set_yticks(range(len(seen.tokens)), seen.tokens)
    figure.savefig("lesson5-real.png")
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# ## Your own layer, opened
# Queries and keys of shape (1, H, T, D) make a map of H heads. Click a head in the page, or press [ and ]. Under the
# text, *Derivation* writes out the arithmetic of the weight that you select. To see your own `MultiHeadAttention`, take
# q, k and v from its layers and split them. The page does clearhead's own arithmetic on them; `clearhead check 5` has
# shown that it equals yours.
# %%
class Mine(torch.nn.Module):
    def attend(self, x):
        q, k, v = ((x @ W).view(1, T, H, D).transpose(1, 2) for W in (W_query, W_key, W_value))
        out = causal_attention(q, k, v).transpose(1, 2).reshape(T, H * D) @ W_out + bias
        return out, clearhead.SoftmaxMap(q, k, v=v, mask=clearhead.masks.causal())


theirs = clearhead.nn.MultiHeadAttention(3, 4, context_length=6, dropout=0.0, num_heads=2)
state = {"W_query.weight": W_query.T, "W_key.weight": W_key.T, "W_value.weight": W_value.T}
theirs.load_state_dict(state | {"out_proj.weight": W_out.T, "out_proj.bias": bias})
print("clearhead's own layer agrees:", torch.allclose(Mine().attend(x)[0], theirs(x), atol=1e-6))
view = clearhead.look(Mine(), x, tokens=words)
print("saved:", view.save("lesson5.html"))
first, second = (math.exp(float(q[0, 0, 1] @ k[0, 0, s]) / math.sqrt(D)) for s in (0, 1))
print(f"head 0, journey → Your by hand: {first:.4f} / ({first:.4f} + {second:.4f}) = {first / (first + second):.2%}")
view
