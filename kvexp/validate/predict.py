"""From the inputs of a case to a prediction: text, values, result."""

from kvexp.validate.case import Inputs
from kvexp.validate.prediction import Prediction


def predict(inputs: Inputs) -> Prediction:
    """What the engine would print when it is started with these inputs."""
    return Prediction.unanswered(f"no rules for engine {inputs.engine!r}")
