# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 10: A GPT from these parts
# **The idea.** You have all the parts. A GPT has a vector for each token, the **stream**. **Blocks** add to it: what
# lesson 5's heads bring, then what a small network, the **MLP**, makes of each token alone. A **norm** before each
# keeps numbers at one size. $E$ has a vector for each kind of token, $P$ for each place; logits say what comes next.
# First without MLPs: watch two heads form that lesson 8 made by hand. Then all of it. Half a minute for each training.
#
# $$x = E_{\mathrm{ids}} + P, \quad x \leftarrow x + \mathrm{attention}(\mathrm{norm}(x)), \quad
# x \leftarrow x + \mathrm{mlp}(\mathrm{norm}(x)), \quad \mathrm{logits} = \mathrm{norm}(x)\, E^\top$$
# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import clearhead
from clearhead import heads, learn, models


class Block(nn.Module):
    def __init__(self, width, num_heads, longest, has_mlp):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = clearhead.nn.MultiHeadAttention(width, width, longest, 0.0, num_heads, qkv_bias=True)
        parts = {"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)}
        self.mlp = nn.ModuleDict(parts) if has_mlp else None

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.norm2(x)), approximate="tanh")) if self.mlp else x


class GPT(nn.Module):
    def __init__(self, kinds, longest, width, num_layers, num_heads, has_mlp=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(kinds, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads, longest, has_mlp) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), None if has_mlp else nn.Linear(width, kinds, bias=False)

    def forward(self, ids):  # (B, T) → (B, T, kinds)
        x = self.norm(self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]]))
        return x @ (self.head or self.tokens).weight.T  # E once more: the weights are tied

    def losses(self, ids):
        return F.cross_entropy(self(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
# %% [markdown]
# ## Nothing to understand
# A text is shuffled tokens that begin again after 6 to 16, each text after another number, so that no fixed distance
# helps. Its first copy cannot be guessed; the second can, by whoever looks up what came next. The model has two layers
# of two heads. Every ten steps, on texts that repeat after 16, we measure the loss in both copies, and lesson 8's
# scores: *previous* of layer 0 in the first copy (where it is needed), *induction* of layer 1.
# %%
def repeating(periods):  # (B, 1) → (B, 33), of 32 kinds of tokens
    return torch.rand(len(periods), 32).argsort(dim=1).gather(1, torch.arange(33) % periods)


def measure():  # two losses; scores of layer 0's heads for previous, of layer 1's for induction
    with clearhead.record(model) as maps:
        losses = model.losses(test)
    found = [heads.relation_score((attn[n], it) for n in range(8)).mass for attn, it in zip(maps, pairs, strict=True)]
    return [losses[:, :15].mean().item(), losses[:, 15:].mean().item(), *found[0].tolist(), *found[1].tolist()]
# %%
torch.manual_seed(0)
model, test = GPT(32, 32, 64, num_layers=2, num_heads=2, has_mlp=False), repeating(torch.full((8, 1), 16))
previous = heads.Pairs.listed("previous", [(t, t - 1) for t in range(1, 16)], torch.arange(32), torch.arange(32))
pairs = previous, heads.Tokens(test[0, :32]).induction()  # for layer 0 and for layer 1
seen = {0: measure()}
how = {"steps": 600, "rate": 3e-3, "weight_decay": 0, "on_step": lambda n, _: n % 10 or seen.update({n: measure()})}
models.fit(model, lambda ids: model.losses(ids).mean(), lambda n: repeating(torch.randint(6, 17, (32, 1))), **how)
names = ["loss, copy 1", "loss, copy 2", "previous, L0H0", "previous, L0H1", "induction, L1H0", "induction, L1H1"]
colours = ["#9a9a9a", "#B4004E", "#00707F", "#4FB3BF", "#B4004E", "#E58AAE"]
figure, axes = plt.subplots(2, 1, figsize=(8, 5.5), sharex=True, layout="constrained")
for name, colour, row, panel in zip(names, colours, zip(*seen.values(), strict=True), axes.repeat([2, 4]), strict=True):
    panel.plot(list(seen), row, color=colour, label=f"{name}: {row[0]:.2f} → {row[-1]:.2f}")
    panel.legend(frameon=False)
axes[1].set(ylim=(0, 1), xlabel="steps")
figure.savefig("lesson10-forming.png")
# %% [markdown]
# For two hundred steps next to nothing, then all within a hundred: a **phase change**, as a head in one layer is of use
# only with one in the other. Previous led by ten to thirty steps with six of six seeds. Now without some (layer, head):
# %%
for taken in [(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)], [(1, 0), (1, 1)]:
    with clearhead.knockout(model, dict.fromkeys(taken, "zero")):
        _, loss, _, _, *scores = measure()
    print(f"without {taken}: loss in the second copy {loss:.2f}, induction", [round(score, 2) for score in scores])
# %% [markdown]
# Without the better previous-token head layer 1 finds little. One induction head can stand in for the other.
#
# ## All of it, on a real text
# With MLPs and tied weights, on the text of lessons 1 to 9, byte by byte: it does not know a single word. The first
# weights are those of `models.GPT`, whose parts have the same names, and which writes with a cache (lesson 7).
# %%
lines = [lesson.script().splitlines() for lesson in learn.all_lessons()]
prose = [" ".join(line[2:] for line in one if line[:2] == "# " and line[2] not in "%#$-") for one in lines]
*read, unread = (torch.tensor(list(text.replace("*", "").encode())) for text in prose)
read, unread = torch.cat(read).unfold(0, 65, 1), unread.unfold(0, 65, 65)  # this lesson is not read
gpt, theirs = GPT(256, 64, 64, 2, 4), models.GPT(models.GPTConfig(256, 64, width=64, num_layers=2, num_heads=4))
gpt.load_state_dict(theirs.state_dict())
how = {"steps": 800, "rate": 5e-3}
loss = models.fit(gpt, lambda ids: gpt.losses(ids).mean(), lambda n: read[torch.randint(len(read), (16,))], **how)
theirs.load_state_dict(gpt.state_dict())
print("clearhead's own layer agrees:", torch.allclose(gpt(unread[:, 1:]), theirs(unread[:, 1:]), atol=1e-4))
print(f"loss {loss[0]:.2f} → {loss[-1]:.2f}, on this lesson {gpt.losses(unread).mean():.2f}. It writes:")
written = theirs.generate(torch.tensor([list(b"The idea. ")]), 200, temperature=0.6)
print(bytes(written[0].tolist()).decode(errors="replace"))
# %% [markdown]
# ## Exercises
# In `exercises.py`: `block`, `next_losses` (what is trained on), and `next_shares` (what the next token is drawn from).
# Then `clearhead check 10`, which the file's first lines spell for your computer.
#
# ## Quiz: answer for yourself first
# 1. Which loss has a guess that gives all 32 tokens the same share?
# 2. Texts repeat after 5, or after 20, which the model has never seen. What is its loss in the second copy?
# 3. How many learned numbers has GPT-2 (12 blocks, 768 wide, 50,257 tokens)? And if its weights were not tied?
# %%
with torch.device("meta"):  # sizes without numbers
    gpts = [models.GPT(models.GPTConfig(tied=tied)) for tied in (True, False)]
answers = {
    "1": round(float(F.cross_entropy(torch.zeros(8, 32), test[:, 0])), 2),
    "2": [round(model.losses(repeating(torch.full((64, 1), n)))[:, n:].mean().item(), 2) for n in (5, 20)],
    "3": [sum(parameter.numel() for parameter in gpt2.parameters()) for gpt2 in gpts],
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: log 32. 2: It knows next to all: it looks up what came next, whatever the distance. 3: A third more.
#
# ## The same in a real model
# SmolLM2 has these parts, with another norm, queries and keys that are turned by their place instead of $P$, and three
# matrices in its MLP. `models.GPT` takes its weights, and writes the same.
# %%
try:
    smollm2, tokenizer = clearhead.zoo.load("smollm2")
    ids = tokenizer("Your journey starts with one step. The next step is", return_tensors="pt").input_ids
    ours, theirs = models.GPT.from_huggingface(smollm2).generate(ids, 12), smollm2.generate(ids, max_new_tokens=12)
    print(tokenizer.decode(ours[0]), "- the same in transformers:", torch.equal(ours, theirs))
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# ## Your own model, opened
# Six of the tokens get words as their names. Click the second *Your*, and go through the heads of both layers.
# %%
with clearhead.record(model) as recording, torch.no_grad():
    model(torch.tensor([[*range(6), *range(6), 0]]))
view = clearhead.look(recording, tokens=["Your", "journey", "starts", "with", "one", "step"] * 2 + ["Your"])
print("saved:", view.save("lesson10.html"))
view
