"""vLLM: 0.26.0 to the byte where it was measured, other versions by their differences."""

from kvexp_vllm.engine import Vllm

__all__ = ["Vllm"]
