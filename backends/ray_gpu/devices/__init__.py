"""What the workers run on: slots with a memory budget on CPU, cards seen through NVML on GPUs."""
