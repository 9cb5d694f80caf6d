"""A trainer rank's process: one `training.trainer.Trainer`, commanded phase by phase by its pipeline.

Ranks of a group run each phase together. Onloading enters the memory it needs before it takes it; publishing writes a
version into the node's weight cache, from rank 0, and offers it to engines that can take it from the device, until the
trainer offloads (`lender`).
"""

import threading
from typing import Any

import msgspec

from backends.ray_gpu.checkpoints import Progress, as_extra, checkpoint_of
from backends.ray_gpu.places import models, trainer_name
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.weights.transports import Meeting
from backends.ray_gpu.workers.base import Worker
from backends.ray_gpu.workers.lender import Lender, Loan
from backends.ray_gpu.workers.memory import DeviceMemory
from core.errors import OperationFailed
from core.model import Role
from core.workload import settled


class TrainerWorker(Worker):
    """A threaded Ray actor; phases come one at a time."""

    def __init__(
        self,
        plan: CrewPlan,
        session: str,
        rank: int,
        meeting: tuple[str, int],
        budgets: dict[int, int],
        epoch: int,
        uuid: str,
        lends: bool,
    ) -> None:
        """`meeting`: address and port where the ranks meet. `uuid`: of the card that this rank is to run on; empty on a
        CPU. `lends`: some engine is where it can take weights from this rank's device."""
        super().__init__(plan, session, trainer_name(Role.ACTOR_TRAIN, rank), (plan.train_gpus[rank],))
        self._rank = rank
        self._meeting = meeting
        self._uuid = uuid
        self._epoch = epoch
        self._memory = DeviceMemory(plan, self.places, self.owner, self.gpus, budgets)
        self._trainer: Any = None
        self._old: list[list[float]] | None = None
        self._loaded = False
        self._lends = lends
        self._lender = Lender()
        self._building = threading.Lock()
        self._built = False

    def build(self) -> None:
        """Load the model and the optimizer; ends onloaded. Once: who asks again waits until it is done."""
        with self._building:
            if not self._built:
                self._build()
                self._built = True

    def _build(self) -> None:
        from backends.ray_gpu.models.resolve import resolve
        from backends.ray_gpu.training.records import TrainerConfig
        from backends.ray_gpu.training.trainer import Trainer

        if self.plan.device == "cuda":
            self._prove()
        workload = settled(self.job.workload, self.plan.device)
        group = self.job.spec.group(Role.ACTOR_TRAIN)
        assert group is not None
        self._trainer = Trainer(
            TrainerConfig(
                model=resolve(workload.model, models()).path, tp=group.tp, rank=self._rank, world_size=len(group.gpus),
                master_addr=self._meeting[0], master_port=self._meeting[1], device=self.plan.device,
                dtype=workload.dtype, seed=self.plan.seed, learning_rate=workload.learning_rate,
                adam_beta1=workload.adam_beta1, adam_beta2=workload.adam_beta2, weight_decay=workload.weight_decay,
                grad_clip=workload.grad_clip, clip_low=workload.clip_low, clip_high=workload.clip_high,
                kl_coef=workload.kl, temperature=workload.temperature, micro_batch_tokens=workload.micro_batch_tokens,
            )
        )  # fmt: skip
        self._trainer.build()
        if self.plan.resume:
            self._trainer.load(self.plan.resume)
        self._memory.hold("train", self._trainer.loaded_bytes())
        self._loaded = True

    def _prove(self) -> None:
        """This process sees the card it was meant for, and no other. Raises OperationFailed."""
        from backends.ray_gpu.devices.cuda_map import cuda_uuids

        found = cuda_uuids()
        if found != (self._uuid,):
            raise OperationFailed(f"{self.owner} was to see the card {self._uuid}, and sees {found or 'none'}")

    def phase(self, phase: str, epoch: int, version: int, rows: Any = None) -> dict[str, float]:
        """Run one phase; what it measured. Raises OperationFailed, OutOfMemory or StaleLease."""
        self.obeys(epoch)
        if self._trainer is None:
            raise OperationFailed(f"{self.owner} is not loaded")
        if not self._loaded and phase == "offload":
            return {}
        if not self._loaded and phase != "onload":
            raise OperationFailed(f"{self.owner} is offloaded and cannot {phase}")
        return getattr(self, f"_{phase}")(version, rows) or {}

    def _onload(self, version: int, rows: Any) -> None:
        if not self._loaded:
            self._memory.hold("train", self._trainer.loaded_bytes())
            self._trainer.onload()
            self._loaded = True

    def _offload(self, version: int, rows: Any) -> None:
        if self._lender.withdraw():
            self._memory.hold("lent", 0)
        self._trainer.offload()
        self._loaded = False
        self._memory.hold("train", self._trainer.resident_bytes())

    def _log_probs(self, version: int, rows: Any) -> None:
        """The trainer's own log-probabilities of the batch, which its training then starts from."""
        self._old = self._trainer.log_probs(rows)

    def _train(self, version: int, rows: Any) -> dict[str, float]:
        old, self._old = self._old, None
        if old is not None:
            rows = [msgspec.structs.replace(row, logprobs=tuple(own)) for row, own in zip(rows, old, strict=True)]
        return self._trainer.train(rows)

    def _publish(self, version: int, rows: Any) -> dict[str, float]:
        """`rows`: batches that this run has used so far."""
        figures = self._write_version(version)
        every = self.plan.checkpoint_every
        if every and version and version % every == 0:
            behind = self.plan.behind
            done = Progress(steps=behind.steps + version, batches=behind.batches + rows)
            self._trainer.save(str(checkpoint_of(self.plan.output, self.plan.id)), as_extra(done))
        return figures

    def _write_version(self, version: int) -> dict[str, float]:
        from backends.ray_gpu.weights.cache import WeightCache
        from backends.ray_gpu.weights.staged import Staging
        from backends.ray_gpu.weights.writer import WeightWriter

        if self._rank:
            for _ in self._trainer.export():
                raise AssertionError("only rank 0 is given tensors")
            return {}
        cache = WeightCache(self.places.memory, self.plan.id, self.job.spec.staleness + 2)
        cache.make_room()
        bucket_bytes = self.job.workload.bucket_bytes
        staging = Staging(bucket_bytes, lambda nbytes: self._memory.hold("lent", nbytes)) if self._lends else None
        with WeightWriter(self.places.memory, self.plan.id, version, bucket_bytes) as writer:
            for name, tensor in self._trainer.export(on_device=self._lends):
                writer.add(name, tensor)
                if staging is not None:
                    staging.add(tensor)
            manifest = writer.commit()
        cache.evict()
        if staging is not None:
            self._offer(manifest, staging)
        return {"published_bytes": float(manifest.nbytes), "cache_bytes": float(cache.nbytes)}

    def _offer(self, manifest: Any, staging: Any) -> None:
        buckets = staging.finish(manifest)
        if staging.refusal:
            self._lender.cannot(staging.refusal)
        else:
            self._lender.offer(manifest, buckets)

    # --- for engines, beside whatever phase runs (see `lender`) -------------------------------------------

    def lend(self, borrower: str, version: int, label: str | None, nccl: tuple[str, ...]) -> Loan:
        return self._lender.lend(borrower, version, label, nccl)

    def meet(self, borrower: str, meeting: bytes) -> None:
        self._lender.meet(borrower, msgspec.msgpack.decode(meeting, type=Meeting))

    def send(self, borrower: str) -> None:
        self._lender.send(borrower)

    def give_back(self, borrower: str, dead: bool = False) -> None:
        self._lender.give_back(borrower, dead=dead)
