"""One start of vLLM as a pass through the pipeline's stages."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvexp.contract import (
    TERMS,
    CachePlan,
    Deployment,
    DeviceFacts,
    Engine,
    EngineRefused,
    InvalidValue,
    Measurement,
    Part,
    Profile,
    Provenance,
    Refusal,
    UnusableReading,
)
from kvexp_vllm_worker.planned import Planned

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""For the engine's process, where the user has not set them."""

_REFUSALS = {
    "Free memory on device": "free_memory_too_low",
    "No available memory for the cache blocks": "no_memory",
    "To serve at least one request": "max_len_too_large",
    "Cannot auto-fit max_model_len": "autofit_failed",
}
"""How vLLM's refusals begin, and what this project calls them."""


def set_environment() -> None:
    """Set what vLLM reads when it is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_STARTUP_PLAN"] = "0"  # it would take the place of measuring


class WorkerMeasurement(Measurement):
    """Starts vLLM with the point's model and values and reads what its workers found."""

    reusable = False

    def __init__(
        self,
        deployment: Deployment,
        engine: Engine,
        configs: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        processor: Sequence[Path],
        verify: bool,
    ) -> None:
        """`configs` are contents of config.json: of the `model` and, where one is, the `draft`.

        `processor` are the files that the model's processor is made from.
        """
        self.deployment = deployment
        self.engine = engine
        self._configs = configs
        self._arguments = arguments
        self._processor = processor
        self._verify = verify
        self._vllm: Any = None
        self._folder: TemporaryDirectory[str] | None = None
        self._ranks: list[dict[str, Any]] = []
        self._readings: dict[str, Any] = {}

    def start(self) -> DeviceFacts | None:
        """Start vLLM's workers; the card is the one with the least free memory.

        Raises:
            InvalidValue: vLLM refuses the values.
            EngineRefused: vLLM refuses to start on what is free.
            UnusableReading: this version of vLLM is laid out differently.
        """
        self._vllm = self._made()
        self._merge(self._vllm.start())
        for rank, found in enumerate(self._ranks):
            if found["problem"]:
                needed = math.ceil(found["total_bytes"] * self.deployment.util)
                raise EngineRefused(_refusal_at_start(found["problem"], rank, needed, found))
        least = min(self._ranks, key=lambda found: int(found["free_bytes"]))
        return DeviceFacts(
            name=least["name"], total_bytes=least["total_bytes"], free_bytes=least["free_bytes"]
        )

    def load(self) -> None:
        """Load random weights."""
        self._merge(self._vllm.load())

    def warmup(self) -> tuple[Profile, ...]:
        """Run vLLM's memory profiling; one profile a rank."""
        self._merge(self._vllm.profile())
        return tuple(_profile(found) for found in self._ranks)

    def plan(self, deployment: Deployment, ruled: CachePlan | Refusal) -> CachePlan | Refusal:
        """vLLM's own plan, with what the rules say beside it."""
        available = [int(found["passed_bytes"]) for found in self._ranks]
        try:
            planned: Planned = self._vllm.plan(available)
        except ValueError as problem:
            refusal = _known_refusal(str(problem), available)
            if refusal is None:
                raise
            return _with_figures(refusal, ruled)
        self._readings["planned"] = asdict(planned)
        notes = [*self._beside(deployment, planned.num_blocks), *_planners_differ(planned, ruled)]
        return CachePlan(
            num_blocks=planned.num_blocks,
            block_size=planned.block_size,
            kv_tokens=planned.kv_tokens,
            max_concurrency=planned.max_concurrency,
            max_model_len=planned.max_model_len,
            num_blocks_per_rank=tuple(
                given // each
                for given, each in zip(available, planned.block_bytes_per_rank, strict=True)
            ),
            block_bytes_per_rank=planned.block_bytes_per_rank,
            groups=planned.groups,
            layout=ruled.layout if isinstance(ruled, CachePlan) else "as vLLM planned it",
            notes=tuple(notes),
            available_bytes_per_rank=tuple(available),
        )

    def allocate(self, plan: CachePlan) -> int | None:
        """vLLM allocates what it planned; the bytes of the first rank.

        Raises:
            UnusableReading: what the model runner holds is not what was planned.
        """
        if not self._verify:
            return None
        sizes = self._vllm.allocate()
        self._merge([{"cache_bytes": size} for size in sizes])
        planned = [plan.num_blocks * each for each in plan.block_bytes_per_rank]
        if sizes != planned:
            raise UnusableReading(f"vLLM holds caches of {sizes} bytes, planned were {planned}")
        return int(sizes[0])

    def verify(self) -> bool | None:
        """vLLM's profiling forward on top of the cache, in eager mode after its warm-up."""
        if not self._verify:
            return None
        if self.deployment.enforce_eager:
            self._merge(self._vllm.warm_up())
        self._merge(self._vllm.verify())
        return True

    @property
    def captures(self) -> bool:
        """Whether vLLM captures CUDA graphs."""
        return self._verify and not self.deployment.enforce_eager

    def capture(self) -> None:
        """vLLM's warm-up with its CUDA graphs."""
        self._merge(self._vllm.warm_up())

    def readings(self) -> Mapping[str, Any]:
        """Every figure by rank, the arguments that vLLM was given, and the rules' figures."""
        return {
            **self._readings,
            "vllm": {"arguments": dict(self._arguments), "ranks": list(self._ranks)},
        }

    def close(self) -> None:
        """End the engine; its memory goes with the process."""
        if self._vllm is not None:
            self._vllm.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _made(self) -> Any:
        """An engine that has its configuration and nothing else."""
        set_environment()
        v2 = getattr(self.engine, "v2_model_runner", None)
        if v2 is not None:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
        estimates = getattr(self.engine, "estimate_cudagraphs", None)
        if estimates is not None:
            os.environ["VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"] = str(int(estimates))
        if getattr(self.engine, "expandable_segments", False):
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if self.deployment.pp_partition is not None:
            layers = ",".join(map(str, self.deployment.pp_partition))
            os.environ["VLLM_PP_LAYER_PARTITION"] = layers
        arguments = self._with_models()
        try:
            module = import_module("kvexp_vllm_worker.engine")
            engine = module.VllmEngine(arguments, self.deployment.usage)
        except (ImportError, AttributeError, TypeError) as problem:
            raise UnusableReading(
                f"the vLLM installed here cannot be used as vLLM 0.26.0 is: {problem}"
            ) from problem
        self._readings["vllm_version"] = engine.version
        return engine

    def _with_models(self) -> dict[str, Any]:
        """The arguments with a folder a model: its config.json and what its processor needs."""
        self._folder = TemporaryDirectory(prefix="kvexp-model-")
        folders = {name: Path(self._folder.name) / name for name in self._configs}
        for name, folder in folders.items():
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(self._configs[name]))
        for file in self._processor:
            (folders["model"] / file.name).symlink_to(file)
        arguments = {"model": str(folders["model"]), **self._arguments}
        if "draft" in folders:
            drafting = {**self._arguments["speculative_config"], "model": str(folders["draft"])}
            arguments["speculative_config"] = drafting
        return arguments

    def _merge(self, found: list[dict[str, Any]]) -> None:
        known = self._ranks or [{} for _ in found]
        self._ranks = [{**old, **new} for old, new in zip(known, found, strict=True)]

    def _beside(self, deployment: Deployment, num_blocks: int) -> list[str]:
        """The terms and blocks by the engine's rules, and how far they are from the measured."""
        try:
            ruled = self._by_rules(deployment)
        except InvalidValue as problem:
            return [f"the rules have no figure to compare: {problem}"]
        self._readings["num_blocks_by_rules"] = ruled["num_blocks"]
        measured = {**_sizes(_profile(self._ranks[0])), "num_blocks": num_blocks}
        texts = [
            f"{name.removesuffix('_bytes')} {ruled[name]:,} ({ruled[name] - value:+,})"
            for name, value in measured.items()
        ]
        return [f"by the rules, and less the measured: {', '.join(texts)}"]

    def _by_rules(self, deployment: Deployment) -> dict[str, int]:
        engine = self.engine
        profiles = [
            Profile(
                weights=engine.predict_weights(deployment, shape),
                activation=engine.predict_activation(deployment, shape),
                non_torch=engine.predict_non_torch(deployment, shape),
                cudagraph=engine.predict_cudagraph(deployment, shape),
            )
            for shape in engine.ranks(deployment)
        ]
        available = [engine.quota(deployment, profile).available_bytes for profile in profiles]
        plan = engine.plan(deployment, available)
        blocks = plan.num_blocks if isinstance(plan, CachePlan) else 0
        return {**_sizes(profiles[0]), "num_blocks": blocks}


