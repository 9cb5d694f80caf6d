"""Same program, same log: across processes with other hash seeds and other heaps, and as a second run of a process.

Run as a script it prints the log of one run, which the tests compare between fresh processes. anyio cancels by walking
sets that are ordered by address, so without the pepper below the heap looks alike everywhere and hides the problem.
"""

import asyncio
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import anyio

from backends.sim.loop import run_sim
from backends.sim.policies import Walk

ROOT = Path(__file__).parent.parent
PROCESSES = 8
POLICIES = {"fifo": lambda: None, "walk": lambda: Walk(11)}


class _Speck:
    __slots__ = ("a", "b", "c")


def pepper() -> list[object]:
    """Fill the heap and punch holes at random, so that what is allocated next lands anywhere."""
    draw = random.Random(os.urandom(16))
    grains: list[object] = []
    for _ in range(30_000):
        grains.append(draw.choice((_Speck, dict, set, list, object))())
        if draw.random() < 0.4:
            grains[draw.randrange(len(grains))] = None
    return grains


async def _workload(log: list[str]) -> None:
    loop = asyncio.get_running_loop()

    async def child(number: int) -> None:
        try:
            with anyio.CancelScope():
                await (anyio.sleep_forever() if number % 3 else loop.sleep_ns(10**15))
        finally:
            log.append(f"{loop.now_ns()} child {number} ends")

    async def worker(number: int) -> str:
        await anyio.sleep(number % 4)
        return f"worker {number}"

    async with anyio.create_task_group() as group:
        for number in range(40):
            group.start_soon(child, number, name=f"child {number}")
        await anyio.sleep(1)
        group.cancel_scope.cancel()
    tasks = [asyncio.create_task(worker(number)) for number in range(20)]
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        log.extend(f"{loop.now_ns()} {task.get_name()} {task.result()}" for task in done)  # a set, on purpose
    log.extend(repr(decision) for decision in loop.decisions)


def log_of_a_run(policy: str) -> list[str]:
    log: list[str] = []
    run_sim(_workload, log, policy=POLICIES[policy]())
    return log


def digest(log: list[str]) -> str:
    return hashlib.sha256("\n".join(log).encode()).hexdigest()


def digests() -> list[str]:
    """Of each policy, then of each once more: a second run must not see anything of the first."""
    return [digest(log_of_a_run(policy)) for policy in (*POLICIES, *POLICIES)]


def _start(hash_seed: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, __file__], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_every_process_and_every_run_writes_the_same_log() -> None:
    processes = [_start(str(seed * 97)) for seed in range(PROCESSES)]
    here = digests()
    assert here[:2] == here[2:]
    for process in processes:
        assert process.communicate(timeout=60)[0].split() == here


def test_the_log_is_worth_comparing() -> None:
    log = log_of_a_run("walk")
    children = [line.split()[2] for line in log if line.endswith("ends")]
    assert len(children) == 40 and children != sorted(children, key=int)
    assert sum(" worker " in line for line in log) == 20
    assert sum(line.startswith("Decision") for line in log) > 50
    assert log != log_of_a_run("fifo")


def test_another_seed_is_another_schedule_and_the_same_seed_is_not() -> None:
    def order(seed: int) -> list[str]:
        log: list[str] = []
        run_sim(_workload, log, policy=Walk(seed))
        return log

    assert order(1) == order(1) != order(2)


if __name__ == "__main__":
    grains = pepper()
    print(*digests(), sep="\n")
