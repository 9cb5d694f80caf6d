"""What a worker on GPUs needs in its environment before it imports anything heavy, beside what every worker needs."""

import os
from pathlib import Path

from backends.ray_gpu.engines.sglang_setup import NCCL_BOTH_SIDES, NO_MULTICAST
from backends.ray_gpu.engines.sglang_setup import environment as engine_environment
from backends.ray_gpu.plan import CrewPlan

COMMON = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that CUDA counts cards as NVML does
    **NO_MULTICAST,
    **NCCL_BOTH_SIDES,
}
# A communicator holds 510 MiB at NCCL's own sizes, and a trainer of one rank has three that move nothing. Both sides of
# a broadcast of weights must have the same sizes, so an engine of one rank, which has nothing to move either, has these
# too where the trainer may broadcast to it.
SMALL_COMMUNICATORS = {"NCCL_MAX_NCHANNELS": "1", "NCCL_BUFFSIZE": str(1 << 20)}


def cuda_environment(plan: CrewPlan, name: str) -> dict[str, str]:
    """For the worker `name` of a pipeline."""
    small = SMALL_COMMUNICATORS if len(plan.train_gpus) == 1 else {}
    if name.startswith("engine-"):
        broadcasts = plan.job.spec.infer.tp == 1 and plan.transport in ("auto", "broadcast")
        return COMMON | engine_environment("cuda", str(kernels())) | (small if broadcasts else {})
    return COMMON | small


def kernels() -> Path:
    """Where compiled kernels are kept for all runs on this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnstile" / "kernels"
