"""Which models can be recorded: compiled ones run uncompiled, quantised layers go, and the others say why not."""

from __future__ import annotations

import functools
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.recording import record

# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "a compiled part"])
def test_a_compiled_model_runs_eagerly_in_the_block_and_it_is_said(nano, ids, how):
    plain = nano(ids)
    compiled = nano
    if how == "torch.compile":
        compiled = torch.compile(nano, backend="eager")
    elif how == "module.compile":
        nano.compile(backend="eager")
    else:
        nano.h[1].compile(backend="eager")
    with pytest.warns(UserWarning, match="runs uncompiled inside this block"), record(compiled) as recording:
        out = compiled(ids)
    assert torch.equal(out, plain)
    assert recording.paths == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert stance() == "default"


def stance() -> str:
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance


@pytest.mark.filterwarnings("ignore:record.*runs uncompiled")
def test_overlapping_blocks_of_compiled_models_restore_the_stance_when_the_last_one_closes(make_nano, ids):
    models = [torch.compile(make_nano(layers=1).eval(), backend="eager") for _ in range(2)]
    a, b = (record(model) for model in models)
    a.__enter__()
    second = b.__enter__()
    models[0](ids)
    a.__exit__(None, None, None)
    assert stance() == "force_eager"
    models[1](ids)
    b.__exit__(None, None, None)
    assert stance() == "default"
    assert len(second) == 1


def test_the_warning_of_a_compiled_model_names_the_users_line(nano, ids):
    nano.compile(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with record(nano):
            nano(ids)
    assert [(one.filename, "uncompiled" in str(one.message)) for one in caught] == [(__file__, True)]


def test_a_compiled_function_inside_a_plain_model_is_seen(attend):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attend
            self.double = torch.compile(lambda x: self.inner(x, x, x) * 2, backend="eager")
            self.bare = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x) * 2, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.bare(self.double(x))

    model, x = Mixed(), torch.randn(1, 2, 5, 4)
    plain = model(x)
    with record(model) as recording:
        out = model(x)
    assert torch.equal(out, plain)
    assert recording.paths == ["inner", ""]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch hides it, where warnings are no errors
@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "a compiled part"])
def test_a_compiled_model_is_compiled_again_after_the_block(nano, ids, how):
    ran: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: ran.append("compiled") or graph(*args)

    model = torch.compile(nano, backend=backend) if how == "torch.compile" else nano
    if how != "torch.compile":
        (nano if how == "module.compile" else nano.h[1]).compile(backend=backend)
    with pytest.warns(UserWarning, match="runs uncompiled"), record(model):
        model(ids)
    assert not ran
    model(ids)
    assert ran


# --- scripted, exported, traced -------------------------------------------------------------------


