"""Second pass of planning: rollout engines for everyone with demand, on what the requests left.

Within a region (`core.regions`) shares are computed once (`core.shares`), then engines change hands in this order:

1. pipelines without an engine, longest hungry first, up to their share: from GPUs that are free or only held by a
   pipeline without demand, else from donors above their share, else by taking a turn;
2. GPUs still to be given away, to whoever is furthest below its share, so that none stays idle;
3. if a donor is a whole engine above its exact share and a receiver a whole one below, one engine each; then again 2.

The third step needs a whole engine on both sides because shares drift with every completed trajectory: rounding alone
must not make engines change hands. A donor's engine is never taken within its residence, and donors with the largest
part of their batches still to come give first.
"""

import heapq

from core.demand import demand
from core.draft import Draft
from core.ledger import Engine, Lease, PipelineBook, Request
from core.regions import GpuClass
from core.shares import Claim, balance, round_off
from core.turns import NEARLY_FINISHED, stay, turn_end

WHOLE = 1 - 1e-6
"""One engine, less what a sum of floats may lack."""


FIRST_ENGINE = (
    ("idle", "idle GPUs"),
    ("need", "it has none; the donor is above its share"),
    ("turn", "its turn: it has none and has waited longest"),
)
"""How a pipeline without an engine may get one, what hurts least first."""


class Wish:
    """One pipeline with demand, in this region."""

    __slots__ = ("book", "tp", "claim", "exact", "target", "most", "fresh", "left", "stays")

    def __init__(self, book: PipelineBook, wanted: int, base: int, up: int) -> None:
        self.book = book
        self.tp = book.tp
        self.most = max(up, min(wanted, book.usable))
        """An engine more than there are trajectories left would have nothing to do."""
        self.claim = Claim(wanted * self.tp, self.tp, self.most * self.tp, base)
        self.exact = 0.0
        self.target = 0
        """Whole engines; known once `Survey.round_off` was asked for them."""
        self.left = book.left_fraction
        self.stays = stay(book)
        self.fresh = up == 0
        """Had no engine when planning began, or gave its last one away: it may be filled up to its share at donors'
        expense."""


Cost = tuple[int, int, int, float, int]
"""Of a bundle: pipelines left without an engine, engines with demand to shrink, engines without, minus the donors'
work left, dp_rank."""


