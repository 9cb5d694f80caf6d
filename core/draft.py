"""A plan, and the draft it is made in: what the two passes of the planner share.

The draft is the ledger as it will be, seen through the decisions taken so far; nothing here changes the ledger.
"""

from core.errors import InvariantBroken
from core.ledger import Engine, Lease, Ledger, PipelineBook, Request


class Plan:
    """What should change. Lists are in order of decision; every entry says why in one clause."""

    __slots__ = ("grants", "expands", "shrinks", "revoked", "waits", "review_at", "unmet")

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

    @property
    def empty(self) -> bool:
        return not (self.grants or self.expands or self.shrinks or self.revoked)


class Draft:
    """A plan in the making: the ledger as it will be, seen through the changes decided so far."""

    __slots__ = ("ledger", "plan", "given", "gone", "gone_last", "held", "touched")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.plan = Plan()
        self.given: dict[int, Engine | Request] = {}
        """GPUs promised by this plan."""
        self.gone: dict[Engine, None] = {}
        """Engines that lose their GPUs, or the promise of them, by this plan."""
        self.gone_last: list[Engine] = []
        """Of these, the ones of the last decision."""
        self.held: dict[PipelineBook, int] = {}
        """Engines up or promised, where this plan changes the number."""
        self.touched: dict[PipelineBook, None] = {}
        """Pipelines that this plan took something from."""

    def tenant(self, gpu: int) -> Engine | Lease | Request | None:
        if gpu in self.given:
            return self.given[gpu]
        tenant = self.ledger.gpus[gpu].tenant
        return None if tenant is None or tenant in self.gone else tenant

    def up(self, book: PipelineBook) -> int:
        """Engines the pipeline has, or is promised."""
        held = self.held.get(book)
        return len(book.up) if held is None else held

    def bears_turn(self, engine: Engine) -> bool:
        """Whether the turn of a pipeline rests on this engine: none of its engines has completed anything, and this one
        has served for longest; or none serves yet, and this one was promised first. So an engine that is only on its
        way up never takes the turn from one that serves."""
        mine = (engine.routable_since, engine.dp_rank)
        first = True
        for other in engine.book.up.values():
            if other is engine:
                first = False  # whoever comes now was promised later
            elif other in self.gone:
                continue
            elif other.routable_since >= 0:
                if other.completed or mine[0] < 0 or (other.routable_since, other.dp_rank) < mine:
                    return False
            elif first and mine[0] < 0:
                return False
        return not engine.completed

    def evict(self, gpus: tuple[int, ...], why: str) -> None:
        """Shrink every engine on these GPUs (or take its promise back)."""
        self.gone_last = []
        for gpu in gpus:
            tenant = self.tenant(gpu)
            if tenant is None:
                continue
            if gpu in self.given or not isinstance(tenant, Engine):
                raise InvariantBroken(f"a plan takes GPU {gpu} from {tenant}, which it may not ({why})")
            self.gone[tenant] = None
            self.gone_last.append(tenant)
            self.held[tenant.book] = self.up(tenant.book) - 1
            self.touched[tenant.book] = None
            (self.plan.revoked if tenant in self.ledger.promised else self.plan.shrinks).append((tenant, why))

    def grant(self, request: Request, why: str) -> None:
        self.evict(request.gpus, f"for {request}")
        for gpu in request.gpus:
            self.given[gpu] = request
        self.plan.grants.append((request, why))

    def expand(self, engine: Engine, why: str) -> None:
        self.evict(engine.gpus, f"for {engine.id}")
        for gpu in engine.gpus:
            self.given[gpu] = engine
        self.held[engine.book] = self.up(engine.book) + 1
        self.plan.expands.append((engine, why))

    def review(self, at: int | None) -> None:
        if at is not None and at > self.ledger.now and (self.plan.review_at is None or at < self.plan.review_at):
            self.plan.review_at = at
