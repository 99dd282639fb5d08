"""Identities over fused kernels: the contract with them forced, the textbook, what plan() says, and GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import SoftmaxMap, masks, reference
from clearhead.kernels import aten, gradients, identities, path
from clearhead.kernels.path import force
from clearhead.maps import reductions
from clearhead.masks import MaskRule
from clearhead.testing import SUBJECTS, Case, Subject, build_case, pairwise, verify
from clearhead.testing.cases import FACTORS, MASKS, SIZES

MAPS = ["SoftmaxMap", "SoftmaxMap[1, 1]", "SoftmaxMap[:, [1, 0], 2:]", "SoftmaxMap[1][..., scattered, :]"]
MAPS += ["SoftmaxMap (T, D)", "SoftmaxMap (B, T, D)", "SoftmaxMap.uniform()"]
# Of a single weight, near 1, the contract allows rounding it, and no rounding of the log-sum-exp it is made from.
SOME = [size for size in SIZES if size != "1x1"]
SAMPLE = pairwise({"map": MAPS, **FACTORS, "size": SOME, "tile": ["default"]})
PLAIN = {"bias": "none", "layout": "contiguous", "dtype": "float32", "heads": "4/2", "tile": "default"}
CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Forced; the kernels that were called."""
    called: list[str] = []
    for name, kernel in list(aten.KERNELS.items()):

        def count(*of: Any, name: str = name, kernel: Any = kernel) -> Any:
            called.append(name)
            return kernel(*of)

        monkeypatch.setitem(aten.KERNELS, name, count)
    with force("fused"):
        yield called


