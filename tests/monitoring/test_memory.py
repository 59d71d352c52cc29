"""Peak memory: known allocations come out exactly, regions leave each other alone, nothing is left behind."""

import gc
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType

import psutil
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_lab.monitoring import MemoryMeter, memory

MIB = 2**20
MakeMeter = Callable[[str], MemoryMeter]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make a test slow and its times noise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def block(mib: int, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(mib * MIB // 4, device=device)


def peak_that_is_gone_before_the_end(make_meter: MakeMeter, device: str) -> None:
    meter = make_meter(device)
    kept = block(8, device)
    with meter.region("step") as region:
        first = block(64, device)
        second = first + 1
        del first
        third = block(16, device)
        del second, third
    assert region.extra_bytes == 128 * MIB
    assert region.peak_bytes - region.extra_bytes >= kept.nbytes
    with meter.region("after") as after:
        pass
    assert after.extra_bytes == 0
    assert after.peak_bytes == region.peak_bytes - region.extra_bytes


def nested_regions(make_meter: MakeMeter, device: str) -> None:
    meter = make_meter(device)
    with meter.region("outer") as outer:
        early = block(100, device)
        del early
        kept = block(10, device)
        with meter.region("inner") as inner:
            block(40, device)
            with meter.region("innermost") as innermost:
                pass
        with meter.region("second") as second:
            block(20, device)
        del kept
    assert [region.extra_bytes // MIB for region in (outer, inner, innermost, second)] == [100, 40, 0, 20]
    assert outer.peak_bytes == inner.peak_bytes + 50 * MIB


def inner_peak_that_is_the_outer_one(make_meter: MakeMeter, device: str) -> None:
    meter = make_meter(device)
    with meter.region("outer") as outer:
        kept = block(10, device)
        with meter.region("inner") as inner:
            block(40, device)
        del kept
        block(20, device)
    assert (outer.extra_bytes, inner.extra_bytes) == (50 * MIB, 40 * MIB)


def two_meters(make_meter: MakeMeter, device: str) -> None:
    one, other = make_meter(device), make_meter(device)
    with one.region("one") as first:
        block(64, device)
        with other.region("other") as second:
            block(16, device)
    assert (first.extra_bytes, second.extra_bytes) == (64 * MIB, 16 * MIB)


def error_inside(make_meter: MakeMeter, device: str) -> None:
    meter = make_meter(device)
    with suppress(ZeroDivisionError), meter.region("fails") as region:
        block(32, device)
        raise ZeroDivisionError
    assert region.extra_bytes == 32 * MIB
    with meter.region("next") as following:
        block(64, device)
    assert following.extra_bytes == 64 * MIB
    assert region.extra_bytes == 32 * MIB


def views_and_outputs_that_were_given(make_meter: MakeMeter, device: str) -> None:
    base, out = block(16, device), block(16, device)
    meter = make_meter(device)
    with meter.region("warm"):
        pass
    late = block(16, device)  # not found yet, on a CPU
    with meter.region("views") as region:
        view = base.view(2, -1).t()[1:].detach()
        base.add_(1).mul_(2)
        late.mul_(2)
        torch.mul(base, 2, out=out)
        parts = [*base.chunk(4), late[1:]]
    assert region.extra_bytes == 0
    del view, parts


def tensors_from_before(make_meter: MakeMeter, device: str) -> None:
    meter = make_meter(device)
    known, old = block(4, device), block(32, device)
    with meter.region("frees") as frees:
        del old
        block(24, device)
    kept = block(8, device)
    if device == "cpu":
        meter._account._counter._next_search_s = 0  # due now, not when a hundred times its cost has passed
    with meter.region("after") as after:
        pass
    assert frees.extra_bytes == 0
    assert after.peak_bytes == frees.peak_bytes - 32 * MIB + kept.nbytes
    assert after.peak_bytes >= known.nbytes + kept.nbytes


CHECKS = [
    peak_that_is_gone_before_the_end,
    nested_regions,
    inner_peak_that_is_the_outer_one,
    two_meters,
    error_inside,
    views_and_outputs_that_were_given,
    tensors_from_before,
]


def all_checks(make_meter: MakeMeter) -> None:
    for check in CHECKS:
        check(make_meter, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS)
def test_known_allocations_come_out_exactly(check: Callable[[MakeMeter, str], None], device: str) -> None:
    check(MemoryMeter, device)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("with self.counting():\n            self._hand_out_peak()", "with self.counting():"),
        ("finally:\n                self._hand_out_peak()", "finally:"),
        ("region.peak_bytes = max(region.peak_bytes, peak_bytes)", "region.peak_bytes = peak_bytes"),
        ("return self.peak_bytes - self._entry_bytes", "return self.peak_bytes"),
        ("for region in self._open:", "for region in self._open[-1:]:"),
        ("self._open.remove(region)", "pass"),
        ("self._counter.find_tensors()", "pass"),
        ("self.allocated_bytes -= size_bytes", "pass"),
        (
            "self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)",
            "self.peak_bytes = self.allocated_bytes",
        ),
        ("value.alias_info is None for", "True for"),
        ("if key not in self._live", "if True"),
    ],
)
def test_each_mutant_of_the_meter_is_caught(old: str, new: str) -> None:
    source = inspect.getsource(memory)
    assert source.count(old) == 1, "the mutant no longer applies"
    mutant = ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), mutant.__dict__)
    with pytest.raises(AssertionError):
        all_checks(mutant.MemoryMeter)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_backward_is_measured(device: str, checkpointing: bool) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin()  # keeps x * 2 for backward: 16 MiB

    weight = block(16, device).requires_grad_()
    meter = MemoryMeter(device)
    with meter.region("step") as step:
        x = weight
        for _ in range(8):
            x = checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)
        with meter.region("backward") as backward:
            x.backward(torch.ones_like(x))
    # Without checkpoints: 8 inputs of sin and the output. With them: 8 outputs of layers.
    forward_mib = 16 * (8 if checkpointing else 9)
    assert step.extra_bytes >= forward_mib * MIB
    assert step.extra_bytes <= (forward_mib + 16 * 5) * MIB
    assert 16 * MIB <= backward.extra_bytes <= 16 * 5 * MIB
    assert weight.grad.abs().max() > 0


