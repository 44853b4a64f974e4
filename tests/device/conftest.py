"""Stand-ins at the two borders to a device: the workload's counters and the NVML binding."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvexp.contract import (
    CachePlan,
    Counters,
    Deployment,
    DeviceFacts,
    DType,
    Gpu,
    KvDtype,
    Model,
)
from kvexp.engine import Engine
from kvexp.request import Mla, Moe
from kvexp.workload import ForwardOptions

MIB = 1 << 20
H200_BYTES = 150109880320
DATA = Path(__file__).with_name("data")

TINY: dict[str, Any] = {
    "name": "tiny",
    "hf_id": "none/tiny",
    "source": "this test",
    "architecture": "LlamaForCausalLM",
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}


def typed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a model with its nested parts as the objects that they are in a request."""
    kinds = {"moe": Moe, "mla": Mla}
    return {key: kinds[key](**value) if key in kinds else value for key, value in facts.items()}


def make_deployment(model: Mapping[str, Any] | None = None, **values: Any) -> Deployment:
    """A resolved deployment: the tiny model in fp32 unless said."""
    facts: dict[str, Any] = {
        "model": Model(**{**TINY, **(model or {})}),
        "gpu": Gpu(name="NVIDIA H200", source="here", total_bytes=H200_BYTES, context_bytes=0),
        "engine": "stub",
        "engine_version": "1",
        "usage": "serve",
        "dtype": DType.fp32,
        "quantization": None,
        "kv_dtype": KvDtype.fp32,
        "block_size": 16,
        "util": 0.9,
        "max_model_len": 64,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "tp": 1,
        "pp": 1,
        "enforce_eager": True,
        "total_bytes": H200_BYTES,
        "free_bytes": H200_BYTES,
        "used_by_others_bytes": 0,
    }
    return Deployment(**{**facts, **values})


def make_plan(deployment: Deployment, num_blocks: int) -> CachePlan:
    """A plan of one group of full-attention layers."""
    itemsize = {"fp32": 4, "bf16": 2, "fp16": 2}.get(deployment.kv_dtype.name, 1)
    model = deployment.model
    block_bytes = (
        2
        * model.num_hidden_layers
        * deployment.block_size
        * deployment.kv_heads_per_rank
        * model.head_size
        * itemsize
    )
    return CachePlan(
        num_blocks=num_blocks,
        block_size=deployment.block_size,
        kv_tokens=num_blocks * deployment.block_size,
        max_concurrency=1.0,
        max_model_len=deployment.max_model_len,
        num_blocks_per_rank=(num_blocks,),
        block_bytes_per_rank=(block_bytes,),
        groups=(),
        layout="full",
    )


class StubEngine:
    """Only what a measurement asks an engine."""

    charges_context: ClassVar[bool] = False
    graph_sizes = (1, 2, 4)

    def cache_tensor_bytes(self, plan, rank):
        return Engine.cache_tensor_bytes(self, plan, rank)

    def graph_batch_sizes(self, deployment):
        return self.graph_sizes


class ContextEngine(StubEngine):
    """Charges all that is in use outside the allocator."""

    charges_context: ClassVar[bool] = True


def counters(**sizes: int) -> Counters:
    """Counters of a card, sizes in MiB; the peaks default to the current values."""
    values = {name: size * MIB for name, size in sizes.items()}
    values.setdefault("total", 1000 * MIB)
    values.setdefault("peak_allocated", values["allocated"])
    values.setdefault("peak_reserved", values["reserved"])
    return Counters(**{f"{name}_bytes": size for name, size in values.items()})


