"""What a tenant brings to a GPU, in bytes: the declared side of S2 and of admission."""

from collections.abc import Iterable

from core.ledger import Engine, Lease, Ledger, PipelineBook, Request
from core.model import PipelineSpec, Priority, Role


def active_need(spec: PipelineSpec, role: Role) -> int:
    """What waking one process of this role adds to its residue."""
    active = spec.memory.engine if role is Role.ACTOR_INFER else spec.memory.train
    return max(0, active - spec.memory.residue)


def largest_need(spec: PipelineSpec, gpu: int) -> int:
    """The most that an initialised pipeline may add to this GPU at one time."""
    return max((active_need(spec, group.role) for group in spec.groups if gpu in group.gpus), default=0)


def tenant_need(tenant: Engine | Lease | Request) -> int:
    """Bytes that must be free on each of its GPUs before this tenant may start, margin not included."""
    if isinstance(tenant, Engine):
        return active_need(tenant.book.spec, Role.ACTOR_INFER)
    if tenant.priority is Priority.INITIALIZATION:
        return tenant.book.spec.memory.init_peak
    return active_need(tenant.book.spec, tenant.role)


def expected_residue(books: Iterable[PipelineBook], gpu: int) -> int:
    """What all initialised pipelines together should keep on a GPU while nobody uses it."""
    return sum([book.kept[gpu] for book in books])


def declare_needs(ledger: Ledger, book: PipelineBook) -> None:
    """Set what must be seen free on the GPUs of a pipeline that became ready, or went."""
    for gpu in book.spec.union:
        needs = [largest_need(other.spec, gpu) for other in ledger.residents(gpu)]
        ledger.need[gpu] = max(needs, default=0) + ledger.cluster.memory_margin
