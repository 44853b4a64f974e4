"""The model under test on a real device, for the profilers that measure.

torch and transformers are imported where they are used: without them this module still imports.
"""

import gc
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvexp.deployment import Deployment
from kvexp.dtypes import KvDtype
from kvexp.engine import CachePlan, Engine
from kvexp.errors import InvalidValue, ProfilerUnavailable
from kvexp.gpu_lock import GpuLock
from kvexp.profiler import DeviceFacts, Measurement
from kvexp.request import Model
from kvexp.results import Profile, Stage

MEASURABLE_MODEL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
ATTENTION = "sdpa"

_STORAGE = {
    KvDtype.bf16: "bfloat16",
    KvDtype.fp16: "float16",
    KvDtype.fp32: "float32",
    KvDtype.fp8: "uint8",
    KvDtype.fp8_e4m3: "uint8",
    KvDtype.fp8_e5m2: "uint8",
}


class UnusableReading(RuntimeError):
    """A counter is missing or cannot be true; the message names it."""


# --- out of memory ---------------------------------------------------------------------------

_DEVICE_OOM = re.compile(
    r"(CUDA|HIP) out of memory"
    r"|(CUDA|HIP)( driver| runtime)? error:? out of memory"
    r"|Cuda failure( 2)? '?out of memory"
    r"|\b(cuda|hip)ErrorMemoryAllocation\b|\b(cuda|hip)ErrorOutOfMemory\b"
    r"|\bCUDA_ERROR_OUT_OF_MEMORY\b"
    r"|\b(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED\b"
    r"|\bNVML_ERROR_MEMORY\b"
    # the driver query made while torch writes its out-of-memory message can itself fail
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED[^\n]*CUDACachingAllocator",
    re.IGNORECASE,
)
_DEVICE_OOM_TYPES = frozenset({"OutOfMemoryError", "NVMLError_Memory"})


def is_out_of_memory(error: BaseException) -> bool:
    """True when the device ran out of memory, here or in an error that led here.

    Host memory (`MemoryError`, torch's CPU allocator), device-side assertions, missing kernels,
    too large a kernel and driver faults are other errors: a smaller model would not cure them.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if any(base.__name__ in _DEVICE_OOM_TYPES for base in type(link).__mro__):
            return True
        if not isinstance(link, MemoryError) and _DEVICE_OOM.search(str(link)):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


# --- can this machine measure ----------------------------------------------------------------

# Run in a process of its own: cuInit leaves state behind that a fork would inherit, and this
# process shall hold nothing of CUDA. It obeys CUDA_VISIBLE_DEVICES and costs no import of torch.
_PROBE = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("no library")
else:
    count = ctypes.c_int()
    print(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""
_DRIVER_ERRORS = {
    100: "no device is visible",
    803: "driver and library versions differ: reboot or reload the driver module",
}


def check_device(modules: tuple[str, ...] = ("torch", "transformers")) -> None:
    """Do nothing where `modules` and a visible NVIDIA GPU are there.

    Nothing is imported and no CUDA context is made: installed packages are looked up, and a short
    process of its own asks the driver.

    Raises:
        ProfilerUnavailable: something is missing; the message says what, and how to get it.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ProfilerUnavailable(f"{module} is not installed: pip install 'kvexp[torch]'")
    if "torch" in modules and not _torch_has_cuda():
        raise ProfilerUnavailable(
            f"torch {importlib.metadata.version('torch')} is built without CUDA:"
            " pip install --force-reinstall 'kvexp[torch]'"
        )
    if problem := _driver_problem():
        raise ProfilerUnavailable(f"{problem}; profiler=analytic needs no GPU")


