"""Every architecture of transformers: traced, or refused with a reason, as the table says."""

import re
from pathlib import Path

import pytest
from simulate_cases import transformers_version

from kvexp import simulate
from kvexp.errors import InvalidValue
from kvexp.simulate import device as devices

TABLE = Path(__file__).parents[2] / "docs" / "simulated-architectures.md"
LAYERS = 14
ROW = re.compile(
    r"^\| `(?P<kind>[^`]+)` \| (?P<traced>[^|]+) \| (?P<repeated>[^|]+) \|$", re.MULTILINE
)


def rows():
    return {found["kind"]: found for found in ROW.finditer(TABLE.read_text())}


def shortened(config):
    """The configuration with fewer layers, where it states their number plainly."""
    text = getattr(config, "text_config", None) or config
    for name, value in list(vars(text).items()):
        if name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if isinstance(value, int) and value > LAYERS:
                setattr(text, name, LAYERS)
        elif isinstance(value, list) and re.search("layer|type|pattern|block", name):
            setattr(text, name, value[:LAYERS])
    return config


def trace(kind, **options):
    from kvexp.simulate import tracing

    config = shortened(simulate.make_config({"model_type": kind}))
    return tracing.trace(config, simulate.Case(batch=1, seq=48), devices.load("h200"), **options)


pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        transformers_version() != "5.17.0", reason="the table is of transformers 5.17.0"
    ),
]


@pytest.mark.slow
def test_the_table_has_every_architecture():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as SHIPPED

    assert sorted(rows()) == sorted(SHIPPED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(rows()))
def test_an_architecture_ends_as_the_table_says(kind):
    said = rows()[kind]
    if said["traced"] != "yes":
        with pytest.raises(simulate.Untraceable) as refused:
            trace(kind)
        assert "\n" not in str(refused.value)
        return
    whole = trace(kind)
    if said["repeated"] == "equal":
        assert trace(kind, repeat_layers=True) == whole
    else:
        with pytest.raises(InvalidValue, match="repeat_layers is refused"):
            trace(kind, repeat_layers=True)
