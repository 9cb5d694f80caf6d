"""The oracles: S1 to S7 and L1 to L5 of the design, checked on the entries of any backend.

1. Independent: what holds is rebuilt from the entries (`core.observed`), never asked of the scheduler or its ledger.
2. Each oracle lives in one of three rooms: `oracles_safety` (S1-S4, S7), `oracles_samples` (S5, S6) and
   `oracles_liveness` (L1-L5). Here are only the list of violations, the verdict and the order of things.
3. An oracle looks at an entry *before* it is taken in: "was this GPU free when it was given away?"
4. Deadlines are looked at when an entry or a `tick` passes them; none of them is ever in a calendar, so that no oracle
   can keep a dead run alive.
5. The first verdict freezes everything.

What cannot be seen in one run is tested by two: under `isolate` a fault changes nothing but timing for the others (S7).
"""

from collections.abc import Callable, Collection
from typing import Any

from core.closeness import Wait
from core.config import DriverPolicy
from core.model import Cluster, DemandPolicy
from core.observed import Observed
from core.oracles_liveness import LivenessOracles
from core.oracles_safety import SafetyOracles
from core.oracles_samples import SampleOracles
from core.trace import Outcome, Verdict, Violation

VIOLATIONS_KEPT = 1_000


class Monitor:
    """A listener that judges. `violations` grows, `verdict` is set once.

    `observed`: the picture of another listener, which takes each entry in right after the monitor has seen it.

    `settle_ns`: how long a GPU may stay unused before L4 asks why, and `skew_ns`: how late telemetry may be. Both are 0
    in virtual time; a real backend needs a second or so.

    `own`: the pipelines of this run, where others may share its world; None: all of them. Safety is everybody's, but
    how long a stranger waits and what it leaves open is judged by its own run.
    """

    def __init__(
        self,
        cluster: Cluster,
        demand: DemandPolicy,
        driver: DriverPolicy = DriverPolicy.ISOLATE,
        settle_ns: int = 0,
        skew_ns: int = 0,
        observed: Observed | None = None,
        own: Collection[str] | None = None,
    ) -> None:
        self._own = None if own is None else dict.fromkeys(own)
        self.violations: list[Violation] = []
        self.not_kept = 0
        """Violations beyond the first `VIOLATIONS_KEPT`."""
        self.verdict: Verdict | None = None
        self.verdict_at_ns = -1
        self.observed = observed or Observed(cluster)
        self._takes_in = observed is None
        self.liveness = LivenessOracles(self, demand, settle_ns)
        self.observed.watch(self.liveness)
        self._samples = SampleOracles(self)
        self._safety = SafetyOracles(self, driver, skew_ns)
        self._checks: dict[type, tuple[Callable[..., None], ...]] = {}
        for oracles in (self._safety, self._samples, self.liveness):
            for kind, check in oracles.checks.items():
                self._checks[kind] = (*self._checks.get(kind, ()), check)
        self._checks[Verdict] = (self._conclude,)

    def __call__(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        if self.verdict is not None:
            return
        if t_ns > self.observed.now:  # `tick`, without the call
            self.liveness.advance(t_ns)
            self.observed.now = t_ns
            if self.verdict is not None:
                return
        for check in self._checks.get(type(item), ()):
            check(item)
        if self._takes_in:
            self.observed.apply(i, t_ns, cause, item)

    def tick(self, now_ns: int) -> None:
        """Time has come this far, whether or not anything happened."""
        if self.verdict is None:
            self.liveness.advance(now_ns)
            if now_ns > self.observed.now:
                self.observed.now = now_ns

    def on_quiescent(self, explanation: str) -> None:
        """Nothing can happen any more (only daemon entries are left) and somebody still waits: L2."""
        if self.verdict is not None:
            return
        self.liveness.quiescent()
        self.breach("L2", explanation)
        self.decide(Verdict(outcome="deadlock", rule="L2", text=explanation))

    def finish(self, outcome: Outcome) -> None:
        """The run is over by itself: what must be settled now is looked at. Nothing is, after a verdict."""
        self._conclude(Verdict(outcome=outcome))

    def _conclude(self, verdict: Verdict) -> None:
        if self.verdict is None and verdict.outcome in ("completed", "failed"):
            self._safety.finish()
            self._samples.finish()
        self.decide(verdict)

    def closest(self) -> tuple[Wait, ...]:
        """How close the run came to its bounds: the closest wait of each rule, waits under way included."""
        return self.liveness.closest()

    # --- for the oracles -------------------------------------------------------------------------------

    def concerns(self, pipeline: str) -> bool:
        """Whether a pipeline is one of this run's."""
        return self._own is None or pipeline in self._own

    def breach(self, rule: str, detail: str, at_ns: int | None = None) -> None:
        """Record a violation, of now unless `at_ns` says when."""
        if len(self.violations) >= VIOLATIONS_KEPT:
            self.not_kept += 1
            return
        self.violations.append(Violation(rule, self.observed.now if at_ns is None else at_ns, detail))

    def decide(self, verdict: Verdict, at_ns: int | None = None) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.verdict_at_ns = self.observed.now if at_ns is None else at_ns
