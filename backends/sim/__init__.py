"""The simulator: a deterministic world of GPUs on a SimPy calendar."""
