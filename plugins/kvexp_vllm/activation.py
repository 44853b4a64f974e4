"""torch_peak_increase of vLLM: the largest of the profile run's phases, by rule and runner.

T = tokens of a step, S = rows that are sampled, H = hidden size, I = intermediate size of a rank,
V = padded vocabulary, n = tensor-parallel size, e = bytes of an element, W = cuBLAS's workspace:

    forward      = e T (3 I + k H) + W + index buffers of S  (experts: their workspace, not 3 I)
    attention    = e T (latents, queries, outputs, 2 H) + the chunked prefill's workspace + W, with
                   the workspace that earlier layers' experts keep              (MLA alone)
    V2 logits    = e V S (1, or 2 + 1/n when gathered) + e H T + e H S + W, and for n = 1 the
                   sampler's block maxima
    V0, V1 sampler = B V S + e H T + 2 e H S + W, with B = e + 36 where top-k and top-p sort (to
                   0.16) and e + 12 with the Triton kernel (from 0.17), which keeps 4 V bytes a
                   multiprocessor; 16 V S more where drafts are rejected (from 0.12)
    draft        = its own forward, and its logits on the V2 runner, while the model's hidden
                   states are alive: 1 H a token, 5 for EAGLE3 (three of inner layers, one combined)
    images       = their pixels and the encoder's output, alive while the phases above run

k = 3 for a plain decoder block, one more where q and k are changed after their projection (a bias
or norms of heads), one more with norms behind attention and MLP. Fitted to vLLM 0.26.0 on one and
two H200 and, for the V0 and V1 runners of other versions, to public start-up logs.
"""

from dataclasses import dataclass, replace

from kvexp.contract import KIB, MIB, Deployment, Model, Quantization, RankShape, weights
from kvexp_vllm.rules import MEASURED, VersionRules, is_v0, release_of

HOPPER_WORKSPACE_BYTES = 32 * MIB
WORKSPACE_BYTES = 8 * MIB + MIB // 8  # on other cards
COMPILE_INDEX_BYTES = 5  # a token, with torch.compile (llama3-8b, qwen3-8b)
COMPILE_EXTRA_NORMS_BYTES = 29892608  # where norms stand behind attention and MLP (gemma3-12b)
DRAFT_SPREAD = 0.02
HIDDEN_STATES = {"eagle3": 5, "mtp": 4}
"""Of a token, alive beside a draft's forward, where it is not the model's last one alone."""

UNSPLIT_BYTES = 2 * MIB
"""What the rests of blocks that the allocator does not split may add to a peak."""

ADAPTERS_BYTES = 5 * KIB  # a layer, on the V2 runner: three sizes of adapters, one and two cards
V1_COMPILED_BYTES = 13 * MIB  # instead of the workspace, three models of 0.19
SAMPLER_ARGUMENT_BYTES = 3 * 1024  # of a row: temperatures, penalties and index arrays
SAMPLER_BLOCK = 1024  # vocabulary entries that one program of the V2 sampler reduces
MLA_WORKSPACE_TOKENS = 65536  # of the chunked prefill

UNKNOWN_PIXELS_BYTES = 256 * MIB

V1_FITTED = ((0, 6), (0, 26))

PRINTED_BYTES = int(0.0075 * 2**30)
"""Rounding of a log's two digits, with half as much again for what stands between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak of one rank, its interval and the phase that reaches it."""

    size_bytes: int
    low_bytes: int
    high_bytes: int
    phase: str
    source: str

    @property
    def is_confirmed(self) -> bool:
        """Whether the rule gave the engine's own bytes, but for what the allocator rounds up."""
        return self.low_bytes == self.size_bytes >= self.high_bytes - UNSPLIT_BYTES

    def with_held(self, held_bytes: int) -> "Peak":
        """The same phase while `held_bytes` of images are alive; a tenth of them is uncertain."""
        doubt = held_bytes // 10
        return replace(
            self,
            size_bytes=self.size_bytes + held_bytes,
            low_bytes=self.low_bytes + held_bytes - doubt,
            high_bytes=self.high_bytes + held_bytes + doubt,
        )


