# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 6: Cross-attention
# **The idea.** So far the words of one text looked at each other. But queries can come from one text, and keys and
# values from another: the word that is being written asks, the words that were read answer. That is
# **cross-attention**. Lesson 1 had it inside a recurrent network; the Transformer (2017) kept the attention and left
# the recurrence out. Nothing in the formula changes, only what comes from where:
#
# $$\mathrm{softmax}(Q K^\top / \sqrt{d_k})\, V \qquad \text{with } Q = X W_Q, \quad K = C W_K, \quad V = C W_V$$
#
# $X$ is the text that is written, T words; $C$, the **context**, the one that was read, S words. So there are T × S
# weights: a table of where each written word came from. Drawn by hand, such a table is called an **alignment**.
# %%
import math
import random
import time

import matplotlib.pyplot as plt
import torch

import clearhead
from clearhead.models import Seq2Seq, Translator

numbers = [0.43, 0.15, 0.89, 0.55, 0.87, 0.66, 0.57, 0.85, 0.64, 0.22, 0.58, 0.33, 0.77, 0.25, 0.1, 0.05, 0.8, 0.55]
x = torch.tensor(numbers).view(6, 3)  # Your journey starts with one step: three numbers a word, as in lesson 2
torch.manual_seed(0)
context = torch.randn(5, 4)  # Jede Reise beginnt am Anfang: four numbers a word, made up
W_query, W_key, W_value = torch.randn(3, 2), torch.randn(4, 2), torch.randn(4, 2)
weights = torch.softmax((x @ W_query) @ (context @ W_key).T / math.sqrt(2), dim=-1)
print("weights", tuple(weights.shape), "- output", tuple((weights @ (context @ W_value)).shape))
# %% [markdown]
# No mask hides the future: all of the context is there before a word is written. (Among the written words attention is
# causal, as in lesson 4.) But sentences of a batch are filled up to one length with **padding**, which must get no
# weight: its scores become $-\infty$. It is about keys, (B, S): line it up with the last dimension of (B, T, S).
#
# ## A Transformer that translates
# It learns number words, German to English, backwards as in lesson 1: there we *know* where each word should come from.
# Each side has two layers of four heads; training takes about ten seconds.
# %%
german = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
english = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def number_words(count, seed):
    draw = random.Random(seed)
    digits = [[draw.randrange(10) for _ in range(draw.randint(3, 9))] for _ in range(count)]
    return [(" ".join(german[d] for d in line), " ".join(english[d] for d in line[::-1])) for line in digits]


train, test = number_words(6_000, seed=0), number_words(200, seed=1)
translator, start = Translator(Seq2Seq.transformer, train, width=64, dropout=0.0), time.perf_counter()
losses = translator.fit(train, steps=500, rate=3e-3)
right, of = (sum(column) for column in zip(*translator.hits(test), strict=True))
print(f"{time.perf_counter() - start:.0f} s, loss {losses[0]:.2f} → {losses[-1]:.2f}, {right / of:.0%} guessed")
print("drei eins vier neun →", translator.translate("drei eins vier neun"))
# %% [markdown]
# ## Reading the alignment off
# Row $t$ of a map is what the model looked at to write word $t$. A person would draw a line from it to word $n - 1 - t$
# of the sentence. How much of each head's attention lies on that line? Beside it stands the share of an even head,
# which looks everywhere alike. Look at such numbers before you read a story off one picture: not every head aligns.
# %%
on_line, even = [], []
for text, translation in test[:40]:
    source, _, maps = translator.attend(text, translation)  # a map a layer, (1, heads, T, S); its last row is the end
    t = torch.arange(len(source))
    on_line.append(torch.stack([attn[0].to_dense()[:, t, t.flip(0)].mean(dim=-1) for attn in maps]))
    even.append(1 / len(source))
table = torch.stack(on_line).mean(dim=0)  # (layers, heads)
for n, row in enumerate(table.tolist()):
    print(f"layer {n}, heads 0 to 3:", *(f"{share:.0%}" for share in row), f"- even: {sum(even) / len(even):.0%}")
