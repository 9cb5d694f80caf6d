"""The real backend: Ray actors, Megatron-Core trainers and inference engines, on CPU or on GPUs."""
