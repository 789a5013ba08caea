"""Checks of CPU mode that need it enabled, which is for good: run in a process of their own."""

from collections.abc import Callable
from typing import Any

import torch


def in_megatron(expression: str) -> Any:
    """Evaluate `expression` as if it stood in a module of Megatron."""
    return eval(expression, {"__name__": "megatron.core.example", "torch": torch})


def check_who_sees_a_device() -> None:
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert (
        in_megatron("torch.cuda.is_available()") and in_megatron("torch.cuda.device_count()") == 1
    )


def check_cuda_means_the_host() -> None:
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0):
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.zeros(2).new_ones(2, device=device).device.type == "cpu"
        assert torch.zeros(2).to(device).device.type == "cpu"
        assert torch.zeros(2).to(device=device, dtype=torch.bfloat16).dtype == torch.bfloat16
    layer = torch.nn.Linear(2, 2, device=torch.cuda.current_device()).cuda()
    assert layer.weight.device.type == "cpu" and layer.weight.is_leaf


def check_other_devices_stay() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2).to("meta").device.type == "meta"
    assert torch.zeros(2).to(torch.float16).dtype == torch.float16
    assert torch.zeros(2).to(torch.zeros(2, dtype=torch.int64)).dtype == torch.int64


def check_factories_are_still_known_to_torch() -> None:
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.zeros(2, device="cuda").device.type == "cpu"

    def add_one(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2)

    assert torch.equal(torch.jit.script(add_one)(torch.zeros(2)), torch.ones(2))


def check_type_names() -> None:
    names = {
        torch.float32: "FloatTensor",
        torch.bfloat16: "BFloat16Tensor",
        torch.float16: "HalfTensor",
    }
    for dtype, name in names.items():
        assert torch.zeros(1, dtype=dtype).type() == f"torch.{name}"
        assert in_megatron(f"torch.zeros(1, dtype={dtype}).type()") == f"torch.cuda.{name}"
    assert in_megatron("torch.zeros(1).type(torch.int64)").dtype == torch.int64


def check_one_random_generator() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(3))


def check_streams_and_events() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        torch.rand(1000).sum()
        end.record()
    torch.cuda.current_stream().wait_event(end)
    torch.cuda.synchronize()
    assert 0 < start.elapsed_time(end) < 10_000


def check_memory_is_the_process() -> None:
    before_bytes = torch.cuda.memory_allocated()
    kept = torch.ones(8 * 2**20)
    grown_bytes = torch.cuda.memory_allocated() - before_bytes
    assert grown_bytes > 0.9 * kept.nbytes
    assert torch.cuda.max_memory_allocated() >= before_bytes + grown_bytes


def check_the_rest_still_fails() -> None:
    """What CPU mode does not know is not made up."""
    for call in (torch.cuda.utilization, torch.cuda.mem_get_info, torch.cuda.MemPool):
        try:
            call()
        except Exception:
            continue
        raise AssertionError(f"{call} answered without a GPU")


def main() -> None:
    from zorse_megatron.adapter import cpu_mode

    cpu_mode.enable()
    cpu_mode.enable()  # a second time changes nothing
    assert cpu_mode.needed() and cpu_mode.enabled()
    checks: list[Callable[[], None]] = [f for name, f in globals().items() if name[:6] == "check_"]
    for check in checks:
        check()
    print(f"{len(checks)} checks passed")


if __name__ == "__main__":
    main()
