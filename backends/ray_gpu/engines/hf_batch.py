"""Continuous batching: a thread that decodes all running requests together, one token each a forward pass.

Rules of this room:

1. Requests are admitted in the order they came, as soon as there is a row for them, with room for all they may become:
   what runs is never pushed out. New ones are read (prefilled) before the others go on.
2. Rows 0 to n-1 of the pool are the n running requests, in the order of `_running`. The last row takes the place of one
   that ends.
3. Everything but `_waiting` and the tickets' `aborted` belongs to the thread. `done` is called in the thread, once a
   ticket, when the pool holds nothing of it any more.
4. A request fails alone where that can be seen (no finite logits); an error of the model fails all that run.
"""

import math
import threading
from collections import deque
from collections.abc import Callable

from backends.ray_gpu.engines.base import GenerateRequest, GenerateResult
from backends.ray_gpu.engines.hf_kv import KvPool
from backends.ray_gpu.engines.hf_model import HFModel
from backends.ray_gpu.engines.hf_sampling import choose

PREFILL_TOKENS = 512
"""Most tokens of one prefill, padding included, so that an abort need not wait long (one sequence may be longer)."""


class Ticket:
    """A request on its way."""

    __slots__ = ("request", "done", "tokens", "logprobs", "aborted")

    def __init__(self, request: GenerateRequest, done: Callable[["Ticket", GenerateResult], None]) -> None:
        self.request = request
        self.done = done
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.aborted = False

    @property
    def room(self) -> int:
        """Tokens of the pool that it may come to need."""
        return len(self.request.input_ids) + self.request.max_new_tokens

    @property
    def position(self) -> int:
        """Of the next token."""
        return len(self.request.input_ids) + len(self.tokens)

    @property
    def complete(self) -> bool:
        return self.tokens[-1] in self.request.stop_ids or len(self.tokens) >= self.request.max_new_tokens

    def end(self, status: str, reason: str = "") -> None:
        result = GenerateResult(
            status=status, token_ids=tuple(self.tokens), logprobs=tuple(self.logprobs), reason=reason
        )
        self.done(self, result)


class Batch:
    """Runs requests on `model`, at most `max_running` at once and never more than `pool` has room for."""

    def __init__(self, model: HFModel, pool: KvPool, max_running: int) -> None:
        self._model = model
        self._pool = pool
        self._max_running = max_running
        self._running: list[Ticket] = []
        self._waiting: deque[Ticket] = deque()
        self._sending_back = False
        """Whoever waits and is not admitted now ends as aborted."""
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    def refusal(self, request: GenerateRequest) -> str:
        """Why this request can never be run; empty if it can."""
        total, vocabulary = len(request.input_ids) + request.max_new_tokens, self._model.vocabulary
        if not request.input_ids:
            return "the prompt is empty"
        if not all(0 <= token < vocabulary for token in request.input_ids):
            return f"the prompt has a token outside the vocabulary of {vocabulary}"
        if not (0 <= request.temperature < math.inf and 0 < request.top_p <= 1):
            return f"temperature {request.temperature} and top_p {request.top_p} are not in [0, inf) and (0, 1]"
        if total > self._model.longest:
            return f"{total} tokens in all are more than the {self._model.longest} the model was made for"
        if total > self._pool.tokens:
            return f"{total} tokens in all never fit into a KV pool of {self._pool.tokens}"
        return ""

    def submit(self, ticket: Ticket) -> None:
        """Queue a request that `refusal` has nothing against, with at least one token to generate."""
        with self._changed:
            self._waiting.append(ticket)
            self._changed.notify()

    def send_back(self) -> None:
        """Of the requests that are queued now, run those that there is room for; the others end as aborted."""
        with self._changed:
            self._sending_back = bool(self._waiting)

    def stop(self) -> None:
        """End the thread; what still runs ends as aborted."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._running or self._waiting)
                stopping = self._stopping
            if stopping:
                self._end_all("aborted", "the engine is being closed")
                return
            try:
                self._step()
            except Exception as error:
                # Whatever it is: those who wait must hear of it, and the thread has to be there for the next ones.
                self._end_all("failed", f"{type(error).__name__}: {error}")

    def _step(self) -> None:
        """One forward pass, if there is anything to run."""
        self._drop_aborted()
        if new := self._admit():
            first = len(self._running)
            self._running.extend(new)
            logits = self._model.prefill([ticket.request.input_ids for ticket in new], self._pool, first)
        elif self._running:
            first = 0
            last = [ticket.tokens[-1] for ticket in self._running]
            logits = self._model.decode(last, [ticket.position - 1 for ticket in self._running], self._pool)
        else:
            return
        grown = self._running[first:]
        requests, positions = [ticket.request for ticket in grown], [ticket.position for ticket in grown]
        self._grow(first, *choose(logits, requests, positions))

    def _grow(self, first: int, tokens: list[int], logprobs: list[float]) -> None:
        """Append a token to each request from row `first` on, and let go of those that end with it."""
        strays = []
        for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), first):
            ticket = self._running[row]
            if math.isfinite(logprob):
                ticket.tokens.append(token)
                ticket.logprobs.append(logprob)
            else:
                strays.append(ticket)
                self._pool.clear(row)
        for ticket in self._take_out(lambda t: t in strays):
            ticket.end("failed", "the model's logits are not finite")
        for ticket in self._take_out(lambda t: t.complete):
            ticket.end("completed")

    def _admit(self) -> list[Ticket]:
        """Take from the queue what there is room for, and lay the pool out for it."""
        new: list[Ticket] = []
        unwanted: list[Ticket] = []
        with self._changed:
            while self._waiting and self._has_room(new, self._waiting[0]):
                new.append(self._waiting.popleft())
            if self._sending_back:
                unwanted, self._waiting, self._sending_back = list(self._waiting), deque(), False
        for ticket in unwanted:
            ticket.end("aborted", "the engine is being emptied")
        if new:
            rows = [*self._running, *new]
            columns = max(ticket.room for ticket in rows)
            if columns > self._pool.columns or len(rows) * self._pool.columns > self._pool.tokens:
                length = max((ticket.position for ticket in self._running), default=0)
                self._pool.lay_out(columns, len(self._running), length)
        return new

    def _has_room(self, new: list[Ticket], ticket: Ticket) -> bool:
        rows = [*self._running, *new, ticket]
        batch = [*new, ticket]
        read = len(batch) * max(len(other.request.input_ids) for other in batch)
        return (
            len(rows) <= self._max_running
            and len(rows) * max(other.room for other in rows) <= self._pool.tokens
            and (not new or read <= PREFILL_TOKENS)
        )

    def _drop_aborted(self) -> None:
        with self._changed:
            gone = [ticket for ticket in self._waiting if ticket.aborted]
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.aborted)
        for ticket in (*gone, *self._take_out(lambda t: t.aborted)):
            ticket.end("aborted")

    def _take_out(self, leaves: Callable[[Ticket], bool]) -> list[Ticket]:
        """Remove requests from their rows and close the gaps."""
        out = []
        for row in reversed(range(len(self._running))):
            if leaves(self._running[row]):
                out.append(self._running[row])
                last = self._running.pop()
                if row < len(self._running):
                    self._running[row] = last
                    self._pool.move(len(self._running), row, last.position)
        return out

    def _end_all(self, status: str, reason: str) -> None:
        with self._changed:
            tickets = [*self._running, *self._waiting]
            self._running, self._waiting, self._sending_back = [], deque(), False
        for ticket in tickets:
            ticket.end(status, reason)
