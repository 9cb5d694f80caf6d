"""The scheduler core: what to do with the GPUs, decided without I/O."""