def _sizes(profile: Profile) -> dict[str, int]:
    return {f"{name}_bytes": getattr(profile, name).size_bytes for name in TERMS}


def _profile(found: Mapping[str, Any]) -> Profile:
    """vLLM's terms; the graphs' share is what it subtracted, which need not be its estimate."""
    weights, activation = found["weights_bytes"], found["activation_bytes"]
    non_torch = found["non_torch_bytes"]
    taken = found["requested_bytes"] - found["available_bytes"]
    estimate = found["cudagraph_estimate_bytes"]
    return Profile(
        weights=_part("weights", weights, "vLLM's model_runner.model_memory_usage"),
        activation=_part("activation", activation, "vLLM's peak_activation_memory"),
        non_torch=_part("non_torch", non_torch, "vLLM's non_torch_memory"),
        cudagraph=_part(
            "cudagraph",
            taken - weights - activation - non_torch,
            f"what vLLM subtracted beside these; its estimate was {estimate:,} bytes",
        ),
    )


def _part(name: str, size_bytes: int, reason: str) -> Part:
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.measured, reason=reason)


def _refusal_at_start(problem: str, rank: int, needed: int, found: Mapping[str, Any]) -> Refusal:
    """vLLM's check of what is free; any other refusal stands in its own words too."""
    text = " ".join(problem.split())
    return Refusal(
        kind=_kind(text) or "refused_start",
        message=text,
        rank=rank,
        needed_bytes=needed,
        available_bytes=int(found["free_bytes"]),
    )


