"""The compiled pass on the CPU: the contract with it forced, the textbook, its threads, and who does without."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clearhead import SoftmaxMap, masks, reference
from clearhead.kernels import cpu, cpu_layout, path, workers
from clearhead.kernels.path import force
from clearhead.maps import reductions
from clearhead.masks import BoundMask, MaskRule
from clearhead.testing import SUBJECTS, Allocations, Case, Subject, build_case, pairwise, verify
from clearhead.testing.cases import FACTORS, MASKS

tile = pytest.importorskip("clearhead.kernels.cpu_tile", reason="needs numba")

MAPS = ["SoftmaxMap", "SoftmaxMap[1, 1]", "SoftmaxMap[:, [1, 0], 2:]", "SoftmaxMap[1][..., scattered, :]"]
MAPS += ["SoftmaxMap (T, D)", "SoftmaxMap (B, T, D)", "SoftmaxMap.uniform()"]
SAMPLE = pairwise({"map": MAPS, **FACTORS, "dtype": ["float32", "bfloat16"], "tile": ["default"]})
PLAIN = {"bias": "none", "layout": "contiguous", "dtype": "float32", "heads": "4/2", "tile": "default"}


@pytest.fixture(autouse=True)
def compiled_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Forced; how many passes it has made."""
    passes, look = [0], cpu.look

    def counted(source: cpu.Source, wanted: cpu.Wanted, threads: int) -> cpu.Found | None:
        found = look(source, wanted, threads)
        passes[0] += found is not None
        return found

    monkeypatch.setattr(cpu, "look", counted)
    with force("cpu"):
        yield passes


