"""Images or audio of a profile run: how many, and what they hold meanwhile.

Their pixels and the encoder's output are alive while the phases of tokens run.
"""

from dataclasses import dataclass, replace

from kvexp.contract import MIB, Deployment, Encoder
from kvexp_vllm import encoder_classes, encoders
from kvexp_vllm.peaks import Peak
from kvexp_vllm.rules import VersionRules

UNKNOWN_BYTES = 2048 * MIB
"""Nine in ten of the catalogue's encoders raise the peak of a start of 0.19 by no more."""

COLOURS = 3

MERGING = ("Qwen2VL", "Qwen2_5_VL")
"""V0's classes that put outputs among the prompt's embeddings as they come, and free them
(`get_input_embeddings_v0`); they keep the pixels as they came and as one tensor."""


TIMED_TOKENS = 12.5
TWO_FRAMES_TOKENS, THREE_FRAMES_TOKENS, LONG_VIDEO_TOKENS = 12_100, 16_200, 12_288
"""Tokens of a video of Qwen3-VL whose frames have 25,165,824 pixels together, three of them filled
up to four after they are made smaller; and of each as it counts with the times between frames
(0.11 `models/qwen3_vl.py: get_max_video_tokens`), though an output has none for these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images of a profile run, a video as so many: all that are held, and the most in one forward.

    V0 runs one prompt with every kind of item a sequence, `sequences` of `tokens` each; V1 as many
    of the largest item as the step's tokens hold, beside a step of text. An item is as much as
    `of_item` images, or frames of a video; `encoder` has the sizes of one. `kept_tokens`: rows that
    the cache of outputs has of an item, where they are filled up.
    """

    encoder: Encoder | None = None
    held: int = 0
    encoded: int = 0
    of_item: int = 1
    kept_tokens: int = 0
    sequences: int | None = None
    tokens: int = 0


def _limits(deployment: Deployment) -> dict[str, int]:
    """The limits of what the encoder takes: audio, or images and videos."""
    heard = encoders.hears(deployment.model)
    return {name: n for name, n in deployment.mm_limits.items() if (name == "audio") is heard}