class FakeWorkload:
    """Answers with given counters; the calls it got are in `calls`."""

    def __init__(
        self,
        deployment: Deployment,
        readings: list[Counters],
        parameter_bytes: int = 0,
        described: Mapping[str, Any] | None = None,
        on_call: Callable[[str], None] = lambda name: None,
        options: ForwardOptions | None = None,
    ) -> None:
        self.deployment = deployment
        self.forward = (options or ForwardOptions()).forward(deployment)
        self.shape = self.forward.shape
        self.device = "cuda:0"
        self.timings: dict[str, float] = {}
        self.rank = None
        self.calls: list[str] = []
        self._readings = iter(readings)
        self._parameter_bytes = parameter_bytes
        self._described = described or {}
        self._on_call = on_call
        self._last: Counters | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self._on_call(name)

    def uuid(self) -> str:
        self._called("uuid")
        return "0000-1111"

    def start(self) -> DeviceFacts:
        self._called("start")
        return DeviceFacts(name="NVIDIA Fake", total_bytes=1000 * MIB, free_bytes=900 * MIB)

    def describe(self) -> dict[str, Any]:
        return dict(self._described)

    def load(self) -> int:
        self._called("load")
        return self._parameter_bytes

    def warmup(self, at_peak: Callable[[], None] | None = None) -> None:
        self._called("warmup")
        if at_peak is not None:
            at_peak()
        self._called("released")

    def allocate(self, sizes: Sequence[int]) -> int:
        self._called("allocate")
        return sum(sizes)

    def verify(self) -> None:
        self._called("verify")

    def capture(self, batch_sizes: Sequence[int]) -> None:
        self._called(f"capture {list(batch_sizes)}")

    def drop_cache(self) -> None:
        self._called("drop_cache")

    def free_bytes(self) -> int:
        return self._last.free_bytes if self._last is not None else 0

    def read(self) -> Counters:
        self._last = next(self._readings, self._last)
        assert self._last is not None
        return self._last

    def close(self) -> None:
        self._called("close")


class FakeNVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(NVML_TEXTS.get(value, f"error {value}"))


NVML_TEXTS = {
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    10: "Timeout",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    17: "The operating system has blocked the request",
    18: "RM has detected an NVML/RM version mismatch.",
    20: "Insufficient Memory",
    999: "Unknown Error",
}


class FakeNvml:
    """The binding: one device of 1000 MiB, of which 20 are the driver's own."""

    NVMLError = FakeNVMLError
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    nvmlMemory_v2 = 33554472  # noqa: N815

    def __init__(self) -> None:
        self.uuid = "GPU-0000-1111"
        self.used_mib = 5
        self.total_bytes = 1000 * MIB
        self.processes: list[SimpleNamespace] = []
        self.record: SimpleNamespace | None = None
        self.has_version_2 = True
        self.initialised = 0
        self.num_inits = 0
        self.num_reads = 0
        self.fail: Callable[[str, int], int | None] = lambda call, n: None
        self._calls: dict[str, int] = {}

    def _enter(self, call: str) -> None:
        n = self._calls[call] = self._calls.get(call, 0) + 1
        if code := self.fail(call, n):
            raise FakeNVMLError(code)
        if call != "init" and not self.initialised:
            raise FakeNVMLError(1)

    def nvmlInit(self):  # noqa: N802
        self._enter("init")
        self.initialised += 1
        self.num_inits += 1

    def nvmlShutdown(self):  # noqa: N802
        self._enter("shutdown")
        self.initialised -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        self._enter("handle")
        if uuid != self.uuid:
            raise FakeNVMLError(6)
        return "handle"

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        self._enter("name")
        return "NVIDIA Fake"

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        self._enter("driver")
        return b"580.1"

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):  # noqa: N802
        assert handle == "handle"
        self._enter("memory" if version else "memory_v1")
        self.num_reads += 1
        used = self.used_mib * MIB
        if self.record is not None:
            return self.record
        if version is None:
            used += 20 * MIB
            return SimpleNamespace(total=self.total_bytes, used=used, free=self.total_bytes - used)
        if not self.has_version_2:
            raise FakeNVMLError(13)
        return SimpleNamespace(
            total=self.total_bytes,
            reserved=20 * MIB,
            used=used,
            free=self.total_bytes - used - 20 * MIB,
        )

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        self._enter("processes")
        return self.processes

    def list_own_process(self, size_bytes: int | None) -> None:
        self.processes = [
            SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=1),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=size_bytes),
        ]


@pytest.fixture
def kit():
    """Everything above, for tests that cannot import it: tests are not a package."""
    return sys.modules[__name__] if __name__ in sys.modules else SimpleNamespace(**globals())
