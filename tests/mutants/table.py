'''The mutants. Each old text is in its file exactly once; `tests/test_mutants.py` makes sure of that.

To add one: the file, a text that is there once, what takes its place, and the guarantee that goes with it. Then
`python -m tests.mutants NAME`. One that nobody finds is a hole to close, or is no fault at all.
'''

from tests.mutants.tree import Mutant

DEMAND = (
    Mutant(
        "demand-consumed-by-grant", "core/demand.py",
        "if policy is DemandPolicy.BATCH:",
        "if policy is DemandPolicy.BATCH and not book.allocation:",
        "L1: open demand survives a grant (the incident).",
    ),
    Mutant(
        "wish-plans-nothing", "core/pipelines.py",
        "book.planned_at = book.open_demand\n        state.touch(book)",
        "book.planned_at = book.open_demand",
        "L4: whatever changes demand is planned for at once.",
    ),
    Mutant(
        "progress-feeds-nobody", "core/pipelines.py",
        "feed(book, policy, state.ledger.now, progress=True)",
        "feed(book, policy, state.ledger.now)",
        "L1, L3: a completed trajectory ends the hunger that may hold up requests.",
    ),
    Mutant(
        "progress-lost-in-state", "core/port.py",
        "target=state.target, delivered=delivered",
        "target=state.target, delivered=state.delivered",
        "L2: a repeated state makes up for lost progress reports.",
    ),
    Mutant(
        "dropped-demand-not-returned", "core/gateway.py",
        "self._port.demand_changed(batch.number, batch.target, len(batch.samples), reason)",
        "pass",
        "L1: the demand of a dropped sample comes back.",
    ),
)  # fmt: skip

MESSAGES = (
    Mutant(
        "duplicate-applied", "core/pipelines.py",
        "if message.seq <= book.seq:",
        "if message.seq == book.seq and type(message) in _HANDLERS:\n"
        "        _answer(state, message, _HANDLERS[type(message)])\n"
        "    elif message.seq <= book.seq:",
        "S7: a doubled message changes nothing.",
    ),
    Mutant(
        "out-of-order-applied", "core/pipelines.py",
        "elif isinstance(message, events.StateResent) or message.seq == book.seq + 1:",
        "else:",
        "L2: a message with a gap before it waits for the whole state.",
    ),
    Mutant(
        "registration-never-late", "core/pipelines.py",
        "if book is None or message.life != book.life:",
        "if book is None or message.life != book.life or type(message) is events.PipelineRegistered:",
        "L2: a registration that arrives when its pipeline is over begins nothing.",
    ),
    Mutant(
        "earlier-client-heard", "core/pipelines.py",
        "if book is None or message.life != book.life:",
        "if book is None or message.life > book.life:",
        "S7: what an earlier client of a name said does not count for the present one.",
    ),
    Mutant(
        "unheard-client-remembered-by-nobody", "core/pipelines.py",
        "if message.life <= ended or (",
        "if (",
        "L2: a client that gave up before it was heard registers nothing.",
    ),
    Mutant(
        "given-back-is-undelivered", "core/port.py",
        "if epoch in self._leases or epoch in self._returned:",
        "if epoch in self._leases:",
        "L2: a lease that was used and given back was not undelivered, whatever a late message asks for.",
    ),
    Mutant(
        "port-repeats-nothing", "core/port.py",
        "if self._acked < self._seq and self._resend is None and not self._closed:",
        "if False:",
        "L2: a lost message only delays.",
    ),
    Mutant(
        "restart-forgets-outcomes", "core/service.py",
        "for event in missed:",
        "for event in ():",
        "L2: what happened while the control plane was away is heard when it is back.",
    ),
    Mutant(
        "unknown-counts-as-done", "core/scheduler.py",
        '_outcome(state, event.action, f"got no answer: {event.reason}", {})',
        "_outcome(state, event.action, None, {})",
        "S2: an operation without an answer may not have happened.",
    ),
    Mutant(
        "old-timer-rings", "core/scheduler.py",
        "if state.timers.get(event.timer) != event.generation:",
        "if event.timer not in state.timers:",
        "L5: a timer of an older generation is ignored.",
    ),
)  # fmt: skip

