"""vLLM itself measures: its own worker on a real GPU, with random weights."""

import importlib.metadata
import importlib.util
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

from kvexp.contract import (
    Deployment,
    Engine,
    InvalidValue,
    Measurement,
    Profiler,
    ProfilerUnavailable,
    check_device,
    config_json,
)
from kvexp_vllm_worker.arguments import engine_arguments
from kvexp_vllm_worker.measurement import WorkerMeasurement, set_environment
from kvexp_vllm_worker.processor import processor_files

__all__ = ["REFERENCE", "VllmWorker"]

REFERENCE = "0.26.0"
"""The version whose objects are read; another one is tried, and what it lacks is named."""


@dataclass
class VllmWorker(Profiler):
    """vLLM's worker loads the model, profiles itself, plans and allocates its cache.

    Nothing is read off a log. `verify=false` ends with the plan: no cache is allocated, no CUDA
    graph captured.

    Known limitations:

    - Weights are random (load_format=dummy), so nothing is said of what they are good for.
    - Every point starts the engine anew, as vLLM does: 20 to 60 s, most of it imports.
    """

    verify: bool = True

    isolated: ClassVar[bool] = True

    def check(self) -> None:
        """Do nothing where vLLM and a visible GPU are there.

        Raises:
            ProfilerUnavailable: one of them is missing.
        """
        if importlib.util.find_spec("vllm") is None:
            raise ProfilerUnavailable(
                f"vllm is not installed: pip install vllm=={REFERENCE}; profiler=analytic needs"
                " neither it nor a GPU"
            )
        check_device()

    def prepare(self) -> None:
        """Import vLLM, which takes longer than all else."""
        set_environment()
        with suppress(ImportError):  # said when the point starts
            for module in ("engine", "worker"):
                import_module(f"kvexp_vllm_worker.{module}")

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """An engine that has not been started yet.

        Raises:
            InvalidValue: vLLM is not the engine, or not at this version, or cannot be given the
                model.
        """
        if deployment.engine != "vllm":
            raise InvalidValue(f"profiler=vllm runs engine=vllm, got engine={deployment.engine}")
        installed = _installed()
        if installed is not None and installed != deployment.engine_version:
            raise InvalidValue(
                f"vLLM {installed} is installed, got engine.version={deployment.engine_version}:"
                f" give engine.version={installed}"
            )
        arguments = engine_arguments(deployment, engine)
        configs = {"model": config_json(deployment.model)}
        drafts = deployment.speculation
        if drafts is not None and drafts.draft is not None and drafts.method != "mtp":
            configs["draft"] = config_json(drafts.draft)
        return WorkerMeasurement(
            deployment,
            engine,
            configs,
            arguments,
            processor=processor_files(deployment),
            verify=self.verify,
        )


def _installed() -> str | None:
    """The release of vLLM at hand, without what a build adds to it."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None
    found = re.match(r"\d+(\.\d+)*", version)
    return found[0] if found else version
