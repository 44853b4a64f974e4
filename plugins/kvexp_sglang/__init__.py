"""SGLang: a share of what is free before the weights load, no forward before the pool."""

from kvexp_sglang.engine import Sglang

__all__ = ["Sglang"]