def qk(T: int, S: int, *, H: int = 2, G: int = 1, D: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(1, H, T, D, generator=g), torch.randn(1, G, S, D, generator=g)


# --- every answer against the oracle ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n % 12 == 0 else pytest.mark.full) for n in range(len(SAMPLE))],
    ids=lambda n: ", ".join(list(SAMPLE[n].values())[:-1]),
)
def test_contract(number: int, calls: list[str]) -> None:
    names = SAMPLE[number]
    case = build_case(names, seed=number)
    subject = SUBJECTS[names["map"]](case)
    # With equal keys PyTorch's kernel adds 512 equal numbers in a row; each rounds the sum so far, all one way.
    if names["layout"] == "stride 0":
        subject = replace(subject, score=subject.score + min(512, subject.size[1]) / 4)
    verify(subject)
    is_capped = case.softcap is not None and names["map"] != "SoftmaxMap.uniform()"
    sees_nothing = names["mask"] == "nothing visible"
    assert bool(calls) != (is_capped or sees_nothing or 0 in subject.exact.shape)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_in_several_blocks(mask: str, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Blocks of 10 rows, on keys that all of them see and on keys that some see."""
    monkeypatch.setattr(identities, "BLOCK", 10)
    agrees(SUBJECTS["SoftmaxMap"](build_case({**PLAIN, "mask": mask, "size": "33x1025"}, seed=1)), twice=False)
    assert bool(calls) != (mask == "nothing visible")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", ["none", "alibi", "learned sinks"])
def test_every_dtype_on_unequal_lengths(bias: str, dtype: torch.dtype) -> None:
    case = build_case({**PLAIN, "mask": "causal", "size": "33x127", "bias": bias}, seed=2)
    fields = {name: getattr(case, name) for name in ("mask", "seen", "bias", "added", "sinks")}
    agrees(SUBJECTS["SoftmaxMap"](Case(case.q.to(dtype), case.k.to(dtype), **fields)))


def agrees(subject: Subject, *, twice: bool = True) -> None:
    """What identities answer, with each row's lse unknown, and then with all known."""
    T, S = subject.size
    like, g = subject.plain, torch.Generator().manual_seed(0)
    apart = (subject.at[:, None] - torch.arange(S)).abs().to(like.device)
    x, y = (torch.randn(n, 3, generator=g).to(like) for n in (S, T))
    attn, chosen = subject.attn, (torch.arange(S) % 7 == 0).to(like)
    for known in ("unknown", "known")[: 1 + twice]:
        subject.agree(attn.received(), lambda a: a.sum(-2), f"received, lse {known}", terms=T)
        subject.agree(attn.mT @ y, lambda a: a.mT @ y.to(a.dtype), f"mT @, lse {known}", terms=T)
        entropy_agrees(subject, attn)
        subject.agree(attn @ x, lambda a: a @ x.to(a.dtype), f"@, lse {known}", terms=S)
        subject.agree(attn.distance(), lambda a: (a * apart.to(a.dtype)).sum(-1), f"distance, lse {known}", terms=S)
        mass = attn._per_query(reductions.mass(chosen))
        subject.agree(mass, lambda a: a[..., ::7].sum(-1), f"mass, lse {known}", terms=S)


def entropy_agrees(subject: Subject, attn: Any) -> None:
    """It is made of the log-sum-exp and of scores: beside it these are the largest numbers that are rounded."""
    terms, size = subject.size[1], max(1.0, subject.score)
    subject.agree(attn.entropy(), reference.entropy, "entropy", terms=terms, size=size)


def test_65537_tokens_one_key_with_most_of_the_weight() -> None:
    """As many queries, too: 59,000 in the sum of one column, and small sums beside it."""
    D, scale = 16, 0.25
    for T, S in ((3, 65537), (65537, 3)):
        q, k = qk(T, S, D=D)
        q[..., 0], k[:, :, 0] = 4, 0
        others = torch.logsumexp((q.double() @ k.double().mT * scale)[..., 1:], -1)
        k[:, :, 0, 0] = (others.mean() + 2.2) / (4 * scale)
        exact, plain = (reference.weights(q.to(d), k.to(d), scale=scale) for d in (torch.float64, torch.float32))
        assert 0.8 < exact[..., 0].mean() < 0.95
        score = float((q.double() @ k.double().mT * scale).abs().max())
        attn = SoftmaxMap(q, k)
        subject = Subject(lambda attn=attn: attn, exact, plain, terms=S + D, score=score)
        subject.agree(attn.received(), lambda a: a.sum(-2), "received", terms=T)
        entropy_agrees(subject, attn)
        subject.agree(attn.mass(0), lambda a: a[..., 0], "mass", terms=S)
        subject.agree(attn @ torch.ones(S, 1), lambda a: a.sum(-1, keepdim=True), "row sums", terms=S)


def test_lse_is_found_on_the_way_and_kept(calls: list[str]) -> None:
    q, k = qk(200, 200)
    attn = SoftmaxMap(q, k, mask=masks.causal())
    attn.entropy()
    assert calls == ["cpu"]  # one call: the kernel knows this mask
    scores = reference.scores(q.double(), k.double()).masked_fill(~reference.causal(200, 200), -torch.inf)
    torch.testing.assert_close(attn.lse.double(), scores.logsumexp(-1), rtol=0, atol=2e-6)
    attn.received()
    assert calls == ["cpu"] * 2
    SoftmaxMap(q, k, mask=masks.causal()).received()
    assert calls == ["cpu"] * 4


def test_keys_so_near_that_their_distance_would_be_inexact_are_read_as_tiles() -> None:
    q, k = qk(1000, 1000)
    attn, exact = (SoftmaxMap(q.to(d), k.to(d), mask=masks.sliding_window(2)) for d in (torch.float32, torch.float64))
    got, want = attn.distance().double()[..., 1:], exact.diagonal(-1)
    assert float((got - want).abs().max()) < 1e-6


# --- what must not leak ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [masks.causal(), masks.causal() & masks.padding(keys=torch.arange(200)[None] < 170)])
def test_nan_and_infinities_in_masked_keys_leak_nowhere(rule: MaskRule) -> None:
    q, k = qk(200, 200)
    spoilt = k.clone()
    spoilt[:, :, 170:180], spoilt[:, :, 180:] = torch.nan, torch.inf
    clean, dirty = (SoftmaxMap(q, keys, mask=rule)[..., :170, :] for keys in (k, spoilt))
    for read in ("entropy", "distance", "received"):
        got, want = getattr(dirty, read)(), getattr(clean, read)()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=read)
    assert (dirty.received()[..., 170:] == 0).all()


