"""The line that starts SGLang with the values of a deployment."""

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvexp.contract import Deployment, KvDtype
from kvexp_sglang import fraction, lora, speculation, states

if TYPE_CHECKING:
    from kvexp_sglang.engine import Sglang

MOST_REQUESTS = 4096
"""Requests at once where no number is given."""

CACHE_DTYPES = {
    KvDtype.bf16: "bf16",
    KvDtype.fp8: "fp8_e4m3",
    KvDtype.fp8_e4m3: "fp8_e4m3",
    KvDtype.fp8_e5m2: "fp8_e5m2",
    KvDtype.nvfp4: "fp4_e2m1",
}


def command(deployment: Deployment, engine: "Sglang") -> Iterator[str]:
    """The words of the line."""
    yield f"python -m sglang.launch_server --model-path {shlex.quote(deployment.model.checkpoint)}"
    yield f"--mem-fraction-static {deployment.util:g} --page-size {deployment.block_size}"
    yield f"--context-length {deployment.max_model_len}"
    yield f"--chunked-prefill-size {deployment.max_num_batched_tokens}"
    yield f"--tp-size {deployment.tp} --pp-size {deployment.pp}"
    if deployment.dp > 1:
        yield f"--dp-size {deployment.dp}"
    yield from _formats(deployment)
    if deployment.max_num_seqs != MOST_REQUESTS:
        yield f"--max-running-requests {deployment.max_num_seqs}"
    if deployment.enforce_eager:
        yield "--disable-cuda-graph"
    release = fraction.release_of(engine.version)
    yield from _options(engine, release)
    yield from speculation.flags(deployment, release, engine.num_draft_layers)
    yield from lora.flags(deployment, engine.lora_target_modules)


def _formats(deployment: Deployment) -> Iterator[str]:
    if deployment.kv_dtype.name != deployment.dtype.name:
        yield f"--kv-cache-dtype {CACHE_DTYPES[deployment.kv_dtype]}"
    if deployment.dtype is not deployment.model.torch_dtype:
        yield f"--dtype {deployment.dtype.value}"
    if deployment.quantization is not None and deployment.model.quantization_config is None:
        yield f"--quantization {deployment.quantization.value}"


def _options(engine: "Sglang", release: tuple[int, ...]) -> Iterator[str]:
    if engine.max_total_tokens is not None:
        yield f"--max-total-tokens {engine.max_total_tokens}"
    if engine.disable_radix_cache:
        yield "--disable-radix-cache"
    if engine.max_mamba_cache_size is not None:
        yield f"--max-mamba-cache-size {engine.max_mamba_cache_size}"
    if engine.mamba_radix_cache_strategy != states.AUTO:
        yield f"{states.flag_of(release)} {shlex.quote(engine.mamba_radix_cache_strategy)}"
    if engine.disable_overlap_schedule:
        yield "--disable-overlap-schedule"
