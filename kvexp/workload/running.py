"""The model under test on a real device, and what torch says of it."""

import gc
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from time import perf_counter
from typing import Any

from kvexp.deployment import Deployment
from kvexp.errors import InvalidValue
from kvexp.nvml import host_memory
from kvexp.profiler import DeviceFacts
from kvexp.simulate import Case
from kvexp.units import gib
from kvexp.workload.building import Rank, build, parameter_bytes, weights_from
from kvexp.workload.counters import Counters
from kvexp.workload.forward import Forward, ForwardOptions
from kvexp.workload.machine import driver_version, import_libraries
from kvexp.workload.snapshot import Recorder

MEETING_S = 300
"""How long a rank waits for the others."""


class Workload:
    """A model, its largest forward, and its KV cache, on one device.

    `device` is the index of a CUDA device, or "cpu" (no counters there); with a `rank` the model
    is that rank's share. The order of calls is start, load, warmup, allocate, verify, capture,
    close; `read` at any time after start.
    """

    def __init__(
        self,
        deployment: Deployment,
        forward: Forward | None = None,
        device: int | str = 0,
        rank: Rank | None = None,
    ) -> None:
        self.deployment = deployment
        self.forward = forward or ForwardOptions().forward(deployment)
        self.shape = self.forward.shape
        self.device = device if isinstance(device, str) else f"cuda:{device}"
        self.rank = rank
        self.timings: dict[str, float] = {}
        self._model: Any = None
        self._cache: list[Any] = []
        self._graphs: list[Any] = []
        self._grouped = False
        self._allowed_bytes: int | None = None

    @property
    def _on_gpu(self) -> bool:
        return self.device != "cpu"

    def uuid(self) -> str:
        """The device's UUID without prefix; makes no CUDA context."""
        import torch  # noqa: PLC0415

        return str(torch.cuda.get_device_properties(self.device).uuid)

    def start(self) -> DeviceFacts:
        """Create the context and read the device.

        Ranks meet here, so their communicator is a part of the baseline, as it is an engine's.
        """
        import torch  # noqa: PLC0415

        if self._on_gpu:
            torch.cuda.set_device(self.device)
        if self.rank is not None:
            self._meet(torch, self.rank)
        if not self._on_gpu:
            return DeviceFacts(name="cpu", total_bytes=self.deployment.total_bytes,
                               free_bytes=self.deployment.free_bytes)  # fmt: skip
        self.release_cached()
        self._cap(torch)
        counters = self.read()
        return DeviceFacts(
            name=str(torch.cuda.get_device_name(self.device)),
            total_bytes=counters.total_bytes,
            free_bytes=counters.free_bytes,
        )

    def _meet(self, torch: Any, rank: Rank) -> None:
        import_libraries()  # before the ranks wait for each other
        chosen = {"device_id": torch.device(self.device)} if self._on_gpu else {}
        torch.distributed.init_process_group(
            "nccl" if self._on_gpu else "gloo",
            init_method=f"file://{rank.meeting}",
            rank=rank.index,
            world_size=rank.size,
            timeout=timedelta(seconds=MEETING_S),
            **chosen,
        )
        self._grouped = True
        torch.distributed.all_reduce(torch.zeros(1, device=self.device))

    def _cap(self, torch: Any) -> None:
        """Let torch have no more than an emulated card would have left for it.

        Raises:
            InvalidValue: it would have nothing left.
        """
        if not self.deployment.gpu.emulate:
            return
        now = self.read()
        left = self.deployment.gpu.total_bytes - now.non_torch_bytes
        if left <= 0:
            raise InvalidValue(
                f"gpu.emulate: {gib(now.non_torch_bytes)} are in use already, gpu="
                f"{self.deployment.gpu.name} has {gib(self.deployment.gpu.total_bytes)}"
            )
        self._allowed_bytes = left
        torch.cuda.set_per_process_memory_fraction(min(1.0, left / now.total_bytes), self.device)

    def read(self) -> Counters:
        """The counters of this device now.

        Raises:
            UnusableReading: they cannot be true.
        """
        import torch  # noqa: PLC0415

        free, total = torch.cuda.mem_get_info(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        if getattr(properties, "is_integrated", 0) and (host := host_memory()) is not None:
            free = min(int(total), host[1])  # the file cache is given back when it is needed
        return Counters(
            allocated_bytes=int(torch.cuda.memory_allocated(self.device)),
            reserved_bytes=int(torch.cuda.memory_reserved(self.device)),
            peak_allocated_bytes=int(torch.cuda.max_memory_allocated(self.device)),
            peak_reserved_bytes=int(torch.cuda.max_memory_reserved(self.device)),
            free_bytes=int(free),
            total_bytes=int(total),
        )

    def free_bytes(self) -> int:
        """What the driver has free on this device now."""
        import torch  # noqa: PLC0415

        return int(torch.cuda.mem_get_info(self.device)[0])

    def describe(self) -> dict[str, Any]:
        """What runs on what, as plain data."""
        import torch  # noqa: PLC0415

        described: dict[str, Any] = {
            "attention": self._attention(),
            "weights_from": weights_from(self.deployment, self.rank),
            "shape": asdict(self.shape),
            "forward": {**asdict(self.forward.case), "warmup": self.forward.warmup},
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
                "allowed_bytes": self._allowed_bytes,
                **{
                    name: os.environ.get(name)
                    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
                },
            }
        return described

    def _attention(self) -> str:
        if self._model is None:
            return self.forward.case.attn
        return str(self._model.config._attn_implementation)

    def load(self) -> int:
        """Put the model on the device; the bytes of its weights and buffers there."""
        started = perf_counter()
        self._reset_peak()
        self._model = build(self.deployment, self.forward.case, self.device, self.rank)
        gc.collect()  # once, after the construction's cycles; later stages leave none
        self.release_cached()
        self.timings["load_s"] = round(perf_counter() - started, 3)
        return parameter_bytes(self._model)

    def warmup(
        self, at_peak: Callable[[], None] | None = None, recorder: Recorder | None = None
    ) -> None:
        """Run the warm-up's forward and sample from its last logits, right or wrong.

        `at_peak` is called after the work and before what the allocator cached is given back. The
        peak is reset before the inputs are made, so it counts them. `recorder` notes every
        allocation.
        """
        self.release_cached()
        if self.forward.warmup != "no_reset":
            self._reset_peak()
        started = perf_counter()
        with recorder.recording(self._model) if recorder is not None else nullcontext():
            if self.forward.warmup != "none":
                self._run(self.forward.case, at_peak)
            elif at_peak is not None:
                at_peak()
        self.timings["warmup_s"] = round(perf_counter() - started, 3)
        self.release_cached()

    def verify(self) -> None:
        """Run the worst case, whatever the warm-up was."""
        self.release_cached()
        self._reset_peak()
        started = perf_counter()
        self._run(self.forward.worst, None)
        self.timings["verify_s"] = round(perf_counter() - started, 3)
        self.release_cached()

    def _run(self, case: Case, at_peak: Callable[[], None] | None) -> None:
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            tokens = torch.zeros((case.batch, case.seq), dtype=torch.int64, device=self.device)
            out = self._forward(tokens, case)
            if case.sampler != "none":
                _sample(torch, out.logits[:, -1], case.sampler)
            self._synchronize()
            if at_peak is not None:
                at_peak()
            del tokens, out

    def _forward(self, tokens: Any, case: Case) -> Any:
        called = self._model.base_model if case.logits == "none" else self._model
        keywords: dict[str, Any] = {"use_cache": case.use_cache}
        accepted = inspect.signature(type(called).forward).parameters
        if case.logits == "last" and "logits_to_keep" in accepted:
            keywords["logits_to_keep"] = 1
        return called(input_ids=tokens, **keywords)

    def allocate(self, sizes: Sequence[int]) -> int:
        """Create and touch the KV cache, one tensor of each size in bytes; the bytes it takes."""
        import torch  # noqa: PLC0415

        self._reset_peak()
        for size in sizes:
            self._cache.append(torch.zeros(size, dtype=torch.int8, device=self.device))
        self._synchronize()
        return sum(int(tensor.untyped_storage().nbytes()) for tensor in self._cache)

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """Capture a decode step of each batch size as a CUDA graph, the largest first.

        All share one pool, and what a step returns is not kept, so that the next one takes its
        place. As in the engines the head is not part of it. Each shape runs once before, so that no
        library starts within a capture.
        """
        import torch  # noqa: PLC0415

        started = perf_counter()
        pool = None
        case = replace(self.forward.worst, logits="none", sampler="none")
        with torch.inference_mode():
            for size in sorted(batch_sizes, reverse=True):
                tokens = torch.zeros((size, 1), dtype=torch.int64, device=self.device)
                self._forward(tokens, case)
                self._synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._forward(tokens, case)
                pool = graph.pool()
                self._graphs.append((graph, tokens))
        self._synchronize()
        self.timings["graphs_s"] = round(perf_counter() - started, 3)

    def drop_cache(self) -> None:
        """Give graphs and KV cache back and keep the model."""
        self._graphs = []
        self._cache = []
        self.release_cached()

    def release_cached(self) -> None:
        """Give back to the driver what the allocator holds but no tensor uses."""
        if self._on_gpu:
            import torch  # noqa: PLC0415

            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._on_gpu:
            import torch  # noqa: PLC0415

            torch.cuda.synchronize(self.device)

    def _reset_peak(self) -> None:
        if self._on_gpu:
            import torch  # noqa: PLC0415

            torch.cuda.reset_peak_memory_stats(self.device)

    def close(self) -> None:
        """Drop all that is held; a device that no longer answers does not matter any more."""
        held = self._model is not None or bool(self._cache)
        self._model = None
        self._cache, self._graphs = [], []
        if held:
            gc.collect()
            with suppress(RuntimeError):
                self.release_cached()
        if self._grouped:
            import torch  # noqa: PLC0415

            self._grouped = False
            with suppress(RuntimeError):
                torch.distributed.destroy_process_group()


def _sample(torch: Any, logits: Any, sampler: str) -> Any:
    """One token a row: the largest logit, or a draw in fp32 without a sort (largest p / noise)."""
    if sampler == "argmax":
        return logits.argmax(dim=-1)
    probabilities = logits.float().softmax(dim=-1)
    noise = torch.empty_like(probabilities).exponential_(1)
    return probabilities.div_(noise).argmax(dim=-1)


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