def profiled(deployment: Deployment, rules: VersionRules) -> Images:
    """The images of a profile run that passes them through the encoder."""
    encoder, limits = deployment.model.encoder, _limits(deployment)
    if encoder is None:
        return Images()
    video = _images_of_a_video(deployment, encoder, rules)
    if not any(n for name, n in limits.items() if video or name != "video"):
        return Images()
    budget = deployment.max_num_batched_tokens
    if not rules.is_v0:
        return _items_of_v1(deployment, encoder, rules, video)
    if encoder.kept_layers or deployment.model.cross_attention:
        # the encoder-decoder runner: each request has its own, beside the decoder's prompt
        count, each = deployment.max_num_seqs * sum(limits.values()), deployment.max_num_seqs
        return Images(encoder=encoder, held=count, encoded=count, sequences=each, tokens=budget)
    pictures, videos = limits.get("image", 0), limits.get("video", 0)
    prompt = (pictures + videos * video) * encoder.tokens_per_item
    sequences = max(1, min(deployment.max_num_seqs, budget // prompt))
    keeps = deployment.model.architecture.startswith(rules.keeps_images)
    if rules.drops_images and not keeps and prompt > budget // sequences:
        return Images(sequences=sequences, tokens=budget)
    return Images(
        encoder=encoder,
        held=sequences * (pictures + videos * video),
        encoded=sequences * max(pictures, videos * video),
        sequences=sequences,
        tokens=max(budget, sequences * prompt),
    )


def _items_of_v1(
    deployment: Deployment, encoder: Encoder, rules: VersionRules, video: int
) -> Images:
    """The largest item of a V1 profile as often as a step holds it, but for the requests'.

    `video`: of how many images or frames a video is.
    """
    limits, unit, of_item = _limits(deployment), encoder, max(video, 1)
    if encoder.frame_tokens:
        pictured = encoder.tokens_per_item if limits.get("image", 0) else 0
        of_item = 1
        if video * encoder.frame_tokens >= pictured:
            unit, of_item = _frame(encoder), video
    if timed := rules.times_videos and bool(limits.get("video", 0)) and _writes_times(deployment):
        unit, of_item = _timed_video(deployment, encoder), 1
    rows = tokens = of_item * unit.tokens_per_item
    if timed:
        tokens = int(rows * TIMED_TOKENS)
    budget = max(deployment.max_num_batched_tokens, tokens)
    items = -(-budget // tokens) if rules.rounds_items_up else budget // tokens
    count = of_item * min(items, deployment.max_num_seqs * max(limits.values()))
    kept = {"budget": budget, "item": tokens, "none": rows}[rules.fills_outputs]
    return Images(encoder=unit, held=count, encoded=count, of_item=of_item, kept_tokens=kept)


def _writes_times(deployment: Deployment) -> bool:
    return deployment.model.architecture.startswith(encoder_classes.TIMED)


def _timed_video(deployment: Deployment, encoder: Encoder) -> Encoder:
    """The longest video, of as many frames as there may be where the length holds three of them."""
    long = deployment.max_model_len >= THREE_FRAMES_TOKENS
    tokens = LONG_VIDEO_TOKENS if long else TWO_FRAMES_TOKENS
    patches = tokens * encoder.patches_per_item // encoder.tokens_per_item
    return replace(encoder, tokens_per_item=tokens, patches_per_item=patches)


def _frame(encoder: Encoder) -> Encoder:
    """The encoder with the sizes of a frame of a video instead of an image's."""
    return replace(
        encoder,
        tokens_per_item=encoder.frame_tokens,
        patches_per_item=encoder.frame_patches,
    )


def _images_of_a_video(deployment: Deployment, encoder: Encoder, rules: VersionRules) -> int:
    """How many images or frames a video is as much as, 0 for none: what the length leaves room for.

    To 0.10.1 the prompt's images come first; V1 takes one of each, V0 as many as are allowed. Audio
    as long as the context ends with a whole chunk.
    """
    limits = _limits(deployment)
    if limits.get("audio", 0) and encoder.frame_tokens:
        return -(-deployment.max_model_len // encoder.frame_tokens)
    if not limits.get("video", 0):
        return 0
    by_limits = deployment.model.architecture.startswith(encoder_classes.BY_LIMITS)
    all_of_them = rules.is_v0 or by_limits
    pictures, videos = (limits.get(name, 0) if all_of_them else 1 for name in ("image", "video"))
    length, most = deployment.max_model_len, encoder.video_items
    if rules.video_beside_images or by_limits:
        length -= pictures * encoder.tokens_per_item
    if not encoder.frame_tokens:
        most = min(most, rules.video_images)
    elif not rules.reads_frames:
        return 0
    fitting = length // (encoder.frame_tokens or encoder.tokens_per_item)
    return min(max(fitting // videos, 1), most)


def step(deployment: Deployment, images: Images) -> Deployment:
    """The deployment with the tokens and sequences of the profile's step, and its item's sizes."""
    if images.encoder is not None:
        deployment = replace(deployment, model=replace(deployment.model, encoder=images.encoder))
    if images.sequences is None:
        return deployment
    return replace(deployment, max_num_batched_tokens=images.tokens, max_num_seqs=images.sequences)


def held_bytes(deployment: Deployment, rules: VersionRules, images: Images) -> int:
    """Pixels and outputs of the images, which live while the decoder runs."""
    encoder = deployment.model.encoder
    assert encoder is not None
    size = encoders.kept_bytes(deployment, rules, images.held)
    if not _merges(deployment, rules):
        outputs = _output_bytes(deployment, images.held)
        outputs += encoders.deepstack_bytes(deployment, images.held)
        rows = images.of_item * encoder.tokens_per_item
        size += outputs * max(images.kept_tokens, rows) // rows
    return size + _pixel_bytes(deployment, rules, images)


def _output_bytes(deployment: Deployment, images: int) -> int:
    encoder = deployment.model.encoder
    assert encoder is not None
    elements = encoder.tokens_per_item * deployment.model.hidden_size
    return images * elements * deployment.dtype.itemsize_bytes


def _pixel_bytes(
    deployment: Deployment,
    rules: VersionRules,
    images: Images,
    *,
    joining: bool = False,
    encoding: bool = False,
) -> int:
    """Pixels, as often as the model class has them: most join them for the encoder alone."""
    encoder = deployment.model.encoder
    assert encoder is not None
    item, copies = deployment.dtype.itemsize_bytes, 1
    if rules.pixel_bytes and not encoders.hears(deployment.model):
        item, copies = rules.pixel_bytes, 2 if encoder.kept_layers else 1
    if encoder.rotary and rules.joins_pixels and (joining or _merges(deployment, rules)):
        copies = 2
    numbers = encoder.patch_size
    if deployment.model.architecture.startswith(encoder_classes.MASKED):
        numbers += numbers // COLOURS
    if encoding and deployment.model.architecture.startswith(encoder_classes.COPIED):
        copies += 1
    return images.held * encoder.patches_per_item * numbers * item * copies


def _beside_bytes(deployment: Deployment, rules: VersionRules, images: Images) -> int:
    """What is alive beside an encoder's own forward, before 0.12.

    V0 has the images' outputs while the videos pass, its Qwen2-VL and 2.5-VL the prompt's
    embeddings too; V1 has pixels alone. Others than rotary encoders are counted with all outputs.
    """
    encoder = deployment.model.encoder
    assert encoder is not None
    if not encoder.rotary:
        return held_bytes(deployment, rules, images)
    size = _pixel_bytes(deployment, rules, images, joining=True)
    if rules.is_v0:
        size += _output_bytes(deployment, images.held - images.encoded)
    if _merges(deployment, rules):
        prompt = deployment.max_num_batched_tokens * deployment.model.hidden_size
        size += prompt * deployment.dtype.itemsize_bytes
    return size


def _merges(deployment: Deployment, rules: VersionRules) -> bool:
    return rules.is_v0 and deployment.model.architecture.startswith(MERGING)


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
    peak = encoders.forward(
        deployment,
        rules,
        encoded * encoder.patches_per_item,
        beside_bytes=_beside_bytes(deployment, rules, images),
        pixel_bytes=_pixel_bytes(deployment, rules, images, encoding=True),
    )
    return replace(peak, high_bytes=peak.high_bytes + 2 * _mask_doubt_bytes(deployment, images))


def _mask_doubt_bytes(deployment: Deployment, images: Images) -> int:
    """How much more a mask of whole numbers is, which transformers makes without torchvision."""
    encoder = deployment.model.encoder
    assert encoder is not None
    if not deployment.model.architecture.startswith(encoder_classes.MASKED):
        return 0
    pixels = images.held * encoder.patches_per_item * encoder.patch_size // COLOURS
    return pixels * (encoders.INT64_BYTES - deployment.dtype.itemsize_bytes)


def unknown_bytes(deployment: Deployment) -> int:
    """What images may take where an encoder is there and its images are not known."""
    model = deployment.model
    takes = model.has_towers and any(deployment.mm_limits.values())
    return UNKNOWN_BYTES if takes and model.encoder is None else 0
