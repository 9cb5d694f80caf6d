"""What must stand in a worker's environment before it imports anything heavy."""

from backends.ray_gpu.plan import CrewPlan

LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""For a group whose processes are all on one node: it listens where nobody else can reach it."""

COMMON = {
    # One worker is one rank; on a CPU all of them share the cores, and threads beyond that only wait for each other.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Nothing here is compiled; importing the compiler alone takes seconds of every worker's start.
    "TORCHDYNAMO_DISABLE": "1",
    # We choose each worker's GPUs ourselves; Ray is not to.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}


def environment(plan: CrewPlan, gpus: tuple[int, ...], name: str, *, one_node: bool) -> dict[str, str]:
    """For the worker `name` of a pipeline on these *physical* GPUs. `one_node`: its whole group is on one node."""
    found = COMMON | (LOOPBACK_ONLY if one_node else {})
    if plan.device == "cpu":
        return {**found, "CUDA_VISIBLE_DEVICES": ""}
    from backends.ray_gpu.workers.cuda_environment import cuda_environment

    return {**found, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **cuda_environment(plan, name)}