def _torch_has_cuda() -> bool:
    """Read off the installed files; True where they do not tell."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    version = Path(spec.origin).with_name("version.py")
    if not version.is_file():
        return True
    return re.search(r"^cuda\b.*= *None\b", version.read_text(), re.MULTILINE) is None


def _driver_problem() -> str | None:
    """Why the driver offers no device, None when it offers one."""
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "the driver did not answer within 60 s"
    if answer.stdout.strip() == "no library":
        return "no driver is installed (libcuda.so.1 cannot be loaded)"
    code, _, count = answer.stdout.strip().partition(" ")
    if not code.isdigit() or not count.isdigit():
        return f"asking the driver failed with exit status {answer.returncode}"
    if int(code) == 0 and int(count) > 0:
        return None
    reason = _DRIVER_ERRORS.get(int(code) or 100, f"the driver answers error {code}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return reason if visible is None else f"{reason} (CUDA_VISIBLE_DEVICES={visible!r})"


def load_key(profiler: str, deployment: Deployment, engine: Engine) -> str:
    """What a load and a warm-up depend on: model, dtype, shape of the forward, kind of engine."""
    shape = WarmupShape.of(deployment)
    facts = (profiler, deployment.engine, deployment.engine_version, engine.charges_context)
    return repr((facts, deployment.model, deployment.dtype, shape, deployment.gpu.name))


def check_measurable(profiler: str, deployment: Deployment) -> None:
    """Do nothing where a `Workload` can be this deployment.

    Raises:
        InvalidValue: it cannot; the message says why.
    """
    if deployment.num_ranks > 1:
        asked = [f"{key}={n}" for key, n in (("tp", deployment.tp), ("pp", deployment.pp)) if n > 1]
        raise InvalidValue(f"{profiler} measures one GPU, got {' '.join(asked)}")
    if deployment.quantization is not None:
        raise InvalidValue(
            f"{profiler} measures unquantised weights,"
            f" got quantization={deployment.quantization.name}"
        )
    if deployment.model.model_type not in MEASURABLE_MODEL_TYPES:
        raise InvalidValue(
            f"{profiler} can build {', '.join(MEASURABLE_MODEL_TYPES)} models,"
            f" got model.model_type={deployment.model.model_type}"
        )
    if deployment.kv_dtype not in _STORAGE:
        raise InvalidValue(
            f"{profiler} can allocate a KV cache of"
            f" {', '.join(dtype.name for dtype in _STORAGE)}, got {deployment.kv_dtype.name}"
        )


# --- counters --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What torch's allocator and the driver report of one device at one moment."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    free_bytes: int
    total_bytes: int

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 0:
                raise UnusableReading(f"counter {name} is negative: {size}")
        for low, high in (
            ("free_bytes", "total_bytes"),
            ("allocated_bytes", "reserved_bytes"),
            ("allocated_bytes", "peak_allocated_bytes"),
            ("reserved_bytes", "peak_reserved_bytes"),
            ("reserved_bytes", "used_bytes"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise UnusableReading(
                    f"counter {low} ({getattr(self, low)}) exceeds {high} ({getattr(self, high)})"
                )

    @property
    def used_bytes(self) -> int:
        """In use on the whole device: of every process, contexts included."""
        return self.total_bytes - self.free_bytes

    @property
    def non_torch_bytes(self) -> int:
        """In use outside torch's allocator: `used = reserved + non_torch` holds by definition."""
        return self.used_bytes - self.reserved_bytes

    def as_dict(self) -> dict[str, int]:
        """The counters and what follows from them, as plain data."""
        return {**asdict(self), "non_torch_bytes": self.non_torch_bytes}


