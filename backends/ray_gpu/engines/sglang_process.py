"""SGLang's processes, seen from the one that holds them: built, listened to, ended. See `sglang` for why each is done.

SGLang 0.5.17 is what these functions know: they reach for a few of its private names, all of them here and in
`sglang_child`, none elsewhere.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backends.ray_gpu.engines import sglang_child as child
from backends.ray_gpu.engines.sglang_setup import cuda_libraries, other_models
from core.errors import ConfigError, OperationFailed, TurnstileError

SNAPSHOTS = Path("/dev/shm")
SOCKET_PATH_MAX = 107
"""Bytes of the path of a Unix socket (unix(7)), the zero at its end left out."""


def build(flags: dict[str, Any], architectures: Sequence[str], scratch: Path) -> Any:
    """The SGLang engine, in the calling thread."""
    # All of these are read by the children, which inherit them.
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = other_models(_model_sources(), architectures)
    # They meet in a file, so no port is taken and nothing listens.
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch}/meeting"
    # The memory saver is preloaded into them, before torch could find the CUDA runtime for it.
    libraries = [*cuda_libraries(), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(folder for folder in libraries if folder)
    child.allow_known_architectures()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import PortArgs

    class Offline(Engine):
        run_scheduler_process_func = staticmethod(child.SCHEDULER)
        run_detokenizer_process_func = staticmethod(child.DETOKENIZER)

        @classmethod
        def _launch_subprocesses(cls, server_args: Any, **more: Any) -> Any:
            ports = within(scratch, PortArgs.init_new(server_args))
            return super()._launch_subprocesses(server_args=server_args, port_args=ports, **more)

    return Offline(**flags)


def within(scratch: Path, ports: Any) -> Any:
    """SGLang's `PortArgs` with every Unix socket in `scratch`, and its load snapshots named after that.

    Raises ConfigError if the folder's path is too long for sockets in it.
    """
    sockets = [name for name, value in vars(ports).items() if isinstance(value, str) and value.startswith("ipc://")]
    if len(f"{scratch}/{len(sockets)}") > SOCKET_PATH_MAX:
        raise ConfigError("TMPDIR", f"{scratch} is too long a path for Unix sockets", "set TMPDIR to a shorter one")
    for number, name in enumerate(sockets):
        # SGLang has made a file there, to have a name that nobody else has.
        Path(getattr(ports, name).removeprefix("ipc://")).unlink(missing_ok=True)
        setattr(ports, name, f"ipc://{scratch}/{number}")
    ports.instance_id = scratch.name
    return ports


def _model_sources() -> Path:
    """SGLang's folder of models, found without importing it."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("--device cuda", "the package sglang is not installed", 'pip install "turnstile[sglang]"')
    return Path(found.submodule_search_locations[0]) / "srt" / "models"


@contextlib.contextmanager
def failing_softly() -> Iterator[None]:
    """Within, the signal by which a failing child of SGLang ends its parent does nothing, so an error can be raised.

    Python sets signal handlers from the main thread only, and an actor's coroutines never run in it; libc has no such
    rule.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    ignore = 1  # SIG_IGN
    before = libc.signal(signal.SIGQUIT, ignore)
    try:
        yield
    finally:
        libc.signal(signal.SIGQUIT, before)


def start_error(error: BaseException) -> BaseException:
    return (
        error
        if isinstance(error, TurnstileError)
        else OperationFailed(f"SGLang did not start: {error or type(error).__name__}")
    )


def listen(engine: Any) -> None:
    """Receive SGLang's answers on this event loop. Its own way of starting that installs signal handlers with it."""
    manager, loop = engine.tokenizer_manager, asyncio.get_running_loop()
    manager.event_loop = loop
    listener = loop.create_task(manager.handle_loop(), name="sglang answers")
    listener.add_done_callback(_end_process_if_failed)
    manager.asyncio_tasks.add(listener)


def _end_process_if_failed(listener: "asyncio.Task[None]") -> None:
    """Nobody would get an answer any more: end as for any other failure of SGLang (rule 1)."""
    if not listener.cancelled() and listener.exception() is not None:
        listener.get_loop().call_exception_handler(
            {"message": "SGLang's answers stopped", "exception": listener.exception()}
        )
        os.kill(os.getpid(), signal.SIGQUIT)


def forget_load_snapshots(scratch: Path) -> None:
    """Remove the file in which its processes tell each other their load. Once all are up they have it mapped; after a
    kill nobody would remove it."""
    for file in SNAPSHOTS.glob(f"sglang_loads_{scratch.name}_*"):
        file.unlink(missing_ok=True)


def kill_children(others: set[Any]) -> None:
    """Kill every child of this process but `others`."""
    for started in set(multiprocessing.active_children()) - others:
        started.kill()
        started.join()


def end(engine: Any) -> None:
    """Kill SGLang's processes and wait until they are gone."""
    atexit.unregister(engine.shutdown)  # it would kill every child of this process, whoever's it is
    if engine.tokenizer_manager._subprocess_watchdog is not None:
        engine.tokenizer_manager._subprocess_watchdog.stop()
    if engine.send_to_rpc is not None:
        engine.send_to_rpc.close(linger=0)
    pids = set(engine.get_all_child_pids())
    processes = [process for process in multiprocessing.active_children() if process.pid in pids]
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


async def silence(engine: Any) -> None:
    """End the tasks of SGLang's tokenizer manager on this event loop."""
    manager = engine.tokenizer_manager
    tasks: list[asyncio.Task[Any]] = [task for task in manager.asyncio_tasks if not task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def message_contexts() -> list[Any]:
    """Every context of ZeroMQ in this process."""
    zmq = sys.modules.get("zmq")
    return [one for one in gc.get_objects() if isinstance(one, zmq.Context)] if zmq is not None else []


def drop_contexts(others: list[Any]) -> None:
    """End all but `others`, with what is still unsent: when the last reference to one goes, it would wait until that
    was sent, and so for ever, because the processes that it is for are gone."""
    for context in message_contexts():
        if all(context is not other for other in others):
            context.destroy(linger=0)
