"""Reads models as Hugging Face publishes them: config.json, safetensors and GGUF headers.

Files are read as data: no code of a repository is imported and nothing is fetched.
"""

from kvexp.hf.reader import read_model
from kvexp.hf.writer import config_json

__all__ = ["config_json", "read_model"]
