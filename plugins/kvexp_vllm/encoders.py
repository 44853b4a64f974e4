"""An encoder's own forward in the profile run: what is alive at its widest point, by family.

P = positions of all items in one forward, h = the encoder's hidden size, I = its MLP's width,
n = tensor-parallel size, e = bytes of an element. Elements a position:

    rotary   = 3 h + 8 h / n from 0.12 on: the layer's input, its norm and what is projected back,
               beside the projections, their queries and keys made contiguous and turned, and the
               attention's output; h more where positions are learned too. Where all projections
               are copied first 2 h + 10 h / n, and no more than 2 h beside the MLP, whose norm is
               added in place. Elsewhere at least the MLP's 3 h + 2 I / n, or 3 I / n with a gate,
               whose norm is torch's own under torch.compile: 2 h more. To the byte on an
               H200 (0.26), with cuBLAS's workspaces, the tables of the rotary positions and the
               outputs that are kept for the decoder's first layers. Before 0.12 2 h + 6 h / n +
               what turning takes in fp32, and its tables; at least as of others
    tiles    = those of others, or 3 h + 4 h / n and the fp32 outputs of the parts that
               FlashAttention 3 splits its keys into (`attention_splits`), to the byte on an H200
    Gemma 4  = 4 h + 3 I and a mask of an image's pairs, of a chunk of the frames, whole on each
               rank; to the byte on an H200
    Pixtral  = 6 h + 3 I / n and a mask of the pairs of all images, read from its code
    MoonViT  = those of rotary, and a table of all positions that it keeps
    SAM      = 8 h and a bias of all pairs in each head, over the whole image, or 11 h and the bias
               over its tiles, one image after another; read from its code
    Gemma 3n = 2 h + 3 I of the widest bottleneck of MobileNetV5, counted without a device
    Mllama   = (2 kept layers + 6) h + 2 I / n, and a mask of all pairs of an image's patches
    normed   = 12 h, or 10 h + 3 h / n where ranks share the heads: the encoder's input, the layer's
               and its norm, the projections (or what is gathered of them) and one that is normed
               already beside the fp32 norm of the other; at least 4 h + 2 I / n
    audio    = 3 h + 2 I / n: the layer's input, its residual and norm beside the MLP
    windows  = twice the first convolution's output, of as many windows of audio as pass together
    others   = 4 h + 2 I / n, 3 I / n where the MLP is gated; `encoder_classes` has those that
               differ by their class
"""

from dataclasses import replace

from kvexp.contract import Deployment, Encoder, Model
from kvexp_vllm import attention_splits, encoder_classes
from kvexp_vllm.encoder_classes import Pass
from kvexp_vllm.peaks import (
    BIAS_WORKSPACE_BYTES,
    FP32_BYTES,
    UNSPLIT_BYTES,
    Peak,
    around,
    bias_workspace_bytes,
    is_compiled,
    workspace_bytes,
)
from kvexp_vllm.rules import MEASURED, VersionRules, release_of

AUDIO_MORE_WIDTHS = 5
"""Hidden sizes a position that V0's audio encoder takes beyond its code, in the one log."""

GEMMA4_SHARE = 10  # of the card, at most this part for one-hot positions
GEMMA4_SIDES = 2  # across and down
INT64_BYTES = 8

CONVOLVED_WINDOWS = 500  # that a convolution of audio takes together

INDEX_BYTES = 24  # of a position of the encoder: token, position and slot, 8 bytes each


