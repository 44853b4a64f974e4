"""One GPU through torch: what runs there, and what torch's allocator does meanwhile."""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvexp.errors import ProfilerUnavailable
from kvexp.gpu_lock import GpuLock
from kvexp.workload import check_device, driver_version

SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
)
"""Environment variables that change what is measured."""

_BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
_CHOICES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}

# Two layers of Llama-3-8B: the kernels that a real model's forward loads, in seconds and 5 GiB.
_MODEL = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_TOKENS = 8192


class CannotMeasure(RuntimeError):
    """A number cannot be had from this card with this software; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What torch's allocator did while something ran; sizes as asked for, in bytes, in order.

    `scratch` was freed before the end, `kept` lives on without being an output. `segments` are
    (address, bytes) taken from the driver.
    """

    scratch: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)


class Card:
    """The first visible GPU; nothing else is done in this process.

    `is_shared`: others compute on it, so that what is in use outside the allocator is not ours.
    """

    def __init__(self, torch: Any, lock: GpuLock, *, is_shared: bool = False) -> None:
        self.torch = torch
        self.is_shared = is_shared
        self._cuda = torch.cuda
        self._lock = lock
        lock.acquire()
        self._cuda.set_device(0)
        self._cuda.empty_cache()
        self.context_bytes = self.outside_bytes()
        self._model: Any = None
        version = torch.backends.cudnn.version()
        self.name = str(self._cuda.get_device_name(0))
        self.capability: tuple[int, int] = tuple(self._cuda.get_device_capability(0))
        self.torch_version = str(torch.__version__)
        self.software = (
            f"driver {driver_version() or 'unknown'}, CUDA {torch.version.cuda},"
            f" cuDNN {version or 'none'}, torch {self.torch_version}"
        )

    def outside_bytes(self) -> int:
        """In use on the card outside torch's allocator."""
        self._cuda.synchronize()
        free, total = self._cuda.mem_get_info(0)
        return int(total - free - self._cuda.memory_reserved(0))

    def allocated_bytes(self) -> int:
        """In use by tensors, rounded as the allocator rounds."""
        return int(self._cuda.memory_allocated(0))

    def empty(self, *shape: int, dtype: str) -> Any:
        """A tensor on the card; its values are anything."""
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device="cuda:0")

    def zeros(self, *shape: int, dtype: str) -> Any:
        """A tensor of zeros on the card."""
        return self.torch.zeros(shape, dtype=getattr(self.torch, dtype), device="cuda:0")

    def give_back(self) -> None:
        """Return to the driver what no tensor uses."""
        self._cuda.synchronize()
        self._cuda.empty_cache()

    def record(self, run: Callable[[], Iterable[Any]]) -> Recording:
        """Run something that gives its output tensors, and watch the allocator."""
        memory = self._cuda.memory
        memory._record_memory_history(enabled="all", context=None)
        try:
            start = len(memory._snapshot()["device_traces"][0])
            with self.torch.no_grad():
                outputs = list(run())
            self._cuda.synchronize()
            history = memory._snapshot()["device_traces"][0][start:]
        finally:
            memory._record_memory_history(enabled=None)
        return _recording(history, {out.untyped_storage().data_ptr() for out in outputs})

    def choose(self, shape: Sequence[int], dtype: str, allowed: Iterable[str]) -> str:
        """The attention backend that torch takes for causal attention of this shape."""
        q, k, v = (self.empty(*shape, dtype=dtype) for _ in range(3))
        with self.torch.no_grad(), self._only(allowed):
            number = self.torch._fused_sdp_choice(q, k, v, None, 0.0, True)
        if number not in _CHOICES:
            raise CannotMeasure(f"torch answers {number} for the attention of {tuple(shape)}")
        return _CHOICES[number]

    def attend(self, backend: str, q: Any, k: Any, v: Any) -> Any:
        """Causal attention by one backend."""
        with self._only([backend]):
            return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def load_model(self) -> Recording:
        """Construct a transformers model.

        Raises:
            CannotMeasure: transformers is not installed.
        """
        if importlib.util.find_spec("transformers") is None:
            raise CannotMeasure("transformers is not installed")
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

        config = AutoConfig.for_model("llama", **_MODEL)

        def construct() -> Iterable[Any]:
            with self.torch.device("cuda:0"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=self.torch.bfloat16, attn_implementation="sdpa"
                )
            self._model = model.eval().requires_grad_(False)
            gc.collect()
            return [*model.parameters(), *model.buffers()]

        return self.record(construct)

    @property
    def has_model(self) -> bool:
        """Whether `load_model` came to its end."""
        return self._model is not None

    def forward(self) -> Recording:
        """Run the model of `load_model` once."""
        tokens = self.zeros(1, _TOKENS, dtype="int64")

        def run() -> Iterable[Any]:
            return [self._model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits]

        return self.record(run)

    def drop_model(self) -> None:
        """Give the model's memory back."""
        self._model = None
        gc.collect()
        self.give_back()

    def close(self) -> None:
        """Let the next measurement use the card."""
        self._lock.release()

    def _only(self, backends: Iterable[str]) -> Any:
        attention = self.torch.nn.attention
        return attention.sdpa_kernel(
            [getattr(attention.SDPBackend, _BACKENDS[name]) for name in backends]
        )


def open_card() -> Card:
    """The GPU at hand.

    Raises:
        ProfilerUnavailable: torch, its CUDA or the GPU is missing, or a setting would change what
            is measured; the message says which.
    """
    changed = [name for name in SETTINGS if os.environ.get(name)]
    if changed:
        raise ProfilerUnavailable(
            f"{', '.join(changed)} is set, and a profile holds torch's defaults: unset it"
        )
    check_device(("torch",))
    is_shared = _other_processes()  # before this process is one
    import torch  # noqa: PLC0415

    lock = GpuLock(str(torch.cuda.get_device_properties(0).uuid))
    return Card(torch, lock, is_shared=is_shared)


def _recording(history: Iterable[Any], outputs: set[int]) -> Recording:
    found = Recording()
    sizes: list[int] = []
    alive: dict[int, int] = {}
    freed: set[int] = set()
    for entry in history:
        action, address = entry["action"], entry.get("addr")
        if action == "alloc":
            alive[address] = len(sizes)
            sizes.append(int(entry["size"]))
        elif action == "free_completed" and address in alive:
            freed.add(alive.pop(address))
        elif action == "segment_alloc":
            found.segments.append((address, int(entry["size"])))
    kept = {number for address, number in alive.items() if address not in outputs}
    found.scratch.extend(size for number, size in enumerate(sizes) if number in freed)
    found.kept.extend(size for number, size in enumerate(sizes) if number in kept)
    return found


def _other_processes() -> bool:
    """Whether somebody else computes on the card; False where NVML does not tell."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    with suppress(Exception):  # the binding is missing, or refuses
        import pynvml  # noqa: PLC0415

        pynvml.nvmlInit()
        try:
            by_index = pynvml.nvmlDeviceGetHandleByIndex
            handle = (
                by_index(int(first)) if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(first)
            )
            return bool(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        finally:
            pynvml.nvmlShutdown()
    return False
