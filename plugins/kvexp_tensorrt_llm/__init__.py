"""TensorRT-LLM: a share of what is left after everything else, the largest forward included."""

from kvexp_tensorrt_llm.engine import TensorrtLlm

__all__ = ["TensorrtLlm"]
