"""Speculative decoding under SGLang: what a draft adds, by release.

Read in the wheels of 0.5.7 to 0.5.23: `server_args.py` and `arg_groups/speculative_hook.py`
(defaults), `arg_groups/memory_hook.py` (the reserve), `pool_configurator.py` (bytes of a token),
`managers/scheduler.py` and `speculative/*_worker*.py` (the order of what is loaded). Since 0.5.14
the draft is loaded before the pool is sized, with an embedding and a head that are given back only
after it; before that it came after the pool, out of what is held back.
"""

import shlex

from kvexp.contract import (
    GIB,
    MIB,
    Deployment,
    InvalidValue,
    Knobs,
    Model,
    Part,
    Speculation,
    drafts,
    gib,
    layers,
    terms,
)
from kvexp_sglang.pools import Cell, layer_bytes

ALGORITHMS = {
    "eagle3": "EAGLE3",
    "eagle": "EAGLE",
    "mtp": "NEXTN",
    "draft_model": "STANDALONE",
    "dflash": "DFLASH",
    "ngram": "NGRAM",
}
"""SGLang's algorithms by the methods of a request."""

MAX_RUNNING_REQUESTS = 48
"""The default of every algorithm."""

SINCE, DFLASH_SINCE, STATES_SINCE = (0, 5, 7), (0, 5, 11), (0, 5, 10)
COUNTED_SINCE = (0, 5, 14)
"""The first release that counts a draft's weights and its share of a token."""

TWO_POOLS_SINCE, OWN_CELL_SINCE = (0, 5, 15), (0, 5, 18)
CHAINS_SINCE = (0, 5, 8)
"""The first release that drafts a chain for models that it does not name."""

TREE, CHAIN, NGRAM_TOKENS, DFLASH_TOKENS = 7, 3, 11, 15
"""Tokens beside the last one that a step verifies by default."""

_TREES = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
_CHAINS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
)
_RESERVES = (
    ("draft_model", (0, 5, 0), 6 * GIB),
    ("", (0, 5, 10), 4 * GIB),
    ("", (0, 5, 0), 2 * GIB),
)
"""What the automatic fraction held back for a draft, by method and first release."""


def resolve(knobs: Knobs, release: tuple[int, ...], given_layers: int | None) -> Speculation | None:
    """The method, the drafted tokens that a step verifies and the drafting model.

    Raises:
        InvalidValue: something is missing, not known for the release or does not belong together.
    """
    if given_layers is not None and given_layers < 0:
        raise InvalidValue(f"engine.num_draft_layers must be at least 0, got {given_layers}")
    if not knobs.speculative.is_asked:
        return None
    if release < SINCE:
        raise InvalidValue(f"speculative is known for SGLang {_text(SINCE)} and newer")
    method, draft = drafts.chosen(knobs, tuple(ALGORITHMS))
    if method == "dflash" and release < DFLASH_SINCE:
        raise InvalidValue(f"speculative.method=dflash needs SGLang {_text(DFLASH_SINCE)} or newer")
    if knobs.pp > 1:
        raise InvalidValue(f"pp must be 1 with speculative for SGLang, got {knobs.pp}")
    if knobs.model.is_attention_free or (knobs.model.is_hybrid and release < STATES_SINCE):
        raise InvalidValue(
            f"speculative is not known for {knobs.model.name} with SGLang {_text(release)}: its"
            f" layers keep states (known from {_text(STATES_SINCE)} on, beside layers with K and V)"
        )
    tokens = knobs.speculative.num_tokens or default_tokens(knobs.model, method, release)
    return Speculation(method=method, num_tokens=tokens, draft=draft)


def default_tokens(model: Model, method: str, release: tuple[int, ...]) -> int:
    """Drafted tokens of a step where none are given (`auto_choose_speculative_params`)."""
    fixed = {"ngram": NGRAM_TOKENS, "dflash": DFLASH_TOKENS, "draft_model": CHAIN}
    if method in fixed:
        return fixed[method]
    if model.architecture in _TREES:
        return TREE
    return CHAIN if release >= CHAINS_SINCE or model.architecture in _CHAINS else TREE


def verified(deployment: Deployment) -> int:
    """Tokens that a step verifies (`speculative_num_draft_tokens`), 0 without drafts."""
    speculation = deployment.speculation
    return 0 if speculation is None else speculation.num_tokens + 1


def reserve_mib(method: str | None, release: tuple[int, ...]) -> int:
    """What the automatic fraction holds back for the draft."""
    if method in (None, "ngram") or release >= COUNTED_SINCE:
        return 0
    return next(
        size // MIB for name, since, size in _RESERVES if name in ("", method) and release >= since
    )