LEASES = (
    Mutant(
        "reservation-off", "core/queueing.py",
        "closed.setdefault(gpu, request)",
        "pass",
        "L3: small requests cannot overtake a large one for ever.",
    ),
    Mutant(
        "ageing-off", "core/demand.py",
        "return filed_at + priority * AGEING_NS",
        "return filed_at + priority * (AGEING_NS << 20)",
        "L3: whoever waits long enough comes before higher priorities.",
    ),
    Mutant(
        "priorities-reversed", "core/demand.py",
        "return filed_at + priority * AGEING_NS",
        "return filed_at - priority * AGEING_NS",
        "L3: of requests filed together the higher priority is served first.",
    ),
    Mutant(
        "two-initialisations", "core/queueing.py",
        "if draft.ledger.init is not None:",
        "if False:",
        "S3: initialisations, whose peak is highest, run one at a time.",
    ),
    Mutant(
        "hold-and-wait", "core/leases.py",
        "if held is not None:",
        "if False:",
        "L2: nobody holds one lease and waits for another.",
    ),
    Mutant(
        "waiter-not-cancelled", "core/pipelines.py",
        "drop_request(state, request)\n        return",
        "return",
        "L3: a request that was cancelled is granted to nobody.",
    ),
    Mutant(
        "lease-epoch-unchecked", "core/leases.py",
        "lease = book.leases.get(epoch)",
        "lease = next(iter(book.leases.values()), None)",
        "S1: a release counts for the lease of its epoch only.",
    ),
    Mutant(
        "hold-limit-ignored", "core/leases.py",
        "if lease is not None:",
        "if False:",
        "L3: whoever holds a lease for longer than its limit is stopped.",
    ),
    Mutant(
        "leaver-keeps-its-gpus", "core/pipelines.py",
        'ledger.clear(lease.gpus, book, f"{book.id} is over")',
        "pass",
        "L2: nothing is held by a pipeline that is over.",
    ),
)  # fmt: skip

MEMORY = (
    Mutant(
        "confirmation-skipped", "core/engines.py",
        "watch_gpu(state, gpu, book, source)",
        "state.ledger.free(gpu)",
        "S2: a released GPU is free only when its memory was seen free.",
    ),
    Mutant(
        "missing-memory-is-free", "core/scheduler.py",
        "if failure is None:\n        memory_seen",
        "if True:\n        memory_seen",
        "S2: memory that did not come back in time is quarantined.",
    ),
    Mutant(
        "old-watch-counts", "core/scheduler.py",
        "if gpu.watch != action.action or gpu.hold not in",
        "if gpu.hold not in",
        "S2: only the watch of this tenancy speaks for a GPU.",
    ),
    Mutant(
        "release-credits-wrong-gpu", "core/engines.py",
        "ledger.free(gpu.id)",
        "ledger.free(clearing.book.spec.union[0])",
        "S1: the GPU that was seen free becomes free, and no other.",
    ),
    Mutant(
        "freed-gpu-credited-twice", "core/ledger.py",
        "if self.promised is not None:\n            return self.promised",
        "if self.promised is not None and self.hold is not Hold.CLEARING:\n            return self.promised",
        "S1: what one shrink frees is promised once.",
    ),
    Mutant(
        "last-releaser-blamed", "core/engines.py",
        "if _missing_before(state, gpu, free.get(gpu.id, 0)):",
        "if False:",
        "S7: nobody is failed for memory that others were seen to keep.",
    ),
    Mutant(
        "broken-promise-unplanned", "core/scheduler.py",
        "dirty = state.dirty | dict.fromkeys(unpromised.values())",
        "dirty = state.dirty",
        "L4: whose promise is broken is planned for again, wherever else it may roll out.",
    ),
    Mutant(
        "quarantine-skipped", "core/ledger.py",
        "return self.hold is not Hold.QUARANTINED and self.hold is not Hold.LOST",
        "return self.hold is not Hold.LOST",
        "L4: a GPU in quarantine is planned with by nobody.",
    ),
    Mutant(
        "kill-without-await", "core/engines.py",
        "watch_gpu(state, gpu, engine.book, engine)",
        "pass",
        "L2: the memory of a killed engine is watched until it is back.",
    ),
    Mutant(
        "admission-without-residue", "core/budget.py",
        "asleep[gpu] += count * spec.memory.residue",
        "asleep[gpu] += 0",
        "S3: admission adds up what all sleeping processes keep.",
    ),
    Mutant(
        "need-without-margin", "core/reconciler.py",
        "tenant_need(tenant) + ledger.cluster.memory_margin",
        "0",
        "S2: the memory last seen free covers what the next tenant declared.",
    ),
)  # fmt: skip

