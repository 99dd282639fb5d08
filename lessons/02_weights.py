# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 2: Weights from dot products
# **The idea.** Take the sentence *Your journey starts with one step*. A model reads each word as a list of numbers, a
# **vector**. But a word says little on its own. So each word gets a new vector: a mix of the vectors of all words, much
# of some and little of others. How much of each? These shares are the **attention weights**. None of them is negative,
# and for each word they add up to 1, like the parts of a recipe.
#
# In this lesson the shares come from the vectors alone: words whose vectors match well take a lot from each other.
# Nothing is learned yet: that starts in lesson 3.
#
# Here are six words with three numbers each, few enough to check everything by hand. The numbers are made up; in a
# model they are learned. `x` is a **tensor**, PyTorch's table of numbers: one row a word.
# %%
import timeit

import matplotlib.pyplot as plt
import torch

import clearhead

words = ["Your", "journey", "starts", "with", "one", "step"]
numbers = [0.43, 0.15, 0.89, 0.55, 0.87, 0.66, 0.57, 0.85, 0.64, 0.22, 0.58, 0.33, 0.77, 0.25, 0.1, 0.05, 0.8, 0.55]
x = torch.tensor(numbers).view(6, 3)
print("x has the shape", tuple(x.shape), "- six words, three numbers each")
# %% [markdown]
# ## How well do two words match?
# Multiply their numbers in pairs and add up. That is the **dot product**, and here it is our **score**:
#
# $$\omega_{ts} = x_t \cdot x_s = \sum_i x_{ti}\, x_{si}$$
#
# It is large where both vectors are large in the same places. Let us score all words for *journey*.
# %%
journey = x[1]
terms = [float(a * b) for a, b in zip(journey, x[0], strict=True)]
print("journey · Your =", " + ".join(f"{term:.4f}" for term in terms), f"= {sum(terms):.4f}")
scores = torch.stack([torch.dot(journey, other) for other in x])
print("scores:", {word: round(float(score), 4) for word, score in zip(words, scores, strict=True)})
# %% [markdown]
# ## From scores to shares
# Shares must be positive and add up to 1. Dividing by the sum is not enough, since a score can be negative. The
# **softmax** first turns every score into a positive number, with $e^\omega$, and divides then:
#
# $$\alpha_{ts} = \frac{e^{\omega_{ts}}}{\sum_j e^{\omega_{tj}}} \qquad\qquad z_t = \sum_s \alpha_{ts}\, x_s$$
#
# The second formula is the mix: the new vector of word $t$, called its **context vector**.
# %%
shares = torch.exp(scores) / torch.exp(scores).sum()
print("shares:", {word: f"{float(share):.1%}" for word, share in zip(words, shares, strict=True)})
mixed = sum(share * vector for share, vector in zip(shares, x, strict=True))
print("together:", float(shares.sum()), "- journey becomes", [round(float(number), 4) for number in mixed])
# %% [markdown]
# ## All words at once
# That was one word, in loops. Row $t$ of the product $X X^\top$ holds the dot products of word $t$ with every word: one
# product of matrices (in code `@`, and `.T` for $\top$) gives all scores, and a second one makes all the mixes.
# `dim=-1` says that the softmax runs along each row. Computers are very good at such products, so let us also look at
# the clock.
# %%
all_scores = x @ x.T  # (6, 3) times (3, 6) is (6, 6)
weights = torch.softmax(all_scores, dim=-1)  # (6, 6): each row adds up to 1
z = weights @ x  # (6, 6) times (6, 3) is (6, 3): one new vector a word

longer = torch.randn(200, 64)  # 200 words, 64 numbers each
one_by_one = timeit.repeat(lambda: [[torch.dot(q, k) for k in longer] for q in longer], number=1, repeat=3)
at_once = timeit.repeat(lambda: longer @ longer.T, number=1, repeat=100)
slow, fast = min(one_by_one), min(at_once)  # the quickest try: a computer is busy with other things now and then
print(f"200 words, one by one {slow * 1e3:.0f} ms, at once {fast * 1e3:.3f} ms: {slow / fast:,.0f} times faster")
# %% [markdown]
# Left: who takes how much from whom, row by row. Right: the words as points (their first two numbers), and where
# *journey* moves. A mix can never leave the outline of the points it is made of.
# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
left.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=0.4)
left.set(xticks=range(6), xticklabels=words, yticks=range(6), yticklabels=words, title="weights: each row adds up to 1")
for t, s in torch.cartesian_prod(torch.arange(6), torch.arange(6)).tolist():
    left.text(s, t, f"{weights[t, s]:.2f}", ha="center", va="center", fontsize=9)
