"""Knocking heads out: just those heads change, everywhere a recording sees them, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import RecordingError
from clearhead.heads import head_means, knockout
from clearhead.recording import Recording, record

from ..recording.architectures import ARCHITECTURES, build
from ..recording.torch_built import H, Mixed, T, built, encoder, kernels, padded, randn

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:.*enable_nested_tensor",
)

_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "proj", "out_lin", "dense", "o")  # W_O, as models call it

Write = Callable[[Tensor], Tensor]  # what the heads bring, (B, T, H, Dv), as it is to be


def output_projection(model: nn.Module, path: str) -> nn.Module:
    """The module that reads what the heads of an attention module bring, side by side."""
    above = path.rpartition(".")[0]
    names = [f"{path}.{name}".removeprefix(".") for name in _PROJECTIONS]
    parts = dict(model.named_modules())
    return next(parts[name] for name in [*names, f"{above}.output.dense"] if name in parts)


@contextmanager
def rewritten(model: nn.Module, recording: Recording, layer: int, write: Write) -> Iterator[None]:
    """The model with the input of a layer's output projection rewritten by hand."""
    heads, path = recording[layer].shape[1], recording.paths[layer]
    before = iter([False] * recording.paths[:layer].count(path) + [True])  # calls of the same module are other layers

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if not next(before, False):
            return args
        return (write(args[0].unflatten(-1, (heads, -1)).clone()).flatten(-2), *args[1:])

    handle = output_projection(model, path).register_forward_pre_hook(hook)
    yield
    handle.remove()


def zeroed(*heads: int) -> Write:
    def write(x: Tensor) -> Tensor:
        x[..., list(heads), :] = 0
        return x

    return write


def flat(out: Any) -> list[Tensor]:
    """The tensors of a model's result that are no cache."""
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
    return [x for x in parts if isinstance(x, Tensor)]