ENGINES = (
    Mutant(
        "barrier-back-in", "core/reconciler.py",
        "if not _free(ledger, tenant.gpus):",
        "if ledger.doomed or any(gpu.hold is Hold.CLEARING for gpu in ledger.gpus) or not _free(ledger, tenant.gpus):",
        "L2, S7: nobody waits for a GPU that is not its own.",
    ),
    Mutant(
        "gate-before-sync", "core/engines.py",
        "engine.version = -1",
        "engine.version = engine.book.published",
        "S4: a gate opens only after the sync.",
    ),
    Mutant(
        "stale-version-routable", "core/pipelines.py",
        "state.ledger.unserving[engine] = None",
        "pass",
        "S4: what is awake is synced to every version published.",
    ),
    Mutant(
        "sync-to-the-version-before", "core/engines.py",
        "version = engine.book.published",
        "version = max(0, engine.book.published - 1)",
        "S4: a sync is always to the latest version.",
    ),
    Mutant(
        "serves-any-epoch", "core/state.py",
        "return engine.routable and engine.epoch == epoch and not engine.doomed",
        "return engine.routable",
        "S4: a gate that was doomed meanwhile is not shown to the client.",
    ),
    Mutant(
        "deaths-not-counted", "core/engines.py",
        "engine.deaths >= STRIKES",
        "False",
        "L2: an engine that dies again and again is given up.",
    ),
    Mutant(
        "lost-gpu-stays", "core/engines.py",
        "ledger.lose(gpu.id)",
        "pass",
        "S1: nobody is given a GPU whose node left.",
    ),
)  # fmt: skip

SHARES = (
    Mutant(
        "rounding-floored", "core/shares.py",
        "while left > 0:",
        "while False:",
        "L4: what rounding leaves over goes to somebody.",
    ),
    Mutant(
        "smallest-remainder", "core/shares.py",
        "(-round(shares[i][0] - engines[i], 6), i)",
        "(round(shares[i][0] - engines[i], 6), i)",
        "Fairness: what is left over goes by largest remainder.",
    ),
    Mutant(
        "residence-zero", "core/turns.py",
        "residence = book.spec.min_residence",
        "residence = 0",
        "L5: an engine keeps its GPUs for its residence.",
    ),
    Mutant(
        "finished-not-spared", "core/turns.py",
        "return 2 * residence if book.left_fraction < NEARLY_FINISHED else residence",
        "return residence",
        "L5: nearly finished donors are spared one more residence.",
    ),
    Mutant(
        "vain-turn-keeps-its-hunger", "core/scheduler.py",
        "if engine.book in made.gave_way and not engine.completed:",
        "if False:",
        "L1: whoever completed nothing in its turn stands last in line again.",
    ),
    Mutant(
        "turn-without-completion", "core/turns.py",
        "if only and not engine.completed:",
        "if False:",
        "L1: a turn lasts until one trajectory is completed.",
    ),
    Mutant(
        "hunger-never-outranks", "core/turns.py",
        "return book.hungry_since >= 0 and",
        "return False and",
        "L1: after five minutes of hunger a pipeline comes before new requests.",
    ),
    Mutant(
        "review-never-rings", "core/scheduler.py",
        "if made.review_at is not None and",
        "if False and",
        "L1: a turn that ends by time alone is noticed.",
    ),
    Mutant(
        "donor-choice-reversed", "core/rollouts.py",
        "1, 0, -wish.left, engine.dp_rank)",
        "1, 0, wish.left, engine.dp_rank)",
        "L5: donors with the most left to do give first.",
    ),
    Mutant(
        "idle-gpus-left", "core/rollouts.py",
        "if not market.survey.idle:",
        "if True:",
        "L4: no GPU stays idle that somebody with demand could use.",
    ),
    Mutant(
        "hands-change-by-rounding", "core/rollouts.py",
        "WHOLE = 1 - 1e-6",
        "WHOLE = 1e-6",
        "L5: engines change hands only between those off by a whole one.",
    ),
    Mutant(
        "tp-bundle-misaligned", "core/model.py",
        "self.gpus[dp_rank * self.tp : (dp_rank + 1) * self.tp]",
        "self.gpus[dp_rank : dp_rank + self.tp]",
        "S1: engines of one pipeline share no GPU.",
    ),
)  # fmt: skip

