# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 8: Inside a real model
# **The idea.** Nobody tells a head what to look for. Yet in nearly every trained language model the same three habits
# are found. A **previous-token head** looks at the word before. An **induction head** finds an earlier copy of the word
# it reads and looks at what came *after* that copy: if *Your* was followed by *journey* before, then perhaps again. And
# where a head finds nothing, it rests on the first token, the **sink**: shares add up to 1, so nobody can look at
# nothing. We build all three by hand, learn to measure them, and then find them in a model.
#
# The text is a sentence, twice. `<s>` is a token that many models begin a text with. A word is a row of zeros with a
# single 1 that says which word it is; a place in the text is written the same way.
# %%
import matplotlib.pyplot as plt
import torch

import clearhead

words = ["<s>", *["Your", "journey", "starts", "with", "one", "step"] * 2]
kinds = list(dict.fromkeys(words))
ids = torch.tensor([kinds.index(word) for word in words])
T, x, places = len(ids), torch.eye(len(kinds))[ids], torch.eye(len(ids))
print(T, "tokens of", len(kinds), "kinds:", ids.tolist())
# %% [markdown]
# ## Two heads, one behind the other
# The first head asks with the place before its own, and tokens are found by their place. Its values are the words, so
# that each token then also knows **which word came before it**. The second head asks with its own word, and tokens are
# found by that *word before*. So it finds what came after the earlier copy. In a formula, $p_t$ being places:
#
# $$A^{(1)}_{ts} = \mathrm{softmax}_s(\beta\, p_{t-1} \cdot p_s), \quad A^{(2)}_{ts} = \mathrm{softmax}_s\left(\beta\,
# x_t \cdot (A^{(1)} x)_s + \tfrac{\beta}{2}\,[s = 0]\right) \quad (s \le t)$$
#
# $[s = 0]$ is 1 for the first token and 0 for others. It makes that token the sink: with half the score of a find, it
# gets what is left where nothing is found. One head alone cannot do this: it needs what the one before has written.
# %%
beta = 16.0
later = torch.ones(T, T, dtype=torch.bool).triu(diagonal=1)


def weigh(q, k):
    return torch.softmax((q @ k.T).masked_fill(later, -torch.inf), dim=-1)


q1, k1 = beta * places.roll(1, dims=0), places  # row t of q1 is the place t - 1
before = weigh(q1, k1) @ x  # what the first head writes: the word before
is_first = places[:, :1]  # 1 for the first token, 0 for others
q2 = torch.cat([beta * x, torch.full((T, 1), beta / 2)], dim=1)
k2 = torch.cat([before, is_first], dim=1)
guess = weigh(q2, k2) @ x  # the second head brings the words it looks at
for t in (1, 7, 8, 11):
    print(f"{t:2} {words[t]:8} looks at {words[int(weigh(q2, k2)[t].argmax())]:8} what comes next: {words[t + 1]}")
# %% [markdown]
# The second time round, it knows what comes next, of any text that repeats: it has learned nothing about words. In a
# model the value goes on to the output, and the guess becomes more likely.
#
# ## Measure it
# A head's **score** for a habit is the share of attention that goes to the keys that the habit expects, on average over
# the words that have such keys. Beside it stands the score of a head that spreads evenly over all it may see: on a
# short text an even head looks at the word before quite often. For one head, in loops:
# %%
def score(weights, expected):
    shares = [sum(float(weights[t, s]) for s in keys) for t, keys in expected.items()]
    return sum(shares) / len(shares)


previous = {t: [t - 1] for t in range(1, T)}
after_copy = {t: [s for s in range(1, t) if ids[s - 1] == ids[t]] for t in range(T)}
after_copy = {t: keys for t, keys in after_copy.items() if keys}  # words without an earlier copy are left out
even = (~later).float() / torch.arange(1, T + 1)[:, None]
for name, weights in {"first head": weigh(q1, k1), "second head": weigh(q2, k2), "even head": even}.items():
    print(f"{name:11} previous {score(weights, previous):.2f}, induction {score(weights, after_copy):.2f}")