def _known_refusal(problem: str, available: list[int]) -> Refusal | None:
    """The planner's refusal; None for an error that is none."""
    text = " ".join(problem.split())
    kind = _kind(text)
    if kind is None:
        return None
    least = min(available)
    return Refusal(
        kind=kind,
        message=text,
        rank=available.index(least),
        needed_bytes=0,
        available_bytes=least,
    )


def _kind(text: str) -> str | None:
    return next((kind for begin, kind in _REFUSALS.items() if text.startswith(begin)), None)


def _with_figures(refusal: Refusal, ruled: CachePlan | Refusal) -> Refusal:
    """vLLM's words with the figures that it rounds, from the planner by its rules."""
    if not isinstance(ruled, Refusal) or ruled.kind != refusal.kind:
        return refusal
    return replace(ruled, message=refusal.message)


def _planners_differ(planned: Planned, ruled: CachePlan | Refusal) -> list[str]:
    """Said only where vLLM's planner and the one by its rules disagree on the same bytes."""
    if isinstance(ruled, Refusal):
        return [f"the planner by vLLM's rules would refuse the same bytes: {ruled.message}"]
    own = (planned.num_blocks, planned.kv_tokens, planned.block_size)
    other = (ruled.num_blocks, ruled.kv_tokens, ruled.block_size)
    if own == other:
        return []
    return [
        f"vLLM planned {own[0]:,} blocks of {own[2]} ({own[1]:,} tokens), the planner by its rules"
        f" {other[0]:,} of {other[2]} ({other[1]:,} tokens) from the same bytes"
    ]