def tiny_step(batch: int = 8) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=432,
        vocab_size=2048,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 2048, (batch, 100), generator=torch.Generator().manual_seed(0))

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        result = torch.stack([loss.detach(), *(p.grad.sum() for p in model.parameters())])
        model.zero_grad()
        return result

    return step


def test_a_model_step_agrees_with_pytorchs_own_accounting_and_is_unchanged() -> None:
    step = tiny_step()
    expected = step()
    meter = MemoryMeter("cpu")
    with meter.region("step") as region:
        measured = step()
    torch.testing.assert_close(measured, expected, rtol=0, atol=0)
    live = peak = 0
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        step()
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak > 40 * MIB
    assert region.extra_bytes == pytest.approx(peak, rel=0.01)


def test_another_profiler_may_be_running() -> None:
    meter = MemoryMeter("cpu")
    with torch.autograd.profiler.profile(profile_memory=True), meter.region("step") as region:
        block(16)
    assert region.extra_bytes == 16 * MIB


def test_a_thread_may_measure_while_others_allocate() -> None:
    meter = MemoryMeter("cpu")
    found: list[int] = []

    def work() -> None:
        weight = block(4).requires_grad_()
        for _ in range(3):
            with meter.region("step") as region:
                (weight * 2).sum().backward()
            found.append(region.extra_bytes)
            weight.grad = None

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        block(32)
    worker.join()
    # The product is gone when backward makes the gradient of the same size; the scalars are small.
    assert found[0] == found[1] == found[2]
    assert 4 * MIB <= found[0] < 5 * MIB


def test_five_hundred_regions_leave_nothing_behind() -> None:
    meter = MemoryMeter("cpu")
    weight = block(1).requires_grad_()

    def step() -> None:
        with meter.region("step"), meter.region("inner"):
            (weight * 2).sum().backward()
        weight.grad = None

    for _ in range(50):
        step()
    gc.collect()
    before, objects = psutil.Process().memory_info().rss, len(gc.get_objects())
    for _ in range(500):
        step()
    gc.collect()
    assert len(gc.get_objects()) - objects < 500
    assert psutil.Process().memory_info().rss - before < 20 * MIB


def test_a_meter_nobody_asks_costs_nothing() -> None:
    meter = MemoryMeter("cpu")
    with meter.region("once"):
        pass
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_measuring_costs_a_tenth_of_a_step_at_most() -> None:
    step = tiny_step(batch=32)
    meter = MemoryMeter("cpu")

    def seconds(measured: bool) -> float:
        started = time.thread_time()
        if measured:
            with meter.region("step"):
                step()
        else:
            step()
        return time.thread_time() - started

    seconds(measured=True)
    pairs = [(seconds(measured=False), seconds(measured=True)) for _ in range(5)]
    plain, measured = (min(column) for column in zip(*pairs, strict=True))
    assert measured < 1.15 * plain  # 1.10 and some noise


def test_a_device_without_an_account_gives_no_figure() -> None:
    meter = MemoryMeter("meta")
    with meter.region("step") as region:
        torch.empty(1000, device="meta")
    assert (region.peak_bytes, region.extra_bytes) == (None, None)
    assert meter.label == "memory is not measured on meta"


def test_the_label_says_what_is_measured() -> None:
    assert MemoryMeter("cpu").label == "CPU tensor storages, peak"


@pytest.mark.gpu
def test_the_cuda_label_names_the_device() -> None:
    assert MemoryMeter("cuda").label == "CUDA memory allocated on cuda:0, peak"
    assert MemoryMeter("cuda:0").label == "CUDA memory allocated on cuda:0, peak"


@pytest.mark.gpu
def test_a_gigabyte_between_two_logs_is_seen() -> None:
    meter = MemoryMeter("cuda")
    with meter.region("step") as region:
        block(1024, "cuda")
    assert torch.cuda.memory_allocated() < 512 * MIB
    assert region.extra_bytes == 1024 * MIB


@pytest.mark.gpu
def test_only_the_meters_own_device_counts() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = MemoryMeter("cuda:0"), MemoryMeter("cuda:1")
    with first.region("first") as on_first, second.region("second") as on_second:
        block(64, "cuda:1")
    assert (on_first.extra_bytes, on_second.extra_bytes) == (0, 64 * MIB)
