"""The processor files of a checkpoint, which vLLM needs to make the items of its profile run."""

from collections.abc import Iterator
from pathlib import Path

from kvexp.contract import Deployment, InvalidValue

DESCRIPTIONS = ("preprocessor_config.json", "processor_config.json")

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def takes_items(deployment: Deployment) -> bool:
    """Whether a request may hold images, videos or audio, so that vLLM builds a processor."""
    return any(deployment.mm_limits.values())


def processor_files(deployment: Deployment) -> tuple[Path, ...]:
    """Files of the checkpoint beside its weights and config.json; none where text is all.

    Raises:
        InvalidValue: a request may hold other items than text and no processor is described.
    """
    if not takes_items(deployment):
        return ()
    model = deployment.model
    folder = Path(model.path or "")
    found = tuple(sorted(_beside(folder))) if model.path and folder.is_dir() else ()
    if not any(path.name in DESCRIPTIONS for path in found):
        limits = ", ".join(f"{name}: 0" for name in deployment.mm_limits)
        raise InvalidValue(
            f"vLLM makes the {_listed(deployment)} of its profile with the checkpoint's processor,"
            f" and {folder if model.path else f'model={model.name}'} has no {DESCRIPTIONS[0]}: give"
            f" model.path=FOLDER with it and the tokenizer's files, or 'mm.limits={{{limits}}}'"
        )
    return found


def _beside(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            yield path.resolve()


def _listed(deployment: Deployment) -> str:
    return " and ".join(f"{name}s" for name, limit in deployment.mm_limits.items() if limit)
