"""From the name of a model to a local folder in Hugging Face's format, and its tokenizer.

1. Whoever needs weights gets a folder; nobody downstream knows where it came from.
2. What has to be made or converted is made once, beside its final place, and moved there whole: a folder that exists is
   complete, whoever else was making it at the same time.
3. torch and transformers are imported inside functions only: a driver resolves a local folder without either.
"""

from backends.ray_gpu.models.folder import ModelFolder
from backends.ray_gpu.models.resolve import resolve
from backends.ray_gpu.models.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ModelFolder", "Tokenizer", "load_tokenizer", "resolve"]
