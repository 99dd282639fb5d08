# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Lesson 1: Why attention was invented
# **The idea.** In 2014 a program that translated had two halves. An **encoder** read the sentence word by word and put
# all of it into one **vector**, a list of numbers of fixed length. A **decoder** got this vector and nothing else, and
# wrote the translation word by word. Imagine it: hear a sentence once, remember, and only then begin to write. It works
# for *It is cold*, and the longer the sentence, the worse it gets. In 2015 Bahdanau, Cho and Bengio let the decoder
# look back: before each word it decides how much of each word of the sentence to take. That is **attention**. In this
# lesson you train both, half a minute in all, and see what it changes.
# %%
import random
import time

import matplotlib.pyplot as plt
import torch

import clearhead
from clearhead.models import Seq2Seq, Translator, ding_pairs

torch.manual_seed(0)
german = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
english = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def number_words(count, seed):  # German, and the same in English, backwards: the first word is needed last
    draw = random.Random(seed)
    digits = [[draw.randrange(10) for _ in range(draw.randint(3, 12))] for _ in range(count)]
    return [(" ".join(german[d] for d in line), " ".join(english[d] for d in line[::-1])) for line in digits]


train, test = number_words(6_000, seed=0), number_words(500, seed=1)
print("to learn from:", train[0])
# %% [markdown]
# ## Through one vector
# The models here are **recurrent**: reader and writer keep a **state**, a vector that each word changes. The encoder
# reads in both directions, and $h_j$ holds both its states at word $j$. The decoder's state $s_i$ follows from the one
# before it, from the word that it wrote last, and from a vector $c_i$, all it knows of the sentence. Without attention,
# $c_i$ is the same at every step: what the two readers know in the end. With Bahdanau's,
#
# $$e_{ij} = v^\top \tanh(W s_{i-1} + U h_j), \qquad \alpha_{ij} = \frac{e^{e_{ij}}}{\sum_m e^{e_{im}}}, \qquad
# c_i = \sum_j \alpha_{ij}\, h_j$$
#
# In words: the state *before* word $i$ is compared with each word of the sentence by a small network, which is learned
# ($W$, $U$, $v$). That gives scores $e$; the second formula makes shares of them that add up to 1; and $c_i$ is a mix
# of the words' states in these shares. Both models are trained alike, on number words; ten seconds for each.
# %%
lengths = [range(n, n + 2) for n in range(3, 12, 2)]
translators, scores = {}, {}
for name, make in {"one vector": Seq2Seq.bottleneck, "attention": Seq2Seq.attentive}.items():
    start, translators[name] = time.perf_counter(), Translator(make, train, width=64, dropout=0.0)
    loss = translators[name].fit(train, steps=300, rate=5e-3)[-1]
    hits = translators[name].hits(test)  # (how many words are guessed when those before are given, of how many)
    by_length = [[hit for (text, _), hit in zip(test, hits, strict=True) if len(text.split()) in n] for n in lengths]
    scores[name] = [sum(right for right, _ in group) / sum(of for _, of in group) for group in by_length]
    print(f"{name}: {time.perf_counter() - start:.0f} s, loss {loss:.2f};", *(f"{share:.0%}" for share in scores[name]))
# %% [markdown]
# ## On real sentences
# Now German and English from the Ding dictionary. It is not part of clearhead; where it is not installed, the next cell
# says how to get it, and goes on with the number words. (Pairs of your own do as well: `clearhead.models.read_pairs`
# reads them from a file, two texts a line with a tab between.) A minute or two of training is little for a language, so
# expect first words and many mistakes; `?` is a word too rare to be learned. But the decoder begins to look where a
# word comes from: at the beginning of the sentence first, at its end last, and for *don't* at *nicht*.
# %%
translator, sentence = translators["attention"], "drei eins vier eins fünf neun zwei sechs"
try:
    pairs = ding_pairs()
    translator, sentence = Translator(Seq2Seq.attentive, pairs, width=96, least=5), "Ich weiß nicht, wo er ist."
    start, losses = time.perf_counter(), translator.fit(pairs, steps=600, rate=4e-3)
    print(f"{len(pairs):,} sentences, {time.perf_counter() - start:.0f} s, loss {losses[0]:.2f} → {losses[-1]:.2f}")
    print(*(f"{text} → {translator.translate(text)}" for text in ("Es ist kalt.", "Er ist sehr alt.")), sep="\n")
