# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 9: Does it matter?
# **The idea.** A large weight says where a head looks. It does not say that the model needs what is there. Three
# questions go further. What does the head **bring**? A share of nothing is nothing, so weights are taken times the size
# of the values. Where does attention **lead** over many layers? That is the **rollout**. And what happens **without**
# the head? That is the **knockout**: take it out and measure. Only the last one says that something matters.
#
# The text and the two heads are those of lesson 8: the first looks at the word before, the second at what came after an
# earlier copy, and what it finds is the guess of the next word.
# %%
import matplotlib.pyplot as plt
import torch

import clearhead

words = ["<s>", *["Your", "journey", "starts", "with", "one", "step"] * 2]
kinds = list(dict.fromkeys(words))
ids = torch.tensor([kinds.index(word) for word in words])
T, x, places, beta = len(ids), torch.eye(len(kinds))[ids], torch.eye(len(ids)), 16.0
later = torch.ones(T, T, dtype=torch.bool).triu(diagonal=1)
even = (~later).float() / torch.arange(1, T + 1)[:, None]
first = torch.softmax((beta * places.roll(1, dims=0) @ places).masked_fill(later, -torch.inf), dim=-1)


def second_of(first):
    """The second head's weights, which need what the first head writes."""
    scores = beta * x @ (first @ x).T + beta / 2 * places[0]  # the first token is the sink
    return torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)


second = second_of(first)
# %% [markdown]
# ## Without a head
# The words 8 to 12 can be guessed, since they stood there before. Spoil the first head, and count.
# %%
def right(second):
    guess = (second @ x)[7:12]
    return f"{int((guess.argmax(-1) == ids[8:13]).sum())} of 5 right"


print("both heads:", right(second))
print("the first looks everywhere:", right(second_of(even)))
# %% [markdown]
# No weight of the first head points to a word that is guessed. Still nothing works without it: weights do not tell.
#
# ## The same output from other weights
# Token 1 and token 7 are both *Your*: their values are the same. Move all weight from one to the other. How far apart
# two rows of weights are is half the sum of the differences, between 0 and 1: the **total variation distance**.
# %%
one, other = torch.eye(T)[1], torch.eye(T)[7]  # two heads that look at one token each
print("distance of the weights:", float((one - other).abs().sum() / 2))
print("distance of what they bring:", float((one @ x - other @ x).norm()))
# %% [markdown]
# As far apart as weights can be, and the same output: weights alone are no explanation yet.
#
# ## What is brought, and where it leads
# The size of what key $s$ brings to query $t$ is $b_{ts} = A_{ts} \lVert v_s \rVert$. Over layers, take the average of
# the heads and half of the word itself, since each layer adds to what was there. Then multiply, the first layer on the
# right, because what the last one looks at has been mixed by those before:
#
# $$R = A'_L \cdots A'_2\, A'_1, \qquad A'_l = \tfrac{1}{2H} \sum_h A^{(l, h)} + \tfrac{1}{2} I$$
# %%
rollout = clearhead.heads.rollout([clearhead.DenseMap(first[None]), clearhead.DenseMap(second[None])])
row = rollout[7]
print("the second Your comes from", {f"{words[s]} {s}": round(float(row[s]), 2) for s in row.topk(4).indices.tolist()})
# %% [markdown]
# ## Exercises
# In `exercises.py`: `without_head`, `brought` and `rollout`. Then `clearhead check 9`, which its first lines spell.
#
# ## Quiz: answer for yourself first
# 1. What does each row of a rollout add up to?
# 2. All values are the same vector. By how much does the output change when the weights do?
# 3. In each of 30 layers every token gives half of its attention to the first one, the rest to itself. Which share of
#    the last token's rollout has the first one?
# %%
resting = (torch.eye(T) + torch.eye(T)[0]) / 2
answers = {
    "1": sorted({round(float(total), 4) for total in rollout @ torch.ones(T, 1)}),
    "2": float((even @ torch.ones(T, 3) - first @ torch.ones(T, 3)).abs().max()),
    "3": round(float(clearhead.heads.rollout([clearhead.DenseMap(resting[None])] * 30)[-1, 0]), 4),
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: To 1. 2: Only rounding: where all bring the same, it does not matter who is asked. 3: Nearly everything: a quarter
# of what is left flows there in each layer. So in a model with a sink a rollout shows the sink.
#
# ## The same in a real model
# SmolLM2 reads 25 random tokens, twice, as in lesson 8. We take out the four heads that look most at the first token,
# at the previous one, at what came after a copy; and, to compare with, four drawn at random, eight times.
# %%
try:
    model, tokenizer = clearhead.zoo.load("smollm2")
    draw = torch.Generator().manual_seed(0)
    twice = torch.randint(1000, 40000, (25,), generator=draw).repeat(2)

    @torch.no_grad()
    def loss():
        return float(torch.nn.functional.cross_entropy(model(twice[None]).logits[0, 25:-1], twice[26:]))

    def without(numbers):  # head n is head n % 9 of layer n // 9
        with clearhead.knockout(model, {divmod(n, 9): "zero" for n in numbers}):
            return loss()

    with clearhead.record(model) as recording:
        print(f"loss in the second half, all heads there: {loss():.2f}")
    tokens, taken = clearhead.heads.Tokens(twice), {}
    for pairs in (tokens.first(), tokens.previous(), tokens.induction()):
        found = clearhead.heads.relation_score([(recording, pairs)]).mass
        taken[pairs.name] = [without(found.flatten().topk(4).indices.tolist())]
        print(f"without the four that look most at {pairs.name}: {taken[pairs.name][0]:.2f}")
    taken["random"] = sorted(without(torch.randperm(270, generator=draw)[:4].tolist()) for _ in range(8))
    print("without four at random:", [round(one, 1) for one in taken["random"]])
    figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    for name, losses in taken.items():
        axes.plot(losses, [name] * len(losses), "o", color="#9a9a9a" if name == "random" else "#B4004E")
    axes.set(xlabel="loss in the second half", xlim=(0, 15))
    figure.savefig("lesson9-model.png")
    sizes = recording[18].v[0, 2].norm(dim=-1)  # L18H8 reads the values of key head 8 // 3
    print(f"L18H8 gives the first token {recording[18][0, 8, -1, 0]:.0%}; its value has size {sizes[0]:.1f},", end=" ")
    print(f"others {sizes[1:].mean():.1f}; the rollout gives it {clearhead.heads.rollout(recording)[0, -1, 0]:.2%}")
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# The largest weights matter least, no more than heads drawn at random. Without the draws we would not know "a lot".
#
# ## Your own heads, opened
# Head 0 and head 1, as they were; go from one to the other with [ and ]. Which of the two would you have kept?
# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
pictures = {"first": first, "second": second, "rollout": rollout.to_dense()}
for panel, (title, picture) in zip(axes, pictures.items(), strict=True):
    panel.imshow(picture.numpy(), cmap="Blues", vmin=0, vmax=1)
    panel.set(title=title, xlabel="token", yticks=range(T), yticklabels=words)
figure.savefig("lesson9-rollout.png")


class Mine(torch.nn.Module):
    def attend(self, x):
        return second @ x, clearhead.DenseMap(torch.stack([first, second]))


by_hand = (second / 2 + torch.eye(T) / 2) @ (first / 2 + torch.eye(T) / 2)
print("clearhead's own layer agrees:", torch.allclose(rollout.to_dense(), by_hand, atol=1e-6))
view = clearhead.look(Mine(), x, tokens=words)
print("saved:", view.save("lesson9.html"))
view
