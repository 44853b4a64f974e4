"""Images of a profile run: how many, what they hold meanwhile, and the encoder's own forward.

Their pixels and the encoder's output are alive while the phases of tokens run.
"""

from dataclasses import dataclass, replace

from kvexp.contract import MIB, Deployment
from kvexp_vllm.peaks import Peak, around
from kvexp_vllm.rules import VersionRules

UNKNOWN_PIXELS_BYTES = 256 * MIB


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


def _profiles_images(deployment: Deployment, rules: VersionRules, *, v2_runner: bool) -> bool:
    """Whether the profile run passes images through the model's encoder."""
    limits = deployment.mm_limits
    allowed = limits.get("image", 1) or limits.get("video", 1)
    runs = rules.v2_profiles_images or not v2_runner
    return deployment.model.encoder is not None and bool(allowed) and runs


def profiled(deployment: Deployment, rules: VersionRules, *, v2_runner: bool) -> Images:
    """The images of a profile run, none where it passes none through the encoder."""
    if not _profiles_images(deployment, rules, v2_runner=v2_runner):
        return Images()
    encoder = deployment.model.encoder
    assert encoder is not None
    budget = deployment.max_num_batched_tokens
    video = _images_of_a_video(deployment)
    if not rules.is_v0:
        largest = max(video, 1)
        count = largest * max(1, budget // (largest * encoder.tokens_per_item))
        return Images(held=count, encoded=count)
    pictures, videos = (deployment.mm_limits.get(name, 0) for name in ("image", "video"))
    if encoder.kept_layers:  # beside the decoder's own prompt, which only looks at them
        count = deployment.max_num_seqs * pictures
        return Images(held=count, encoded=count, sequences=deployment.max_num_seqs, tokens=budget)
    prompt = (pictures + videos * video) * encoder.tokens_per_item
    sequences = max(1, min(deployment.max_num_seqs, budget // prompt))
    if rules.drops_images and prompt > budget // sequences:
        return Images(sequences=sequences, tokens=budget)
    return Images(
        held=sequences * (pictures + videos * video),
        encoded=sequences * max(pictures, videos * video),
        sequences=sequences,
        tokens=max(budget, sequences * prompt),
    )


def _images_of_a_video(deployment: Deployment) -> int:
    """How many images the video is as much as that fits the length beside one image, 0 for none."""
    encoder = deployment.model.encoder
    assert encoder is not None
    if not deployment.mm_limits.get("video", 0):
        return 0
    fitting = deployment.max_model_len // encoder.tokens_per_item - 1
    return min(max(fitting, 1), encoder.video_items)


def step(deployment: Deployment, images: Images) -> Deployment:
    """The deployment with the tokens and sequences of the profile's step."""
    if images.sequences is None:
        return deployment
    return replace(deployment, max_num_batched_tokens=images.tokens, max_num_seqs=images.sequences)


def held_bytes(deployment: Deployment, rules: VersionRules, images: Images) -> int:
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


def encoding(deployment: Deployment, rules: VersionRules, images: Images) -> Peak:
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
        return around("encoder", patches * elements * item + beside, "one log", spread=0.1)
    if encoder.video_items:
        turning = (2 + 2 * rules.rotary_copies) * hidden // n
        gathered = 3 * hidden if n > 1 else 0
        elements = max(elements, 2 * hidden + 6 * hidden // n + max(turning, gathered))
    if rules.pixel_bytes:
        elements += encoder.patch_size  # the pixels in the compute dtype
    size = patches * elements * item + held_bytes(deployment, rules, images)
    return around("encoder", size, "logs of two models of images", spread=0.2)


def unknown_bytes(deployment: Deployment) -> int:
    """What images may take where an encoder is there and its images are not known."""
    model = deployment.model
    if not model.tower_parameters or model.encoder is not None:
        return 0
    outputs = deployment.max_num_batched_tokens * model.hidden_size
    return UNKNOWN_PIXELS_BYTES + outputs * deployment.dtype.itemsize_bytes
