"""Forwards of real models on an H200, against their simulation on a machine without one."""

import pytest
from simulate_cases import measured, transformers_version

from kvexp import simulate
from kvexp.simulate import device as devices

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

MEASURED = measured("h200_forwards.json.xz")
MEASURED_WITH = "5.17.0"
UNCHANGED = ("llama3_8b", "qwen3_8b", "qwen3_0_6b", "gemma3_12b")
"""Models whose code is the same in later releases of transformers."""
QUICK = ("llama3_8b", "qwen3_0_6b", "gpt_oss_20b")
ARCHITECTURES = measured("h200_architectures.json.xz")
QUICK_ARCHITECTURES = ("bloom", "falcon", "gemma4_unified", "lfm2", "mixtral", "gpt_neox")


def forward(model, batch, seq, limits=None, **options):
    h200 = devices.load("h200")
    case = simulate.Case(batch=batch, seq=seq, **options)
    subject = simulate.Subject(facts=model, make_config=lambda: simulate.make_config(model))
    traces = simulate.traces_of(subject, case, h200)
    settings = simulate.AllocatorSettings()
    return simulate.simulate(traces, case, h200, settings, limits or simulate.Limits())


def rows():
    for row in MEASURED["forwards"]:
        name = f"{row['model']}-{row['batch']}x{row['seq']}-{row['logits']}-{row['extra'] or ''}"
        quick = row["model"] in QUICK and row["seq"] <= 4096
        marks = [] if quick else [pytest.mark.slow]
        if row["model"] not in UNCHANGED:
            marks.append(same_code)
        yield pytest.param(row, id=name, marks=marks)


same_code = pytest.mark.skipif(
    transformers_version() != MEASURED_WITH,
    reason=f"measured with transformers {MEASURED_WITH}, whose model code this is",
)


@pytest.mark.parametrize("row", list(rows()))
def test_allocated_equals_the_cards_to_the_byte(row):
    found = forward(
        MEASURED["configs"][row["model"]],
        row["batch"],
        row["seq"],
        logits=row["logits"],
        **row["extra"],
    )
    # the first forward of a process includes the workspaces, later ones find them there
    own = found.first if row["first"] else found.warm

    assert own.activation_bytes == row["allocated_peak"] - row["before"]
    assert found.first.allocated_bytes == row["allocated_peak"]
    assert found.weights_bytes == MEASURED["loads"][row["model"]]["allocated"]
    assert found.weights_reserved_bytes == MEASURED["loads"][row["model"]]["reserved"]
    if transformers_version() == MEASURED_WITH:
        assert found.reserved_low_bytes <= row["reserved_peak"] <= found.reserved_high_bytes


def architectures():
    for each in ARCHITECTURES:
        quick = each["type"] in QUICK_ARCHITECTURES
        yield pytest.param(each, id=each["type"], marks=[] if quick else [pytest.mark.slow])


@same_code
@pytest.mark.parametrize("architecture", list(architectures()))
def test_architectures_are_within_a_thousandth(architecture):
    for case in architecture["cases"]:
        found = forward(architecture["config"], case["batch"], case["seq"], logits=case["logits"])
        # measured one after the other in a process whose workspaces existed
        assert found.warm.activation_bytes == pytest.approx(case["activation"], rel=0.001)


@same_code
def test_out_of_memory_comes_at_the_same_place_with_the_same_figures():
    limits = simulate.Limits(allowed_bytes=17500 << 20)
    with pytest.raises(simulate.OutOfMemory) as failed:
        forward(MEASURED["configs"]["llama3_8b"], 2, 8192, limits)

    assert failed.value.requested_bytes == 448 << 20
    assert round(failed.value.allocated_bytes / 2**30, 2) == 16.37
    assert round(failed.value.cached_bytes / 2**20, 2) == 445.30
    assert "layers.1.mlp" in str(failed.value)


def test_attention_backends_are_those_that_the_card_chose():
    from kvexp.simulate.attention import Shapes, eligible

    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    h200 = devices.load("h200")
    for text, chosen in MEASURED["attention"].items():
        dtype, heads, seq, sizes, kind = text.split()
        q, kv = (int(count) for count in heads[1:].split("/"))
        d, dv = (int(size) for size in sizes[1:].split("/"))
        length = int(seq[1:])
        shapes = Shapes(
            dtype=f"torch.{dtype}",
            query=(1, q, length, d),
            key=(1, kv, length, d),
            value=(1, kv, length, dv),
            unit_stride=True,
            has_mask=kind == "mask",
            enable_gqa=q != kv,
        )
        if dtype == "float32" and kind == "mask" and q != kv:
            continue  # asked with the heads repeated
        assert eligible(shapes, h200)[0] == names[chosen], text
