"""Built-in tasks whose answers can be checked exactly: prompts without a data set, rewards without a judge.

1. A prompt depends on the seed and its index alone: any process makes the same one, in any order.
2. A reward is a number from 0 to 1; it is 1 for the answer and for nothing else.
3. What is nearly right earns something (`scoring`), or a model that knows nothing would never learn anything.
"""

from collections.abc import Callable

from backends.ray_gpu.tasks.arithmetic import Arithmetic
from backends.ray_gpu.tasks.base import Task
from backends.ray_gpu.tasks.copying import Copy
from backends.ray_gpu.tasks.sorting import Sort
from core.errors import ConfigError
from core.reading import nearest

TASKS: dict[str, Callable[[int], Task]] = {"arithmetic": Arithmetic, "copy": Copy, "sort": Sort}


def make_task(name: str, size: int) -> Task:
    """The task of that name, `size` hard. Raises ConfigError if there is none."""
    if name not in TASKS:
        raise ConfigError("task", f"no task is called {name!r}", nearest(name, TASKS))
    return TASKS[name](size)
