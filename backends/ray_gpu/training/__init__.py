"""Training one pipeline's policy with Megatron-Core: one `trainer.Trainer` is one rank of its trainer group.

Importing this package loads nothing heavy. `records` and `grpo` are safe anywhere; every other module imports torch
or Megatron at its top and belongs into a worker process.
"""