class Market:
    """The bundles of GPUs that could change hands, cheapest first, one heap for each layout of engines."""

    def __init__(self, draft: Draft, survey: "Survey", layout_of: dict[PipelineBook, int]) -> None:
        self._layout_of = layout_of
        self.draft = draft
        self.survey = survey
        self.wishes = survey.wishes
        self._heaps: dict[tuple[int, str], list[Cost]] = {}
        self._shown: dict[int, PipelineBook] = {}
        """A pipeline of each layout that was priced; any will do to name its bundles."""

    def best(self, book: PipelineBook, mode: str) -> Engine | None:
        """The cheapest engine of `book` whose GPUs can be had. Mode `idle`: from nobody with demand; `need`: also from
        donors above their share; `spare`: from those of them that are not nearly finished; `rich`: from those a whole
        engine above it; `turn`: from whoever had its turn."""
        spare = mode == "spare"
        mode = "need" if spare else mode
        key = (self._layout_of[book], mode)
        heap = self._heaps.get(key)
        if heap is None:
            heap = self._heaps[key] = self._price_all(book, mode)
            self._shown.setdefault(key[0], book)
        kept: list[Cost] = []
        found = None
        while heap and found is None:
            cost = heapq.heappop(heap)
            engine = book.engines[cost[4]]
            now = self._price(engine, mode)
            if now is None:
                continue
            if now != cost:
                heapq.heappush(heap, now)
            elif engine.disabled or (spare and cost[1] and -cost[3] < NEARLY_FINISHED):
                kept.append(cost)  # of no use to this pipeline; others share the heap
            else:
                found = engine
        for cost in kept:
            heapq.heappush(heap, cost)
        return found

    def sold(self, engine: Engine) -> None:
        """An engine was expanded. If one that lay otherwise made way, its other GPUs are on offer now: price again what
        lies on them. (What else changed only got dearer, and is looked at again when it comes up.)"""
        left = [gpu for victim in self.draft.gone_last for gpu in victim.gpus if gpu not in engine.gpus]
        if not left:
            return
        self.survey.idle.extend(left)
        for (layout, mode), heap in self._heaps.items():
            for cost in self._price_on(left, self._shown[layout], mode):
                heapq.heappush(heap, cost)

    def _price_all(self, book: PipelineBook, mode: str) -> list[Cost]:
        survey = self.survey
        gpus = list(survey.idle)
        if mode != "idle":
            for donor, held in survey.busy.items():
                if mode != "rich" or self.draft.up(donor) - self.wishes[donor].exact >= WHOLE:
                    gpus += held
        costs = self._price_on(gpus, book, mode)
        heapq.heapify(costs)
        return costs

    def _price_on(self, gpus: list[int], book: PipelineBook, mode: str) -> list[Cost]:
        """The engines of `book` (or of one of the same layout) that can be had and lie on some of these GPUs."""
        rank_at, engines = book.rank_at, book.engines
        ranks = {rank_at[gpu]: None for gpu in gpus if gpu in rank_at}
        return [cost for rank in ranks if (cost := self._price(engines[rank], mode)) is not None]

    def _price(self, engine: Engine, mode: str) -> Cost | None:
        """What it costs to bring this engine (or one of the same layout) up; None: not to be had this way."""
        if len(engine.gpus) > 1:
            return self._price_wide(engine, mode)
        gpu = engine.gpus[0]
        victim = self.draft.tenants[gpu]
        if victim is None:
            return (0, 0, 0, 0.0, engine.dp_rank) if self.draft.ledger.gpus[gpu].usable else None
        if not isinstance(victim, Engine):
            return None
        wish = self.wishes.get(victim.book)
        if wish is None:
            return None if self._foreign(victim) else (0, 0, 1, 0.0, engine.dp_rank)
        remaining = self._gives(victim, wish, 1, mode)
        return None if remaining < 0 else (int(remaining == 0), 1, 0, -wish.left, engine.dp_rank)

    def _price_wide(self, engine: Engine, mode: str) -> Cost | None:
        """The same for an engine of several GPUs, which may have to make several others go."""
        draft, gpus, tenants = self.draft, self.draft.ledger.gpus, self.draft.tenants
        victims: dict[Engine | Lease | Request, None] = {}
        for gpu in engine.gpus:
            tenant = tenants[gpu]
            if tenant is not None:
                victims[tenant] = None
            elif not gpus[gpu].usable:
                return None
        left = 0.0
        taken: dict[PipelineBook, int] = {}
        for victim in victims:
            if type(victim) is not Engine:
                return None
            wish = self.wishes.get(victim.book)
            if wish is None:
                if self._foreign(victim):
                    return None
                continue
            taken[wish.book] = count = taken.get(wish.book, 0) + 1
            if self._gives(victim, wish, count, mode) < 0:
                return None
            if wish.left > left:
                left = wish.left
        emptied = sum([draft.up(book) == lost for book, lost in taken.items()])
        busy = sum(taken.values())
        return (emptied, busy, len(victims) - busy, -left, engine.dp_rank)

    def _foreign(self, engine: Engine) -> bool:
        """Its pipeline has demand but no wish here, so its share is not known."""
        return demand(engine.book, self.draft.ledger.policy) > 0

    def _gives(self, engine: Engine, wish: Wish, taken: int, mode: str) -> int:
        """Engines its pipeline keeps if `taken` of them, this one the last, are given up; -1: it may not be."""
        if mode == "idle":
            return -1
        draft = self.draft
        remaining = draft.up(wish.book) - taken
        if mode != "turn":
            if remaining < wish.target or (mode == "rich" and remaining + 1 - wish.exact < WHOLE):
                return -1
            if mode == "rich" and wish.left < NEARLY_FINISHED:
                return -1
        only = not engine.completed and (remaining == 0 or draft.bears_turn(engine))
        end = turn_end(engine, only, wish.stays)
        if end is None or end > draft.ledger.now:
            draft.review(end)
            return -1
        return -1 if engine.gpus[0] in draft.given else remaining  # it was to sleep, and may stay by this very plan


def share_rollouts(
    draft: Draft, demanders: list[PipelineBook], classes: list[GpuClass], layout_of: dict[PipelineBook, int]
) -> bool:
    """Decide about every engine of the region; the answers are in `draft.plan`. False: somebody has found no engine,
    and then others were given more of them, so that the same question may have another answer now."""
    for book in demanders:
        draft.plan.unmet.pop(book, None)
    if not demanders or not classes:
        return True
    survey = Survey(draft, demanders, classes)
    market = Market(draft, survey, layout_of)
    everyone = list(survey.wishes.values())
    hungry = [wish for wish in everyone if wish.fresh]
    if hungry:
        survey.round_off()
        hungry = _first_engines(draft, market, hungry)
    for wish in hungry:
        while 0 < draft.up(wish.book) < wish.target:
            if not (
                _take(draft, market, wish, "idle", "idle GPUs") or _take(draft, market, wish, "spare", "its share")
            ):
                break
    without = len(draft.plan.expands)
    _use_idle(draft, market, everyone)
    before = len(draft.plan.expands)
    _level(draft, market, everyone)
    if len(draft.plan.expands) > before:  # who gave may find a use for what was idle
        _use_idle(draft, market, everyone)
    settled = True
    for wish in everyone:
        if not draft.up(wish.book):  # it waits for somebody else's turn to end, or to be allowed to take one
            draft.plan.unmet[wish.book] = None
            settled = len(draft.plan.expands) == without
    return settled


