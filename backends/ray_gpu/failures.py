"""Ray's errors in one line: its own texts have many, and say little about what went wrong in the worker."""

import ray

from core.errors import TurnstileError


def first_line(error: BaseException) -> str:
    """What went wrong, on one line; with the type where the error is none of ours."""
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause or error
    if isinstance(error, ray.exceptions.RayActorError) and not _unborn(error):
        return "its process is gone"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return text if isinstance(error, TurnstileError) else f"{type(error).__name__}: {text}"


def _unborn(error: ray.exceptions.RayActorError) -> bool:
    """Whether the actor failed while it was being made: then the text ends with what was raised there."""
    return isinstance(error, ray.exceptions.ActorDiedError) and error.actor_init_failed
