"""What is simulated: the options, read against a deployment."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvexp.contract import (
    MEASURABLE_MODEL_TYPES,
    Deployment,
    Model,
    WarmupShape,
    simulate,
    transformers_config,
)
from kvexp_simulated.architectures import facts_of

WARMUPS = ("worst_case", "no_reset", "short_prompt", "decode", "none")
SHORT_PROMPT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The profiler's options, checked; see `Simulated`."""

    batch_size: int | None
    seq_len: int | None
    logits: str
    sampler: str
    attn: str
    use_cache: bool
    mask: bool
    cudnn: bool
    warmup: str
    settings: simulate.AllocatorSettings
    allowed_bytes: int | None
    config_path: str | None
    device: simulate.Device | None
    timeline: str | None
    snapshot: str | None

    def case(self, deployment: Deployment) -> simulate.Case:
        """The forward of this warm-up.

        Raises:
            InvalidValue: an option's value is not allowed.
        """
        worst = self.worst_case(deployment)
        if self.warmup == "short_prompt":
            return replace(worst, seq=min(SHORT_PROMPT, worst.seq))
        if self.warmup == "decode":
            return replace(worst, seq=1)
        return worst

    def worst_case(self, deployment: Deployment) -> simulate.Case:
        """The largest forward: as long and as many prompts as the batch limits allow."""
        shape = WarmupShape.of(deployment)
        tokens = deployment.max_num_batched_tokens
        seq = self.seq_len or (
            shape.seq_len
            if self.batch_size is None
            else max(1, min(tokens // self.batch_size, deployment.max_model_len))
        )
        batch = self.batch_size or max(1, min(tokens // seq, deployment.max_num_seqs))
        return simulate.Case(
            batch=batch,
            seq=seq,
            logits=self.logits,
            sampler=self.sampler,
            attn=self.attn,
            use_cache=self.use_cache,
            mask=self.mask,
            cudnn=self.cudnn,
            dtype=deployment.dtype.value,
        )

    def is_of(self, model: Model) -> bool:
        """Whether what is traced is this model, as far as a config.json of its own tells."""
        if self.config_path is None:
            return True
        facts = simulate.read_facts(self.config_path)
        facts = facts.get("text_config") or facts
        return all(
            facts.get(name) == getattr(model, name)
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        )

    def is_engines_own(self, deployment: Deployment) -> bool:
        """Whether the forward is the one that an engine's rule for its own forward is about."""
        shape = WarmupShape.of(deployment)
        case = self.worst_case(deployment)
        return (
            self.is_of(deployment.model)
            and self.warmup == "worst_case"
            and (case.batch, case.seq) == (shape.num_seqs, shape.seq_len)
            and (self.logits, self.sampler, self.use_cache, self.mask)
            == ("last", "none", False, False)
            and self.attn != "eager"
        )

    def subject(self, deployment: Deployment) -> simulate.Subject:
        """The model to trace.

        Raises:
            Untraceable: its facts do not say all that transformers needs.
            InvalidValue: the config.json cannot be read.
        """
        model = deployment.model
        path = self.config_path or _config_of(model)
        if path is not None:
            facts = simulate.read_facts(path)
            return simulate.Subject(facts=facts, make_config=lambda: simulate.make_config(facts))
        if model.model_type in MEASURABLE_MODEL_TYPES:
            kept = {name: value for name, value in asdict(model).items() if name not in _NOT_FACTS}
            return simulate.Subject(facts=kept, make_config=lambda: transformers_config(model))
        facts = facts_of(model)
        return simulate.Subject(facts=facts, make_config=lambda: simulate.make_config(facts))


def _config_of(model: Model) -> str | None:
    """The config.json that the model's facts were read from, where there is one."""
    if model.path is None:
        return None
    path = Path(model.path)
    path = path / "config.json" if path.is_dir() else path
    return str(path) if path.suffix == ".json" and path.is_file() else None


_NOT_FACTS = ("name", "hf_id", "source", "aliases", "notes", "checkpoint_bytes")