def peak(deployment: Deployment, shape: RankShape, rules: VersionRules, *, v2_runner: bool) -> Peak:
    """The activation peak of one rank; of two phases the higher end counts for the interval too."""
    images = _images(deployment, rules, v2_runner=v2_runner)
    deployment = _step(deployment, images)
    phases = [_forward(deployment, shape, rules, v2_runner=v2_runner)]
    if shape.pp_rank == deployment.pp - 1:
        phases += _of_drafts(deployment, shape, rules, v2_runner=v2_runner)
        last = _logits(deployment, rules) if v2_runner else _sampler(deployment, shape, rules)
        phases.append(last)
    if images.held and shape.pp_rank == 0:
        held = _image_bytes(deployment, rules, images)
        phases = [phase.with_held(held) for phase in phases]
        phases.append(_encoder(deployment, rules, images))
    largest = max(phases, key=lambda phase: phase.size_bytes)
    adapts = deployment.lora is not None
    adapters = ADAPTERS_BYTES * shape.num_layers if adapts and v2_runner else 0
    more = UNSPLIT_BYTES if adapts else 0
    more += _unknown_images_bytes(deployment) if shape.pp_rank == 0 and not v2_runner else 0
    beyond = 4 if release_of(deployment.engine_version) < V1_FITTED[0] else 1  # a log of 0.5 has 4
    return replace(
        largest,
        size_bytes=largest.size_bytes + adapters,
        low_bytes=max(phase.low_bytes for phase in phases) + adapters,
        high_bytes=beyond * max(phase.high_bytes for phase in phases) + adapters + more,
    )


def lasting_bytes(deployment: Deployment, rules: VersionRules) -> int:
    """What the first forward allocates for good: workspaces of cuBLAS and of experts."""
    return _workspace_bytes(deployment) + _kept_experts_bytes(deployment, rules)


def profiles_images(deployment: Deployment, rules: VersionRules, *, v2_runner: bool) -> bool:
    """Whether the profile run passes images through the model's encoder."""
    limits = deployment.mm_limits
    allowed = limits.get("image", 1) or limits.get("video", 1)
    profiled = rules.v2_profiles_images or not v2_runner
    return deployment.model.encoder is not None and bool(allowed) and profiled


def _peak(
    phase: str,
    size_bytes: int,
    source: str,
    *,
    spread: float = 0.0,
    more_bytes: int = 0,
    above_bytes: int = 0,
) -> Peak:
    error = int(size_bytes * spread) + more_bytes
    return Peak(
        size_bytes=size_bytes,
        low_bytes=max(0, size_bytes - error),
        high_bytes=size_bytes + error + above_bytes,
        phase=phase,
        source=source,
    )


def _fitted(deployment: Deployment, *, v2_runner: bool) -> str:
    """What a phase's rule was fitted to, and whether this version lies outside."""
    release = release_of(deployment.engine_version)
    if v2_runner:
        beyond = "" if release == MEASURED else f", not to {deployment.engine_version}"
        return f"fitted to vLLM 0.26 on H200{beyond}"
    beyond = "" if V1_FITTED[0] <= release <= V1_FITTED[1] else " and none of this version"
    return f"fitted to start-up logs of 0.6 to 0.19 and to 0.26 on H200{beyond}"


def _rows(deployment: Deployment) -> int:
    return min(deployment.max_num_seqs, deployment.max_num_batched_tokens)


def _workspace_bytes(deployment: Deployment) -> int:
    """cuBLAS's workspace by the card's compute capability, as torch asks for it."""
    capability = deployment.gpu.compute_capability or "9.0"
    return HOPPER_WORKSPACE_BYTES if capability[:2] in ("9.", "10") else WORKSPACE_BYTES


