"""Tensors of models that embed a token anew for every layer (Gemma 3n and 4).

From vLLM 0.26's `gemma3n.py` and `gemma4.py`, and the classes of transformers of the same names.
"""

from collections.abc import Callable, Iterator

from kvexp.dtypes import DType
from kvexp.formats import Tensor
from kvexp.parts import PerLayerInput
from kvexp.request import Model

Make = Callable[..., Iterator[Tensor]]
"""Yields a matrix by name, outputs and inputs, as `weights` stores it."""


SCALES = ("embed_scale_per_layer", "per_layer_input_scale", "per_layer_projection_scale")
"""Numbers by which embeddings and projections are multiplied."""


def tables(model: Model, inputs: PerLayerInput, tp: int, dtype: DType) -> Iterator[Tensor]:
    """The embedding of all layers, its projection from the hidden states, and copies of those."""
    width = model.num_hidden_layers * inputs.hidden_size_per_layer_input
    hidden = model.hidden_size
    rows = _padded(inputs) // tp
    yield _plain("embed_tokens_per_layer", rows * width, dtype, "embedding")
    yield _column("per_layer_model_projection", width // tp, hidden, dtype)
    size = inputs.hidden_size_per_layer_input
    yield _plain("per_layer_projection_norm", size, dtype, "norm")
    for name in SCALES:
        yield _plain(name, 1, dtype, "scale")
    for number in range(1, inputs.altup_num_inputs or 1):
        for name in ("altup_projections", "altup_unembed_projections"):
            yield _column(f"{name}.{number}", hidden // tp, hidden, dtype)


def layer(
    model: Model, inputs: PerLayerInput, tp: int, dtype: DType, make: Make
) -> Iterator[Tensor]:
    """What a layer does with its own embedding, its low-rank residual and its copies."""
    hidden, size = model.hidden_size, inputs.hidden_size_per_layer_input
    yield from make("per_layer_input_gate", size, hidden)
    yield from make("per_layer_projection", hidden, size)
    yield _plain("post_per_layer_input_norm", hidden, dtype, "norm")
    if inputs.laurel_rank is not None:
        yield from make("laurel.linear_left", inputs.laurel_rank // tp, hidden)
        yield from make("laurel.linear_right", hidden, inputs.laurel_rank // tp)
        yield _plain("laurel.post_norm", hidden, dtype, "norm")
    copies = inputs.altup_num_inputs
    if copies is not None:
        yield from make("altup.correction_coefs", copies, copies)
        yield from make("altup.prediction_coefs", copies * copies, copies)
        yield from make("altup.modality_router", copies, hidden)
        yield _plain("altup.router_norm", hidden, dtype, "norm")
        yield _plain("altup.router_input_scale", 1, dtype, "scale")
        yield Tensor(
            name="altup.correct_output_scale", numel=hidden, itemsize_bytes=4, role="scale"
        )


def padding(model: Model) -> int:
    """Numbers that no checkpoint holds: rows that pad the table, and scales."""
    inputs = model.per_layer_input
    if inputs is None:
        return 0
    rows = _padded(inputs) - inputs.vocab_size_per_layer_input
    layers = model.num_hidden_layers
    scales = len(SCALES) + (0 if inputs.altup_num_inputs is None else layers)
    return rows * layers * inputs.hidden_size_per_layer_input + scales


def _padded(inputs: PerLayerInput) -> int:
    return -(-inputs.vocab_size_per_layer_input // 64) * 64


def _column(name: str, rows: int, columns: int, dtype: DType) -> Tensor:
    return Tensor(
        name=name,
        numel=rows * columns,
        itemsize_bytes=dtype.itemsize_bytes,
        role="linear",
        inputs=columns,
        outputs=(rows,),
    )


def _plain(name: str, numel: int, dtype: DType, role: str) -> Tensor:
    return Tensor(name=name, numel=numel, itemsize_bytes=dtype.itemsize_bytes, role=role)
