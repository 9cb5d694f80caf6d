"""What every worker process has, without Ray around it."""

import asyncio
import tempfile
import threading
from pathlib import Path

import pytest
from fakes import make_job
from ray_world import until

from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.workers.base import AsyncWorker, Worker

WATCHERS = 5
"""Control planes, each of which died and was followed by the next."""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_whoever_watches_a_worker_takes_one_of_its_threads_however_many_did_before() -> None:
    worker = Worker(CrewPlan(job=make_job(), seed=0), "session", "desk")
    threads = [threading.Thread(target=worker.live, daemon=True) for _ in range(WATCHERS)]
    for thread in threads:
        thread.start()

    def living() -> int:
        return sum(thread.is_alive() for thread in threads)

    until(lambda: living() == 1, "the end of all calls but one")
    threads[0].join(0.1)
    assert living() == 1


def test_whoever_watches_an_async_worker_takes_one_of_its_places() -> None:
    async def main() -> list[bool]:
        worker = AsyncWorker(CrewPlan(job=make_job(), seed=0), "session", "desk")
        calls = []
        for _ in range(WATCHERS):
            calls.append(asyncio.create_task(worker.live()))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        over = [call.done() for call in calls]
        calls[-1].cancel()
        return over

    assert asyncio.run(main()) == [True] * (WATCHERS - 1) + [False]