def forward(
    deployment: Deployment,
    rules: VersionRules,
    positions: int,
    *,
    beside_bytes: int,
    pixel_bytes: int,
) -> Peak:
    """The peak of one forward over `positions`, beside its `pixel_bytes` or all that is alive."""
    encoder = deployment.model.encoder
    assert encoder is not None
    if encoder.convolved_channels:
        return _windows(deployment, positions, pixel_bytes)
    if hears(deployment.model):
        return _audio(deployment, rules, positions, pixel_bytes)
    if not encoder.intermediate_size:
        return _projected(deployment, beside_bytes)
    item = deployment.dtype.itemsize_bytes
    if encoder.kept_layers:
        elements = _mlp_elements(encoder, deployment.tp) + encoder.patches_per_item
        elements += (2 * encoder.kept_layers + 2) * encoder.hidden_size
        size = positions * elements * item + pixel_bytes
        return around("encoder", size, "one log", spread=0.1)
    if encoder.convolved:
        return _convolved(deployment, positions, pixel_bytes)
    if encoder.whole_patches:
        return _biased(deployment, beside_bytes)
    if encoder.one_hot_positions:
        return _in_chunks(deployment, rules, positions, pixel_bytes)
    if passing := encoder_classes.pass_of(deployment.model.architecture):
        return _passed(deployment, passing, positions, pixel_bytes)
    elements = _mlp_elements(encoder, deployment.tp)
    if encoder.qk_norm:
        elements = max(elements, _normed_elements(encoder, deployment.tp))
        size = positions * elements * item + pixel_bytes
        return around("encoder", size, "its code and one log", spread=0.1)
    if rules.turns_queries_in_dtype:
        return _forward_of_v1(deployment, positions, pixel_bytes)
    if encoder.rotary:
        return _forward_in_fp32(deployment, rules, positions, beside_bytes)
    elements += _lasting_elements(encoder, rules)
    size = positions * elements * item + beside_bytes
    return around("encoder", size, "logs of three models of images", spread=0.2)


