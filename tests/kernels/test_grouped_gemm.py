"""Grouped products against fp64, expert by expert; and what Triton's compiler makes of them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.memory import DEVICE, DTYPES, IS_INTERPRETED, cheap, guarded, seeds
from zorse_megatron.kernels import grouped_gemm
from zorse_megatron.kernels.grouped_gemm import GroupedProduct, grouped_linear

ROOT = Path(__file__).resolve().parents[2]
# Triton's interpreter multiplies the bits of bf16 as integers.
PRODUCT_DTYPES = [d for d in DTYPES if not (IS_INTERPRETED and d is torch.bfloat16)]
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What rounding to a type changes a number by at most, relative to it."""
SHARED_KIB = {86: 99, 90: 227}
"""Of one program at most (CUDA C++ Programming Guide, "Technical Specifications")."""

counts_of_experts = st.lists(
    st.one_of(st.sampled_from([0, 1, 16, 17]), st.integers(0, 70)), min_size=1, max_size=6
)
widths = st.one_of(st.sampled_from([1, 16, 32, 33, 64]), st.integers(1, 80))


@pytest.fixture(scope="module", autouse=True)
def small_tiles(implementation: str) -> Iterator[None]:
    """In the interpreter: small tensors have many tiles, and rows of tiles that are cut."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_INTERPRETED:
            module = import_module("zorse_megatron.kernels.grouped_gemm_on_triton")
            small = module.Blocks(rows=16, columns=32, depth=16, num_warps=4, num_stages=2)
            patch.setattr(module, "FP32", small)
        yield


class Case:
    """Tensors on the device, and the same in fp64."""

    def __init__(
        self, counts, in_width, out_width, dtype=torch.float32, *, seed=0, counts_on=DEVICE
    ) -> None:
        source = torch.Generator().manual_seed(seed)

        def new(*shape):
            return torch.randn(*shape, generator=source).to(DEVICE, dtype)

        self.sizes, self.dtype = counts, dtype
        self.counts = torch.tensor(counts, device=counts_on)
        self.x = new(sum(counts), in_width).requires_grad_()
        self.weights = [new(out_width, in_width).requires_grad_() for _ in counts]
        self.dy = new(sum(counts), out_width)

    def by_expert(self):
        """Rows of x, of dy, and the weight."""
        pieces = self.x.detach().split(self.sizes), self.dy.split(self.sizes)
        return zip(*pieces, [weight.detach() for weight in self.weights], strict=True)

    def run(self, **options):
        """The output."""
        return grouped_linear(self.x, self.counts, self.weights, **options)


def assert_product(found, a, b, added=None):
    """Within the bound of a sum in fp32 in any order, rounded to the type of `found`."""
    a, b = a.double(), b.double()
    exact, magnitude, terms = a @ b, a.abs() @ b.abs(), a.shape[1]
    if added is not None:
        exact, magnitude, terms = exact + added, magnitude + added.abs(), terms + 1
    bound = (terms + 2) * UNITS[torch.float32] * magnitude
    # fp16 has a fixed step below 2^-14.
    bound += UNITS[found.dtype] * 1.01 * (exact.abs() + bound) + 2.0**-25
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound).all()


@cheap
@given(
    counts=counts_of_experts,
    in_width=widths,
    out_width=widths,
    dtype=st.sampled_from(PRODUCT_DTYPES),
    seed=seeds,
    first=st.sampled_from([None, 0, 1]),
)
def test_all_three_products_of_ragged_experts(
    implementation: str, *, counts, in_width, out_width, dtype, seed, first: int | None
) -> None:
    """And weights' gradients are added in place to main_grads, unless `first` is None.

    With 1 none of these starts at a multiple of 16 bytes.
    """
    case = Case(counts, in_width, out_width, dtype, seed=seed)
    source, size = torch.Generator().manual_seed(seed + 1), in_width * out_width
    kept = [guarded(torch.randn(size + (first or 0), generator=source)) for _ in counts]
    main_grads = [one.inner[first or 0 :].view(out_width, in_width) for one in kept]
    before = [main_grad.double() for main_grad in main_grads]
    y = case.run(main_grads=None if first is None else main_grads)
    y.backward(case.dy)
    dx = case.x.grad
    assert y.dtype is dx.dtype is dtype
    rows = (y.detach().split(counts), dx.split(counts), case.weights, main_grads, before)
    for (x, dy, weight), out, of_x, mine, main_grad, old in zip(
        case.by_expert(), *rows, strict=True
    ):
        assert_product(out, x, weight.t())
        assert_product(of_x, dy, weight)
        if first is None:
            assert mine.grad.dtype is dtype
            assert_product(mine.grad, dy.t(), x)
            continue
        assert mine.grad is None
        assert_product(main_grad, dy.t(), x, added=old)
        if not len(x):
            assert main_grad.double().equal(old)
    for one in kept:
        one.assert_guards_untouched()


def test_rows_without_an_expert_are_zero(implementation: str) -> None:
    """They come last, and there are no gradients of them."""
    case, whole = (Case([5, 0, 20, 9], 33, 40) for _ in range(2))
    case.counts, case.weights = case.counts[:3], case.weights[:3]
    y, expected = case.run(has_rest=True), whole.run()
    y.backward(case.dy)
    expected.backward(whole.dy)
    assert y[:25].equal(expected[:25]) and case.x.grad[:25].equal(whole.x.grad[:25])
    assert not y[25:].any() and not case.x.grad[25:].any()
    for one, other in zip(case.weights, whole.weights[:3], strict=True):
        assert one.grad.equal(other.grad)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter runs one program after another")
def test_twice_the_same_bits(implementation: str) -> None:
    case = Case([40, 0, 100, 3], 48, 80, torch.float16)

    def found():
        y = case.run()
        return [y, *torch.autograd.grad(y, [case.x, *case.weights], case.dy)]

    assert all(one.equal(other) for one, other in zip(found(), found(), strict=True))


def test_what_is_not_finite_stays_with_its_token_and_its_expert(implementation: str) -> None:
    case = Case([5, 20, 3], 33, 40)
    with torch.no_grad():
        case.x[:5], case.dy[:5], case.x[27] = torch.nan, torch.inf, torch.nan
        case.weights[0].fill_(torch.nan)
    y = case.run()
    dx, *gradients = torch.autograd.grad(y, [case.x, *case.weights], case.dy)
    assert y[5:27].isfinite().all() and dx[5:].isfinite().all() and y[27].isnan().all()
    assert gradients[1].isfinite().all() and gradients[2].isnan().all()


def test_autograd_sees_parameters_as_megatron_expects(implementation: str) -> None:
    case = Case([4, 0], 16, 16)
    main_grads, ran = [torch.zeros(16, 16, device=DEVICE) for _ in range(2)], []
    case.weights[0].grad_added_to_main_grad = False
    nodes = [weight.expand_as(weight).grad_fn.next_functions[0][0] for weight in case.weights]
    for number, node in enumerate(nodes):
        node.register_hook(lambda *_, number=number: ran.append(number))
    case.run(main_grads=main_grads).backward(case.dy)
    assert sorted(ran) == [0, 1]
    assert case.weights[0].grad_added_to_main_grad
    assert not hasattr(case.weights[1], "grad_added_to_main_grad")


@pytest.mark.parametrize("is_fused", [False, True])
def test_weight_gradients_can_wait(implementation: str, is_fused: bool) -> None:
    one, other = (Case([4, 0, 30], 32, 17, counts_on="cpu") for _ in range(2))
    into = [[torch.ones(17, 32, device=DEVICE) for _ in range(3)] for _ in range(2)]
    waiting: list[GroupedProduct] = []
    one.run(main_grads=into[0] if is_fused else None).backward(one.dy)
    other.run(main_grads=into[1] if is_fused else None, later=waiting.append).backward(other.dy)
    assert other.x.grad.equal(one.x.grad)
    assert not is_fused or all(main_grad.eq(1).all() for main_grad in into[1])
    (product,) = waiting
    product.accumulate(product.start())
    if is_fused:
        assert all(a.equal(b) for a, b in zip(*into, strict=True))
        return
    for a, b in zip(one.weights, other.weights, strict=True):
        assert a.grad.equal(b.grad)


def test_frozen_weights_keep_no_input(implementation: str) -> None:
    case = Case([4, 3], 16, 16)
    for weight in case.weights:
        weight.requires_grad_(False)
    y = case.run()
    assert y.grad_fn.saved_tensors[0] is None
    y.backward(case.dy)
    for dx, (_, dy, weight) in zip(case.x.grad.split([4, 3]), case.by_expert(), strict=True):
        assert_product(dx, dy, weight)


@pytest.mark.parametrize(("capability", "in_triton"), [((7, 5), False), ((8, 0), True)])
def test_triton_where_it_has_tensor_cores(
    implementation: str, monkeypatch, capability: tuple[int, int], in_triton: bool
) -> None:
    if implementation != "triton":
        pytest.skip("Triton need not be there")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reference = grouped_gemm.grouped_rows_torch
    picked = grouped_gemm._pick("grouped_rows", torch.device("cuda", 0), reference)
    assert (picked is not reference) == in_triton


@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_compiles_without_spills(implementation: str) -> None:
    if implementation != "torch":
        pytest.skip("once is enough")
    command = [sys.executable, "-m", "tests.kernels.compile_grouped_main", *map(str, SHARED_KIB)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    launches = json.loads(done.stdout)
    products = [launch for launch in launches if launch["kernel"] != "grouped_tiles_kernel"]
    kernels = [*["grouped_rows_kernel"] * 2, "grouped_weights_kernel"] * 3
    assert [launch["kernel"] for launch in products] == kernels * len(SHARED_KIB)
    assert {launch["capability"] for launch in launches} == set(SHARED_KIB)
    for launch in launches:
        assert not launch["spilled_bytes"]
        assert launch["shared_bytes"] <= SHARED_KIB[launch["capability"]] * 1024
    for launch in products:
        ptx = launch["instructions"]
        has_cores = any(word.startswith(("mma.sync", "wgmma.mma", "tcgen05")) for word in ptx)
        assert has_cores == (launch["types"]["x"] == "*bf16")  # no TF32 in fp32
        # 16 bytes at a time from addresses of the tables too.
        assert {"st.global.v4.b32"} <= set(ptx)
        assert {"cp.async.cg.shared.global", "ld.global.v4.b32"} & set(ptx)
