"""Which pipelines meet on which GPUs: the static half of planning, cached between registrations.

GPUs on which exactly the same engines' pipelines are mapped are alike, so the planner shares out *classes* of GPUs
instead of single ones. A plan concerns a *region*: the classes that some pipeline with a changed wish can use. In a
cluster where everything is mapped to everything that is the whole cluster and one class; in a patchwork it is a
neighbourhood, and a plan costs what changed, not what exists.
"""

from collections.abc import Collection, Sequence
from operator import attrgetter

from core.ledger import Engine, Ledger, PipelineBook

_NUMBER = attrgetter("number")


class GpuClass:
    """GPUs that the same pipelines can roll out on."""

    __slots__ = ("number", "gpus", "books", "beside")

    def __init__(self, number: int, books: tuple[PipelineBook, ...]) -> None:
        self.number = number
        self.gpus: list[int] = []
        self.books = books
        self.beside: dict[GpuClass, None] = {}
        """Other classes, where some engine lies on GPUs of both: it can be had only if both are looked at."""


class Regions:
    """The classes of a ledger; rebuild when `Ledger.mapping_generation` has moved."""

    def __init__(self, ledger: Ledger) -> None:
        self.generation = ledger.mapping_generation
        self.class_of: list[GpuClass | None] = [None] * len(ledger.gpus)
        self.classes_of: dict[PipelineBook, list[GpuClass]] = {}
        self.layout_of: dict[PipelineBook, int] = {}
        """Pipelines with the same engines on the same GPUs have the same number."""
        on: list[list[int]] = [[] for _ in ledger.gpus]
        books = [book for book in ledger.books.values() if book.alive]
        layouts: dict[tuple[tuple[int, ...], int], int] = {}
        for index, book in enumerate(books):
            self.classes_of[book] = []
            infer = book.spec.infer
            self.layout_of[book] = layouts.setdefault((infer.gpus, infer.tp), len(layouts))
            for gpu in book.rank_at:
                on[gpu].append(index)
        classes: dict[tuple[int, ...], GpuClass] = {}
        for gpu, indices in enumerate(on):
            if not indices:
                continue
            key = tuple(indices)
            found = classes.get(key)
            if found is None:
                found = classes[key] = GpuClass(len(classes), tuple(books[i] for i in indices))
                for book in found.books:
                    self.classes_of[book].append(found)
            found.gpus.append(gpu)
            self.class_of[gpu] = found
        self.everywhere = list(classes.values())
        self._split = any([self._join(engine) for book in books if book.tp > 1 for engine in book.engines])
        """Whether any engine lies on GPUs of more than one class."""

    def _join(self, engine: Engine) -> bool:
        class_of = self.class_of
        touched = dict.fromkeys([class_of[gpu] for gpu in engine.gpus])
        if len(touched) == 1:
            return False
        for cls in touched:
            cls.beside.update(touched)
        return True

    def around(self, books: Sequence[PipelineBook], gpus: Collection[int]) -> list[GpuClass]:
        """The classes that these pipelines can use or these GPUs belong to, with those beside them, by number."""
        if len(books) == 1 and not (gpus or self._split):
            return self.classes_of.get(books[0], [])
        class_of = self.class_of
        found = {cls for gpu in gpus if (cls := class_of[gpu]) is not None}
        for book in books:
            found.update(self.classes_of.get(book, ()))
        if self._split:
            found = found.union(*[cls.beside for cls in sorted(found, key=_NUMBER)])
        return sorted(found, key=_NUMBER)