def qk(T: int, S: int, *, H: int = 2, G: int = 1, D: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(1, H, T, D, generator=g), torch.randn(1, G, S, D, generator=g)


# --- every field against the oracle ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n % 10 == 0 else pytest.mark.full) for n in range(len(SAMPLE))],
    ids=lambda n: ", ".join(list(SAMPLE[n].values())[:-1]),
)
def test_contract(number: int, compiled_pass: list[int]) -> None:
    subject = SUBJECTS[SAMPLE[number]["map"]](build_case(SAMPLE[number], seed=number))
    verify(subject)
    assert compiled_pass[0] > 0 or 0 in subject.exact.shape


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_in_several_blocks_and_ranges(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows halved until few scores are in a block, on 1,025 keys where that is allowed, else on 127."""
    monkeypatch.setattr(cpu, "SCORES", 1 << 13)
    monkeypatch.setattr(cpu, "FEWEST", 4)
    case = build_case({**PLAIN, "mask": mask, "size": "33x1025"}, seed=1)
    agrees(SUBJECTS["SoftmaxMap"](case))


@pytest.mark.parametrize("bias", ["none", "alibi", "softcap", "learned sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_1025_tokens_in_every_dtype(bias: str, dtype: torch.dtype) -> None:
    size = "1025x1025" if (bias, dtype) == ("none", torch.float32) else "33x1025"
    names = {**PLAIN, "mask": "causal", "size": size, "bias": bias}
    case = build_case(names, seed=2)
    fields = {name: getattr(case, name) for name in ("mask", "seen", "bias", "added", "softcap", "sinks")}
    agrees(SUBJECTS["SoftmaxMap"](Case(case.q.to(dtype), case.k.to(dtype), **fields)))


def agrees(subject: Subject) -> None:
    """All statistics, first with each row's lse unknown and then with all known."""
    T, S = subject.size
    apart = (subject.at[:, None] - torch.arange(S)).abs()
    at = torch.where((subject.at >= 0) & (subject.at < S), subject.at, S)
    oracles: dict[str, Callable[[Tensor], Tensor]] = {
        "distance": lambda a: (a * apart.to(a.dtype)).sum(-1),
        "to_first": lambda a: a[..., 0],
        "to_self": lambda a: torch.nn.functional.pad(a, (0, 1))[..., torch.arange(T), at],
        "peak": lambda a: a.amax(-1),
        "received": lambda a: a.sum(-2),
        "received_peak": lambda a: a.amax(-2),
    }
    for known in ("unknown", "known"):
        got = subject.attn.statistics()
        subject.agree_on_entropy(got.entropy, f"entropy, lse {known}", ...)
        for name, oracle in oracles.items():
            subject.agree(getattr(got, name), oracle, f"{name}, lse {known}", terms=max(T, S))
        subject.agree(subject.attn.topk(5)[0], lambda a: a.topk(5).values, "topk", terms=S)
        keys = torch.arange(S) % 7 == 0
        subject.agree(
            subject.attn._per_query(reductions.mass(keys.float())), lambda a: a[..., ::7].sum(-1), "mass", terms=S
        )


class Dense(reductions.Above):
    """All that it is given, as a matrix."""

    def __init__(self, shape: tuple[int, ...], threshold: float) -> None:
        self.threshold, self.weights, self.forgotten = threshold, torch.zeros(shape), 0

    def take_some(self, rows: slice, heads: slice, counts: Any, keys: Any, weights: Any) -> None:
        assert int(counts.sum()) == len(keys) == len(weights)
        t = torch.arange(rows.start, rows.stop).expand(len(counts), -1).reshape(-1)
        h = torch.arange(heads.start, heads.stop)[:, None].expand(-1, counts.shape[1]).reshape(-1)
        each = torch.from_numpy(counts).reshape(-1)
        at = h.repeat_interleave(each), t.repeat_interleave(each), torch.from_numpy(keys.copy())
        assert not bool(self.weights[at].any())  # each comes once
        self.weights[at] = torch.from_numpy(weights.copy())

    def update(self, tile: Any) -> None:
        raise AssertionError("the pass was to serve it")

    def forget(self) -> None:
        self.forgotten += 1


@pytest.mark.parametrize(
    ("mask", "how"),
    [
        (masks.causal(), {}),
        (None, {"softcap": 2.0}),
        (masks.causal() & masks.sliding_window(37), {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        (masks.causal() & masks.documents(torch.arange(200) // 55), {}),
    ],
    ids=["causal", "softcap", "window and sinks", "documents"],
)
@pytest.mark.parametrize(("scores", "side"), [(cpu.SCORES, 16), (1 << 11, 16), (cpu.SCORES, 48)])
def test_weights_above_a_threshold_and_peaks_of_blocks(
    mask: Any, how: dict[str, Any], scores: int, side: int, monkeypatch: pytest.MonkeyPatch, compiled_pass: list[int]
) -> None:
    monkeypatch.setattr(cpu, "SCORES", scores)
    monkeypatch.setattr(cpu, "FEWEST", 4)
    T, threshold, n = 200, 0.01, -(-200 // side)
    q, k = qk(T, T, H=4, G=2, seed=8)
    attn = SoftmaxMap(3 * q, k, mask=mask, **how)[0]
    exact = SoftmaxMap(3 * q.double(), k.double(), mask=mask, **how)[0].to_dense()
    for _ in ("lse unknown", "lse known"):
        above, blocks = Dense(attn.shape, threshold), reductions.Blocks((4,), T, T, side, attn.like)
        picture = reductions.Pool((4,), T, T, (7, 9), attn.like, maximum=False)
        entropy = reductions.PerQuery((4,), T, attn.like, reductions.entropy)
        attn._stream(above, blocks, picture, entropy)
        near = (exact - threshold).abs() < 1e-6
        there = (exact >= threshold) & ~near
        torch.testing.assert_close(above.weights[there], exact[there].float(), rtol=2e-5, atol=0)
        assert not bool(above.weights[~there & ~near].any())
        padded = torch.nn.functional.pad(exact, (0, -T % side, 0, -T % side)).view(4, n, side, n, side)
        torch.testing.assert_close(blocks.result, padded.amax((2, 4)).float(), rtol=2e-5, atol=1e-7)
        alone, other = (reductions.Pool((4,), T, T, size, attn.like, maximum=False) for size in ((7, 9), (3, 5)))
        attn._stream(alone, other)
        torch.testing.assert_close(picture.result, alone.result, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.result, attn.pool_sum((3, 5)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.result, attn.entropy(), rtol=0, atol=1e-5)
    assert compiled_pass[0] >= 4


def test_a_pass_that_comes_to_nothing_is_forgotten() -> None:
    q, k = qk(70, 70)
    q[0, 0, 5] = torch.inf
    attn = SoftmaxMap(q, k, mask=masks.causal())[0]
    above = Dense(attn.shape, 0.1)
    with pytest.raises(AssertionError, match="the pass was to serve it"):  # tiles come
        attn._stream(above)
    assert above.forgotten == 1


def test_65537_keys_one_with_most_of_the_weight() -> None:
    """0.9 on the first key; the sum over many small weights beside a large one must not drift."""
    T, S, D = 12, 65537, 16
    q, k = qk(T, S, D=D)
    seen, scale = reference.causal(T, S), D**-0.5
    q[..., 0], k[:, :, 0] = 4, 0
    others = torch.logsumexp((q.double() @ k.double().mT * scale)[..., 1:], -1)
    k[:, :, 0, 0] = (others.mean() + 2.2) / (4 * scale)
    exact, plain = (reference.weights(q.to(d), k.to(d), mask=seen, scale=scale) for d in (torch.float64, torch.float32))
    assert 0.85 < exact[..., 0].mean() < 0.95
    score = float((q.double() @ k.double().mT * scale).abs().max())
    agrees(Subject(lambda: SoftmaxMap(q, k, mask=masks.causal()), exact, plain, terms=S + D, score=score))


def test_lse_is_found_on_the_way_and_kept(compiled_pass: list[int]) -> None:
    q, k = qk(200, 300)
    attn, exact = SoftmaxMap(q, k, mask=masks.causal()), SoftmaxMap(q.double(), k.double(), mask=masks.causal())
    attn.entropy()
    assert compiled_pass == [1]
    torch.testing.assert_close(attn.lse.double(), exact.lse, rtol=0, atol=2e-6)
    assert compiled_pass == [1]
    fresh = SoftmaxMap(q, k, mask=masks.causal())
    torch.testing.assert_close(fresh.diagonal(-1).double(), exact.diagonal(-1), rtol=0, atol=1e-6)
    assert compiled_pass == [2]  # for its lse


def test_two_pictures_and_two_moments_in_one_pass_are_each_their_own(compiled_pass: list[int]) -> None:
    q, k = qk(60, 60)
    lead, like, chosen = (1, 2), torch.empty(0), (torch.arange(60) % 2 == 0).float()
    pools = [reductions.Pool(lead, 60, 60, size, like, maximum=True) for size in ((3, 3), (5, 4))]
    moments = [reductions.distance(torch.arange(60)), reductions.mass(chosen), reductions.mass(1 - chosen)]
    rows = [reductions.PerQuery(lead, 60, like, measure) for measure in moments]
    tops = [reductions.TopK(lead, 60, k, like) for k in (2, 3)]
    SoftmaxMap(q, k)._stream(*pools, *rows, *tops)
    assert compiled_pass == [1]
    a = reference.weights(q.double(), k.double())
    apart = (torch.arange(60)[:, None] - torch.arange(60)).abs()
    for got, exact in [
        (pools[0].result, a.unflatten(-1, (3, 20)).unflatten(-3, (3, 20)).amax((-1, -3))),
        (pools[1].result, a.unflatten(-1, (4, 15)).unflatten(-3, (5, 12)).amax((-1, -3))),
        (rows[0].result, (a * apart).sum(-1)),
        (rows[1].result, a[..., ::2].sum(-1)),
        (rows[2].result, a[..., 1::2].sum(-1)),
        *((top.result()[0], a.topk(top.k).values) for top in tops),
    ]:
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-20, 300.0, 1e6, 1e9])
def test_scores_of_any_size(factor: float) -> None:
    """Also where all of a row are so far below 0 that their bits are in another order."""
    q, k = qk(70, 90)
    k = k.abs()
    for sign in (1, -1):
        case = Case(sign * q.abs() * factor, k, None, torch.ones(1, 2, 70, 90, dtype=torch.bool))
        subject = SUBJECTS["SoftmaxMap"](case)
        subject.agree(subject.attn.received(), lambda a: a.sum(-2), "received", terms=70)
        subject.agree_on_entropy(subject.attn.entropy(), "entropy", ...)


# --- what must not leak ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [masks.causal(), masks.causal() & masks.padding(keys=torch.arange(200)[None] < 170)])
def test_nan_and_infinities_in_masked_keys_leak_nowhere(rule: MaskRule) -> None:
    q, k = qk(200, 200)
    spoilt = k.clone()
    spoilt[:, :, 170:180], spoilt[:, :, 180:] = torch.nan, torch.inf
    seeing = slice(0, 170)
    clean, dirty = (SoftmaxMap(q, keys, mask=rule)[..., seeing, :].statistics() for keys in (k, spoilt))
    for name, value in vars(clean).items():
        assert torch.equal(getattr(dirty, name), value), name
    assert (dirty.received[..., 170:] == 0).all()
    assert (dirty.received_peak[..., 170:] == 0).all()


def test_nan_that_is_seen_is_told_by_tiles(compiled_pass: list[int]) -> None:
    q, k = qk(50, 50)
    k[:, :, 20] = torch.nan
    found = SoftmaxMap(q, k, mask=masks.causal()).entropy()
    assert compiled_pass == [0]
    assert not found[..., :20].isnan().any()
    assert found[..., 20:].isnan().all()


def test_rows_that_see_nothing() -> None:
    q, k = qk(300, 300)
    attn = SoftmaxMap(q, k, mask=masks.causal() & ~masks.first_tokens(140))
    found = attn.statistics()
    for name in ("entropy", "distance", "to_first", "to_self", "peak"):
        assert (getattr(found, name)[..., :140] == 0).all(), name
    assert (attn.lse[..., :140] == -torch.inf).all()
    assert (attn.topk(3)[0][..., :140, :] == 0).all()
    assert not attn.pool_max((3, 3)).isnan().any()
    torch.testing.assert_close(found.received.sum(-1), torch.full((1, 2), 160.0))


def test_the_default_dtype_and_device_change_nothing() -> None:
    q, k = qk(70, 90, H=4, G=2)
    rules = (masks.causal(), masks.causal() & masks.strided(2))
    want = [SoftmaxMap(q, k, mask=rule).statistics() for rule in rules]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = [SoftmaxMap(q, k, mask=rule).statistics() for rule in rules]
    finally:
        torch.set_default_dtype(torch.float32)
    for got, exact in zip(found, want, strict=True):
        assert all(torch.equal(value, getattr(exact, name)) for name, value in vars(got).items())


# --- the loops -------------------------------------------------------------------------------------------------------


def test_the_power_of_2_and_its_exact_0() -> None:
    """2^y as the loops have it, read off rows of two keys: one of score 0, one of score y · ln 2."""
    y = -torch.linspace(0, 125, 20001)
    q = torch.stack([y, torch.zeros_like(y)], -1)[:, :1].contiguous()
    k = torch.tensor([[0.0], [1.0]])
    ln2 = float(1 / tile.LOG2E.astype(np.float64))
    attn = SoftmaxMap(q, k, scale=ln2)
    shares = attn.topk(2)[0].double()
    exact = torch.softmax(torch.stack([torch.zeros_like(y), y], -1).double() * np.log(2), -1)
    total = attn.statistics().received.double()
    assert float(((total - exact.sum(0)).abs() / exact.sum(0)).max()) < 2.4e-7
    assert float(((shares - exact).abs() / exact).max()) < 1e-5  # as far as the score itself is exact: 125 · eps
    hidden = SoftmaxMap(q, k, scale=ln2, mask=torch.tensor([[True, False]]).expand(len(q), 2)).statistics()
    assert (hidden.received_peak[1], hidden.received[1]) == (0, 0)


@pytest.mark.parametrize(("T", "S"), [(129, 700), (700, 700), (300, 127)])
@pytest.mark.parametrize("name", ["causal", "upper-left", "window", "symmetric", "sinks + window", "strided"])
def test_layouts_hold_every_visible_pair_once(name: str, T: int, S: int) -> None:
    rule, seen = MASKS[name](1, 1, T, S, torch.Generator())
    assert isinstance(rule, MaskRule)
    bound = BoundMask(rule, T, S)
    ends = rule.interval(torch.arange(T), T, S)
    for interval in (None, None if ends is None else tuple(end.numpy() for end in ends)):
        layouts = cpu_layout.Layouts(bound, interval, T, S, height=50, lowest=4, scores=5000)
        pieces = [piece for n in range(len(layouts)) for piece in layouts[n]]
        assert [t for piece in pieces for t in range(piece.rows.start, piece.rows.stop)] == list(range(T))
        for piece in pieces:
            keys = [s for _, _, key, n in piece.runs.tolist() for s in range(key, key + n)]
            assert len(set(keys)) == len(keys)
            outside = torch.ones(S, dtype=torch.bool)
            outside[keys] = False
            assert not seen.expand(1, 1, T, S)[0, 0, piece.rows][:, outside].any()
            assert piece.height <= 4 or piece.height * piece.width <= 5000


@pytest.mark.parametrize(("rule", "most"), [(masks.causal(), None), (masks.sliding_window(256), 256)], ids=repr)
@pytest.mark.parametrize("told", [True, False], ids=["intervals", "blocks"])
def test_layouts_skip_what_is_empty_and_mask_only_what_is_mixed(rule: MaskRule, most: int | None, told: bool) -> None:
    n, height, step = 2048, 128, 2 * cpu_layout.STEP
    ends = rule.interval(torch.arange(n), n, n)
    assert ends is not None
    interval = (ends[0].numpy(), ends[1].numpy()) if told else None
    layouts = cpu_layout.Layouts(BoundMask(rule, n, n), interval, n, n, height, lowest=4, scores=1 << 20)
    for piece in (piece for block in range(len(layouts)) for piece in layouts[block]):
        assert piece.width <= step + (piece.rows.stop if most is None else piece.height + most)
        assert sum(cols.stop - cols.start for cols in piece.partly) <= (0 if told else 2 * (height + step))


@pytest.mark.parametrize(("T", "S"), [(5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize(
    "rule",
    [
        masks.causal(),
        masks.causal_upper_left(),
        masks.sliding_window(3),
        masks.symmetric_window(4),
        masks.first_tokens(3),
        masks.causal() & masks.first_tokens(3),
        masks.sliding_window(4) & masks.symmetric_window(3),
    ],
    ids=repr,
)
def test_a_rule_that_knows_its_intervals_tells_them_right(rule: MaskRule, T: int, S: int) -> None:
    first, after = rule.interval(torch.arange(T), T, S) or (None, None)
    assert first is not None
    keys = torch.arange(S)
    seen = rule.bind(T, S).tile(slice(0, T), slice(0, S), torch.zeros(1).long(), torch.zeros(1).long())
    assert torch.equal((keys >= first[:, None]) & (keys < after[:, None]), seen.expand(1, 1, T, S)[0, 0])


def test_rules_of_several_ranges_or_batches_have_no_interval() -> None:
    q = torch.arange(4)
    for rule in (masks.strided(2), masks.prefix(2), ~masks.causal(), masks.first_tokens(torch.tensor([1, 2]))):
        assert rule.interval(q, 4, 4) is None
        assert (rule & masks.causal()).interval(q, 4, 4) is None


# --- threads and memory ----------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_the_same_call_gives_the_same_bits(two_threads: None) -> None:
    q, k = qk(700, 700, H=6, G=3)
    first, second = (SoftmaxMap(q, k, mask=masks.causal()).statistics() for _ in range(2))
    for name, value in vars(first).items():
        assert torch.equal(value, getattr(second, name)), name


def test_workers_share_the_blocks_and_agree_with_one(two_threads: None) -> None:
    q, k = qk(700, 700, H=6, G=3)
    used: set[int] = set()
    rule = Watched(used)
    two = SoftmaxMap(q, k, mask=rule).statistics()
    assert len(used) == 2
    torch.set_num_threads(1)
    one = SoftmaxMap(q, k, mask=rule).statistics()
    for name, value in vars(one).items():
        torch.testing.assert_close(getattr(two, name), value, rtol=1e-6, atol=1e-7)


def test_what_computes_apart_has_one_thread_and_the_callers_modes_and_variables(two_threads: None) -> None:
    seen = ContextVar("seen", default=0)
    seen.set(7)

    def state() -> tuple[Any, ...]:
        return torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), seen.get()

    assert workers.apart(state) == (1, True, False, 7)
    assert workers.apart(lambda: workers.apart(state)) == (1, True, False, 7)  # does not wait for itself
    with torch.inference_mode():
        assert workers.apart(state) == (1, False, True, 7)
    with pytest.raises(ZeroDivisionError):
        workers.apart(lambda: 1 // 0)
    assert torch.get_num_threads() == 2


class Watched(MaskRule):
    """Every second key; which threads ask for it."""

    def __init__(self, used: set[int]) -> None:
        self._used = used

    def allows(self, b: Any, h: Any, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        if q.shape[2] > 1:
            self._used.add(threading.get_ident())
        return k % 2 == 0


class Broken(MaskRule):
    """Fails when a block is asked for."""

    def allows(self, b: Any, h: Any, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        if q.shape[2] > 1:
            raise KeyError("broken")
        return k < 5


def test_threads_are_as_before_even_after_an_exception(two_threads: None) -> None:
    workers._threads.cache_clear()  # threads that have not set anything yet
    q, k = qk(700, 700)
    assert threads_of_a_new_thread() == 2
    with pytest.raises(KeyError, match="broken"):
        SoftmaxMap(q, k, mask=Broken()).entropy()
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (2, 2)
    SoftmaxMap(q, k, mask=masks.causal()).entropy()
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (2, 2)


def test_inference_mode_and_gradients(two_threads: None) -> None:
    q, k = qk(700, 700)
    with torch.inference_mode():
        inside = SoftmaxMap(q * 1, k * 1, mask=masks.causal()).entropy()
    assert torch.equal(inside, SoftmaxMap(q, k, mask=masks.causal()).entropy())
    leaf = q.clone().requires_grad_()
    entropy = SoftmaxMap(leaf, k, mask=masks.causal()).entropy()
    assert torch.equal(entropy.detach(), inside)
    entropy.sum().backward()
    with force("tiles"):
        other = q.clone().requires_grad_()
        SoftmaxMap(other, k, mask=masks.causal()).entropy().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


FORKED = """
import os
from clearhead.kernels import workers
def count():
    done = []
    workers.together([lambda: done.append(1), lambda: done.append(2)])
    return sorted(done)
assert count() == [1, 2]
child = os.fork()
if child == 0:
    os._exit(0 if count() == [1, 2] else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_workers_of_its_own() -> None:
    """PyTorch's own threads, which a fork loses too, are not in it: their products would hang."""
    assert run(FORKED) == "0"


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("threads", [1, 2])
def test_no_quadratic_memory_and_no_expanded_keys(threads: int, two_threads: None, compiled_pass: list[int]) -> None:
    torch.set_num_threads(threads)
    T = 4096
    q, k = qk(T, T, H=8, G=1, D=16)
    attn = SoftmaxMap(q, k, mask=masks.sliding_window(512) | masks.first_tokens(4))
    with Allocations() as allocations:
        attn.statistics(), attn.topk(8), attn.pool_max((512, 512)), attn.mass(torch.arange(T) % 2 == 0)
    assert compiled_pass == [4]
    assert allocations.largest < T * T
    assert allocations.peak < 2 * T * T


PEAK = """
import resource, torch
from clearhead import SoftmaxMap, masks
from clearhead.kernels.path import force
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def look(n):
    q, k = torch.randn(1, 8, n, 16), torch.randn(1, 2, n, 16)
    attn = SoftmaxMap(q, k, mask=masks.sliding_window(256))
    with force("cpu"):
        attn.statistics(), attn.topk(4), attn.pool_max((64, 64)), attn[0, 3].entropy()
look(300)
before = peak()
look(8192)
print(peak() - before)
"""


def test_peak_of_the_whole_process() -> None:
    """8,192 tokens, 8 heads: dense 2.1 GB, one head's mask 67 MB; queries, keys and results are 12 MB."""
    assert int(run(PEAK)) * 1024 < 50e6


# --- who does without, and what plan() says --------------------------------------------------------------------------


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "clearhead.kernels.cpu_tile")
    monkeypatch.delattr("clearhead.kernels.cpu_tile")
    cpu.missing.cache_clear()
    yield
    cpu.missing.cache_clear()


def test_without_numba_tiles_serve_and_plan_says_so(no_numba: None, compiled_pass: list[int]) -> None:
    q, k = qk(40, 50)
    attn = SoftmaxMap(q, k, mask=masks.causal())
    taken = attn.plan()["statistics"]
    assert (taken.kernel, "numba" in taken.why) == ("tiles", True)
    seen = reference.causal(40, 50)
    exact = reference.entropy(reference.weights(q.double(), k.double(), mask=seen))
    torch.testing.assert_close(attn.statistics().entropy.double(), exact, rtol=0, atol=1e-5)
    assert compiled_pass == [0]


def test_where_numba_is_told_not_to_compile_tiles_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """NUMBA_DISABLE_JIT=1, as under a debugger: the loops have parts that no Python can run."""
    monkeypatch.setattr(tile, "DISABLED", True)
    cpu.missing.cache_clear()
    try:
        taken = SoftmaxMap(*qk(40, 50)).plan()["statistics"]
    finally:
        cpu.missing.cache_clear()
    assert (taken.kernel, "NUMBA_DISABLE_JIT" in taken.why) == ("tiles", True)


def test_plan_says_what_is_taken_and_computes_nothing() -> None:
    q, k = qk(2048, 2048)
    attn = SoftmaxMap(q, k, mask=masks.causal())
    plan = attn.plan()
    assert {plan[name].kernel for name in ("statistics", "entropy", "received", "topk", "pool_max")} == {"cpu"}
    assert plan["@"].kernel == "fused"
    assert "statistics  cpu   compiled" in repr(plan)
    assert attn._lse.isnan().all()


@pytest.mark.parametrize(
    ("attn", "why"),
    [
        (SoftmaxMap(torch.zeros(1, 2, 9, 4).double(), torch.zeros(1, 2, 9, 4).double()), "float64"),
        (SoftmaxMap(torch.zeros(1, 2, 9, 4, device="meta"), torch.zeros(1, 2, 9, 4, device="meta")), "on meta"),
        (SoftmaxMap(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 9, 4)), "no weights"),
    ],
    ids=["float64", "meta", "empty"],
)
def test_plan_says_why_not(attn: SoftmaxMap, why: str) -> None:
    taken = attn.plan()["entropy"]
    assert (taken.kernel, why in taken.why) == ("tiles", True), taken


def test_left_to_itself_it_is_taken_where_it_pays(compiled_pass: list[int]) -> None:
    token = path._forced.set(None)
    try:
        small, many, large = (SoftmaxMap(*qk(n, n, H=h, D=4)) for n, h in ((64, 2), (300, 50), (2048, 2)))
        assert "8,192 weights are too few" in small.plan()["entropy"].why
        assert "90,000 weights a head are too few" in many.plan()["entropy"].why
        small.entropy()
        assert compiled_pass == [0]
        large.received()
        assert compiled_pass == [1]
    finally:
        path._forced.reset(token)


def test_forcing_tiles() -> None:
    with force("tiles"):
        assert "forced" in SoftmaxMap(*qk(2048, 2048)).plan()["entropy"].why
    with pytest.raises(ValueError, match="expected 'cpu', 'fused', 'tiles'"), force("numba"):
        pass


def test_where_nothing_can_be_written_the_loops_are_compiled_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def njit(function: Any, *, cache: bool = False, **flags: Any) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return function

    monkeypatch.setattr(tile, "_compile", njit)
    monkeypatch.setattr(tile, "_sums", lambda function, **flags: njit(function, **flags))
    assert tile._entry(abs) is abs
    assert asked == [True, False]


CACHED = """
import torch
from clearhead import SoftmaxMap
from clearhead.kernels.path import force
with force("cpu"):
    SoftmaxMap(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)).entropy()
"""


@pytest.mark.full
def test_the_compiled_loops_are_kept_where_numba_is_told(tmp_path: Any) -> None:
    run(CACHED, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").rglob("cpu_tile.look*.nbc"))
    (tmp_path / "file").touch()
    run(CACHED, NUMBA_CACHE_DIR=str(tmp_path / "file" / "cannot be"))
