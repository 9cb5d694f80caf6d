"""What the control plane must know of a pipeline to start its workers, at first and again after a crash."""

import msgspec

from backends.ray_gpu.checkpoints import Progress
from core.config import Job
from core.model import Record, Role


class CrewPlan(Record, frozen=True, kw_only=True):
    job: Job
    seed: int
    """Of the run; every random draw of the workers is keyed by it."""
    device: str = "cpu"
    transport: str = "auto"
    """How weights are to reach engines (`weights.choice.ASKED`)."""
    verify_weights: bool = False
    """Compare every synced engine tensor by tensor with what was published."""
    caller_path: tuple[str, ...] = ()
    """Folders in which the driver looks for modules: where a reward function may live."""
    output: str = ""
    """Folder for checkpoints; empty: none are kept."""
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0: none are made."""
    resume: str = ""
    """Folder of the checkpoint to go on from; empty: from the model."""
    behind: Progress = Progress()
    """What the pipeline had done in earlier runs."""

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