def _forward(
    deployment: Deployment, shape: RankShape, rules: VersionRules, *, v2_runner: bool
) -> Peak:
    model, item = deployment.model, deployment.dtype.itemsize_bytes
    tokens = deployment.max_num_batched_tokens
    compiled = _is_compiled(deployment)
    hidden = _hidden_elements(deployment)
    if deployment.quantization is Quantization.fp8:
        hidden -= model.hidden_size // 2  # the quantised input replaces one two-byte tensor
    if compiled and not v2_runner:
        hidden = max(hidden, 4 * model.hidden_size)
    if v2_runner and shape.pp_rank > 0:
        hidden -= model.hidden_size  # what the stage before hands on is in a buffer that is there
    if not v2_runner and deployment.pp > 1:
        hidden += 2 * model.hidden_size  # hidden states and residual between the stages
    size = item * tokens * (_mlp_width(deployment) + hidden)
    if compiled and v2_runner and model.mla is None:
        size += _compiled_bytes(deployment)
    if model.mla is not None:
        size = max(size, _latent_attention_bytes(deployment, shape, rules, v2_runner=v2_runner))
    size += V1_COMPILED_BYTES if compiled and not v2_runner else _workspace_bytes(deployment)
    size += _index_buffers(_rows(deployment))
    source = _fitted(deployment, v2_runner=v2_runner)
    spread = _forward_spread(deployment, v2_runner=v2_runner)
    return _peak("forward", size, source, spread=spread)


def _is_compiled(deployment: Deployment) -> bool:
    return not deployment.enforce_eager and not is_v0(deployment.engine_version)


def _compiled_bytes(deployment: Deployment) -> int:
    """What torch.compile's graphs have alive beside the eager forward, on the V2 runner.

    One more tensor of the MLP's width for a plain block (llama3-8b); two, and one more of hidden
    states, where q and k are normed (qwen3-8b); four with norms behind attention and MLP
    (gemma3-12b). Five or two tensors of a head's size stand beside them.
    """
    model, known = deployment.model, weights.architecture_of(deployment.model)
    tokens, item = deployment.max_num_batched_tokens, deployment.dtype.itemsize_bytes
    width = model.intermediate_size // deployment.tp
    if known.norms == 4:
        return item * tokens * 4 * width + COMPILE_EXTRA_NORMS_BYTES
    if known.qk_norm or model.qk_norm:
        elements = 2 * width + model.hidden_size + 2 * model.head_size
    else:
        elements = width + 5 * model.head_size
    return item * tokens * elements + COMPILE_INDEX_BYTES * tokens


def _latent_attention_bytes(
    deployment: Deployment, shape: RankShape, rules: VersionRules, *, v2_runner: bool
) -> int:
    """Latent attention in a layer behind one with experts, whose workspace is still held.

    Queries and outputs of all heads, the hidden states and their residual, what is projected down,
    and its normed copies, which torch.compile fuses away. The profile adds the largest context that
    a chunk of a prefill reads.
    """
    model, mla = deployment.model, deployment.model.mla
    assert mla is not None
    heads = model.num_attention_heads // deployment.tp
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
    elements = queries + heads * mla.v_head_dim + latents + mla.qk_rope_head_dim
    if v2_runner and _is_compiled(deployment):
        elements += model.hidden_size
    else:
        rotated = mla.qk_rope_head_dim if model.rope_type == "yarn" else 0
        elements += 2 * model.hidden_size + latents + rotated
    if v2_runner and shape.pp_rank > 0:
        elements -= model.hidden_size
    size = deployment.dtype.itemsize_bytes * deployment.max_num_batched_tokens * elements
    return size + _kept_experts_bytes(deployment, rules) + _mla_workspace_bytes(deployment)


def _hidden_elements(deployment: Deployment) -> int:
    """Elements a token outside the MLP that are alive at its peak: k H."""
    model = deployment.model
    known = weights.architecture_of(model)
    changed = bool(known.qk_norm or model.qk_norm or model.attention_bias)
    return (3 + changed + (known.norms == 4)) * model.hidden_size