# %% [markdown]
# ## Exercises
# In `exercises.py`, for all heads at once: `previous_score`, `induction_score`, and `without_sink`, what heads look at
# when they do not rest. Then `clearhead check 8`, which the file's first lines spell for your computer.
#
# ## Quiz: answer for yourself first
# 1. Take the sink away ($\beta / 2$ becomes 0). What does *step* of the first sentence, token 6, give to each token?
# 2. The sentence stands there three times. How many keys does induction expect of the last *Your*?
# 3. Take the first head away (it looks everywhere evenly). Which induction score has the second one left?
# %%
thrice = clearhead.heads.Tokens([0, *ids[1:7].tolist() * 3]).induction()
unaware = weigh(q2, torch.cat([even @ x, is_first], dim=1))
answers = {
    "1": [round(float(share), 4) for share in weigh(beta * x, before)[6, :7]],
    "2": int((thrice.q == 13).sum()),
    "3": round(score(unaware, after_copy), 2),
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: The same to each of the seven: it finds nothing, and has nowhere to rest. 2: Two, and their weights add up. 3: Next
# to none: keys no longer know the word before them. Most words rest. *Your* gives the first *Your* as much as the sink,
# as half of what that key knows is *Your*: 16 / 2 = 8. In a model, too, an induction head needs heads before it.
#
# ## The same in a real model
# SmolLM2 reads 25 random tokens, twice. There is nothing to understand in them, so whoever guesses the second half well
# has looked it up in the first. `clearhead.heads` has the scores, the even head's beside them.
# %%
try:
    model, tokenizer = clearhead.zoo.load("smollm2")
    twice = torch.randint(1000, 40000, (25,), generator=torch.Generator().manual_seed(0)).repeat(2)
    with clearhead.record(model) as recording, torch.no_grad():
        logits = model(twice[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], twice[1:], reduction="none")  # how wrong each guess is
    blind = torch.tensor(logits.shape[-1]).log()  # all tokens alike; loss[24], of where it begins again, is left out
    print(f"loss in the first half {loss[:24].mean():.1f}, in the second {loss[25:].mean():.1f}; blind {blind:.1f}")
    tokens = clearhead.heads.Tokens(twice)
    figure, axes = plt.subplots(1, 3, figsize=(8, 7), layout="constrained")
    for panel, pairs in zip(axes, (tokens.first(), tokens.previous(), tokens.induction()), strict=True):
        found = clearhead.heads.relation_score([(recording, pairs)])
        layer, head = divmod(int(found.mass.argmax()), 9)
        best, base, many = found.mass[layer, head], found.uniform[layer, head], int((found.mass > 0.5).sum())
        print(f"{pairs.name:9}: L{layer}H{head} {best:.2f}, even head {base:.2f}; {many} of 270 heads above 0.5")
        panel.imshow(found.mass.numpy(), cmap="Blues", vmin=0, vmax=1)
        panel.set(title=pairs.name, xlabel="head", ylabel="layer", xticks=range(9))
    figure.savefig("lesson8-model.png")
    seen = clearhead.look(model, tokenizer, "Your journey starts with one step. Your journey starts with")
    print("its heads on our sentence:", seen.save("lesson8-smollm2.html"))
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# Guessing all 49,152 tokens alike has the loss ln 49,152. The first half is worse, since the model expects language.
# Half of the heads rest on the first token most of the time, and an average over heads shows little else: take it away
# first. In `lesson8-smollm2.html` each head is a picture; press `?` for help. Do they matter? Lesson 9 takes them out.
#
# ## Your own heads, opened
# Both heads, in one map. Click the second *Your* (token 7) and go from head to head with [ and ].
# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
for panel, pair, title in zip(axes, [(q1, k1), (q2, k2)], ["first: previous", "second: induction"], strict=True):
    panel.imshow(weigh(*pair).numpy(), cmap="Blues", vmin=0, vmax=1)
    panel.set(title=title, xlabel="token", yticks=range(T), yticklabels=words)
figure.savefig("lesson8-heads.png")


class Mine(torch.nn.Module):
    def attend(self, x):
        wide = [torch.cat([each, torch.zeros(T, T - each.shape[1])], dim=1) for each in (q1, q2, k1, k2)]
        q, k = torch.stack(wide[:2])[None], torch.stack(wide[2:])[None]
        attn = clearhead.SoftmaxMap(q, k, v=x.expand(1, 2, -1, -1), scale=1.0, mask=clearhead.masks.causal())
        return guess, attn


_, attn = Mine().attend(x)
print("clearhead's own layer agrees:", torch.allclose((attn @ x)[0, 1], guess, atol=1e-6))
view = clearhead.look(Mine(), x, tokens=words)
print("saved:", view.save("lesson8.html"))
view