class Heads(nn.Module):
    """Self-attention of (B, T, 8) in two heads, then whatever module is given."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(8, 8), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return self.after(F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2))


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
SCRIPTED: dict[str, Callable[[], Any]] = {
    "traced": lambda: torch.jit.trace(Heads(), X),
    "scripted": lambda: torch.jit.script(Heads()),
    "a traced function": lambda: torch.jit.trace(torch.relu, (X,)),
}
EXPORTED: dict[str, Callable[[], Any]] = {
    "exported": lambda: torch.export.export(Heads(), (X,)),
    "as a module": lambda: torch.export.export(Heads(), (X,)).module(),
    "unflattened": lambda: torch.export.unflatten(torch.export.export(Heads(), (X,))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", SCRIPTED)
def test_scripted_models_say_why_not(how):
    with pytest.raises(RecordingError, match=r"TorchScript.*Record the nn\.Module that it was made from"):
        record(SCRIPTED[how]())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", EXPORTED)
def test_exported_models_say_why_not(how):
    with pytest.raises(RecordingError, match=r"exported program.*Record the nn\.Module that it was exported from"):
        record(EXPORTED[how]())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [SCRIPTED["traced"], EXPORTED["as a module"]])
def test_trap26_parts_in_which_nothing_can_be_seen_are_named(make):
    model = Holder(make())
    with (
        pytest.raises(RecordingError, match=r"(?s)call was seen.*scripted or exported parts \(here: 'inner'\)"),
        record(model),
    ):
        model(X)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_part_without_attention_does_no_harm():
    model = Heads(torch.jit.script(nn.Linear(8, 8)))
    with record(model) as recording:
        model(X)
    assert recording.paths == [""]


def test_a_symbolic_trace_still_calls_the_function_and_is_recorded():
    model = Heads()
    traced = torch.fx.symbolic_trace(model)
    with record(traced) as recording:
        traced(X)
    with record(model) as expected:
        model(X)
    assert torch.equal(recording[0].to_dense(), expected[0].to_dense())


# --- quantised ------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("kind", [Heads, Attends])
def test_a_model_whose_linear_layers_are_quantised_is_recorded_as_it_computes(kind, grad):
    quantisation = pytest.importorskip("torch.ao.quantization")
    torch.manual_seed(0)
    model = quantisation.quantize_dynamic(kind().eval(), {nn.Linear}, dtype=torch.qint8)
    with grad(), record(model) as recording:
        out = model(X)
    with grad():
        assert torch.equal(out, model(X))
    q = k = model.linear(X) if kind is Heads else X
    if kind is Attends:
        q, k, _ = F.linear(X, model.attn.in_proj_weight, model.attn.in_proj_bias).chunk(3, -1)
    q, k = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (q, k))
    assert (recording[0].to_dense() - (q @ k.mT / 2).softmax(-1)).abs().max() <= 1e-6


@pytest.fixture
def prepared() -> Any:
    """A model whose nn.MultiheadAttention torch.ao has made quantizable."""
    quantisation = pytest.importorskip("torch.ao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(quantisation.QuantStub(), Attends(), quantisation.DeQuantStub()).eval()
    model.qconfig = quantisation.get_default_qconfig("fbgemm")
    return quantisation.prepare(model)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_prepared_for_quantising_is_recorded(prepared):
    with record(prepared) as recording:
        prepared(X)
    attn = prepared[1].attn
    own = attn(X, X, X, average_attn_weights=False)[1]
    assert recording.paths[0] == "1.attn"
    assert (recording[0].to_dense() - own).abs().max() <= 1e-6


@pytest.mark.filterwarnings("ignore")
def test_quantised_multihead_attention_says_why_not(prepared):
    prepared(X)
    model = torch.ao.quantization.convert(prepared)
    said = r"record\(Sequential\): '1\.attn' is torch\.ao's quantised.*was made from"
    with pytest.raises(RecordingError, match=said), record(model):
        pass


# --- no module at all -----------------------------------------------------------------------------


class Wrapper:
    """As a pipeline, or a trainer."""

    def __init__(self) -> None:
        self.model, self.config = Heads(), {}

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)


class Keras:
    """As a model of another framework."""

    def predict(self, x: Any) -> Any:
        return x


NO_MODULE: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, r"record\(NoneType\).*pass the module inside"),
    "a name": (
        lambda: "gpt2",
        r"record\('gpt2'\).*That is a name: load the model, for example with clearhead\.zoo\.load",
    ),
    "a path": (lambda: pathlib.PurePosixPath("model"), r"record\(PurePosixPath\).*That is a name"),
    "a class": (lambda: Heads, r"record\(the class Heads\).*Pass an object of a class"),
    "a method": (lambda: Heads().forward, r"record\(method\).*Pass the module, and not a method of it"),
    "a function": (lambda: lambda x: x, r"record\(function\).*pass the module that it calls, and call the function"),
    "a compiled function": (lambda: torch.compile(lambda x: x, backend="eager"), r"Of a function, compiled or not"),
    "a partial": (lambda: functools.partial(Heads()), r"record\(partial\).*pass the module inside"),
    "a wrapper": (Wrapper, r"record\(Wrapper\).*It holds one: pass its \.model\."),
    "another framework's": (Keras, r"record\(Keras\).*models of other frameworks cannot be recorded"),
    "an array": (lambda: np.ones((2, 3)), r"record\(ndarray of shape \(2, 3\)\)"),
    "a tensor": (lambda: torch.ones(2, 3), r"record\(a float32 tensor of shape \(2, 3\)\)"),
    "weights": (lambda: Heads().state_dict(), r"record\(OrderedDict\)"),
    "a list": (lambda: [Heads()], r"record\(list\)"),
}


@pytest.mark.parametrize("what", NO_MODULE)
def test_what_is_no_module_is_refused_and_it_is_said_what_to_pass(what, touched):
    (make, message), before = NO_MODULE[what], touched()
    model = make()
    with pytest.raises(RecordingError, match=r"expected the torch\.nn\.Module that is called in the block"):
        record(model)
    with pytest.raises(RecordingError, match=message):
        record(model)
    assert touched()[:-1] == before[:-1]  # but random numbers, which making a module takes


def test_a_pipeline_names_its_model_and_that_records_it(smollm2):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = smollm2
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    with pytest.raises(RecordingError, match=r"It holds one: pass its \.model"):
        record(pipeline)
    with pytest.raises(RecordingError, match=r"other frameworks"):
        record(tokenizer)
    with record(pipeline.model) as recording:
        pipeline("The capital of France is", max_new_tokens=2, do_sample=False)
    assert len(recording.passes) == 2


# --- other ways to call a model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_compiled_model_that_holds_the_recorded_one_says_what_to_pass(nano, ids, when, touched):
    compiled, state = torch.compile(nano, backend="eager"), touched()
    with pytest.raises(RecordingError, match=r"OptimizedModule, compiled, .* pass the compiled model"), record(nano):
        (compiled if when == "before" else torch.compile(nano, backend="eager"))(ids)
    assert touched() == state


def test_a_symbolic_trace_inside_the_block_is_an_error_that_says_so():
    class Fixed(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    model = Fixed()
    with pytest.raises(RecordingError, match="attention of Proxy, Proxy, Proxy cannot be recorded"), record(model):
        fx.symbolic_trace(model)


def test_a_wrapper_whose_method_calls_the_model_inside_names_it(nano, ids):
    class Generating(type(nano)):
        def generate(self, ids: Tensor) -> Tensor:
            return self(ids)

    class Adapted(nn.Module):
        """As peft wraps models."""

        def __init__(self) -> None:
            super().__init__()
            self.base_model = nn.ModuleDict({"model": Generating().eval()})

        def generate(self, ids: Tensor) -> Tensor:
            return self.base_model["model"].generate(ids)

    wrapper = Adapted()
    said = pytest.raises(RecordingError, match=r"not called inside the block.* record that \('base_model\.model'\)")
    with said, record(wrapper):
        wrapper.generate(ids)
    with record(wrapper.base_model["model"]) as recording:
        wrapper.generate(ids)
    assert len(recording) == 3