layer, head = divmod(int(table.argmax()), 4)
source, written, maps = translator.attend("drei eins vier neun zwei sechs", "six two nine four one three")
dense = maps[layer][0].to_dense()
panels = {f"layer {layer}, head {head}": dense[head], "its layer, on average": dense.mean(dim=0)}
panels["what a person would draw"] = torch.cat([torch.eye(6).flip(0), torch.zeros(1, 6)])  # the end: from nowhere
figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
for panel, (title, picture) in zip(axes, panels.items(), strict=True):
    panel.imshow(picture.numpy(), cmap="Blues", vmin=0, vmax=1)
    panel.set(title=title, xticks=range(6), xticklabels=source, yticks=range(7), yticklabels=written)
figure.savefig("lesson6-alignment.png")
# %% [markdown]
# ## Exercises
# In `exercises.py`: `cross_attention`, `padded_weights` and `alignment_share`. Then `clearhead check 6`, which the
# file's first lines spell for your computer.
#
# ## Quiz: answer for yourself first
# 1. Change the last word of the context. How many of the 6 outputs change?
# 2. Put the words of the context into another order. By how much do the outputs change?
# 3. Let the context be the text itself. How far is cross-attention from self-attention with the same matrices?
# %%
cross = clearhead.nn.Attention(3, 4, num_heads=2, d_context=3).requires_grad_(False)
own = clearhead.nn.Attention(3, 4, num_heads=2, is_causal=False).requires_grad_(False)
own.load_state_dict(cross.state_dict())
c, changed = torch.randn(5, 3), torch.randn(1, 3)
answers = {
    "1": int((cross(x, c) != cross(x, torch.cat([c[:4], changed]))).any(dim=-1).sum()),
    "2": float((cross(x, c) - cross(x, c.flip(0))).abs().max()),
    "3": float((cross(x, x) - own(x)).abs().max()),
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: All. 2: Only by rounding: keys have no order, so an encoder writes into its states where a word stands. 3: Not at
# all, or by rounding: self-attention is the case of one text.
#
# ## The same in a real model
# SmolLM2 has no second text: it reads one, in which a translation follows the original. Then self-attention does what
# cross-attention does. Which of its 270 heads look from a word of the translation at the word that it translates? (Head
# L9H2 found earlier copies of a word in lesson 2: a translation is a kind of copy.)
# %%
try:
    model, tokenizer = clearhead.zoo.load("smollm2")
    words = ["/", "house", "dog", "water", "red", "king", "/", "maison", "chien", "eau", "rouge", "roi"]
    ids = [tokenizer(f" {word}")["input_ids"] for word in words]
    ends = torch.tensor([len(part) for part in ids]).cumsum(dim=0) - 1  # the last token of each word
    with clearhead.record(model) as recording, torch.no_grad():
        model(torch.tensor([[token for part in ids for token in part]]))
    to = torch.stack([layer[0].to_dense()[:, ends[7:], ends[1:6]].mean(dim=-1) for layer in recording])
    best = [divmod(int(n), to.shape[1]) for n in to.flatten().topk(3).indices]  # to: (layers, heads)
    print([f"L{n}H{h} {to[n, h]:.0%}" for n, h in best], f"- the median head {to.median():.1%}")
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# ## Your own layer, opened
# `record` keeps what a module attends to; where its name says *cross*, the page has two texts, one that asks and one
# that answers. Click a word of either. Then put your own `cross_attention` into `forward`.
# %%
class Mine(torch.nn.Module):
    def forward(self, x, context):
        q, k, v = (x @ W_query)[None], (context @ W_key)[None], (context @ W_value)[None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0]


class Decoder(torch.nn.ModuleDict):
    def forward(self, x, context):
        return self["cross_attention"](x, context)


theirs, decoder = clearhead.nn.Attention(3, 2, d_context=4, out_bias=False), Decoder({"cross_attention": Mine()})
state = {"W_query.weight": W_query.T, "W_key.weight": W_key.T, "W_value.weight": W_value.T}
theirs.load_state_dict(state | {"out_proj.weight": torch.eye(2)})
with clearhead.record(decoder) as recording:
    out = decoder(x, context)
print("clearhead's own layer agrees:", torch.allclose(out, theirs(x, context), atol=1e-6))
read, writes = ["Jede", "Reise", "beginnt", "am", "Anfang"], ["Your", "journey", "starts", "with", "one", "step"]
view = clearhead.look(recording, tokens=read, target=writes)
print("saved:", view.save("lesson6.html"))
view
