"""One engine of vLLM taken through its start, step by step. Importing this imports vLLM."""

from collections.abc import Mapping
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_configs,
)
from vllm.v1.executor import Executor

from kvexp.contract import InvalidValue, KvGroup
from kvexp_vllm_worker.planned import Planned

WORKER = "kvexp_vllm_worker.worker.StagedWorker"


class VllmEngine:
    """The steps of vLLM's engine core up to the first request; one object a start.

    Every step but `plan` returns one mapping a rank; what each holds is in `StagedWorker`.
    """

    def __init__(self, arguments: Mapping[str, Any], usage: str) -> None:
        context = UsageContext.LLM_CLASS if usage == "llm" else UsageContext.OPENAI_API_SERVER
        try:
            made = EngineArgs(**arguments, worker_cls=WORKER)
            self._config = made.create_engine_config(context)
        except ValueError as problem:
            text = " ".join(str(problem).split())
            raise InvalidValue(f"vLLM {vllm.__version__} refuses: {text}") from None
        self._executor: Any = None
        self._kv_configs: list[Any] = []

    @property
    def version(self) -> str:
        """vLLM's own."""
        return str(vllm.__version__)

    def start(self) -> list[dict[str, Any]]:
        """Make the workers, each with its device and its place among the ranks."""
        self._executor = Executor.get_class(self._config)(self._config)
        return self._call("staged_start")

    def load(self) -> list[dict[str, Any]]:
        """Load the model on every rank."""
        return self._call("staged_load")

    def profile(self) -> list[dict[str, Any]]:
        """Run vLLM's memory profiling on every rank."""
        passed = self._executor.determine_available_memory()
        found = self._call("staged_profile")
        return [
            {**one, "passed_bytes": int(given)} for one, given in zip(found, passed, strict=True)
        ]

    def plan(self, available_bytes: list[int]) -> Planned:
        """Divide the available bytes into blocks with vLLM's planner.

        Raises:
            ValueError: vLLM refuses, in its own words.
        """
        config = self._config
        length = config.model_config.max_model_len
        specs = self._executor.get_kv_cache_specs()
        self._kv_configs = get_kv_cache_configs(config, specs, available_bytes)
        if config.model_config.max_model_len != length:  # it was fitted
            self._call("update_max_model_len", config.model_config.max_model_len)
        common = generate_scheduler_kv_cache_config(self._kv_configs)
        tokens, concurrency = get_kv_cache_capacity(config, common)
        block_size = min(int(group.kv_cache_spec.block_size) for group in common.kv_cache_groups)
        config.cache_config.num_gpu_blocks = common.num_blocks
        config.cache_config.block_size = block_size
        return Planned(
            num_blocks=int(common.num_blocks),
            block_size=block_size,
            kv_tokens=int(tokens),
            max_concurrency=float(concurrency),
            max_model_len=int(config.model_config.max_model_len),
            block_bytes_per_rank=tuple(
                sum(int(tensor.size) for tensor in each.kv_cache_tensors) // int(each.num_blocks)
                for each in self._kv_configs
            ),
            groups=tuple(self._group(group, common.num_blocks) for group in common.kv_cache_groups),
        )

    def allocate(self) -> list[int]:
        """Allocate the planned cache; its bytes on each rank."""
        self._call("initialize_from_config", self._kv_configs)
        return [int(size) for size in self._call("staged_cache_bytes")]

    def warm_up(self) -> list[dict[str, Any]]:
        """vLLM's warm-up of kernels, with graph capture where it is not eager."""
        self._call("compile_or_warm_up_model")
        return self._call("staged_warmed")

    def verify(self) -> list[dict[str, Any]]:
        """The forward of the profile once more, on top of the cache."""
        return self._call("staged_verify")

    def close(self) -> None:
        """End the workers."""
        if self._executor is not None:
            self._executor.shutdown()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        found: list[Any] = self._executor.collective_rpc(method, args=arguments)
        return found

    def _group(self, group: Any, num_blocks: int) -> KvGroup:
        spec = group.kv_cache_spec
        page = int(spec.page_size_bytes)
        return KvGroup(
            kind=type(spec).__name__,
            num_layers=len(group.layer_names),
            block_size=int(spec.block_size),
            page_size_bytes=page,
            num_blocks=int(num_blocks),
            blocks_per_request=-(-int(spec.max_memory_usage_bytes(self._config)) // page),
        )