def _passed(deployment: Deployment, passing: Pass, positions: int, pixel_bytes: int) -> Peak:
    """The forward of a class of its own, all items at once or so many after the others."""
    encoder, item, n = deployment.model.encoder, deployment.dtype.itemsize_bytes, deployment.tp
    assert encoder is not None
    each = encoder.tile_patches or encoder.patches_per_item
    together = min(positions, passing.at_once * each) if passing.at_once else positions
    hidden, widths = encoder.hidden_size, 3 if encoder.gated else 2
    mlp = passing.beside_mlp * hidden + widths * (encoder.intermediate_size // n)
    if is_compiled(deployment):
        mlp += passing.native_norm * hidden
    elements = max(mlp, passing.whole * hidden + passing.shared * hidden // n)
    size = max(together * elements, _projected_elements(deployment, together)) * item
    size += (positions - together) * hidden * item + pixel_bytes
    size += together * passing.tables * _half_head(encoder) * FP32_BYTES
    size += together * passing.indices * INT64_BYTES + _kept_rows_bytes(deployment)
    size += workspace_bytes(deployment) + BIAS_WORKSPACE_BYTES
    return _by_its_code(deployment, size)


def _by_its_code(deployment: Deployment, size: int, *, read: bool = False) -> Peak:
    """A forward counted tensor by tensor; `read`: a part of it was never measured."""
    read = read or not deployment.model.architecture.startswith(encoder_classes.MEASURED)
    if read:
        return around("encoder", size, "its code alone", spread=0.1, above_bytes=2 * UNSPLIT_BYTES)
    measured = release_of(deployment.engine_version) == MEASURED and deployment.tp == 1
    return around(
        "encoder",
        size,
        "vLLM 0.26 on one H200" + ("" if measured else ", not this version or tp"),
        spread=0.0 if measured else 0.1,
        above_bytes=2 * UNSPLIT_BYTES,
    )


def _projected_elements(deployment: Deployment, positions: int) -> int:
    """Features of positions, in their order and merged, and what the projector makes of them."""
    model, encoder = deployment.model, deployment.model.encoder
    assert encoder is not None
    if not encoder.projected_size:
        return 0
    shared = model.architecture.startswith(encoder_classes.SHARED_PROJECTORS)
    width = encoder.projected_size // (deployment.tp if shared else 1)
    tokens = positions * encoder.tokens_per_item // encoder.patches_per_item
    return 2 * positions * encoder.hidden_size + tokens * width


def _windows(deployment: Deployment, frames: int, feature_bytes: int) -> Peak:
    """The first convolution of Qwen3's audio encoder (0.13 to 0.33 `qwen3_omni_moe_thinker.py`).

    It halves frames and bins; its output and what GELU makes of it stand beside the windows of all
    audio. cuDNN's workspace may come to it.
    """
    encoder, item = deployment.model.encoder, deployment.dtype.itemsize_bytes
    assert encoder is not None
    together = min(frames, CONVOLVED_WINDOWS * encoder.tile_patches)
    made = together * encoder.convolved_channels * encoder.patch_size // 4 * item
    size = 2 * made + 2 * feature_bytes
    return around("encoder", size, "its code alone", spread=0.1, above_bytes=made)


def _biased(deployment: Deployment, beside_bytes: int) -> Peak:
    """Layers of SAM that look at a whole view (0.11.1 to 0.33 `models/deepencoder.py`).

    A bias of each pair and head, beside the layer's input and norm, the projections, the rows and
    columns of the bias and what is attended. Of several views the projections are copied first.
    """
    encoder, item = deployment.model.encoder, deployment.dtype.itemsize_bytes
    assert encoder is not None
    heads, tile = encoder.num_attention_heads or 0, encoder.tile_patches
    whole = encoder.whole_patches * (8 * encoder.hidden_size + heads * encoder.whole_patches)
    tiles = encoder.patches_per_item - encoder.whole_patches
    size = max(whole, tiles * (11 * encoder.hidden_size + heads * tile)) * item
    size += beside_bytes + workspace_bytes(deployment)
    return around("encoder", size, "its code alone", spread=0.1)


def _lasting_elements(encoder: Encoder, rules: VersionRules) -> int:
    """Outputs of layers that are kept, and before 0.9 the pixels in the compute dtype."""
    kept = (encoder.deepstack_layers + encoder.returned_layers) * encoder.hidden_size
    return kept + (encoder.patch_size if rules.pixel_bytes else 0)


def _forward_in_fp32(
    deployment: Deployment, rules: VersionRules, positions: int, beside_bytes: int
) -> Peak:
    """The forward before 0.12, which turns queries and keys in fp32."""
    encoder = deployment.model.encoder
    assert encoder is not None
    item, widest = deployment.dtype.itemsize_bytes, _turning_or_mlp(encoder, rules, deployment.tp)
    size = positions * (widest + _lasting_elements(encoder, rules)) * item + beside_bytes
    size += positions * rules.rotary_tables * _half_head(encoder) * FP32_BYTES
    size += workspace_bytes(deployment) + BIAS_WORKSPACE_BYTES
    # to 0.8 the flash-attn package, where it is there, turns them in fewer tensors
    fused = replace(rules, rotary_copies=1) if rules.pixel_bytes else rules
    less = widest - _turning_or_mlp(encoder, fused, deployment.tp)
    alone = rules.is_v0 and deployment.tp == 1
    return around(
        "encoder",
        size,
        "its code, and logs of V0" if alone else "its code alone",
        spread=0.02 if alone and not encoder.deepstack_layers else 0.2,
        below_bytes=positions * less * item,
    )


def _turning_or_mlp(encoder: Encoder, rules: VersionRules, n: int) -> int:
    return max(_mlp_elements(encoder, n), _turned_elements(encoder, rules, n))


def _projected(deployment: Deployment, beside_bytes: int) -> Peak:
    """Patches of one item through a projection, 0.22 to 0.33 `models/gemma4_unified.py`."""
    encoder = deployment.model.encoder
    assert encoder is not None
    elements = 2 * encoder.patch_size + 4 * encoder.hidden_size
    size = encoder.patches_per_item * elements * deployment.dtype.itemsize_bytes
    return around("encoder", beside_bytes + size, "its code alone", more_bytes=size)


def _forward_of_v1(deployment: Deployment, positions: int, pixel_bytes: int) -> Peak:
    """The forward from 0.12 on, as its memory history on an H200 shows it."""
    encoder = deployment.model.encoder
    assert encoder is not None
    elements = _elements_of_v1(deployment, encoder)
    if encoder.gated and encoder.rotary and is_compiled(deployment):
        elements += 2 * encoder.hidden_size
    widest = max(positions * elements, _projected_elements(deployment, positions))
    size = widest * deployment.dtype.itemsize_bytes + pixel_bytes
    size += workspace_bytes(deployment) + BIAS_WORKSPACE_BYTES
    size += _tables_bytes(deployment, positions) * (2 if encoder.windowed else 1)
    size += deepstack_bytes(deployment, positions // encoder.patches_per_item)
    size += _kept_table_bytes(encoder)
    if encoder.copies_projections and not encoder.learned_positions:
        size += positions * 2 * INT64_BYTES  # row and column of each
    if encoder.masks_pairs:
        size += positions * positions * deployment.dtype.itemsize_bytes
    read = bool(encoder.masks_pairs or encoder.returned_layers or encoder.table_positions)
    return _by_its_code(deployment, size, read=read)


def _elements_of_v1(deployment: Deployment, encoder: Encoder) -> int:
    """Elements a position at the widest of attention and MLP."""
    hidden, n = encoder.hidden_size, deployment.tp
    elements = _mlp_elements(encoder, n)
    if encoder.masks_pairs:
        return elements + 2 * hidden
    if encoder.rotary:
        elements -= hidden
        turned = (3 + encoder.learned_positions) * hidden + 8 * hidden // n
        if encoder.copies_projections:
            elements -= (not encoder.learned_positions) * hidden
            turned = max(turned, (2 + encoder.learned_positions) * hidden + 10 * hidden // n)
        return max(elements, turned)
    parts = attention_splits.parts(deployment, encoder, encoder.tile_patches)
    if encoder.tile_patches and parts > 1:
        item, heads = deployment.dtype.itemsize_bytes, encoder.num_attention_heads or 0
        partial = parts * hidden + (1 + parts) * heads  # fp32
        attending = 3 * hidden + 4 * hidden // n + FP32_BYTES * partial // (n * item)
        elements = max(elements, attending)
    return elements + encoder.returned_layers * hidden


def _in_chunks(
    deployment: Deployment, rules: VersionRules, positions: int, pixel_bytes: int
) -> Peak:
    """Gemma 4's encoder, transformers' own: a chunk of images, beside the outputs of all of them.

    0.22 to 0.33 `models/gemma4_mm.py`: as many at once as a tenth of the card, or half of what is
    free, holds one-hot positions of, whether transformers makes them (to 5.9) or not.
    """
    encoder, item = deployment.model.encoder, deployment.dtype.itemsize_bytes
    assert encoder is not None
    each = encoder.patches_per_item
    one_hot = encoder.one_hot_positions * GEMMA4_SIDES  # of a position
    room = deployment.gpu.total_bytes // GEMMA4_SHARE // (2 * one_hot * INT64_BYTES)
    chunk = max(each, min(positions, room // each * each)) if rules.chunks_frames else each
    held = pixel_bytes + positions * GEMMA4_SIDES * INT64_BYTES + workspace_bytes(deployment)
    layers = chunk * (_mlp_elements(encoder, 1) * item + each)  # a mask of all pairs of an image
    layers += 2 * _tables_bytes(deployment, chunk) + held
    layers += (positions - chunk) * encoder.hidden_size * item  # outputs of the other chunks
    looked_up = chunk * one_hot * (INT64_BYTES + item) + held
    one = each * _mlp_elements(encoder, 1) * item + held
    best = max(layers, looked_up) if rules.one_hot_positions else layers
    return Peak(
        size_bytes=best,
        low_bytes=layers if chunk == positions else one,
        high_bytes=best + 2 * UNSPLIT_BYTES,
        phase="encoder",
        source="vLLM 0.26 on one H200; with transformers up to 5.9 its positions take more",
    )


def _tables_bytes(deployment: Deployment, positions: int) -> int:
    """Cosines and sines of rotary positions, half a head each."""
    encoder = deployment.model.encoder
    assert encoder is not None
    if not (encoder.rotary or encoder.one_hot_positions):
        return 0
    return 2 * positions * _half_head(encoder) * deployment.dtype.itemsize_bytes


def _half_head(encoder: Encoder) -> int:
    """Columns of a rotary table; none where the heads are not known."""
    heads = encoder.num_attention_heads
    return encoder.hidden_size // heads // 2 if heads else 0


def _kept_rows_bytes(deployment: Deployment) -> int:
    """Embeddings of positions in fp32 that a class keeps from its first forward on."""
    encoder = deployment.model.encoder
    passing = encoder_classes.pass_of(deployment.model.architecture)
    assert encoder is not None
    return passing.kept_rows * encoder.hidden_size * FP32_BYTES if passing else 0


def _kept_table_bytes(encoder: Encoder) -> int:
    """Rotary pairs in fp32 of all positions that an image may have, made by the first forward."""
    if not encoder.num_attention_heads:
        return 0
    pairs = encoder.hidden_size // encoder.num_attention_heads // 2
    return encoder.table_positions * pairs * 2 * FP32_BYTES


def kept_bytes(deployment: Deployment, rules: VersionRules, images: int) -> int:
    """What outlives the forward beside its outputs, from 0.12 on.

    A workspace, the tables of encoders that order positions anew by windows, and the tables that a
    first forward makes (MoonViT, HunYuan-VL), before 0.12 too.
    """
    encoder = deployment.model.encoder
    assert encoder is not None
    kept = _kept_table_bytes(encoder) + _kept_rows_bytes(deployment)
    if not rules.turns_queries_in_dtype:
        return kept
    kept += BIAS_WORKSPACE_BYTES - bias_workspace_bytes(deployment)
    if not encoder.windowed:
        return kept
    return kept + _tables_bytes(deployment, images * encoder.patches_per_item)


def deepstack_bytes(deployment: Deployment, images: int) -> int:
    """Outputs of inner layers for the decoder's first layers."""
    model, encoder = deployment.model, deployment.model.encoder
    assert encoder is not None
    elements = encoder.deepstack_layers * encoder.tokens_per_item * model.hidden_size
    return images * elements * deployment.dtype.itemsize_bytes


def hears(model: Model) -> bool:
    """Whether its encoder is one of audio alone."""
    return 0 < model.tower_parameters == model.audio_tower_parameters


def _convolved(deployment: Deployment, positions: int, pixel_bytes: int) -> Peak:
    """MobileNetV5 (timm 1.0): a bottleneck, its norm and their product beside a block's ends.

    cuDNN's workspaces come to it, by the card and its version.
    """
    encoder = deployment.model.encoder
    assert encoder is not None
    elements = 3 * encoder.intermediate_size + 2 * encoder.hidden_size
    size = positions * elements * deployment.dtype.itemsize_bytes + pixel_bytes
    error = size // 10
    return around("encoder", size, "its code alone", more_bytes=error, above_bytes=error)


def _mlp_elements(encoder: Encoder, n: int) -> int:
    widths = 3 if encoder.gated else 2
    return widths * (encoder.intermediate_size // n) + 4 * encoder.hidden_size


def _normed_elements(encoder: Encoder, n: int) -> int:
    """Attention whose queries and keys are normed over all heads, in fp32.

    0.6.6 to 0.19 `models/intern_vit.py`: ranks gather both first, or have all heads each.
    """
    shared = n > 1 and encoder.splits_heads(n)
    widths = 10 + 3 / n if shared else 12
    return int(widths * encoder.hidden_size)


def _turned_elements(encoder: Encoder, rules: VersionRules, n: int) -> int:
    """Attention with rotary positions.

    The input and its norm, the projections and their contiguous copies stand beside fp32 queries
    and what turning them takes, or what is made of them, or beside the projections that all ranks
    gather: as views of one tensor, or of parts that are put together (`all_gather_interleave`).
    """
    hidden = encoder.hidden_size
    turning = max(2 + 2 * rules.rotary_copies, 5) * hidden // n
    gathered = 3 * hidden if n > 1 else 0
    found = 2 * hidden + 6 * hidden // n + max(turning, gathered)
    if n > 1 and encoder.windowed and rules.gathers_parts:
        found = max(found, 8 * hidden + 3 * hidden // n)
    return found


def _audio(deployment: Deployment, rules: VersionRules, positions: int, pixel_bytes: int) -> Peak:
    """Whisper's encoder (0.7.0 `models/whisper.py`).

    The one log of V0 has `AUDIO_MORE_WIDTHS` more than the code accounts for, so the code's count
    is the lower end there, and what the log has is the upper end for V1.
    """
    encoder, item = deployment.model.encoder, deployment.dtype.itemsize_bytes
    assert encoder is not None
    hidden = encoder.hidden_size
    elements = _mlp_elements(encoder, deployment.tp) - hidden
    code = positions * (elements * item + INDEX_BYTES) + pixel_bytes
    more = positions * AUDIO_MORE_WIDTHS * hidden * item
    error = code // 20
    best = code + more if rules.is_v0 else code
    return Peak(
        size_bytes=best,
        low_bytes=code - error,
        high_bytes=code + more + error,
        phase="encoder",
        source="its code, and one log of V0 that has more",
    )