# --- the model under test --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupShape:
    """The largest prefill that a deployment allows: `num_seqs` prompts of `seq_len` tokens."""

    num_seqs: int
    seq_len: int

    @classmethod
    def of(cls, deployment: Deployment) -> "WarmupShape":
        """As few and as long prompts as `max_num_batched_tokens` and `max_model_len` allow."""
        seq_len = min(deployment.max_num_batched_tokens, deployment.max_model_len)
        num_seqs = min(deployment.max_num_batched_tokens // seq_len, deployment.max_num_seqs)
        return cls(num_seqs=num_seqs, seq_len=seq_len)


def transformers_config(model: Model) -> Any:
    """The transformers configuration of a model's facts.

    Attention is full in every layer, also where a checkpoint has a sliding window: transformers
    would build a mask of tokens x tokens for one, which no serving engine does.

    Raises:
        InvalidValue: transformers refuses the facts.
    """
    from transformers import AutoConfig  # noqa: PLC0415

    facts = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": model.attention_bias,
        "rope_theta": model.rope_theta,
        "rope_scaling": dict(model.rope_scaling) if model.rope_scaling else None,
        "sliding_window": None,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    try:
        return AutoConfig.for_model(model.model_type, **facts)
    except Exception as error:  # each release has its own validation errors
        raise InvalidValue(
            f"transformers refuses model={model.name}: {' '.join(str(error).split())}"
        ) from None


class Workload:
    """A model with random weights, its largest forward, and its KV cache, on one device.

    `device` is the index of a CUDA device, or "cpu" (no counters there). The order of calls is
    start, load, warmup, allocate, close; `read` at any time after start.
    """

    def __init__(self, deployment: Deployment, device: int | str = 0) -> None:
        self.deployment = deployment
        self.shape = WarmupShape.of(deployment)
        self.device = device if isinstance(device, str) else f"cuda:{device}"
        self._model: Any = None
        self._cache: list[Any] = []
        self._lock: GpuLock | None = None

    @property
    def _on_gpu(self) -> bool:
        return self.device != "cpu"

    def uuid(self) -> str:
        """The device's UUID without prefix; makes no CUDA context."""
        import torch  # noqa: PLC0415

        return str(torch.cuda.get_device_properties(self.device).uuid)

    def start(self) -> DeviceFacts:
        """Wait for the device to be free of other measurements, create the context, read it."""
        import torch  # noqa: PLC0415

        self._lock = GpuLock(self.uuid())
        self._lock.acquire()
        torch.cuda.set_device(self.device)
        self.release_cached()
        counters = self.read()
        return DeviceFacts(
            name=str(torch.cuda.get_device_name(self.device)),
            total_bytes=counters.total_bytes,
            free_bytes=counters.free_bytes,
        )

    def read(self) -> Counters:
        """The counters of this device now.

        Raises:
            UnusableReading: they cannot be true.
        """
        import torch  # noqa: PLC0415

        free, total = torch.cuda.mem_get_info(self.device)
        return Counters(
            allocated_bytes=int(torch.cuda.memory_allocated(self.device)),
            reserved_bytes=int(torch.cuda.memory_reserved(self.device)),
            peak_allocated_bytes=int(torch.cuda.max_memory_allocated(self.device)),
            peak_reserved_bytes=int(torch.cuda.max_memory_reserved(self.device)),
            free_bytes=int(free),
            total_bytes=int(total),
        )

    def describe(self) -> dict[str, Any]:
        """What runs on what, as plain data."""
        import torch  # noqa: PLC0415

        described: dict[str, Any] = {
            "attention": ATTENTION,
            "shape": asdict(self.shape),
            "versions": {
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda,
                "transformers": importlib.metadata.version("transformers"),
            },
        }
        if self._on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            described["device"] = {
                "name": str(properties.name),
                "uuid": str(properties.uuid),
                "capability": f"{properties.major}.{properties.minor}",
                "driver_version": driver_version(),
            }
            described["allocator"] = {
                "backend": str(torch.cuda.get_allocator_backend()),
                "settings": _allocator_settings(torch),
                **{
                    name: os.environ.get(name)
                    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
                },
            }
        return described

    def load(self) -> int:
        """Build the model on the device with random weights; the bytes of weights and buffers."""
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        config = transformers_config(self.deployment.model)
        self._reset_peak()
        # Built where it shall live: the initialisation runs on the device (well under a second
        # for 8B there), rotary buffers get their true values, and no copy passes through the host.
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, self.deployment.dtype.value),
                attn_implementation=ATTENTION,
            )
        self._model = model.eval().requires_grad_(False)
        gc.collect()  # once, after the construction's cycles; later stages leave none
        self.release_cached()
        storages = {
            tensor.untyped_storage().data_ptr(): int(tensor.untyped_storage().nbytes())
            for tensor in (*self._model.parameters(), *self._model.buffers())
        }
        return sum(storages.values())

    def warmup(self, at_peak: Callable[[], None] | None = None) -> None:
        """Run the largest prefill and sample from its last logits.

        `at_peak` is called after the work and before what the allocator cached is given back.
        The peak is reset before the inputs are made, so it counts them.
        """
        import torch  # noqa: PLC0415

        self.release_cached()
        self._reset_peak()
        with torch.inference_mode():
            tokens = torch.zeros(
                (self.shape.num_seqs, self.shape.seq_len), dtype=torch.int64, device=self.device
            )
            logits = self._model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
            self._sample(torch, logits[:, -1])
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
        if at_peak is not None:
            at_peak()
        del tokens, logits
        self.release_cached()

    @staticmethod
    def _sample(torch: Any, logits: Any) -> Any:
        """Draw one token a row in fp32, without a sort: the largest p / noise wins."""
        probabilities = logits.float().softmax(dim=-1)
        noise = torch.empty_like(probabilities).exponential_(1)
        return probabilities.div_(noise).argmax(dim=-1)

    def allocate(self, num_blocks: int, block_size: int) -> int:
        """Create and touch the KV cache, one tensor a layer; its bytes."""
        import torch  # noqa: PLC0415

        self._reset_peak()
        shape = (
            2,
            num_blocks,
            block_size,
            self.deployment.kv_heads_per_rank,
            self.deployment.model.head_size,
        )
        dtype = getattr(torch, _STORAGE[self.deployment.kv_dtype])
        for _ in range(self.deployment.model.num_hidden_layers):
            self._cache.append(torch.empty(shape, dtype=dtype, device=self.device).zero_())
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
        return sum(int(layer.untyped_storage().nbytes()) for layer in self._cache)

    def drop_cache(self) -> None:
        """Give the KV cache back and keep the model."""
        self._cache = []
        self.release_cached()

    def release_cached(self) -> None:
        """Give back to the driver what the allocator holds but no tensor uses."""
        if self._on_gpu:
            import torch  # noqa: PLC0415

            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _reset_peak(self) -> None:
        if self._on_gpu:
            import torch  # noqa: PLC0415

            torch.cuda.reset_peak_memory_stats(self.device)

    def close(self) -> None:
        """Drop model and cache; a device that no longer answers does not matter any more."""
        held = self._model is not None or bool(self._cache)
        self._model = None
        self._cache = []
        if held:
            gc.collect()
            with suppress(RuntimeError):
                self.release_cached()
        if self._lock is not None:
            self._lock.release()