ROLLOUTS = (
    Mutant(
        "dispatch-too-stale", "core/gateway.py",
        "self._being_trained - self._job.spec.staleness",
        "self._being_trained - self._job.spec.staleness - 1",
        "S6: nothing runs on an engine whose version will be too old when it is taken.",
    ),
    Mutant(
        "staleness-off-by-one", "core/gateway.py",
        "version - s.version > self._job.spec.staleness",
        "version - s.version > self._job.spec.staleness + 1",
        "S6: what is too stale when it is taken is dropped.",
    ),
    Mutant(
        "attempt-ids-ignored", "core/gateway.py",
        "return self.attempt == self.trajectory.attempt",
        "return True",
        "S5: a late result of an older attempt is ignored.",
    ),
    Mutant(
        "reissue-never", "core/gateway.py",
        "if limit:\n",
        "if False:\n",
        "L1: a trajectory that does not come back is given to another engine.",
    ),
    Mutant(
        "cleanup-masks-first-error", "core/pipeline.py",
        "raise error or trouble",
        "raise trouble or error",
        "S7: cleanup never hides the error that caused it.",
    ),
    Mutant(
        "last-error-is-first", "core/driver.py",
        "if self._first is not None:",
        "if False:",
        "S7: of several errors the one that happened first is raised.",
    ),
)  # fmt: skip

SIMULATOR = (
    Mutant(
        "epoch-unchecked", "backends/sim/worker.py",
        "if epoch < self.epoch:",
        "if False:",
        "S4: workers refuse orders of older epochs.",
    ),
    Mutant(
        "memory-never-runs-out", "backends/sim/memory.py",
        "if device.free < amount:",
        "if False:",
        "S3: no device gives more than it has.",
    ),
    Mutant(
        "release-is-a-fact", "backends/sim/memory.py",
        "if lag <= 0:",
        "if True:",
        "S2 would never be tried: released memory takes its time.",
    ),
    Mutant(
        "gate-open-while-asleep", "backends/sim/engine.py",
        "self.gate = False\n        self._abort(self.waiting)\n        if",
        "self._abort(self.waiting)\n        if",
        "S4: an engine closes its gate before it is emptied.",
    ),
    Mutant(
        "sleeper-keeps-its-version", "backends/sim/engine.py",
        "self.awake = False\n        self.version = -1",
        "self.awake = False",
        "S4: weights are gone after a sleep.",
    ),
    Mutant(
        "dead-client-speaks", "backends/sim/wire.py",
        "or pipeline in self._cut or",
        "or",
        "S7: a client that died says nothing more.",
    ),
    Mutant(
        "aborted-request-decodes-on", "backends/sim/backend.py",
        "engine.withdraw(request)",
        "pass",
        "S5: a cancelled attempt gives its slot back.",
    ),
    Mutant(
        "draws-by-attempt", "backends/sim/crew.py",
        "attempt.batch, attempt.trajectory)",
        "attempt.batch, attempt.attempt)",
        "S7: draws depend on nothing but the trajectory.",
    ),
)  # fmt: skip

MUTANTS = (*DEMAND, *MESSAGES, *LEASES, *MEMORY, *ENGINES, *SHARES, *ROLLOUTS, *SIMULATOR)
