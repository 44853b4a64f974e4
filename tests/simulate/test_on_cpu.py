"""Real small models on the CPU: torch.profiler's memory events against the trace without data.

The CPU's kernels are others than a card's, so that scratch and the choice of attention differ.
What remains (which tensors there are, how large, how long) must be equal: to the byte in half
precision, and but for 12 bytes of scalars in fp32. Fused attention is compared where the CPU has
it for the same shapes: half precision, no window.
"""

import pytest

from kvexp import simulate
from kvexp.simulate import device as devices

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,
    "pad_token_id": None,
}
WINDOWED = ("mistral", "gemma2", "gemma3_text")
KINDS = ("llama", "qwen2", "qwen3", "phi3", *WINDOWED)
SCALARS_IN_FP32 = 12


def forwards():
    for kind in KINDS:
        for dtype, attn in (("bfloat16", "eager"), ("float32", "eager"), ("bfloat16", "sdpa")):
            if kind in WINDOWED and attn == "sdpa":
                continue
            marks = [] if kind in ("llama", "gemma3_text") else [pytest.mark.slow]
            yield pytest.param(kind, dtype, attn, id=f"{kind}-{dtype}-{attn}", marks=marks)


def highest(changes):
    total = peak = 0
    for change in changes:
        total += change
        peak = max(peak, total)
    return peak


def traced_peak(config, case):
    from kvexp.simulate import tracing

    trace = tracing.trace(config, case, devices.load("h200"))
    sizes = [event for event in trace.events if event >= 0]
    return highest(event if event >= 0 else -sizes[-event - 1] for event in trace.events)


def real_peak(config, case):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, case.dtype), attn_implementation=case.attn
    ).eval()
    tokens = torch.zeros((case.batch, case.seq), dtype=torch.int64)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    events = profile.profiler.kineto_results.events()
    return highest(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize(("kind", "dtype", "attn"), list(forwards()))
def test_tensors_and_their_lifetimes_are_those_of_a_real_forward(kind, dtype, attn):
    facts = {"model_type": kind, **SIZES}
    if kind in WINDOWED:
        facts["sliding_window"] = 64
    case = simulate.Case(batch=1, seq=128, dtype=dtype, attn=attn)
    traced = traced_peak(simulate.make_config(facts), case)
    real = real_peak(simulate.make_config(facts), case)

    assert real - traced == (SCALARS_IN_FP32 if dtype == "float32" else 0)