except clearhead.ModelError as error:
    print("On with number words, since the real sentences are not here:", error)
source, written, (alignment,) = translator.attend(sentence)
print(sentence, "→", *written)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
for (name, shares), colour in zip(scores.items(), ("#B4004E", "#00707F"), strict=True):
    left.plot([f"{n[0]}-{n[-1]}" for n in lengths], shares, "o-", color=colour, label=name)
left.set(xlabel="number words", ylabel="guessed", ylim=(0, 1.02), title="accuracy by length")
left.legend(frameon=False)
right.imshow(alignment[0, 0].to_dense().numpy(), cmap="Blues", vmin=0, vmax=1)
right.set(xticks=range(len(source)), yticks=range(len(written)), yticklabels=written, title="a row a word: where from?")
right.set_xticklabels(source, rotation=60)
figure.savefig("lesson1-length.png")
# %% [markdown]
# ## Exercises
# In `exercises.py`: `sentence_vector`, `additive_scores` and the layer `AdditiveAttention`. Then `clearhead check 1`,
# which the file's first lines spell for your computer.
#
# ## Quiz: answer for yourself first
# 1. How many percentage points does each model lose from the shortest number words to the longest?
# 2. How many numbers does the decoder without attention get of 3 words, and of 12? And the one with attention?
# 3. How many learned numbers does attention add to the model, in percent?
# %%
vector = 2 * 64  # two readers, 64 numbers each
sizes = [sum(p.numel() for p in translators[name].model.parameters()) for name in scores]
answers = {
    "1": {name: round(100 * (shares[0] - shares[-1]), 1) for name, shares in scores.items()},
    "2": dict(zip(scores, ([vector, vector], [vector * n for n in (3, 12)]), strict=True)),
    "3": round(100 * (sizes[1] / sizes[0] - 1), 1),
}
print(*(f"{number}. {answer}" for number, answer in answers.items()), sep="\n")
# %% [markdown]
# 1: The longer the sentence, the more the one vector loses. 2: As many, whatever it has to hold; with attention the
# memory grows with the sentence. 3: Not much: it is what the decoder sees that counts.
#
# ## The same in a real model
# SmolLM2, a small language model of today, keeps a vector for every word and looks back at all of them, in each layer.
# So give it what one vector cannot hold: random pieces of words, twice. How many of the second copy does it guess? (It
# needs a few to notice that the text repeats; after that, length does no harm.)
# %%
try:
    model, _ = clearhead.zoo.load("smollm2")
    for count in (5, 20, 80):
        once = torch.randint(1000, 20_000, (count,))
        with torch.no_grad():
            guessed = model(torch.cat([once, once])[None]).logits[0].argmax(dim=-1)
        print(f"{count} pieces: {int((guessed[count:-1] == once[1:]).sum())} of {count - 1} guessed")
except clearhead.ModelError as error:
    print("This part is left out, since the model is not installed:", error)
# %% [markdown]
# ## Your own layer, opened
# The layer of the formula, on six made-up words that ask each other. `clearhead.AdditiveMap` gets what is added, $Ws$
# and $Uh$, and $v$. To see your own layer, take these from its `W_query`, `W_key` and `score`.
# %%
x = torch.randn(6, 3)
theirs = clearhead.nn.AdditiveAttention(d_query=3, d_key=3, d_attn=4).requires_grad_(False)
W, U, v = theirs.W_query.weight.T, theirs.W_key.weight.T, theirs.score.weight[0]


class Mine(torch.nn.Module):
    def attend(self, x):
        attn = clearhead.AdditiveMap(x @ W, x @ U, v)
        return attn @ x, attn


print("clearhead's own layer agrees:", torch.allclose(Mine().attend(x)[0], theirs(x, x), atol=1e-6))
view = clearhead.look(Mine(), x, tokens=["Your", "journey", "starts", "with", "one", "step"])
print("saved:", view.save("lesson1.html"))
view
