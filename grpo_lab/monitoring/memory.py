"""Peak memory of a stretch of code: the allocator's own figure on a GPU, the sum of tensor storages on a CPU.

A figure that is read between steps shows little more than the weights, so the peak is taken inside. CUDA's
caching allocator keeps one. PyTorch keeps none on a CPU: there each storage that an operator returns is
counted until it is freed, and what an operator allocates and frees within itself is not seen.
"""

import gc
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import compress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryRegion:
    """What one `MemoryMeter.region` measured.

    Attributes:
        name: of the region.
        peak_bytes: most that was allocated at one time, all live tensors of the device counted; `None` where
            the device has no account of its memory.
    """

    def __init__(self, name: str, entry_bytes: int | None) -> None:
        self.name = name
        self._entry_bytes = entry_bytes
        self.peak_bytes = entry_bytes

    @property
    def extra_bytes(self) -> int | None:
        """The peak above what was allocated when the region was entered; `None` where there is no peak."""
        if self.peak_bytes is None or self._entry_bytes is None:
            return None
        return self.peak_bytes - self._entry_bytes


class MemoryMeter:
    """Measures the peak memory of regions of code on one device; a region inside another disturbs neither.

    On CUDA the regions of all meters of a device share its peak counter and reset it, so a reading of
    `torch.cuda.max_memory_allocated` around a region is not the run's peak. On a CPU a region belongs to the
    thread that opened it, and counts what that thread allocates in it on top of what was live before.

    Args:
        device: `"cuda"` without an index is the current CUDA device.

    Attributes:
        label: what the figures are, for the axis of a plot.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._account: _Account | None = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._account = _cuda_account(index)
            self.label = f"CUDA memory allocated on cuda:{index}, peak"
        elif device.type == "cpu":
            self._account = _StorageAccount()
            self.label = "CPU tensor storages, peak"
        else:
            self.label = f"memory is not measured on {device.type}"

    @contextmanager
    def region(self, name: str) -> Iterator[MemoryRegion]:
        """Measure what the body of a `with` allocates.

        Args:
            name: of the region.

        Yields:
            The region; its figures are whole once the body has ended, with an error too.
        """
        if self._account is None:
            yield MemoryRegion(name, None)
            return
        with self._account.measure(name) as region:
            yield region


class _Account(ABC):
    """Splits one running peak among the regions that are open while it grows."""

    def __init__(self) -> None:
        self._open: list[MemoryRegion] = []

    @abstractmethod
    def allocated_bytes(self) -> int:
        """What is allocated now."""

    @abstractmethod
    def take_peak_bytes(self) -> int:
        """The peak since the last call, which begins a new one at what is allocated now."""

    def counting(self) -> AbstractContextManager[Any]:
        """Keeps the account going inside a region."""
        return nullcontext()

    @contextmanager
    def measure(self, name: str) -> Iterator[MemoryRegion]:
        with self.counting():
            self._hand_out_peak()
            region = MemoryRegion(name, self.allocated_bytes())
            self._open.append(region)
            try:
                yield region
            finally:
                self._hand_out_peak()
                self._open.remove(region)

    def _hand_out_peak(self) -> None:
        peak_bytes = self.take_peak_bytes()
        for region in self._open:
            assert region.peak_bytes is not None
            region.peak_bytes = max(region.peak_bytes, peak_bytes)


class _CudaAccount(_Account):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.cuda.init()  # the counter of a device that nothing has used yet cannot be reset
        self.index = index

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.index)

    def take_peak_bytes(self) -> int:
        peak_bytes = torch.cuda.max_memory_allocated(self.index)
        torch.cuda.reset_peak_memory_stats(self.index)
        return peak_bytes


@cache
def _cuda_account(index: int) -> _CudaAccount:
    """The account of a device: one, as the allocator keeps one peak."""
    return _CudaAccount(index)


class _StorageAccount(_Account):
    def __init__(self) -> None:
        super().__init__()
        self._counter = _StorageCounter()

    def allocated_bytes(self) -> int:
        return self._counter.allocated_bytes

    def take_peak_bytes(self) -> int:
        peak_bytes, self._counter.peak_bytes = self._counter.peak_bytes, self._counter.allocated_bytes
        return peak_bytes

    def counting(self) -> AbstractContextManager[Any]:
        if self._open:
            return nullcontext()
        self._counter.find_tensors()
        return self._counter


class _StorageCounter(TorchDispatchMode):
    """Counts live CPU storages: those found by a search, and those that operators return while it is on."""

    _TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
    # The search walks all Python objects (0.1 s for half a million), so it may take a hundredth of the time.
    _SEARCH_SHARE = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._lock = threading.RLock()  # a storage may be freed by any thread, and while one is being added
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._returns_new: dict[Any, bool] = {}
        self._next_search_s = 0.0

    def find_tensors(self) -> None:
        """Count what was made outside regions: weights, optimizer states, batches."""
        started = time.monotonic()
        if started < self._next_search_s:
            return
        objects = gc.get_objects()
        for tensor in compress(objects, map(self._TENSOR_TYPES.__contains__, map(type, objects))):
            self._add(tensor)
        ended = time.monotonic()
        self._next_search_s = ended + (ended - started) / self._SEARCH_SHARE

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        returns_new = self._returns_new.get(func)
        if returns_new is None:
            # Views, in-place and out= operators return what they were given.
            returns_new = any(value.alias_info is None for value in func._schema.returns)
            self._returns_new[func] = returns_new
        if returns_new:
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, torch.Tensor):
                    self._add(value)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        if not tensor.is_cpu:
            return
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse or wrapped tensor; the tensors inside it are seen for themselves
            return
        key, size_bytes = id(storage), storage.nbytes()  # the object lives as long as the memory
        with self._lock:
            if key not in self._live:
                self._live[key] = weakref.ref(storage, partial(self._freed, key, size_bytes))
                self.allocated_bytes += size_bytes
                self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _freed(self, key: int, size_bytes: int, _: Any) -> None:
        with self._lock:
            if self._live.pop(key, None) is not None:
                self.allocated_bytes -= size_bytes