def part(deployment: Deployment, release: tuple[int, ...]) -> Part | None:
    """The draft's weights as they lie when the pool is sized; None where they come after it."""
    draft = deployment.draft
    if draft is None or release < COUNTED_SINCE:
        return None
    size = drafts.weights_bytes(deployment, embedding=True, head=True)
    shared = deployment.speculation is not None and deployment.speculation.method in (
        *drafts.EAGLES,
        "mtp",
    )
    freed = "; its copy of the vocabulary is given back only after the pool" if shared else ""
    return terms.assumed("draft", size, f"{draft.name}, loaded before the pool{freed}")


def token_bytes(
    cell: Cell, deployment: Deployment, release: tuple[int, ...], given_layers: int | None
) -> int:
    """Bytes that SGLang adds to a token's for the draft.

    The draft's layers are taken to be as the model's; from 0.5.18 on DFlash's are its own. Beside a
    pool of windows they are layers that keep all. `given_layers` overrides their number.
    """
    speculation, own = deployment.speculation, cell.full_bytes + cell.swa_bytes
    count = _counted_layers(speculation, release) if given_layers is None else given_layers
    num_layers = cell.num_full + cell.num_swa
    if not count or not num_layers:
        return 0
    is_dflash = speculation is not None and speculation.method == "dflash" and given_layers is None
    if is_dflash and release >= OWN_CELL_SINCE:
        return pool_token_bytes(deployment)
    if cell.has_two_pools:
        counted = not is_dflash and release >= TWO_POOLS_SINCE
        return cell.full_bytes // cell.num_full * count if counted else 0
    if is_dflash:
        return -(-own * (num_layers + count) // num_layers) - own
    return int(own * count / num_layers)


def pool_token_bytes(deployment: Deployment) -> int:
    """Bytes of a token in the draft's own pool on one rank, 0 without a drafting model."""
    return sum(sum(layer) for layer in _layers(deployment))


def log_line(deployment: Deployment, tokens: int, slots: int) -> str:
    """The line of the draft's pool, which follows the model's."""
    k, v = (sum(sizes) * slots / GIB for sizes in zip(*_layers(deployment), strict=True))
    size = f"K size: {k:.2f} GB, V size: {v:.2f} GB" if v else f"KV size: {k:.2f} GB"
    return f"KV Cache is allocated. #tokens: {tokens}, {size}"


def plan_notes(
    deployment: Deployment, release: tuple[int, ...], tokens: int, counted_bytes: int
) -> list[str]:
    """Where the draft's cache lies, and its weights before they were counted."""
    if deployment.draft is None:
        return []
    cache = pool_token_bytes(deployment) * tokens
    notes = [f"the draft's cache takes {gib(cache)}"]
    beyond = cache - counted_bytes * tokens
    if beyond > 0:
        notes.append(f"{gib(beyond)} of the draft's cache come out of what is held back")
    if release < COUNTED_SINCE:
        own = deployment.speculation is not None and deployment.speculation.method == "draft_model"
        size = drafts.weights_bytes(deployment, embedding=own, head=own)
        notes.append(
            f"SGLang {_text(release)} loads the draft after the pool: {gib(size)} of weights come"
            " out of what is held back"
        )
    return notes


def flags(deployment: Deployment, release: tuple[int, ...], given_layers: int | None) -> list[str]:
    """The options that draft so; a tree of drafts is SGLang's own default.

    A model's own layers count where its path is given again (`given_layers`).
    """
    speculation = deployment.speculation
    if speculation is None:
        return []
    method, tokens = speculation.method, speculation.num_tokens
    words = [f"--speculative-algorithm {ALGORITHMS[method]}"]
    draft = speculation.draft
    if method == "mtp":
        draft = deployment.model if given_layers else None
    if draft is not None:
        words.append(f"--speculative-draft-model-path {shlex.quote(draft.checkpoint)}")
    if tokens == default_tokens(deployment.model, method, release):
        return words
    if method not in ("ngram", "dflash"):
        words.append(f"--speculative-num-steps {tokens} --speculative-eagle-topk 1")
    return [*words, f"--speculative-num-draft-tokens {tokens + 1}"]


def _counted_layers(speculation: Speculation | None, release: tuple[int, ...]) -> int:
    """Layers of the draft in a token's bytes.

    A model's own layers count where SGLang sets the draft's path itself, which it does not for
    types whose layers share one projection.
    """
    if speculation is None or speculation.draft is None:
        return 0
    is_counted = release >= COUNTED_SINCE or speculation.method == "dflash"
    by_path = speculation.method != "mtp" or speculation.draft.model_type in drafts.MTP_BY_LAYER
    return speculation.draft.num_hidden_layers if is_counted and by_path else 0


def _layers(deployment: Deployment) -> list[tuple[int, int]]:
    if deployment.draft is None:
        return []
    own = drafts.alone(deployment)
    return [layer_bytes(own, index) for index in layers.of_rank(drafts.shape(deployment))]


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
