"""Reads models as Hugging Face publishes them: config.json, safetensors and GGUF headers.

Files are read as data: no code of a repository is imported and nothing is fetched.
"""

from kvexp.hf.reader import read_model
from kvexp.hf.writer import WRITABLE, config_json, text_config

__all__ = ["WRITABLE", "config_json", "read_model", "text_config"]
