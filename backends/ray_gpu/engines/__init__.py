"""Inference engines: one interface (`base`), a transformers engine for the CPU, SGLang for GPUs."""
