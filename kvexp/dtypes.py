"""Element types by the short names used on the command line."""

from enum import Enum


class DType(Enum):
    """Compute dtype of a model; the value is torch's name. `auto` is the checkpoint's own."""

    auto = "auto"
    bf16 = "bfloat16"
    fp16 = "float16"
    fp32 = "float32"

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return {"bfloat16": 2, "float16": 2, "float32": 4}[self.value]


class KvDtype(Enum):
    """Storage dtype of the KV cache; the value is vLLM's `--kv-cache-dtype` name.

    `auto` is the compute dtype, or the checkpoint's own KV scheme where it has one.
    """

    auto = "auto"
    bf16 = "bfloat16"
    fp16 = "float16"
    fp32 = "float32"
    fp8 = "fp8"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"
    fp8_ds_mla = "fp8_ds_mla"
    int8_per_token_head = "int8_per_token_head"
    fp8_per_token_head = "fp8_per_token_head"
    int4_per_token_head = "int4_per_token_head"
    nvfp4 = "nvfp4"
    turboquant_k8v4 = "turboquant_k8v4"
    turboquant_4bit_nc = "turboquant_4bit_nc"
    turboquant_k3v4_nc = "turboquant_k3v4_nc"
    turboquant_3bit_nc = "turboquant_3bit_nc"

    @property
    def is_fp8(self) -> bool:
        """True for fp8 with one scale a tensor, and DeepSeek's sparse layout of it."""
        return self in (KvDtype.fp8, KvDtype.fp8_e4m3, KvDtype.fp8_e5m2, KvDtype.fp8_ds_mla)

    @property
    def is_turboquant(self) -> bool:
        """True for keys and values packed into one slot."""
        return self.name.startswith("turboquant_")


class Quantization(Enum):
    """How weights are stored; never decides the KV dtype.

    fp8 is applied while loading where the checkpoint is not quantised. w8a8 and w4a16 are
    compressed-tensors' int8 and int4, bitsandbytes is NF4, the others are formats of that name.
    """

    fp8 = "fp8"
    w8a8 = "w8a8"
    w4a16 = "w4a16"
    awq = "awq"
    gptq = "gptq"
    bitsandbytes = "bitsandbytes"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"
