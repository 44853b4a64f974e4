"""A real transformers model on a device: random weights, a checkpoint's, or one rank's share."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvexp.deployment import Deployment
from kvexp.errors import InvalidValue
from kvexp.simulate import Case
from kvexp.workload.architectures import checkpoint_path, transformers_config
from kvexp.workload.oom import is_out_of_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One of `size` tensor-parallel processes; they find each other through the file `meeting`."""

    index: int
    size: int
    meeting: str


def build(deployment: Deployment, case: Case, device: str, rank: Rank | None = None) -> Any:
    """The model of a deployment on `device`, ready to run and without gradients.

    Raises:
        InvalidValue: transformers cannot build it; the message holds its reason.
    """
    config = transformers_config(deployment.model)
    chosen = {} if case.attn == "auto" else {"attn_implementation": case.attn}
    folder = checkpoint_path(deployment.model)
    try:
        with _quiet():
            if rank is not None:
                model = _share(config, case, chosen, device, rank)
            elif folder is not None:
                model = _checkpoint(folder, config, case, chosen, device)
            else:
                model = _random(config, case, chosen, device)
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise InvalidValue(
            f"transformers cannot build model={deployment.model.name}: {reason}"
        ) from error
    return model.eval().requires_grad_(False)


def weights_from(deployment: Deployment, rank: Rank | None) -> str:
    """Where `build` takes the weights from."""
    if rank is None and (folder := checkpoint_path(deployment.model)) is not None:
        return f"safetensors of {folder}"
    return "random"


def parameter_bytes(model: Any) -> int:
    """Bytes of weights and buffers on this device, tied ones once."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = int(storage.nbytes())
    return sum(storages.values())


def _random(config: Any, case: Case, chosen: dict[str, str], device: str) -> Any:
    """Built where it shall live: no copy passes through the host."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype), **chosen)


def _checkpoint(folder: str, config: Any, case: Case, chosen: dict[str, str], device: str) -> Any:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, case.dtype),
        local_files_only=True,
        use_safetensors=True,
        **chosen,
    )
    return model.to(device)


def _share(config: Any, case: Case, chosen: dict[str, str], device: str, rank: Rank) -> Any:
    """This rank's part by transformers' tensor-parallel plan; the whole model exists nowhere."""
    import torch  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.distributed.tensor_parallel import (  # noqa: PLC0415
        apply_tensor_parallelism,
    )

    mesh = init_device_mesh(device.partition(":")[0], (rank.size,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype), **chosen)
    model = apply_tensor_parallelism(model, mesh)
    model.to_empty(device=device)
    model.tie_weights()
    model.initialize_weights()
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' advice to itself."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    before = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bar:
            transformers_logging.enable_progress_bar()
