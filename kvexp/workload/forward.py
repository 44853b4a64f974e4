"""Which forward a profiler runs or simulates: the options that all of them share."""

from dataclasses import asdict, dataclass, replace

from kvexp.deployment import Deployment
from kvexp.errors import InvalidValue
from kvexp.simulate import Case

SHORT_PROMPT = 16

MISTAKES = {
    "no_reset": "the peak is not reset after loading, so loading's own peak counts as activation:"
    " too few blocks",
    "short_prompt": "a short_prompt warm-up is not the worst case: too many blocks, and out of"
    " memory at the first long prefill unless the card has room above the request",
    "decode": "a decode warm-up is not the worst case, its scores are 1 x n and not n x n: far too"
    " many blocks, and out of memory at the first prefill unless the card has room above the"
    " request",
    "none": "no warm-up, so no activation is seen and none is reserved: far too many blocks, and"
    " out of memory at the first prefill unless the card has room above the request",
}
"""The ways to get the warm-up wrong, and what each would cause."""

WARMUPS = ("worst_case", *MISTAKES)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """What the warm-up runs, and what it should have run (`worst`)."""

    case: Case
    worst: Case
    warmup: str

    @property
    def mistake(self) -> str | None:
        """What this warm-up gets wrong and would cause, None where it is the worst case."""
        return MISTAKES.get(self.warmup)

    @property
    def shape(self) -> WarmupShape:
        """The prompts of the warm-up."""
        return WarmupShape(num_seqs=self.case.batch, seq_len=self.case.seq)


@dataclass
class ForwardOptions:
    """The options that say which forward a profiler runs or simulates; a profiler inherits them.

    `batch_size`, `seq_len`: prompts and tokens of each, null for the engine's worst case.
    `logits`: last, all or none. `sampler`: none, argmax or random (a draw in fp32). `attn`: auto,
    sdpa or eager. `use_cache`: transformers keeps keys and values. `warmup`: worst_case, or one of
    the mistakes no_reset, short_prompt, decode and none.
    """

    batch_size: int | None = None
    seq_len: int | None = None
    logits: str = "last"
    sampler: str = "none"
    attn: str = "auto"
    use_cache: bool = False
    warmup: str = "worst_case"

    def forward(self, deployment: Deployment) -> Forward:
        """The options read against a deployment.

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
        worst = self._worst_case(deployment)
        case = worst
        if self.warmup == "short_prompt":
            case = replace(worst, seq=min(SHORT_PROMPT, worst.seq))
        elif self.warmup == "decode":
            case = replace(worst, seq=1)
        return Forward(case=case, worst=worst, warmup=self.warmup)

    def _worst_case(self, deployment: Deployment) -> Case:
        """As long and as many prompts as the batch limits allow, unless they are given."""
        tokens = deployment.max_num_batched_tokens
        seq = self.seq_len or (
            WarmupShape.of(deployment).seq_len
            if self.batch_size is None
            else max(1, min(tokens // self.batch_size, deployment.max_model_len))
        )
        return Case(
            batch=self.batch_size or max(1, min(tokens // seq, deployment.max_num_seqs)),
            seq=seq,
            logits=self.logits,
            sampler=self.sampler,
            attn=self.attn,
            use_cache=self.use_cache,
            dtype=deployment.dtype.value,
        )

    def is_engines_own(self, deployment: Deployment) -> bool:
        """Whether the forward is the one that an engine's rule for its own forward is about."""
        forward = self.forward(deployment)
        return (
            self.warmup in ("worst_case", "no_reset")
            and forward.shape == WarmupShape.of(deployment)
            and (self.logits, self.sampler, self.use_cache) == ("last", "none", False)
            and self.attn != "eager"
        )


def forward_key(forward: Forward) -> str:
    """What of a forward a load and a warm-up depend on."""
    return repr((asdict(forward.case), asdict(forward.worst), forward.warmup))
