"""What the control plane must know of a pipeline to start its workers, at first and again after a crash."""

import msgspec

from core.config import Job
from core.model import Record, Role


class CrewPlan(Record, frozen=True, kw_only=True):
    job: Job
    seed: int
    """Of the run; every random draw of the workers is keyed by it."""
    device: str = "cpu"
    verify_weights: bool = False
    """Compare every synced engine tensor by tensor with what was published."""
    transport: str = "auto"
    """How weights reach an engine: `cache`, `ipc`, `nccl` or `auto`."""
    caller_path: tuple[str, ...] = ()
    """Folders in which the driver looks for modules: where a reward function may live."""
    output: str = ""
    """Folder for checkpoints and samples; empty: none are kept."""

    @property
    def id(self) -> str:
        return self.job.spec.id

    @property
    def train_gpus(self) -> tuple[int, ...]:
        group = self.job.spec.group(Role.ACTOR_TRAIN)
        assert group is not None, f"{self.id} has no actor_train group"
        return group.gpus

    def renamed(self, name: str) -> "CrewPlan":
        """The same pipeline under another id."""
        spec = msgspec.structs.replace(self.job.spec, id=name)
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, spec=spec))
