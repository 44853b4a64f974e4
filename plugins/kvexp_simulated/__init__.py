"""Simulates the forward and torch's allocator on a machine without a GPU."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from kvexp.contract import (
    Deployment,
    Engine,
    InvalidValue,
    Measurement,
    Profiler,
    ProfilerUnavailable,
    parse_bytes_of,
    simulate,
)
from kvexp_simulated.measurement import Simulation
from kvexp_simulated.request import WARMUPS, Request

__all__ = ["Simulated", "Simulation"]


@dataclass
class Simulated(Profiler):
    """The peak of transformers' forward to the byte, from a trace without data and no GPU.

    `batch_size`, `seq_len`: prompts and tokens of each, null for the engine's worst case.
    `logits`: last, all or none. `sampler`: none, argmax or random. `attn`: auto, sdpa or eager.
    `use_cache`: transformers keeps keys and values. `mask`: an attention mask of ones is passed.
    `cudnn`: cuDNN's attention is enabled, as is torch's default.
    `warmup`: worst_case, or one of the mistakes no_reset, short_prompt, decode and none.
    `allocator_conf`: what PYTORCH_ALLOC_CONF would hold. `memory_limit`: the process's cap on
    torch's memory in bytes. `config_path`: a config.json to trace instead of the model's facts.
    `device`: a card's profile, as `python -m kvexp.calibrate` writes it, in place of the packaged.
    `timeline`, `snapshot`: files to write, a picture and what PyTorch's memory viewer opens.

    Known limitations:

    - It is transformers' forward, not the engine's; what an engine takes more or less is a part of
      its own, by the engine's rule.
    - Reserved memory is a range. One GPU, unquantised weights. Kernels' own memory was measured on
      an H200 only. What cannot be traced is said, and the engine's rules stand in.
    """

    batch_size: int | None = None
    seq_len: int | None = None
    logits: str = "last"
    sampler: str = "none"
    attn: str = "auto"
    use_cache: bool = False
    mask: bool = False
    cudnn: bool = True
    warmup: str = "worst_case"
    allocator_conf: str | None = None
    memory_limit: Any = None
    config_path: str | None = None
    device: str | None = None
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
        for name in ("batch_size", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValue(f"profiler.{name} must be at least 1, got {value}")
        if self.warmup not in WARMUPS:
            raise InvalidValue(
                f"profiler.warmup must be one of {', '.join(WARMUPS)}, got {self.warmup!r}"
            )
        limit = self.memory_limit
        request = Request(
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            logits=self.logits,
            sampler=self.sampler,
            attn=self.attn,
            use_cache=self.use_cache,
            mask=self.mask,
            cudnn=self.cudnn,
            warmup=self.warmup,
            settings=simulate.parse_settings(self.allocator_conf),
            allowed_bytes=None if limit is None else parse_bytes_of("profiler.memory_limit", limit),
            config_path=self.config_path,
            device=None if self.device is None else simulate.read_device(self.device),
            timeline=self.timeline,
            snapshot=self.snapshot,
        )
        request.case(deployment)
        return Simulation(deployment, engine, request)
