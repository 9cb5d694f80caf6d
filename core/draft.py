"""A plan, and the draft it is made in: what the two passes of the planner share.

The draft is the ledger as it will be, seen through the decisions taken so far; nothing here changes the ledger.
"""

from core.demand import demand
from core.errors import InvariantBroken
from core.ledger import Engine, Lease, Ledger, PipelineBook, Request
from core.turns import rests_until

Tenant = Engine | Lease | Request | None


class Plan:
    """What should change. Lists are in order of decision; every entry says why in one clause."""

    __slots__ = ("grants", "expands", "shrinks", "revoked", "waits", "review_at", "unmet", "gave_way")

    def __init__(self) -> None:
        self.grants: list[tuple[Request, str]] = []
        """Requests whose whole mapping is promised from now on."""
        self.expands: list[tuple[Engine, str]] = []
        self.shrinks: list[tuple[Engine, str]] = []
        self.revoked: list[tuple[Engine, str]] = []
        """Engines that were promised GPUs and had not started to wake: the promise is taken back."""
        self.waits: list[tuple[Request, str]] = []
        """Requests that stay in the queue."""
        self.review_at: int | None = None
        """When time alone (a residence, a turn) will make another plan possible."""
        self.unmet: dict[PipelineBook, None] = {}
        """Pipelines that wait for somebody else's turn or residence to end."""
        self.gave_way: dict[PipelineBook, None] = {}
        """Pipelines with demand that lose their last engine to other rollouts."""

    @property
    def empty(self) -> bool:
        return not (self.grants or self.expands or self.shrinks or self.revoked)


class Tenants(dict[int, Tenant]):
    """Whose each GPU is after the decisions so far (None: nobody's), read from the ledger when first asked for."""

    def __init__(self, ledger: Ledger) -> None:
        self._gpus = ledger.gpus

    def __missing__(self, gpu: int) -> Tenant:
        tenant = self[gpu] = self._gpus[gpu].tenant
        return tenant


class Turn:
    """On which of its engines a pipeline's turn rests: none of them has completed anything, and this one has served for
    longest; or none serves yet, and this one was promised first. So an engine that is only on its way up never takes
    the turn from one that serves. Engines that the plan takes away are passed over; all questions and losses of one
    plan together cost one sort."""

    __slots__ = ("_coming", "_completed", "_serving")

    def __init__(self, book: PipelineBook, gone: dict[Engine, None]) -> None:
        up = [engine for engine in book.up.values() if engine not in gone]
        serving = [engine for engine in up if engine.routable_since >= 0]
        self._completed = sum(engine.completed > 0 for engine in serving)
        self._serving = sorted(serving, key=lambda engine: (engine.routable_since, engine.dp_rank), reverse=True)
        self._coming = [engine for engine in reversed(up) if engine.routable_since < 0]

    def bearer(self, gone: dict[Engine, None]) -> Engine | None:
        """None: some engine has completed something."""
        if self._completed:
            return None
        for engines in (self._serving, self._coming):
            while engines and engines[-1] in gone:
                engines.pop()
            if engines:
                return engines[-1]
        return None

    def lost(self, engine: Engine) -> None:
        self._completed -= engine.routable_since >= 0 and engine.completed > 0


class Draft:
    """A plan in the making: the ledger as it will be, seen through the changes decided so far."""

    __slots__ = ("ledger", "plan", "tenants", "given", "gone", "gone_last", "held", "touched", "_turns")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.plan = Plan()
        self.tenants = Tenants(ledger)
        self.given: dict[int, Engine | Request] = {}
        """GPUs promised by this plan."""
        self.gone: dict[Engine, None] = {}
        """Engines that lose their GPUs, or the promise of them, by this plan."""
        self.gone_last: list[Engine] = []
        """Of these, the ones of the last decision."""
        self.held: dict[PipelineBook, int] = {}
        """Engines up or promised, where this plan changes the number."""
        self.touched: dict[PipelineBook, None] = {}
        """Pipelines that this plan gave an engine to, or took one from."""
        self._turns: dict[PipelineBook, Turn] = {}

    def tenant(self, gpu: int) -> Tenant:
        return self.tenants[gpu]

    def up(self, book: PipelineBook) -> int:
        """Engines the pipeline has, or is promised."""
        held = self.held.get(book)
        return len(book.up) if held is None else held

    def bears_turn(self, engine: Engine) -> bool:
        """Whether the turn of a pipeline rests on this engine."""
        turn = self._turns.get(engine.book)
        if turn is None:
            turn = self._turns[engine.book] = Turn(engine.book, self.gone)
        return not engine.completed and turn.bearer(self.gone) is engine

    def evict(self, gpus: tuple[int, ...], heir: Engine | Request) -> None:
        """Shrink every engine on these GPUs (or take its promise back), for `heir`."""
        self.gone_last = []
        for gpu in gpus:
            tenant = self.tenants[gpu]
            if tenant is None:
                continue
            why = f"for {heir.id if isinstance(heir, Engine) else heir}"
            if gpu in self.given or not isinstance(tenant, Engine):
                raise InvariantBroken(f"a plan takes GPU {gpu} from {tenant}, which it may not ({why})")
            self.gone[tenant] = None
            for freed in tenant.gpus:
                self.tenants[freed] = None
            self.gone_last.append(tenant)
            if tenant.book in self._turns:
                self._turns[tenant.book].lost(tenant)
            self.held[tenant.book] = left = self.up(tenant.book) - 1
            if not left and isinstance(heir, Engine) and demand(tenant.book, self.ledger.policy):
                self.plan.gave_way[tenant.book] = None
            self.touched[tenant.book] = None
            (self.plan.revoked if tenant in self.ledger.promised else self.plan.shrinks).append((tenant, why))

    def grant(self, request: Request, why: str) -> None:
        self.evict(request.gpus, request)
        for gpu in request.gpus:
            self.given[gpu] = self.tenants[gpu] = request
        self.plan.grants.append((request, why))

    def expand(self, engine: Engine, why: str) -> None:
        self.evict(engine.gpus, engine)
        for gpu in engine.gpus:
            self.given[gpu] = self.tenants[gpu] = engine
        self.held[engine.book] = self.up(engine.book) + 1
        self.touched[engine.book] = None
        self.plan.gave_way.pop(engine.book, None)
        self.plan.expands.append((engine, why))

    def rests(self, book: PipelineBook) -> bool:
        """Whether the pipeline may not take a turn, since it has just given way to one."""
        end = rests_until(book, self.ledger.now if book in self.plan.gave_way else book.gave_way_at)
        self.review(end)
        return end > self.ledger.now

    def review(self, at: int | None) -> None:
        if at is not None and at > self.ledger.now and (self.plan.review_at is None or at < self.plan.review_at):
            self.plan.review_at = at