def test_nan_that_is_seen_stays_in_its_rows() -> None:
    q, k = qk(50, 50)
    k[:, :, 20] = torch.nan
    for read in (lambda m: m.entropy(), lambda m: (m @ torch.ones(50, 1))[..., 0], lambda m: m.lse):
        found = read(SoftmaxMap(q, k, mask=masks.causal()))
        assert not found[..., :20].isnan().any()
        assert found[..., 20:].isnan().all()


def test_rows_that_see_nothing() -> None:
    q, k = qk(300, 300)
    attn = SoftmaxMap(q, k, mask=masks.causal() & ~masks.first_tokens(140))
    for found in (attn.entropy(), attn.distance(), attn @ k, attn.mass(150)):
        assert (found[:, :, :140] == 0).all()
        assert (found[:, :, 141:] != 0).any()
    assert (attn.lse[..., :140] == -torch.inf).all()
    torch.testing.assert_close(attn.received().sum(-1), torch.full((1, 2), 160.0))


def test_a_factor_on_the_graph_has_its_gradient(calls: list[str]) -> None:
    q, k = qk(600, 600)
    x = torch.randn(600, 2, requires_grad=True)
    (SoftmaxMap(q, k, mask=masks.causal()) @ x).square().sum().backward()
    assert calls == ["cpu"]  # forward; the backward pass computes tiles again
    want = x.detach().double().requires_grad_()
    (reference.weights(q.double(), k.double(), mask=reference.causal(600, 600)) @ want).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", [masks.causal(), masks.causal() & masks.padding(keys=torch.arange(13)[None] > 3)])