def driver_version() -> str | None:
    """The NVIDIA driver's version as the kernel module states it, None where it does not."""
    for path in (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")):
        with suppress(OSError):
            if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", path.read_text()):
                return found[0]
    return None


def _allocator_settings(torch: Any) -> dict[str, Any] | None:
    """The settings in force, which need not be those in the environment; None where unknown."""
    with suppress(AttributeError, KeyError, RuntimeError):
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        return {
            str(name): value
            for name, value in settings.items()
            if value is None or isinstance(value, bool | int | float | str)
        }
    return None


# --- a measurement on it ---------------------------------------------------------------------


class WorkloadMeasurement(Measurement):
    """Takes a `Workload` through the stages and keeps the counters after each of them.

    A subclass says what the counters mean (`profile`), and may read more (`_record`, `_at_peak`).
    """

    def __init__(self, deployment: Deployment, engine: Engine, workload: Workload) -> None:
        self.deployment = deployment
        self.engine = engine
        self.workload = workload
        self.counters: dict[Stage, Counters] = {}
        self.parameter_bytes: int | None = None
        self._described: Mapping[str, Any] = {}

    @abstractmethod
    def profile(self) -> Profile:
        """The memory terms, from what was read up to the warm-up."""

    def start(self) -> DeviceFacts | None:
        """Create the CUDA context and read the baseline."""
        facts = self.workload.start()
        self._described = self.workload.describe()
        self._record(Stage.start)
        return facts

    def load(self) -> None:
        """Build the model on the device."""
        self.parameter_bytes = self.workload.load()
        self._record(Stage.load)

    def warmup(self) -> tuple[Profile, ...]:
        """Run the largest prefill."""
        self.workload.warmup(self._at_peak)
        self._record(Stage.warmup)
        return (self.profile(),)

    def allocate(self, plan: CachePlan) -> int | None:
        """Allocate the planned cache for real.

        Raises:
            UnusableReading: what was allocated is not what was planned.
        """
        allocated = self.workload.allocate(plan.num_blocks, plan.block_size)
        self._record(Stage.allocate)
        planned = plan.num_blocks * plan.block_bytes_per_rank[0]
        if allocated != planned:
            raise UnusableReading(
                f"the KV cache takes {allocated} bytes, but {plan.num_blocks} blocks of"
                f" {plan.block_bytes_per_rank[0]} bytes were planned ({planned})"
            )
        grown = self._growth("allocated_bytes", Stage.warmup, Stage.allocate)
        if grown < allocated:
            raise UnusableReading(
                f"counter allocated_bytes grew by {grown} for a KV cache of {allocated} bytes"
            )
        return allocated

    def verify(self) -> bool | None:
        """Run the largest prefill again, with the cache in place."""
        self.workload.warmup()
        self._record(Stage.verify)
        return True

    def release(self) -> None:
        """Drop the cache; model and counters of the warm-up stay."""
        self.workload.drop_cache()

    def readings(self) -> Mapping[str, Any]:
        """The counters by stage, and what was measured on what."""
        return {
            **{stage.value: counters.as_dict() for stage, counters in self.counters.items()},
            **self._described,
            "parameter_bytes": self.parameter_bytes,
            "charges_context": self.engine.charges_context,
        }

    def close(self) -> None:
        """Give the device's memory back."""
        self.workload.close()

    def _record(self, stage: Stage) -> None:
        self.counters[stage] = self.workload.read()

    def _at_peak(self) -> None:
        return

    def _growth(self, name: str, before: Stage, after: Stage) -> int:
        return int(getattr(self.counters[after], name) - getattr(self.counters[before], name))

    def _require_weights(self, counter: str, grown_bytes: int) -> int:
        """`grown_bytes`, which a counter of this device cannot find less than the weights."""
        if self.parameter_bytes is not None and grown_bytes < self.parameter_bytes:
            raise UnusableReading(
                f"counter {counter} grew by {grown_bytes} while {self.parameter_bytes} bytes of"
                " weights were loaded: it counts another device, or another process gave memory"
                " back meanwhile"
            )
        return grown_bytes
