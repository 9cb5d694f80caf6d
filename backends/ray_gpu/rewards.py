"""Reward functions of the user's own: found by name, called with a limit, and never trusted.

1. `module:function` takes the prompt's record (a dict with `prompt`, `answer` and the rest) and the completion's text,
   and returns a finite number. It may be `async`.
2. Whatever else it does is the error of that one trajectory (`OperationFailed`), and nobody else's.
3. A plain function runs in a thread of its own, so that a slow one holds up nothing. A thread cannot be killed: past
   the limit it is left behind, and once `LEFT_BEHIND` are still busy the next calls fail at once.
"""

import asyncio
import importlib
import inspect
import math
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from core.errors import ConfigError, OperationFailed
from core.reading import one_line
from core.units import seconds, show_s

Reward = Callable[[dict[str, Any], str], float | Awaitable[float]]

LEFT_BEHIND = 32
"""Threads past their limit. More than these, and the function is broken rather than slow."""


def load_reward(name: str, limit: int, folder: str | Path = ".") -> "RewardFunction":
    """The function `module:function`, of a module that can be imported or lies in `folder`; `limit` ns a call.

    Raises ConfigError if it cannot be imported or called. Runs the module's top level, whatever that does.
    """
    module_name, _, function_name = name.partition(":")
    _look_in(str(Path(folder).resolve()))
    try:
        module = importlib.import_module(module_name)
    except Exception as bad:
        reason = one_line(f"{type(bad).__name__}: {bad}")
        raise ConfigError("reward", f"{name} cannot be imported: {reason}", "check the name and its folder") from bad
    function = getattr(module, function_name, None)
    if function is None:
        raise ConfigError("reward", f"the module {module_name} has no {function_name!r}")
    if not callable(function):
        raise ConfigError("reward", f"{name} is no function")
    _check_signature(name, function)
    return RewardFunction(name, function, limit)


def _look_in(folder: str) -> None:
    """Behind everything else, so that no file there can take the place of an installed package."""
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # builtins without one
        return
    try:
        signature.bind({}, "")
    except TypeError as bad:
        raise ConfigError("reward", f"{name}{signature} does not take (prompt, completion): {bad}") from None


class RewardFunction:
    """A reward function behind its limit. Called on an event loop, any number of times at once."""

    def __init__(self, name: str, function: Reward, limit: int) -> None:
        self.name = name
        self._function = function
        self._limit = limit
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is async
        )
        self._late: list[threading.Thread] = []

    async def __call__(self, prompt: dict[str, Any], completion: str) -> float:
        """The reward. Raises OperationFailed if the function raises, takes too long or returns no finite number."""
        try:
            async with asyncio.timeout(seconds(self._limit)) as scope:
                found = await self._result(prompt, completion)
        except TimeoutError as bad:
            # The function may raise one of its own.
            late = scope.expired()
            raise self._failed(f"took more than {show_s(self._limit)}" if late else _raised(bad)) from bad
        except OperationFailed:
            raise
        except Exception as bad:
            raise self._failed(_raised(bad)) from bad
        return self._number(found)

    async def _result(self, prompt: dict[str, Any], completion: str) -> Any:
        if self._is_async:
            return await self._function(prompt, completion)  # type: ignore[misc]
        found = await self._in_thread(prompt, completion)
        return await found if inspect.isawaitable(found) else found

    async def _in_thread(self, prompt: dict[str, Any], completion: str) -> Any:
        """Not one of a pool's: those are waited for when the process ends, and this one may never end."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        if len(self._late) >= LEFT_BEHIND:
            raise self._failed(f"{LEFT_BEHIND} earlier calls have not ended yet, long past {show_s(self._limit)}")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, str]] = loop.create_future()
        work = partial(self._work, loop, done, prompt, completion)
        thread = threading.Thread(target=work, name=f"reward {self.name}", daemon=True)
        thread.start()
        try:
            found, raised = await done
        except asyncio.CancelledError:
            self._late.append(thread)
            raise
        if raised:
            raise self._failed(raised)
        return found

    def _work(
        self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[tuple[Any, str]], prompt: dict[str, Any], text: str
    ) -> None:
        """The thread: call the function, hand over (what it returned, what it raised)."""
        outcome: tuple[Any, str]
        try:
            outcome = self._function(prompt, text), ""
        except BaseException as bad:  # SystemExit too: it must not pass for an answer
            outcome = None, _raised(bad)
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(_settle, done, outcome)

    def _number(self, found: Any) -> float:
        try:
            value = float(found)
        except (TypeError, ValueError, OverflowError):
            raise self._failed(f"returned {_short(found)}, which is no number") from None
        if not math.isfinite(value):
            raise self._failed(f"returned {value}")
        return value

    def _failed(self, what: str) -> OperationFailed:
        return OperationFailed(f"the reward {self.name} {what}")


def _settle(done: asyncio.Future[tuple[Any, str]], outcome: tuple[Any, str]) -> None:
    if not done.done():  # else nobody waits any more
        done.set_result(outcome)


def _raised(bad: BaseException) -> str:
    said = str(bad)
    return one_line(f"raised {type(bad).__name__}: {said}" if said else f"raised {type(bad).__name__}")


def _short(found: Any) -> str:
    text = f"the text {found!r}" if isinstance(found, str) else f"a {type(found).__name__}"
    return one_line(text)[:80]