def same(ours: Any, expected: Any, atol: float = 1e-12) -> None:
    assert len(flat(ours)) == len(flat(expected)) > 0
    for one, other in zip(flat(ours), flat(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol, equal_nan=True)


def differs(ours: Any, other: Any) -> bool:
    return any((a - b).abs().nan_to_num().max() > 1e-4 for a, b in zip(flat(ours), flat(other), strict=True))


def doubles(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


# --- zero, in every architecture ------------------------------------------------------------------------------

MANY = [(name, how) for name, row in ARCHITECTURES.items() for how in row.runs if row.group == "transformers"]
MANY = [row for row in MANY if row[0] not in ("XLNet", "Qwen2-VL")]  # no module; several calls for one
SINGLE = [("Mixtral", "eager"), ("Mixtral", "sdpa"), ("GPT-OSS", "eager"), ("XGLM", "eager")]  # not run in float64
FEW = [("GPT-2", "eager"), ("Llama", "sdpa"), ("BERT", "eager"), ("MPNet", "eager"), ("Bloom", "eager"), ("T5", "sdpa")]
FLEX = (pytest.mark.full, pytest.mark.filterwarnings("ignore"))  # FlexAttention and what compiles it have many
ROWS = [
    pytest.param(*row, marks=() if row in FEW else FLEX if row[1] == "flex_attention" else pytest.mark.full)
    for row in MANY
]


@pytest.mark.parametrize(("name", "implementation"), [*ROWS, ("timm's attention", "written out")])
def test_a_head_at_zero_is_its_slice_of_the_projections_input_at_zero(name: str, implementation: str) -> None:
    model, inputs, atol = build(name, implementation), ARCHITECTURES[name].inputs(True), 1e-5
    if (name, implementation) not in SINGLE and implementation != "flex_attention":
        model, inputs, atol = model.double(), doubles(inputs), 1e-12
    with torch.no_grad(), record(model) as recording:
        plain = model(**inputs)
    for layer in sorted({0, len(recording) // 2, len(recording) - 1}):
        heads = {0, recording[layer].shape[1] - 1}
        with torch.no_grad(), rewritten(model, recording, layer, zeroed(*heads)):
            expected = model(**inputs)
        with torch.no_grad(), knockout(model, {(layer, head): "zero" for head in heads}):
            ours = model(**inputs)
        same(ours, expected, atol)
        assert differs(ours, plain)
    with torch.no_grad():
        same(model(**inputs), plain, atol=0)


# --- uniform, previous, mean: the textbook's attention with these weights -------------------------------------

PADDED = torch.tensor([[1] * 10, [0] * 3 + [1] * 7, [1] * 7 + [0] * 3]).bool()  # as inputs are padded; True is real
WHOLE = torch.ones_like(PADDED)


def seen(real: Tensor, causal: bool, window: int = 10) -> Tensor:
    """Which keys each query may see, (B, T, S)."""
    t, s = torch.arange(10)[:, None], torch.arange(10)
    return real[:, None] & ((s <= t) & (t - s < window) if causal else torch.ones(10, 10, dtype=torch.bool))


def evenly(visible: Tensor) -> Tensor:
    return visible.double() / visible.sum(-1, keepdim=True).clamp(min=1)


def before(visible: Tensor) -> Tensor:
    """The previous token, else the query itself, else nothing."""
    weights = torch.zeros(visible.shape, dtype=torch.float64)
    for b, t in torch.cartesian_prod(torch.arange(len(visible)), torch.arange(10)).tolist():
        if t and visible[b, t, t - 1]:
            weights[b, t, t - 1] = 1
        elif visible[b, t, t]:
            weights[b, t, t] = 1
    return weights


def attending(head: int, weights: Tensor, v: Tensor) -> Write:
    """The head's output by its weights (B, T, S), of the values (B, G, S, Dv)."""

    def write(x: Tensor) -> Tensor:
        x[:, :, head] = weights @ v[:, head // (x.shape[2] // v.shape[1])]
        return x

    return write


CASES = [  # in float64, eager models make NaN of queries that see nothing
    ("Llama", "eager", WHOLE, seen(WHOLE, True)),
    ("Llama", "sdpa", PADDED, seen(PADDED, True)),
    ("Mistral", "sdpa", PADDED, seen(PADDED, True, 4)),
    ("Bloom", "eager", WHOLE, seen(WHOLE, True)),  # ALiBi
    ("BERT", "sdpa", PADDED, seen(PADDED, False)),
    ("MPNet", "eager", PADDED, seen(PADDED, False)),  # its weights alone are recorded
]


@pytest.mark.parametrize(
    ("name", "implementation", "real", "visible"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_trivial_head_attends_as_the_textbook_says(
    name: str, implementation: str, real: Tensor, visible: Tensor
) -> None:
    model, inputs = build(name, implementation).double(), ARCHITECTURES[name].inputs(real is PADDED)
    with torch.no_grad(), record(model, padding=False) as recording, record(model, keep=lambda _, attn: attn.v) as kept:
        model(**inputs)
    for head, kind, weights in ((0, "uniform", evenly(visible)), (3, "previous", before(visible))):
        with torch.no_grad(), rewritten(model, recording, 1, attending(head, weights, kept.results["L1"])):
            expected = model(**inputs)
        with torch.no_grad(), knockout(model, {(1, head): kind}), record(model) as changed:
            ours = model(**inputs)
        for one, other in zip(flat(ours), flat(expected), strict=True):
            apart = (one - other).abs() if one.ndim < 3 else (one - other).abs()[real]
            assert apart.max() <= 1e-10
        shown, rest = changed[1], [h for h in range(4) if h != head]
        torch.testing.assert_close(shown[:, head].to_dense().double(), weights * real[..., None], rtol=0, atol=1e-6)
        assert torch.equal(shown[:, rest].to_dense(), recording[1].to_dense()[:, rest] * real[:, None, :, None])


def test_weights_that_an_eager_model_hands_out_are_the_changed_ones() -> None:
    model, inputs = build("Llama", "eager"), ARCHITECTURES["Llama"].inputs(False)
    with torch.inference_mode(), knockout(model, {(1, 0): "uniform", (1, 3): "previous"}), record(model) as recording:
        handed_out = model(**inputs, output_attentions=True).attentions
    assert torch.equal(handed_out[1][0, 3].diagonal(-1), torch.ones(9))
    for given, attn in zip(handed_out, recording, strict=True):
        torch.testing.assert_close(given, attn.to_dense(), rtol=0, atol=1e-6)


def test_a_head_at_its_mean_brings_the_mean_of_its_outputs_over_the_real_tokens_of_a_corpus() -> None:
    model = build("Llama", "sdpa").double()
    corpus = [ARCHITECTURES["Llama"].inputs(padded) for padded in (False, True)]
    outputs = []
    handle = output_projection(model, "model.layers.1.self_attn").register_forward_pre_hook(
        lambda _, args: outputs.append(args[0].unflatten(-1, (4, 8)))
    )
    means = head_means(model, corpus)
    handle.remove()
    expected = torch.cat([outputs[0].flatten(0, 1), outputs[1][PADDED]]).mean(0)
    torch.testing.assert_close(means[1], expected, rtol=0, atol=1e-12)

    def write(x: Tensor) -> Tensor:
        x[:, :, 2] = expected[2]
        return x

    with torch.no_grad(), record(model) as recording:
        model(**corpus[0])
    with torch.no_grad(), rewritten(model, recording, 1, write):
        wanted = model(**corpus[0])
    with torch.no_grad(), knockout(model, {(1, 2): "mean"}, means=means), record(model) as changed:
        same(model(**corpus[0]), wanted)
    assert not changed[1][:, 2].to_dense().any()
    with pytest.raises(TypeError, match="a corpus member is str; expected a tensor"):
        head_means(model, ["text"])
    with pytest.raises(ValueError, match=r"none of layer 7. Pass means=clearhead.heads.head_means"):
        knockout(model, {(7, 0): "mean"}, means=means)


# --- PyTorch's own modules ------------------------------------------------------------------------------------


def by_weights(mha: nn.MultiheadAttention, x: Tensor, how: dict[int, Tensor], hidden: Tensor | None) -> Tensor:
    """The module's output (B, T, E), by the formula; some heads attend with weights (B, T, S) of their own."""
    q, k, v = (x @ mha.in_proj_weight.mT + mha.in_proj_bias).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)
    for head, own in how.items():
        weights[:, head] = own
    return (weights @ v).transpose(1, 2).flatten(2) @ mha.out_proj.weight.mT + mha.out_proj.bias


def trivial(hidden: Tensor) -> dict[int, Tensor]:
    """Weights of a head at zero, a uniform one and one of the previous token, for keys (B, S) that are hidden."""
    visible = ~hidden[:, None].expand(-1, T, T)
    at = torch.arange(T)
    previous = torch.zeros(visible.shape, dtype=torch.float64)
    previous[:, at[1:], at[:-1]] = 1
    previous = previous * visible
    own = torch.eye(T, dtype=torch.float64) * visible * (previous.sum(-1, keepdim=True) == 0)
    return {0: torch.zeros(visible.shape, dtype=torch.float64), 1: evenly(visible), 3: previous + own}


TRIVIAL = {0: "zero", 1: "uniform", 3: "previous"}


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("weights", [False, True])
def test_heads_of_a_multihead_attention(grad: Any, weights: bool) -> None:
    mha = built(nn.MultiheadAttention, 16, H, batch_first=True).double()
    x, hidden = randn(3, T, 16).double(), padded(T)
    with grad(), kernels() as ran, knockout(mha, {(0, h): how for h, how in TRIVIAL.items()}), record(mha) as changed:
        ours, given = mha(x, x, x, key_padding_mask=hidden, need_weights=weights, average_attn_weights=False)
    assert bool(ran) == (grad is torch.no_grad)
    expected = by_weights(mha, x, trivial(hidden), hidden[:, None, None])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    for head, own in trivial(hidden).items():
        torch.testing.assert_close(changed[0][:, head].to_dense()[~hidden], own[~hidden], rtol=0, atol=1e-12)
        if weights:
            torch.testing.assert_close(given[:, head], own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("nested", [False, True])
def test_heads_of_an_encoder_on_its_fast_path(norm_first: bool, activation: str, nested: bool) -> None:
    nested = nested and not norm_first  # PyTorch makes no nested tensors where the norm is first
    model = encoder(nested=nested, norm_first=norm_first, activation=activation).double()
    x, hidden = randn(3, T, 16).double(), padded(T)
    heads = {(1, h): how for h, how in TRIVIAL.items()}
    with torch.no_grad(), kernels() as ran, knockout(model, heads):
        fast = model(x, src_key_padding_mask=hidden)
    assert ran == ["_transformer_encoder_layer_fwd", "_native_multi_head_attention"]
    with knockout(model, heads):
        slow = model(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(fast[~hidden], slow[~hidden], rtol=0, atol=1e-12)
    first, second = model.layers
    inner = first(x, src_key_padding_mask=hidden)
    attended = by_weights(
        second.self_attn, second.norm1(inner) if norm_first else inner, trivial(hidden), hidden[:, None, None]
    )
    inner = inner + attended if norm_first else second.norm1(inner + attended)
    then = second.linear2(second.activation(second.linear1(second.norm2(inner) if norm_first else inner)))
    expected = inner + then if norm_first else second.norm2(inner + then)
    torch.testing.assert_close(slow[~hidden], expected[~hidden], rtol=0, atol=1e-12)


def test_every_seam_of_a_mixed_model_is_changed_in_its_own_place() -> None:
    model, x = built(Mixed), randn(3, T, 16)
    with torch.no_grad(), record(model) as plain:
        model(x)
    for layer in range(5):
        with torch.no_grad(), knockout(model, {(layer, 1): "previous"}), record(model) as changed:
            model(x)
        assert changed.paths == plain.paths
        assert torch.equal(changed[layer][0, 1].diagonal(-1), torch.ones(T - 1))
        assert all(torch.equal(changed[n].to_dense(), plain[n].to_dense()) for n in range(layer))
        assert torch.equal(changed[layer][:, [0, 2, 3]].to_dense(), plain[layer][:, [0, 2, 3]].to_dense())


# --- the block ------------------------------------------------------------------------------------------------


def test_trap02_nothing_is_left_behind(nano: Any, ids: Tensor, touched: Callable[[], list[Any]]) -> None:
    before, plain = touched(), nano(ids)
    with knockout(nano, {(1, 2): "uniform"}):
        assert differs(nano(ids), plain)
    assert touched() == before
    assert torch.equal(nano(ids), plain)
    with pytest.raises(TypeError), knockout(nano, {(1, 2): "zero"}):
        nano(nano(ids) / "text")
    with pytest.raises(IndexError), knockout(nano, {(1, 2): "zero"}):
        nano(ids + 50)  # ends within the model
    assert touched() == before
    assert torch.equal(nano(ids), plain)


def test_blocks_nest_and_the_innermost_word_counts(nano: Any, ids: Tensor) -> None:
    with knockout(nano, {(0, 1): "uniform", (2, 0): "zero"}):
        expected = nano(ids)
    with knockout(nano, {(0, 1): "zero", (2, 0): "zero"}), knockout(nano, {(0, 1): "uniform"}), record(nano) as inside:
        assert torch.equal(nano(ids), expected)
    assert torch.equal(inside[0][:, 1].to_dense(), inside[0].uniform()[:, 1].to_dense())
    with ExitStack() as stack:
        recording = stack.enter_context(record(nano))
        stack.enter_context(knockout(nano, {(0, 1): "uniform", (2, 0): "zero"}))
        nano(ids)
    assert torch.equal(recording[2].to_dense(), inside[2].to_dense())


def test_another_model_in_the_block_is_not_changed(make_nano: Any, nano: Any, ids: Tensor) -> None:
    other = make_nano().eval()
    plain = other(ids)
    with knockout(nano, {(0, 0): "zero"}):
        nano(ids)
        assert torch.equal(other(ids), plain)


def test_gradients_flow_around_a_head_and_through_the_values_of_a_uniform_one(nano: Any, ids: Tensor) -> None:
    with knockout(nano, {(0, h): "zero" for h in range(4)}):
        nano(ids).sum().backward()
    assert not nano.h[0].attn.c_attn.weight.grad.any()
    assert nano.h[1].attn.c_attn.weight.grad.any()
    nano.zero_grad()
    with knockout(nano, {(0, h): "uniform" for h in range(4)}):
        nano(ids).sum().backward()
    q, k, v = nano.h[0].attn.c_attn.weight.grad.chunk(3)
    assert [bool(part.any()) for part in (q, k, v)] == [False, False, True]


def test_generating_with_a_changed_head_is_the_model_with_it_on_the_whole_text() -> None:
    model = build("Llama", "sdpa")
    ids = ARCHITECTURES["Llama"].inputs(False)["input_ids"][:1]
    heads = {(1, 0): "uniform", (2, 3): "previous"}
    for cache in ("dynamic", "static"):
        with knockout(model, heads), record(model) as recording:
            text = model.generate(
                ids, max_new_tokens=5, do_sample=False, cache_implementation=cache, disable_compile=True
            )
        with torch.no_grad(), knockout(model, heads), record(model) as whole:
            logits = model(text[:, :-1]).logits
        assert torch.equal(logits[:, ids.shape[1] - 1 :].argmax(-1), text[:, ids.shape[1] :])
        for layer in range(3):
            torch.testing.assert_close(recording[layer].to_dense(), whole[layer].to_dense(), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_calls_of_one_text_that_were_changed_otherwise_stay_apart() -> None:
    model, ids = build("Llama", "sdpa"), ARCHITECTURES["Llama"].inputs(False)["input_ids"][:1]
    with torch.no_grad(), record(model) as recording:
        cache = model(ids[:, :6]).past_key_values
        with knockout(model, {(0, 1): "previous"}):
            for n in range(6, 9):
                model(ids[:, n : n + 1], past_key_values=cache)
    with torch.no_grad(), record(model) as plain:
        model(ids[:, :9])
    text, whole = recording[0].to_dense(), plain[0].to_dense()
    assert torch.equal(recording[0][0, 1].diagonal(-1)[-3:], torch.ones(3))
    torch.testing.assert_close(text[:, :, :6], whole[:, :, :6], rtol=0, atol=1e-6)
    torch.testing.assert_close(text[:, [0, 2, 3]], whole[:, [0, 2, 3]], rtol=0, atol=1e-6)


# --- what cannot be done is said ------------------------------------------------------------------------------


def test_what_is_not_there_is_an_error(nano: Any, ids: Tensor) -> None:
    def run(heads: Any) -> None:
        with knockout(nano, heads):
            nano(ids)

    with pytest.raises(
        RecordingError, match=r"no layer 3, so nothing was changed.*made 3 attention calls, layers 0 to 2"
    ):
        run({(0, 0): "zero", (3, 0): "zero"})
    with pytest.raises(RecordingError, match=r"layer 1 \('h.1.attn'\): there is no head 4; its heads are 0 to 3"):
        run({(1, 4): "zero"})
    for wrong, message in (
        ({(0, 0): "none"}, r"head \(0, 0\) cannot be 'none'; expected one of zero, mean, uniform, previous"),
        ({"L0H0": "zero"}, r"'L0H0' is no \(layer, head\)"),
        ({(0, -1): "zero"}, r"\(0, -1\) is no \(layer, head\)"),
        ({}, "at least one, got {}"),
        ({(0, 0): "mean"}, r"there is none of layer 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(wrong)
    for means, message in (
        ([torch.zeros(4, 8)], r"means=list; expected them by layer"),
        ({0: [[0.0] * 8] * 4}, r"the means of layer 0 are list; expected a tensor"),
        ({0: torch.full((4, 8), torch.nan)}, r"of shape \(4, 8\); expected a tensor .* of finite numbers"),
        ({0: torch.zeros(1, 8)}, r"there is no head 1; means of layer 0 have 1"),
    ):
        with pytest.raises(ValueError, match=message):
            knockout(nano, {(0, 1): "mean"}, means=means)
    with pytest.raises(RecordingError, match="was not called inside the block"), knockout(nano, {(0, 0): "zero"}):
        pass
    with pytest.raises(RecordingError, match="no attention call was seen"), knockout(nano.wte, {(0, 0): "zero"}):
        nano.wte(ids)
    with pytest.raises(RecordingError, match=r"knockout\('gpt2'\): expected the torch.nn.Module"):
        clearhead.knockout("gpt2", {(0, 0): "zero"})


def test_what_is_no_corpus_or_has_no_mean_is_an_error(make_nano: Any, ids: Tensor) -> None:
    broken = make_nano()
    with pytest.raises(TypeError, match=r"the corpus is a int64 tensor .*expected a list of such, \[ids\]"):
        head_means(broken, ids)
    with pytest.raises(ValueError, match="the corpus is empty"):
        head_means(broken, [])
    with torch.no_grad():
        next(iter(broken.parameters()))[ids[0, 1]] = torch.nan
    with pytest.raises(RecordingError, match="what the heads of L0 bring is not finite"):
        head_means(broken, [ids])


def test_previous_of_cross_attention_means_nothing() -> None:
    model = build("T5", "eager")
    with torch.no_grad(), record(model) as recording:
        model(**ARCHITECTURES["T5"].inputs(False))
    cross = recording.cross.layers[0]
    with pytest.raises(RecordingError, match="'previous' of cross"), knockout(model, {(cross, 0): "previous"}):
        model(**ARCHITECTURES["T5"].inputs(False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_would_compute_the_head_again_unchanged(nano: Any, ids: Tensor, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nano.train()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.inner.wte(ids)
            for block in self.inner.h:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Saving()
    with pytest.raises(RecordingError, match=r"layer 0 .*checkpointing"), knockout(model, {(0, 0): "zero"}):
        model(ids)


def test_weights_whose_products_cannot_be_told_apart_are_refused() -> None:
    class Hand(nn.Module):
        def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
            super().__init__()
            self.product = product

        def forward(self, x: Tensor) -> Tensor:
            return self.product((x @ x.mT).softmax(-1), x)

    x = randn(2, 3, 5, 4)
    summed = Hand(lambda w, v: torch.einsum("bhts,bhsd->btd", w, v))
    twice = Hand(lambda w, v: w @ v + w @ (v + 1))
    for model, message in ((summed, "cannot be told apart"), (twice, "a second time")):
        with pytest.raises(RecordingError, match=message), knockout(model, {(0, 1): "zero"}):
            model(x)
    expected = (x @ x.mT).softmax(-1) @ x
    expected[:, 1] = 0
    for product, turn in (
        (lambda w, v: torch.einsum("bhts,bhsd->bthd", w, v), lambda y: y.transpose(1, 2)),
        (lambda w, v: torch.einsum("bhst,bhsd->bdht", w.mT, v), lambda y: y.permute(0, 2, 3, 1)),
        (lambda w, v: v.mT @ w.mT, lambda y: y.mT),
        (lambda w, v: (w.flatten(0, 1) @ v.flatten(0, 1)).unflatten(0, (2, 3)), lambda y: y),
    ):
        model = Hand(product)
        with knockout(model, {(0, 1): "zero"}):
            torch.testing.assert_close(turn(model(x)), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_that_a_model_calls_itself_is_changed() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flex_attention(x, x, x, score_mod=self.mod)

    x, model = randn(2, 3, 5, 4), Flex()
    for model.mod in (lambda s, b, h, q, k: s + 0.1 * (q - k), lambda s, b, h, q, k: 2 * torch.tanh(s / 2)):
        with torch.no_grad():
            expected = model(x)
            with knockout(model, {(0, 1): "uniform", (0, 2): "zero"}):
                ours = model(x)
        expected[:, 1], expected[:, 2] = x[:, 1].mean(-2, keepdim=True), 0
        torch.testing.assert_close(ours, expected)


def test_smollm2_without_a_head_is_the_model_without_its_columns(smollm2: Any) -> None:
    model, tokenizer = smollm2
    given = tokenizer("The capital of France is the city of Paris. The capital of", return_tensors="pt")
    projection = model.model.layers[17].self_attn.o_proj
    with torch.no_grad():
        plain = model(**given).logits
        with knockout(model, {(17, 5): "zero"}):
            ours = model(**given).logits
        handle = projection.register_forward_pre_hook(
            lambda _, args: (zeroed(5)(args[0].unflatten(-1, (9, 64)).clone()).flatten(-2),)
        )
        expected = model(**given).logits
        handle.remove()
        assert torch.equal(ours, expected)
        assert differs((ours,), (plain,))
        assert torch.equal(model(**given).logits, plain)
