"""Simulates the forward and torch's allocator on a machine without a GPU."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from kvexp.contract import (
    Deployment,
    Engine,
    ForwardOptions,
    InvalidValue,
    Measurement,
    Profiler,
    ProfilerUnavailable,
    parse_bytes_of,
    simulate,
)
from kvexp_simulated.measurement import Simulation
from kvexp_simulated.request import LOADINGS, Request

__all__ = ["Simulated", "Simulation"]


@dataclass
class Simulated(ForwardOptions, Profiler):
    """The peak of transformers' forward to the byte, from a trace without data and no GPU.

    The options of the forward are those of `ForwardOptions`. `mask`: an attention mask of ones is
    passed. `cudnn`: cuDNN's attention is enabled, as is torch's default.
    `loading`: in_place, or state_dict, when a checkpoint lies beside the model for a while.
    `allocator_conf`: what PYTORCH_ALLOC_CONF would hold. `memory_limit`: the process's cap on
    torch's memory in bytes. `config_path`: the model's own config.json, traced instead of its
    facts; one of another model is refused.
    `device`: a card's profile, as `python -m kvexp.calibrate` writes it, in place of the packaged.
    `repeat_layers`: of equal layers a few are run and repeated; refused where layers differ.
    `timeline`, `snapshot`: files to write, a picture and what PyTorch's memory viewer opens.

    Known limitations:

    - It is transformers' forward, not the engine's; what an engine takes more or less is a part of
      its own, by the engine's rule.
    - Reserved memory is a range. One GPU, unquantised weights. Kernels' own memory was measured on
      an H200 only. What cannot be traced is said, and the engine's rules stand in.
    """

    mask: bool = False
    cudnn: bool = True
    loading: str = "in_place"
    allocator_conf: str | None = None
    memory_limit: Any = None
    config_path: str | None = None
    device: str | None = None
    repeat_layers: bool = False
    timeline: str | None = None
    snapshot: str | None = None

    def check(self) -> None:
        """Do nothing where torch and transformers are installed; a GPU is not needed.

        Raises:
            ProfilerUnavailable: one of them is missing.
        """
        for module in ("torch", "transformers"):
            if importlib.util.find_spec(module) is None:
                raise ProfilerUnavailable(f"{module} is not installed: pip install 'kvexp[torch]'")

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """A simulation; nothing is traced before `load`.

        Raises:
            InvalidValue: an option's value is not allowed.
        """
        if self.loading not in LOADINGS:
            raise InvalidValue(
                f"profiler.loading must be one of {', '.join(LOADINGS)}, got {self.loading!r}"
            )
        limit = self.memory_limit
        request = Request(
            options=self,
            mask=self.mask,
            cudnn=self.cudnn,
            loading=self.loading,
            settings=simulate.parse_settings(self.allocator_conf),
            allowed_bytes=None if limit is None else parse_bytes_of("profiler.memory_limit", limit),
            config_path=self.config_path,
            device=None if self.device is None else simulate.read_device(self.device),
            repeat_layers=self.repeat_layers,
            timeline=self.timeline,
            snapshot=self.snapshot,
        )
        request.check_model(deployment.model)
        request.case(deployment)
        return Simulation(deployment, engine, request)
