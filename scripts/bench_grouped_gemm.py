"""How fast the grouped products of experts are on this GPU, and whether they are right.

    python -m scripts.bench_grouped_gemm

For the experts of three models, routed at random and unevenly: TFLOP/s (median by CUDA events) of
each product with each choice of blocks, of a loop over experts, and of torch's own
`torch.nn.functional.grouped_mm`; the relative error against fp32, in units of the
type's rounding. What fails is printed and the rest goes on; exit status 1 then, 2 without a
GPU. `--dry`: the same code at small sizes on the CPU.
"""

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zorse_megatron.kernels import grouped_gemm
from zorse_megatron.kernels.dispatch import why_not_triton
from zorse_megatron.kernels.grouped_gemm import grouped_linear, grouped_rows_torch

NUM_TOKENS, REPEATS, IN_A_ROW, WITHIN_S = 8192, 7, 3, 52.0
# Experts, how many of them a token goes to, width of the model, of an expert.
MODELS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "OLMoE": (64, 8, 2048, 1024),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
}
# Rows, columns, depth, warps, stages.
OTHER_BLOCKS = (
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (64, 256, 64, 4, 3),
)
MOST_ERROR = 0.6
"""In units of the most that rounding changes a number by (of fp32: 1e-5): one rounding makes 0.42,
two make 0.6."""
failures: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One matrix of each expert, and what it is multiplied with."""

    name: str
    counts: torch.Tensor
    x: torch.Tensor
    dy: torch.Tensor
    weights: torch.Tensor
    main_grads: torch.Tensor

    @property
    def flops(self) -> int:
        """Of one product."""
        return 2 * self.x.shape[0] * self.weights[0].numel()


def layer_of(name: str, counts: torch.Tensor, in_width: int, out_width: int, dtype: Any) -> Layer:
    """Random numbers of the usual sizes."""
    device, num_rows = counts.device, int(counts.sum())
    num_experts = len(counts)
    weights = torch.randn(num_experts, out_width, in_width, device=device, dtype=dtype)
    return Layer(
        name=name,
        counts=counts,
        x=torch.randn(num_rows, in_width, device=device, dtype=dtype),
        dy=torch.randn(num_rows, out_width, device=device, dtype=dtype),
        weights=weights.div_(in_width**0.5),
        main_grads=torch.zeros(num_experts, out_width, in_width, device=device),
    )


def uneven_counts(num_rows: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """How many rows each expert gets: the popular ones several times as many as the others."""
    popularity = torch.softmax(torch.randn(num_experts, device=device), 0)
    chosen = torch.multinomial(popularity, num_rows, replacement=True)
    return torch.bincount(chosen, minlength=num_experts)


def ours(layer: Layer, blocks: Any) -> dict[str, Callable[[], Any]]:
    """The three products as they are picked on this device, with these blocks if there are any."""
    device, weights = layer.x.device, layer.weights.unbind()
    options = {} if blocks is None else {"blocks": blocks}
    rows = grouped_gemm._pick("grouped_rows", device, grouped_rows_torch)
    add = grouped_gemm._pick("grouped_weights", device, grouped_gemm.grouped_weights_torch)
    into, counts = layer.main_grads.unbind(), layer.counts
    return {
        "forward": lambda: rows(layer.x, counts, weights, transposed=True, **options),
        "of input": lambda: rows(layer.dy, counts, weights, transposed=False, **options),
        "of weights": lambda: add(layer.x, layer.dy, counts, into, add=True, **options),
    }


def loop(layer: Layer) -> dict[str, Callable[[], Any]]:
    """As stock: the host waits for the counts, and launches a product per expert."""

    def rows(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        pieces = x.split(layer.counts.tolist())
        return torch.cat([torch.matmul(a, b) for a, b in zip(pieces, matrices, strict=True)])

    def of_weights() -> None:
        sizes = layer.counts.tolist()
        pieces = zip(layer.x.split(sizes), layer.dy.split(sizes), layer.main_grads, strict=True)
        for x, dy, main_grad in pieces:
            main_grad.add_(torch.matmul(dy.t(), x))

    return {
        "forward": lambda: rows(layer.x, layer.weights.transpose(1, 2)),
        "of input": lambda: rows(layer.dy, layer.weights),
        "of weights": of_weights,
    }


def torchs(layer: Layer) -> dict[str, Callable[[], Any]]:
    """Of stacked weights; gradients in bf16, then added."""
    product = torch.nn.functional.grouped_mm

    def ends() -> torch.Tensor:
        return layer.counts.cumsum(0).to(torch.int32)

    return {
        "forward": lambda: product(layer.x, layer.weights.transpose(1, 2), offs=ends()),
        "of input": lambda: product(layer.dy, layer.weights, offs=ends()),
        "of weights": lambda: layer.main_grads.add_(product(layer.dy.t(), layer.x, offs=ends())),
    }


def errors(layer: Layer, works: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, float]]:
    """Relative to fp32, by the norm of everything, in units of the result's type."""
    layer.main_grads.zero_()
    found = {name: work() for name, work in works.items()}
    sizes = layer.counts.tolist()
    found["of weights"] = layer.main_grads
    for name, result in found.items():
        squares = torch.zeros(2, dtype=torch.float64, device=layer.x.device)
        parts = result if name == "of weights" else result.split(sizes)
        inputs = layer.x.split(sizes), layer.dy.split(sizes), layer.weights
        for part, *three in zip(parts, *inputs, strict=True):
            x, dy, weight = (tensor.float() for tensor in three)
            factors = {"forward": (x, weight.t()), "of input": (dy, weight)}
            a, b = factors.get(name, (dy.t(), x))
            exact = a @ b
            squares[0] += (part.float() - exact).square().sum(dtype=torch.float64)
            squares[1] += exact.square().sum(dtype=torch.float64)
        unit = 1e-5 if result.dtype is torch.float32 else torch.finfo(result.dtype).eps / 2
        yield name, (squares[0] / squares[1]).sqrt().item() / unit
        if name == "of weights":
            once = result.clone()
            result.zero_()
            works[name]()
            note(once.equal(result), f"{layer.name}, {name}: two runs differ")
        else:
            note(works[name]().equal(result), f"{layer.name}, {name}: two runs differ")


