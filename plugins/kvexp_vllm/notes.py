"""What is assumed of a model where its config or the user says nothing."""

from kvexp.contract import Knobs, Model, weights


def of_model(model: Model) -> list[str]:
    """What the reader assumed, and what vLLM takes for keys that are absent."""
    found = list(model.notes)
    if not weights.is_known(model) and model.path is None:  # the reader says it
        kind = model.model_type
        found.append(f"the structure of model_type {kind!r} is assumed: a gated decoder")
    if model.head_dim is None:
        found.append(f"head_dim = hidden_size / heads = {model.head_size}")
    if model.num_key_value_heads is None:
        found.append(f"num_key_value_heads = num_attention_heads = {model.kv_heads}")
    return found


def of_replicas(knobs: Knobs, *, expert_parallel: bool) -> list[str]:
    """Which replica the figures are of, where they differ."""
    moe, ranks = knobs.model.moe, knobs.tp * knobs.dp
    if moe is None or not expert_parallel or moe.num_experts % ranks == 0:
        return []
    return [
        f"{moe.num_experts} experts are dealt out to {ranks} ranks unevenly: figures are of the"
        " first replica, which holds the most"
    ]
