"""vLLM's worker, stage by stage. Importing this module imports vLLM."""

from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from kvexp.contract import UnusableReading


class StagedWorker(Worker):  # type: ignore[misc]
    """Loads the model when it is asked to, not when it is made, and tells what it knows.

    All methods called `staged_...` are called through the executor, on every rank.
    """

    def init_device(self) -> None:
        """vLLM's; its refusal is kept, to be told in vLLM's own words."""
        self.staged_problem: str | None = None
        self.staged_graph_bytes: int | None = None
        try:
            super().init_device()
        except ValueError as problem:
            self.staged_problem = str(problem)

    def load_model(self, **_: Any) -> None:
        """Nothing yet: the executor asks for it as soon as the worker is made."""

    def staged_start(self) -> dict[str, Any]:
        """The card before anything is loaded, and why the engine would not start."""
        refused = self.staged_problem is not None
        if refused and not hasattr(self, "init_snapshot"):
            raise RuntimeError(self.staged_problem)
        return {
            "problem": self.staged_problem,
            "name": str(torch.cuda.get_device_name(self.device)),
            "total_bytes": int(read(self, "init_snapshot.total_memory")),
            "free_bytes": int(read(self, "init_snapshot.free_memory")),
            "requested_bytes": None if refused else int(read(self, "requested_memory")),
        }

    def staged_load(self) -> dict[str, Any]:
        """Load the model; what it takes as vLLM counts it."""
        super().load_model()
        current_platform.update_block_size_for_backend(self.vllm_config)
        runner = type(read(self, "model_runner"))
        return {
            "weights_bytes": int(read(self, "model_runner.model_memory_usage")),
            "model_runner": f"{runner.__module__}.{runner.__qualname__}",
        }

    def staged_profile(self) -> dict[str, Any]:
        """What vLLM's own profiling found."""
        return {
            "activation_bytes": int(read(self, "peak_activation_memory")),
            "non_torch_bytes": int(read(self, "non_torch_memory")),
            "cudagraph_estimate_bytes": int(read(self, "cudagraph_memory_estimate")),
            "available_bytes": int(read(self, "available_kv_cache_memory_bytes")),
        }

    def staged_cache_bytes(self) -> int:
        """Bytes of the cache tensors that the model runner holds."""
        storages = {
            tensor.untyped_storage().data_ptr(): int(tensor.untyped_storage().nbytes())
            for tensor in _flat(read(self, "model_runner.kv_caches"))
        }
        return sum(storages.values())

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's, with the bytes of the graphs that it captures."""
        capture = self.model_runner.capture_model

        def counted() -> int:
            self.staged_graph_bytes = int(capture())
            return self.staged_graph_bytes

        self.model_runner.capture_model = counted
        return super().compile_or_warm_up_model()

    def staged_warmed(self) -> dict[str, Any]:
        """What the captured graphs took; null where none were captured."""
        return {"cudagraph_bytes": self.staged_graph_bytes, **self._free("warmed_up")}

    def staged_verify(self) -> dict[str, Any]:
        """The forward of the profile once more, on top of the allocated cache."""
        with torch.inference_mode():
            self.model_runner.profile_run()
        return self._free("verified")

    def _free(self, when: str) -> dict[str, int]:
        free, _ = torch.cuda.mem_get_info(self.device)
        return {f"free_when_{when}_bytes": int(free)}


def read(owner: Any, path: str) -> Any:
    """An attribute of one of vLLM's objects.

    Raises:
        UnusableReading: this version of vLLM has no such attribute.
    """
    for name in path.split("."):
        try:
            owner = getattr(owner, name)
        except AttributeError:
            raise UnusableReading(
                f"vLLM {vllm.__version__} keeps no {name} in {type(owner).__name__}:"
                " its objects are read as vLLM 0.26.0 names them"
            ) from None
    return owner


def _flat(tensors: Any) -> list[Any]:
    """Tensors of layers that keep several (recurrent states) beside those that keep one."""
    if not isinstance(tensors, list | tuple):
        return [tensors]
    return [each for inner in tensors for each in _flat(inner)]