across, up, size = x[:, 0].tolist(), x[:, 1].tolist(), (900 * weights[1]).tolist()
right.scatter(across, up, s=size, color="#00707F", alpha=0.6, label="a word, as large as its share")
right.scatter(*z[1, :2].tolist(), marker="*", s=150, color="#B4004E", label="the new vector of journey")
right.annotate("", z[1, :2].tolist(), journey[:2].tolist(), arrowprops={"arrowstyle": "->", "color": "#B4004E"})
for word, *place in zip(words, across, up, strict=True):
    right.annotate(word, place, xytext=(9, 6 if word == "journey" else -12), textcoords="offset points")
right.set(xlim=(-0.05, 1), ylim=(0, 1.25), xlabel="first number", ylabel="second number", title="journey, mixed")
right.legend(loc="upper right", frameon=False)
figure.savefig("lesson2-weights.png")
# %% [markdown]
# ## Exercises
# Open `exercises.py` beside this lesson (`clearhead learn 2` writes both) and fill in `dot_scores`, `softmax` and
# `context_vectors`. Then run `clearhead check 2`, which its first lines spell for your computer, or in a notebook
# `from clearhead.learn import check; check(2)`: it says what is right, and what is not and why. `--hint` helps.
#
# ## Quiz
# Answer for yourself first; the next cell computes the answers.
#
# 1. Does every word give the largest share to itself? If not, which words do not?
# 2. Add 100 to all scores of a row. By how much do the shares change?
# 3. Among the six words each of the three numbers has a smallest and a largest. How many numbers of `z` lie outside?
# %%
answers = {
    "1": [f"{words[t]} prefers {words[s]}" for t, s in enumerate(weights.argmax(dim=-1).tolist()) if t != s],
    "2": float((torch.softmax(all_scores + 100, dim=-1) - weights).abs().max()),
    "3": int(((z > x.max(dim=0).values) | (z < x.min(dim=0).values)).sum()),
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: The dot product is often called a similarity, but it also grows with length: long vectors score high with all. 2:
# Only rounding. Top and bottom of the fraction grow by the same factor, so only *differences* of scores matter. 3: An
# average lies between what it averages.
#
# ## The same in a real model
# SmolLM2 is a small language model. What you have just done it does in 270 places, its **heads**. A `tokenizer` cuts
# the text into words and pieces of words, and `record` keeps what the heads compute while the model reads. We redo by
# hand what one of them (layer 9, head 2), which finds earlier copies of a word, does for the last word. Two things are
# new, and lesson 3 explains them: the head compares *queries* with *keys* instead of $x$ with itself, and multiplies
# the scores by a `scale`.
# %%
try:
    model, tokenizer = clearhead.zoo.load("smollm2")
    inputs = tokenizer("Your journey starts with one step. Your journey", return_tensors="pt")
    with clearhead.record(model) as recording, torch.no_grad():
        model(**inputs)
    head, pieces = recording[9][0, 2], [tokenizer.decode(token) for token in inputs["input_ids"][0]]
    by_hand = torch.softmax(torch.stack([torch.dot(head.q[-1], key) for key in head.k]) * head.scale, dim=0)
    print("the last journey takes", [f"{piece} {share:.1%}" for piece, share in zip(pieces, by_hand, strict=True)])
    print(f"largest difference from what the model did: {(by_hand - head[-1]).abs().max():.0e}")
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# ## Your own layer, opened
# A layer is one step of a model. It shows its weights to clearhead through `attend`, as a `SoftmaxMap` of the vectors
# that are compared: $x$ with $x$, and `scale=1.0` leaves the scores as they are. In the page below, also saved as
# `lesson2.html`, click a word, or walk with the arrow keys. Under the text, *Derivation* writes out the arithmetic of
# the weight that you select. It is clearhead's own arithmetic on your $x$; that your `attend` makes the same of it is
# checked where it says *agrees*. Change `x`, or put your own code into `attend`, and look again.
# %%
class Mine(torch.nn.Module):
    def attend(self, x):
        return torch.softmax(x @ x.T, dim=-1) @ x, clearhead.SoftmaxMap(x, x, v=x, scale=1.0)


print("clearhead's own layer agrees:", torch.allclose(Mine().attend(x)[0], clearhead.nn.SimpleSelfAttention()(x)))
view = clearhead.look(Mine(), x, tokens=words)
print("saved:", view.save("lesson2.html"))
top, total = float(torch.exp(x[5] @ x[1])), sum(float(torch.exp(x[5] @ other)) for other in x)
print(f"step → journey by hand: {top:.4f} / {total:.4f} = {top / total:.2%}; the page has the same")
view