def test_gradcheck(rule: MaskRule, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """The results are the kernel's, their gradients those of tiles, computed again."""
    monkeypatch.setattr(gradients, "FEW", -1)
    q, k = (x.double().requires_grad_() for x in qk(13, 13, H=4, G=2, D=3))
    x, chosen = torch.randn(13, 2).double(), (torch.arange(13) % 3 == 0).double()
    reads: list[Callable[[SoftmaxMap], Tensor]] = [
        lambda m: m.entropy(),
        lambda m: m.received(),
        lambda m: m @ x,
        lambda m: m.mT @ x,
        lambda m: m._per_query(reductions.mass(chosen)),
    ]
    for read in reads:
        calls.clear()
        assert torch.autograd.gradcheck(lambda q, k, of=read: of(SoftmaxMap(q, k, mask=rule)), (q, k), fast_mode=True)
        assert calls


# --- which kernels, and what plan() says -----------------------------------------------------------------------------


def test_half_precision_kernels_are_not_exact_here() -> None:
    """The CPU's: its output is rounded to half precision, its log-sum-exp is off by six times what is allowed."""
    for dtype in (torch.float32, torch.float64):
        assert max(aten.errors("cpu", CPU, dtype)) < 1
        assert aten.exact(CPU, dtype) == "cpu"
    for dtype in (torch.bfloat16, torch.float16):
        assert min(aten.errors("cpu", CPU, dtype)) > 2
        assert (aten.exact(CPU, dtype), aten.exact_sums(CPU, dtype)) == (None, None)


@pytest.mark.parametrize("name", ["efficient", "flash", "cudnn"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_of_gpus_take_what_they_are_given(name: str, is_causal: bool) -> None:
    """On the meta device: grouped heads and odd widths, filled up as GPUs want them."""
    dtype = torch.float32 if name == "efficient" else torch.float16
    q, k, x = (torch.empty(2, heads, 33, n, dtype=dtype, device="meta") for heads, n in ((4, 9), (2, 9), (1, 3)))
    added = None if name == "flash" else torch.empty(2, 1, 33, 33, dtype=dtype, device="meta")
    out, lse = aten.attend(q, k, x, scale=1.0, is_causal=is_causal, added=added, kernel=name)
    assert (out.shape, lse.shape) == ((2, 4, 33, 3), (2, 4, 33))
    assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (aten._padded(q, 1), aten._padded(k, 1)))


def test_what_refuses_is_not_exact() -> None:
    assert aten.errors("flash", CPU, torch.float16) == (math.inf, math.inf)


def test_plan_says_what_is_taken_and_why() -> None:
    q, k = qk(2048, 2048)
    with force("tiles"):
        assert "forced" in SoftmaxMap(q, k).plan()["@"].why
    attn = SoftmaxMap(q, k, mask=masks.causal())
    plan = attn.plan()
    assert {plan[name].kernel for name in ("@", "mT @", "entropy", "received", "distance", "mass")} == {"fused"}
    assert plan["topk"].kernel == plan["statistics"].kernel == plan["to_dense"].kernel == "tiles"
    assert attn._lse.isnan().all()  # nothing is computed


@pytest.mark.parametrize(
    ("how", "question", "why"),
    [
        ({"softcap": 2.0}, "@", "soft-cap"),
        ({"bias": torch.zeros(9, 9)}, "entropy", "bias"),
        ({}, "distance", "ahead"),
        ({"mask": masks.symmetric_window(3)}, "distance", "ahead"),
    ],
)
def test_plan_says_why_not(how: dict[str, Any], question: str, why: str) -> None:
    found = SoftmaxMap(*qk(9, 9), **how).plan()[question]
    assert (found.kernel, why in found.why) == ("tiles", True), found


@pytest.fixture
def left_to_itself() -> Iterator[None]:
    token = path._forced.set(None)
    yield
    path._forced.reset(token)


def test_left_to_itself_it_is_taken_where_it_pays(left_to_itself: None, calls: list[str]) -> None:
    few, more = (SoftmaxMap(*qk(n, n, D=4), mask=masks.causal()) for n in (64, 600))
    assert "8,192 weights are too few" in few.plan()["@"].why
    few @ torch.ones(64, 1)
    assert not calls
    assert "lse would have to be found first" in more.plan()["mT @"].why
    more @ torch.ones(600, 300)  # wide
    assert not calls
    more @ torch.ones(600, 1)
    assert calls == ["cpu"]
    assert more.plan()["mT @"].kernel == "fused"
    double = SoftmaxMap(*(x.double() for x in qk(600, 600)), mask=masks.causal())
    assert (double.plan()["entropy"].kernel, "float64" in double.plan()["entropy"].why) == ("fused", True)


# --- GPUs ------------------------------------------------------------------------------------------------------------


@no_gpu
@pytest.mark.gpu
def test_on_a_gpu_a_kernel_is_exact_in_float32() -> None:
    assert max(aten.errors("efficient", torch.device("cuda"), torch.float32)) <= 1
    assert max(aten.errors("flash", torch.device("cuda"), torch.bfloat16)) > 1  # its output is rounded


@no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", ["none", "alibi", "learned sinks"])
@pytest.mark.parametrize("mask", ["none", "causal", "causal + padded keys", "window"])
@pytest.mark.parametrize("size", ["129x129", "33x127", "1025x1025"])
def test_on_a_gpu(size: str, mask: str, bias: str, dtype: torch.dtype, calls: list[str]) -> None:
    case = build_case({**PLAIN, "mask": mask, "size": size, "bias": bias}, seed=3)
    case = Case(case.q.to(dtype), case.k.to(dtype), case.mask, case.seen, case.bias, case.added, sinks=case.sinks)
    oracle = SUBJECTS["SoftmaxMap"](case)
    sinks = None if case.sinks is None else case.sinks.cuda()

    def make() -> SoftmaxMap:
        return SoftmaxMap(case.q.cuda(), case.k.cuda(), mask=case.mask, bias=case.bias, sinks=sinks)

    terms, score = oracle.terms, oracle.score
    agrees(Subject(make, oracle.exact.cuda(), oracle.plain.cuda(), terms=terms, score=score))
    assert "efficient" in calls


@no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_the_log_sum_exp_comes_from_a_half_precision_kernel(dtype: torch.dtype, calls: list[str]) -> None:
    q, k = (x.to("cuda", dtype) for x in qk(1000, 1000, H=4, G=2, D=64))
    attn = SoftmaxMap(q, k, mask=masks.causal())
    got, exact = attn.lse, SoftmaxMap(q.double(), k.double(), mask=masks.causal()).lse
    assert calls[-1] == (aten.exact_sums(q.device, dtype) or "efficient")
    score = float((q.double() @ k.double().repeat_interleave(2, 1).mT).abs().max()) / 8
    assert float((got.double() - exact).abs().max()) <= torch.finfo(torch.float32).eps * (math.sqrt(1064) + score)
