"""What this node's cards hold, seen from outside every worker, through NVML.

Rules of this room:

1. It only looks. Nothing here sets, resets or partitions anything.
2. A look is plain data (`Card`); what it means for our logical GPUs is decided in `attribution`, without NVML.
3. What the driver does not say stays unknown (`None`), and is never taken for 0.

The package (`nvidia-ml-py`, imported as `pynvml`) is imported when the library is opened, so that machines without
NVIDIA cards can import this module. Reference: NVML API, "Device Queries", nvmlDeviceGetMemoryInfo_v2 and
nvmlDeviceGetComputeRunningProcesses_v3.
"""

from typing import Any

from core.errors import ConfigError, OperationFailed
from core.model import Record


class ProcessMemory(Record, frozen=True, kw_only=True):
    """A process with a context on a card, as the driver names it: in a container, possibly by a pid of the host."""

    pid: int
    nbytes: int | None
    """None: the driver does not say."""


class Card(Record, frozen=True, kw_only=True):
    """One look at one card."""

    index: int
    """NVML's: the order of the PCI bus."""
    uuid: str
    name: str
    total: int
    """Bytes that programs can have at most, what the driver reserves for itself left out."""
    used: int
    """Bytes taken by programs, whoever's."""
    processes: tuple[ProcessMemory, ...]

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def attributed(self) -> int:
        """Bytes that the driver says processes hold."""
        return sum(process.nbytes or 0 for process in self.processes)


class Nvml:
    """The open library. `module`: what to use in place of `pynvml` (tests)."""

    def __init__(self, module: Any = None) -> None:
        self._nvml = module if module is not None else _import()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise ConfigError(
                "--device cuda", f"NVML does not work here: {error}", "is the NVIDIA driver running?"
            ) from error

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cards(self) -> tuple[Card, ...]:
        """All cards of the node, by index; also those that CUDA_VISIBLE_DEVICES hides. Raises OperationFailed."""
        try:
            return tuple(self._card(index) for index in range(self._nvml.nvmlDeviceGetCount()))
        except self._nvml.NVMLError as error:
            raise OperationFailed(f"NVML could not read the cards: {error}") from error

    def _card(self, index: int) -> Card:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory, reserved = self._memory(handle)
        return Card(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            total=memory.total - reserved,
            used=memory.used if reserved else memory.total - memory.free,
            processes=self._processes(handle),
        )

    def _memory(self, handle: Any) -> tuple[Any, int]:
        """Version 2 tells apart what the driver reserves and what programs use; drivers before 510 lack it."""
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except (AttributeError, TypeError, nvml.NVMLError):
            return nvml.nvmlDeviceGetMemoryInfo(handle), 0
        return memory, memory.reserved

    def _processes(self, handle: Any) -> tuple[ProcessMemory, ...]:
        """Compute and graphics contexts; a process with both is listed with the larger figure, which covers them."""
        nvml, found = self._nvml, dict[int, int | None]()
        for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            try:
                listed = ask(handle)
            except nvml.NVMLError:
                continue  # not every driver answers for every kind; what is missing shows as memory that nobody holds
            for process in listed:
                found[process.pid] = _larger(found.get(process.pid), process.usedGpuMemory)
        return tuple(ProcessMemory(pid=pid, nbytes=nbytes) for pid, nbytes in sorted(found.items()))


def _larger(one: int | None, other: int | None) -> int | None:
    known = [nbytes for nbytes in (one, other) if nbytes is not None]
    return max(known) if known else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _import() -> Any:
    try:
        import pynvml
    except ModuleNotFoundError as missing:
        raise ConfigError(
            "--device cuda",
            "the package nvidia-ml-py is not installed",
            'install it with: pip install "turnstile[ray_gpu]"',
        ) from missing
    return pynvml