class Survey:
    """What there is to share out in a region, and everyone's exact share of it."""

    def __init__(self, draft: Draft, demanders: list[PipelineBook], classes: list[GpuClass]) -> None:
        self.idle: list[int] = []
        """GPUs nobody with demand has."""
        self.busy: dict[PipelineBook, list[int]] = {book: [] for book in demanders}
        """GPUs in the region that the engines of each pipeline with demand have."""
        available = [self._count(draft, cls) for cls in classes]
        self.wishes = {book: self._wish(draft, book) for book in demanders}
        self._total = sum(available) + sum([wish.claim.base for wish in self.wishes.values()])
        self._share_out(available, classes)

    def _count(self, draft: Draft, cls: GpuClass) -> int:
        """GPUs of a class that rollouts may use."""
        gpus, tenants, busy = draft.ledger.gpus, draft.tenants, self.busy
        count = 0
        for gpu in cls.gpus:
            tenant = tenants[gpu]
            if type(tenant) is Engine:
                busy.get(tenant.book, self.idle).append(gpu)
                count += 1
            elif tenant is None and gpus[gpu].usable:
                self.idle.append(gpu)
                count += 1
        return count

    def _wish(self, draft: Draft, book: PipelineBook) -> Wish:
        up = draft.up(book)
        outside = max(0, up * book.tp - len(self.busy[book]))
        return Wish(book, demand(book, draft.ledger.policy), outside, up)

    def _share_out(self, available: list[int], classes: list[GpuClass]) -> None:
        wishes = self.wishes
        balance(
            [
                (count, [wishes[book].claim for book in cls.books if book in wishes])
                for count, cls in zip(available, classes, strict=True)
            ]
        )
        for wish in wishes.values():
            wish.exact = wish.claim.share / wish.tp

    def round_off(self) -> None:
        """Set everyone's `target`: only who may give or get something needs to know it."""
        wishes = self.wishes.values()
        targets = round_off([(wish.exact, wish.tp, wish.most) for wish in wishes], self._total)
        for wish, target in zip(wishes, targets, strict=True):
            wish.target = target


def _first_engines(draft: Draft, market: Market, hungry: list[Wish]) -> list[Wish]:
    """One engine for each before a second for anyone, longest hungry first. Returns them in the order of their turn.

    Whoever gives its last engine to somebody's turn stands in line at once, and may find a donor or idle GPUs where the
    other could not use them; but for a turn of its own it has to wait (`core.turns`).
    """
    queue = [(wish.book.hungry_since, wish.book.number, wish) for wish in hungry]
    heapq.heapify(queue)
    seen = []
    while queue:
        _, _, wish = heapq.heappop(queue)
        seen.append(wish)
        modes = FIRST_ENGINE[:-1] if draft.rests(wish.book) else FIRST_ENGINE
        if not any(_take(draft, market, wish, mode, why) for mode, why in modes):
            continue
        for victim in draft.gone_last:
            loser = market.wishes.get(victim.book)
            if loser is not None and not loser.fresh and not draft.up(loser.book):
                loser.fresh = True
                heapq.heappush(queue, (loser.book.hungry_since, loser.book.number, loser))
    return seen


def _take(draft: Draft, market: Market, wish: Wish, mode: str, why: str) -> bool:
    if draft.up(wish.book) >= wish.most:
        return False
    engine = market.best(wish.book, mode)
    if engine is None:
        return False
    draft.expand(engine, why)
    market.sold(engine)
    return True


def _use_idle(draft: Draft, market: Market, wishes: list[Wish]) -> None:
    """No GPU stays idle that somebody with demand could use: to the one furthest below its share, again and again."""
    if not market.survey.idle:
        return
    queue = [(_surplus(draft, wish), i) for i, wish in enumerate(wishes)]
    heapq.heapify(queue)
    while queue:
        _, i = heapq.heappop(queue)
        if _take(draft, market, wishes[i], "idle", "the GPUs would stay idle"):
            heapq.heappush(queue, (_surplus(draft, wishes[i]), i))


def _surplus(draft: Draft, wish: Wish) -> float:
    """Engines above its exact share, to a millionth (negative: below)."""
    return round(draft.up(wish.book) - wish.exact, 6)


def _level(draft: Draft, market: Market, wishes: list[Wish]) -> None:
    """From the rich to the poor, as long as both are off by a whole engine."""
    poor = [(surplus, i) for i, wish in enumerate(wishes) if -(surplus := _surplus(draft, wish)) >= WHOLE]
    if poor:
        market.survey.round_off()
        heapq.heapify(poor)
    while poor:
        _, i = heapq.heappop(poor)
        wish = wishes[i]
        if _take(draft, market, wish, "rich", "it is a whole engine below its share, the donor one above"):
            surplus = _surplus(draft, wish)
            if -surplus >= WHOLE:
                heapq.heappush(poor, (surplus, i))
        else:
            draft.plan.unmet[wish.book] = None
