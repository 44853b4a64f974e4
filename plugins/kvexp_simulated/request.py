"""What is simulated: the options, read against a deployment."""

from dataclasses import dataclass, replace

from kvexp.contract import (
    Deployment,
    Forward,
    ForwardOptions,
    InvalidValue,
    Model,
    check_describes,
    config_facts,
    simulate,
    transformers_config,
)

LOADINGS = ("in_place", "state_dict")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The profiler's options, checked; see `Simulated`."""

    options: ForwardOptions
    mask: bool
    cudnn: bool
    loading: str
    settings: simulate.AllocatorSettings
    allowed_bytes: int | None
    config_path: str | None
    device: simulate.Device | None
    repeat_layers: bool
    timeline: str | None
    snapshot: str | None

    def forward(self, deployment: Deployment) -> Forward:
        """What the warm-up runs.

        Raises:
            InvalidValue: an option's value is not allowed.
        """
        return self.options.forward(deployment)

    def case(self, deployment: Deployment) -> simulate.Case:
        """The forward of this warm-up.

        Raises:
            InvalidValue: an option's value is not allowed.
        """
        return replace(self.forward(deployment).case, mask=self.mask, cudnn=self.cudnn)

    def check_model(self, model: Model) -> None:
        """A config.json of its own is of this model.

        Raises:
            InvalidValue: it is of another one, or cannot be read.
        """
        if self.config_path is not None:
            simulate.read_facts(self.config_path)
            check_describes(model, self.config_path, "profiler.config_path")

    def is_engines_own(self, deployment: Deployment) -> bool:
        """Whether the forward is the one that an engine's rule for its own forward is about."""
        return not self.mask and self.options.is_engines_own(deployment)

    def subject(self, deployment: Deployment) -> simulate.Subject:
        """The model to trace.

        Raises:
            Untraceable: its facts do not say all that transformers needs.
            InvalidValue: the config.json cannot be read.
        """
        model = deployment.model
        if self.config_path is not None:
            facts = simulate.read_facts(self.config_path)
            return simulate.Subject(facts=facts, make_config=lambda: simulate.make_config(facts))
        try:
            facts = dict(config_facts(model))
        except InvalidValue as problem:
            raise simulate.Untraceable(f"{problem}; give profiler.config_path") from None
        return simulate.Subject(facts=facts, make_config=lambda: transformers_config(model))