def _forward_spread(deployment: Deployment, *, v2_runner: bool) -> float:
    model = deployment.model
    measured = model.moe is None and model.model_type in MEASURED_FORWARDS
    if v2_runner and release_of(deployment.engine_version) == MEASURED:
        if measured and (deployment.enforce_eager or model.model_type in COMPILED_FORWARDS):
            return 0.0
        if model.mla is not None and model.moe is not None:
            return 0.0
        return 0.05
    return 0.05 if measured else 0.15


MEASURED_FORWARDS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma3_text")
"""Types whose dense forward was measured, without torch.compile."""

COMPILED_FORWARDS = ("llama", "qwen3", "gemma3_text")
"""And with it."""


def _mlp_width(deployment: Deployment) -> int:
    """Elements a token of the widest MLP: gate, up and their product, or the experts' workspace."""
    model, tp = deployment.model, deployment.tp
    if model.moe is None:
        return 3 * (model.intermediate_size // tp)
    moe, width = model.moe, model.moe.moe_intermediate_size // tp
    rows = moe.num_experts_per_tok
    workspace = rows * max(2 * width, model.hidden_size) + rows * width
    return workspace + 3 * (moe.shared_intermediate_size // tp)


def _mla_workspace_bytes(deployment: Deployment) -> int:
    mla = deployment.model.mla
    if mla is None or is_v0(deployment.engine_version):
        return 0
    heads = deployment.model.num_attention_heads // deployment.tp
    elements = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return MLA_WORKSPACE_TOKENS * elements * deployment.dtype.itemsize_bytes


def _logits(deployment: Deployment, rules: VersionRules) -> Peak:
    """The V2 runner's logits and plain sampler."""
    model, rows, n = deployment.model, _rows(deployment), deployment.tp
    item = deployment.dtype.itemsize_bytes
    vocab = weights.padded_vocab_size(model)
    size = item * model.hidden_size * (deployment.max_num_batched_tokens + rows)
    size += _workspace_bytes(deployment) + _kept_experts_bytes(deployment, rules)
    size += _gathered_bytes(deployment, vocab)
    if n == 1:
        maxima = -(-vocab // SAMPLER_BLOCK) * (8 + 4) * rows  # an index and a value each
        size += maxima + 28 * rows + _index_buffers(rows)
    known = n <= 2 and release_of(deployment.engine_version) == MEASURED
    source = _fitted(deployment, v2_runner=True)
    spread = 0.0 if known else 0.02
    return _peak("logits", size, source, spread=spread, above_bytes=UNSPLIT_BYTES)


def _gathered_bytes(deployment: Deployment, vocab: int) -> int:
    """Logits of all rows: whole, or gathered, transposed and the local share."""
    logits, n = deployment.dtype.itemsize_bytes * vocab * _rows(deployment), deployment.tp
    return logits if n == 1 else 2 * logits + logits // n


def _of_drafts(
    deployment: Deployment, shape: RankShape, rules: VersionRules, *, v2_runner: bool
) -> list[Peak]:
    """The drafting model's phases, the model's own hidden states being alive."""
    drafts, draft = deployment.speculation, deployment.draft
    if drafts is None or draft is None:
        return []
    alone = replace(deployment, model=draft, speculation=None)
    forward = _forward(alone, shape, rules, v2_runner=v2_runner)
    held = HIDDEN_STATES.get(drafts.method, 1)
    item, rows = deployment.dtype.itemsize_bytes, _rows(deployment)
    tokens, width = deployment.max_num_batched_tokens, deployment.model.hidden_size
    alive = item * tokens * width * held + 16 * rows
    source = _fitted(deployment, v2_runner=v2_runner)
    phases = [_peak("draft", forward.size_bytes + alive, source, spread=DRAFT_SPREAD)]
    if v2_runner:
        logits = _draft_logits_bytes(deployment, draft)
        logits += item * width * (tokens + rows) + _workspace_bytes(deployment)
        logits += _index_buffers(rows)
        phases.append(_peak("draft_logits", alive + logits, source, spread=DRAFT_SPREAD))
    return phases


def _draft_logits_bytes(deployment: Deployment, draft: Model) -> int:
    """Logits of the draft's vocabulary, then spread over the model's by their ids."""
    vocab = draft.draft_vocab_size or draft.vocab_size
    gathered = _gathered_bytes(deployment, vocab)
    if draft.draft_vocab_size is None:
        return gathered
    both = deployment.dtype.itemsize_bytes * _rows(deployment) * (vocab + draft.vocab_size)
    return max(gathered, both + 2 * 8 * vocab)


def _sampler(deployment: Deployment, shape: RankShape, rules: VersionRules) -> Peak:
    """The sampler with top-k and top-p of the V0 and V1 runners."""
    model, rows = deployment.model, _rows(deployment)
    item = deployment.dtype.itemsize_bytes
    vocab = weights.padded_vocab_size(model)
    rejected = rules.rejection_bytes if deployment.speculation is not None else 0
    size = (item + rules.sampler_bytes + rejected) * vocab * rows
    if rules.sampler_keeps_rows:
        size += 4 * vocab * min(deployment.gpu.num_sms or 132, rows)
    size += item * model.hidden_size * (deployment.max_num_batched_tokens + 2 * rows)
    if shape.pp_rank > 0:
        size += 2 * item * model.hidden_size * deployment.max_num_batched_tokens
    size += SAMPLER_ARGUMENT_BYTES * rows
    experts = _kept_experts_bytes(deployment, rules)
    size += experts + _workspace_bytes(deployment)
    doubt = PRINTED_BYTES + experts // 20
    if model.moe is not None and model.moe.format is not None:
        doubt += 16 * MIB
    return _peak("sampler", size, _fitted(deployment, v2_runner=False), more_bytes=doubt)


def _kept_experts_bytes(deployment: Deployment, rules: VersionRules) -> int:
    """The fused experts' two workspaces, which outlive the forward; mxfp4 kernels keep none."""
    model, moe = deployment.model, deployment.model.moe
    if moe is None or moe.format is not None or not rules.keeps_experts_workspace:
        return 0
    width, hidden = moe.moe_intermediate_size // deployment.tp, model.hidden_size
    rows = deployment.max_num_batched_tokens * moe.num_experts_per_tok
    elements = rows * (max(width, hidden) + max(2 * width, hidden))
    return deployment.dtype.itemsize_bytes * elements


def _unknown_images_bytes(deployment: Deployment) -> int:
    """What images may take where an encoder is there and its images are not known."""
    model = deployment.model
    if not model.tower_parameters or model.encoder is not None:
        return 0
    outputs = deployment.max_num_batched_tokens * model.hidden_size
    return UNKNOWN_PIXELS_BYTES + outputs * deployment.dtype.itemsize_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images of a profile run, a video as so many: all that are held, and the most in one forward.

    V0 runs one prompt with every kind of item a sequence, `sequences` of `tokens` each; V1 as many
    of the largest item as the step's tokens hold, beside a step of text.
    """

    held: int = 0
    encoded: int = 0
    sequences: int | None = None
    tokens: int = 0


def _images(deployment: Deployment, rules: VersionRules, *, v2_runner: bool) -> Images:
    if not profiles_images(deployment, rules, v2_runner=v2_runner):
        return Images()
    encoder = deployment.model.encoder
    assert encoder is not None
    step = deployment.max_num_batched_tokens
    video = _images_of_a_video(deployment)
    if not rules.is_v0:
        largest = max(video, 1)
        count = largest * max(1, step // (largest * encoder.tokens_per_item))
        return Images(held=count, encoded=count)
    pictures, videos = (deployment.mm_limits.get(name, 0) for name in ("image", "video"))
    if encoder.kept_layers:  # beside the decoder's own prompt, which only looks at them
        count = deployment.max_num_seqs * pictures
        return Images(held=count, encoded=count, sequences=deployment.max_num_seqs, tokens=step)
    prompt = (pictures + videos * video) * encoder.tokens_per_item
    sequences = max(1, min(deployment.max_num_seqs, step // prompt))
    if rules.drops_images and prompt > step // sequences:
        return Images(sequences=sequences, tokens=step)
    return Images(
        held=sequences * (pictures + videos * video),
        encoded=sequences * max(pictures, videos * video),
        sequences=sequences,
        tokens=max(step, sequences * prompt),
    )


def _images_of_a_video(deployment: Deployment) -> int:
    """How many images the video is as much as that fits the length beside one image, 0 for none."""
    encoder = deployment.model.encoder
    assert encoder is not None
    if not deployment.mm_limits.get("video", 0):
        return 0
    fitting = deployment.max_model_len // encoder.tokens_per_item - 1
    return min(max(fitting, 1), encoder.video_items)


def _step(deployment: Deployment, images: Images) -> Deployment:
    """The deployment with the tokens and sequences of the profile's step."""
    if images.sequences is None:
        return deployment
    return replace(deployment, max_num_batched_tokens=images.tokens, max_num_seqs=images.sequences)


def _image_bytes(deployment: Deployment, rules: VersionRules, images: Images) -> int:
    """Pixels and outputs of the images, which live while the decoder runs."""
    encoder = deployment.model.encoder
    assert encoder is not None
    outputs = encoder.tokens_per_item * deployment.model.hidden_size
    outputs *= deployment.dtype.itemsize_bytes
    return _pixel_bytes(deployment, rules, images) + images.held * outputs


def _pixel_bytes(deployment: Deployment, rules: VersionRules, images: Images) -> int:
    encoder = deployment.model.encoder
    assert encoder is not None
    item = rules.pixel_bytes or deployment.dtype.itemsize_bytes
    return images.held * encoder.patches_per_item * encoder.patch_size * item


def _encoder(deployment: Deployment, rules: VersionRules, images: Images) -> Peak:
    """The encoder's own forward: all patches through its MLP, or through rotary attention.

    With rotary positions (encoders that take videos) the input and its norm, the projections and
    their contiguous copies stand beside fp32 queries and what turning them takes, or beside the
    projections that all ranks gather. An encoder that keeps outputs of layers holds each of them
    and their stack, and a mask of all pairs of an image's patches.
    """
    encoder, item, n = deployment.model.encoder, deployment.dtype.itemsize_bytes, deployment.tp
    assert encoder is not None
    patches = images.encoded * encoder.patches_per_item
    hidden, widths = encoder.hidden_size, 3 if encoder.gated else 2
    elements = widths * (encoder.intermediate_size // n) + 4 * hidden
    if encoder.kept_layers:
        elements += (2 * encoder.kept_layers + 2) * hidden + encoder.patches_per_item
        beside = _pixel_bytes(deployment, rules, images)
        return _peak("encoder", patches * elements * item + beside, "one log", spread=0.1)
    if encoder.video_items:
        turning = (2 + 2 * rules.rotary_copies) * hidden // n
        gathered = 3 * hidden if n > 1 else 0
        elements = max(elements, 2 * hidden + 6 * hidden // n + max(turning, gathered))
    if rules.pixel_bytes:
        elements += encoder.patch_size  # the pixels in the compute dtype
    size = patches * elements * item + _image_bytes(deployment, rules, images)
    return _peak("encoder", size, "logs of two models of images", spread=0.2)


def _index_buffers(rows: int) -> int:
    """Three int32 arrays of the rows and one of row starts, each in whole 512 bytes."""
    return 3 * _round(4 * rows) + _round(4 * (rows + 1))


def _round(size_bytes: int) -> int:
    return -(-size_bytes // 512) * 512