def note(is_right: bool, problem: str) -> None:
    """Print a failure, and remember it."""
    if not is_right:
        failures.append(problem)
        print(f"FAILED: {problem}", flush=True)


def attempt(what: str, work: Callable[[], Any]) -> Any:
    """What `work` returns; None if it raises, after all that is known of it has been printed."""
    try:
        return work()
    except Exception:
        note(False, f"{what}\n{traceback.format_exc()}")
        return None


def median_s(work: Callable[[], Any], device: torch.device) -> float:
    """Of a call: median over some rows of calls, the GPU idle before each row."""
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    times_ms = []
    for _ in range(REPEATS + 2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(IN_A_ROW):
            work()
        events[1].record()
        torch.cuda.synchronize(device)
        times_ms.append(events[0].elapsed_time(events[1]))
    return statistics.median(times_ms[2:]) / IN_A_ROW / 1e3


def check(layer: Layer, label: str, works: dict[str, Callable[[], Any]]) -> None:
    """Note whatever is not right."""
    for name, error in errors(layer, works):
        print(f"{layer.name:24} {label:18} {name:11} error {error:.3f}", flush=True)
        note(error < MOST_ERROR, f"{layer.name}, {label}, {name}: error {error}")


def timed(layer: Layer, label: str, works: dict[str, Callable[[], Any]]) -> None:
    """Print one line."""
    figures = []
    for name, work in works.items():
        seconds = attempt(f"{layer.name}, {label}, {name}", partial(median_s, work, layer.x.device))
        if seconds:
            figures.append(f"{name} {layer.flops / seconds / 1e12:6.1f} ({seconds * 1e3:.3f} ms)")
    print(f"{layer.name:24} {label:18} " + "  ".join(figures), flush=True)


def try_odd_shapes(device: torch.device) -> None:
    """Sizes that no block divides, empty experts, all types; through autograd, in both bodies."""
    counts = torch.tensor([0, 130, 1, 0, 257, 64, 0], device=device)
    narrow = [(dtype, 136, 264) for dtype in (torch.bfloat16, torch.float16)]
    for dtype, in_width, out_width in (
        *narrow,
        (torch.bfloat16, 200, 333),
        (torch.float32, 70, 99),
    ):
        name = f"odd {in_width}x{out_width} {str(dtype)[6:]}"
        layer = layer_of(name, counts, in_width, out_width, dtype)
        attempt(name, partial(check, layer, "picked", ours(layer, None)))
        attempt(name, partial(try_autograd, layer))


def try_autograd(layer: Layer) -> None:
    """`grouped_linear` and its gradients beside the reference's, and host time of the former."""
    found = []
    for pick in (grouped_gemm._pick, lambda name, device, in_torch: in_torch):
        kept, grouped_gemm._pick = grouped_gemm._pick, pick
        try:
            x = layer.x.clone().requires_grad_()
            weights = [torch.nn.Parameter(weight) for weight in layer.weights.unbind()]
            layer.main_grads.zero_()
            y = grouped_linear(x, layer.counts, weights)
            y.backward(layer.dy)
            y = grouped_linear(x, layer.counts, weights, main_grads=layer.main_grads.unbind())
            y.backward(layer.dy)
            gradients = torch.stack([weight.grad for weight in weights])
            found.append((y.detach(), x.grad, gradients, layer.main_grads.clone()))
        finally:
            grouped_gemm._pick = kept
    for name, one, other in zip(("y", "dx", "dW", "main_grads"), *found, strict=True):
        difference = ((one.float() - other.float()).norm() / other.float().norm()).item()
        limit = 1e-5 if one.dtype is torch.float32 else torch.finfo(one.dtype).eps
        note(
            difference <= limit, f"{layer.name}: {name} differs by {difference} from plain torch's"
        )


def host_time(layer: Layer) -> str:
    """What the host takes to launch a forward and a backward, the GPU behind it."""
    weights = [torch.nn.Parameter(weight) for weight in layer.weights.unbind()]
    x, main_grads = layer.x.requires_grad_(), layer.main_grads.unbind()
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        y = grouped_linear(x, layer.counts, weights, main_grads=main_grads)
        middle = time.perf_counter()
        y.backward(layer.dy)
        spent.append((middle - start, time.perf_counter() - middle))
        x.grad = None
        if x.device.type == "cuda":
            torch.cuda.synchronize()
    forward, backward = (statistics.median(each) * 1e6 for each in zip(*spent, strict=True))
    x.requires_grad_(False)
    return f"{layer.name:24} host: forward {forward:.0f} us, backward {backward:.0f} us"


def layers(device: torch.device, shrink: int) -> Iterator[Layer]:
    """Both matrices of each model's experts; one at a time is in memory."""
    for name, (num_experts, top_k, *widths) in MODELS.items():
        counts = uneven_counts(NUM_TOKENS * top_k // shrink, num_experts, device)
        width, ffn_width = (each // shrink for each in widths)
        for which, in_width, out_width in (
            ("fc1", width, 2 * ffn_width),
            ("fc2", ffn_width, width),
        ):
            yield layer_of(f"{name} {which}", counts, in_width, out_width, torch.bfloat16)


def main() -> int:
    """Run all of it: first what is picked and what it is compared with, then other blocks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="dry run: small sizes on the CPU")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("found no GPU; expected one, or --dry to try the script without")
    device = torch.device("cpu" if options.dry else "cuda:0")
    start, shrink = time.perf_counter(), 32 if options.dry else 1
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, in plain torch because: {why_not_triton(device)}")
    attempt("odd shapes", partial(try_odd_shapes, device))
    rivals = {"loop": loop, "torch grouped_mm": torchs}
    for layer in layers(device, shrink):
        print(f"{layer.name}: rows {layer.counts.min()} to {layer.counts.max()}")
        attempt(layer.name, partial(check, layer, "picked", ours(layer, None)))
        timed(layer, "picked", ours(layer, None))
        for label, make in rivals.items():
            timed(layer, label, make(layer))
        print(attempt(layer.name, partial(host_time, layer)), flush=True)
    print(f"{time.perf_counter() - start:.1f} s")
    if why_not_triton(device) is None:
        from zorse_megatron.kernels.grouped_gemm_on_triton import Blocks

        names = ("rows", "columns", "depth", "num_warps", "num_stages")
        for numbers in OTHER_BLOCKS:
            blocks = Blocks(**dict(zip(names, numbers, strict=True)))
            for layer in layers(device, shrink):
                if time.perf_counter() - start > WITHIN_S:
                    print(f"no time for {layer.name} with {numbers}")
                    continue
                timed(layer, "x".join(map(str, numbers)), ours(layer, blocks))
    print(f"{time.perf_counter() - start:.1f} s; {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
