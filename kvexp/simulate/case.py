"""Which forward is simulated."""

from dataclasses import dataclass

from kvexp.errors import InvalidValue

LOGITS = ("last", "all", "none")
SAMPLERS = ("none", "argmax", "random")
ATTENTION = ("auto", "sdpa", "eager")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One forward of `batch` prompts of `seq` tokens.

    `logits`: of the last position, of all, or none (the model without its head). `sampler`: what
    follows the last position's logits: nothing, argmax, or a random draw in fp32. `attn`: auto is
    sdpa where the model has it. `mask`: an
    attention mask of ones is passed. `cudnn`: cuDNN's attention is enabled. `dtype` is torch's
    name of the weights' dtype.
    """

    batch: int
    seq: int
    logits: str = "last"
    sampler: str = "none"
    attn: str = "auto"
    use_cache: bool = False
    mask: bool = False
    cudnn: bool = True
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("logits", self.logits, LOGITS),
            ("sampler", self.sampler, SAMPLERS),
            ("attn", self.attn, ATTENTION),
        ):
            if value not in allowed:
                raise InvalidValue(
                    f"profiler.{name} must be one of {', '.join(allowed)}, got {value!r}"
                )
        if self.batch < 1 or self.seq < 1:
            raise InvalidValue(f"a forward needs at least one token, got {self.batch} x {self.seq}")
        if self.sampler != "none" and self.logits == "none":
            raise InvalidValue("profiler.sampler needs logits, got profiler.logits=none")

    @property
    def input_bytes(self) -> int:
        """The token ids, which exist before the forward."""
        return 8 * self.batch * self.seq
