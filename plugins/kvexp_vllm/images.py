"""Images or audio of a profile run: how many, and what they hold meanwhile.

Their pixels and the encoder's output are alive while the phases of tokens run.
"""

from dataclasses import dataclass, replace

from kvexp.contract import MIB, Deployment
from kvexp_vllm import encoders
from kvexp_vllm.peaks import Peak
from kvexp_vllm.rules import VersionRules

UNKNOWN_PIXELS_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images of a profile run, a video as so many: all that are held, and the most in one forward.

    V0 runs one prompt with every kind of item a sequence, `sequences` of `tokens` each; V1 as many
    of the largest item as the step's tokens hold, beside a step of text. An item is as much as
    `of_item` images.
    """

    held: int = 0
    encoded: int = 0
    of_item: int = 1
    sequences: int | None = None
    tokens: int = 0


def _limits(deployment: Deployment) -> dict[str, int]:
    """The limits of what the encoder takes: audio, or images and videos."""
    hears = deployment.model.cross_attention
    return {name: n for name, n in deployment.mm_limits.items() if (name == "audio") is hears}


def profiled(deployment: Deployment, rules: VersionRules, *, v2_runner: bool) -> Images:
    """The images of a profile run, none where it passes none through the encoder."""
    encoder, limits = deployment.model.encoder, _limits(deployment)
    if encoder is None or (v2_runner and not rules.v2_profiles_images):
        return Images()
    video = _images_of_a_video(deployment, rules)
    if not any(n for name, n in limits.items() if video or name != "video"):
        return Images()
    budget = deployment.max_num_batched_tokens
    if not rules.is_v0:
        largest = max(video, 1)
        count = largest * _items_of_v1(deployment, rules, largest=largest)
        return Images(held=count, encoded=count, of_item=largest)
    if encoder.kept_layers or deployment.model.cross_attention:
        # the encoder-decoder runner: each request has its own, beside the decoder's prompt
        count = deployment.max_num_seqs * sum(limits.values())
        return Images(held=count, encoded=count, sequences=deployment.max_num_seqs, tokens=budget)
    pictures, videos = limits.get("image", 0), limits.get("video", 0)
    prompt = (pictures + videos * video) * encoder.tokens_per_item
    sequences = max(1, min(deployment.max_num_seqs, budget // prompt))
    keeps = deployment.model.architecture.startswith(rules.keeps_images)
    if rules.drops_images and not keeps and prompt > budget // sequences:
        return Images(sequences=sequences, tokens=budget)
    return Images(
        held=sequences * (pictures + videos * video),
        encoded=sequences * max(pictures, videos * video),
        sequences=sequences,
        tokens=max(budget, sequences * prompt),
    )


def _items_of_v1(deployment: Deployment, rules: VersionRules, *, largest: int) -> int:
    """Items of a V1 profile: of the largest one as many as a step holds, but for the requests'.

    `largest`: how many images the largest item is as much as.
    """
    encoder, limits = deployment.model.encoder, _limits(deployment)
    assert encoder is not None
    tokens = largest * encoder.tokens_per_item
    budget = max(deployment.max_num_batched_tokens, tokens)
    items = -(-budget // tokens) if rules.rounds_items_up else budget // tokens
    return min(items, deployment.max_num_seqs * max(limits.values()))


def _images_of_a_video(deployment: Deployment, rules: VersionRules) -> int:
    """How many images a video is as much as, 0 for none: those that the length leaves room for.

    To 0.10.1 the prompt's images come first; V1 takes one of each, V0 as many as are allowed.
    """
    encoder, limits = deployment.model.encoder, _limits(deployment)
    assert encoder is not None
    if not limits.get("video", 0):
        return 0
    fitting = deployment.max_model_len // encoder.tokens_per_item
    pictures, videos = (limits.get(name, 0) if rules.is_v0 else 1 for name in ("image", "video"))
    if rules.video_beside_images:
        fitting -= pictures
    return min(max(fitting // videos, 1), encoder.video_items, rules.video_images)


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
    size = images.held * outputs * deployment.dtype.itemsize_bytes
    size += encoders.deepstack_bytes(deployment, images.held)
    size += encoders.kept_bytes(deployment, rules, images.held)
    return _pixel_bytes(deployment, rules, images) + size


def _pixel_bytes(deployment: Deployment, rules: VersionRules, images: Images) -> int:
    encoder = deployment.model.encoder
    assert encoder is not None
    item = deployment.dtype.itemsize_bytes
    if rules.pixel_bytes and not deployment.model.cross_attention:
        joined = encoder.rotary or encoder.kept_layers
        item = rules.pixel_bytes * (2 if joined else 1)  # as they came, and as one tensor
    return images.held * encoder.patches_per_item * encoder.patch_size * item


def encoding(
    deployment: Deployment, rules: VersionRules, images: Images, *, shared: bool = False
) -> Peak:
    """The encoder's forward over the images that are encoded at once, all of them being held.

    `shared`: each rank has a whole encoder and passes its share of the images through it.
    """
    encoder = deployment.model.encoder
    assert encoder is not None
    encoded = images.encoded
    if shared:
        items = encoded // images.of_item
        encoded = images.of_item * -(-items // deployment.tp)
        deployment = replace(deployment, tp=1)
    return encoders.forward(
        deployment,
        rules,
        encoded * encoder.patches_per_item,
        held_bytes=held_bytes(deployment, rules, images),
        pixel_bytes=_pixel_bytes(deployment, rules, images),
    )


def unknown_bytes(deployment: Deployment) -> int:
    """What images may take where an encoder is there and its images are not known."""
    model = deployment.model
    if not model.tower_parameters or model.encoder is not None:
        return 0
    outputs = deployment.max_num_batched_tokens * model.hidden_size
    return UNKNOWN_PIXELS_BYTES + outputs * deployment.dtype.itemsize_bytes
