"""From the parts of one adapter to what it does to each tensor of a model, checked against the model.

Modules are named as the model's own code names them. Where that code fuses projections (Phi-3), rows of one
part go to several tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llorch_export.adapter.agreement import check_agreement
from llorch_export.adapter.files import CONFIG, AdapterFiles
from llorch_export.adapter.merge import Change, Product, TokenRows
from llorch_export.adapter.modules import EMBEDDING_MODULE, TABLES, ModelModules, Piece
from llorch_export.adapter.parts import FACTORS, Part, Parts
from llorch_export.adapter.settings import MERGE_FIRST, AdapterSettings
from llorch_export.checkpoint.stream import TensorRange
from llorch_serve.errors import ArtifactError


def changes_of(
    files: AdapterFiles, settings: AdapterSettings, parts: Parts, model: ModelModules
) -> dict[str, Change]:
    """Return what an adapter does, by the name of the tensor.

    Raises ArtifactError if config, file and model do not agree.
    """
    check_agreement(files, settings, parts, model)
    found: dict[str, Change] = {}
    for module, own in parts.items():
        pieces = model.pieces(module)
        if not pieces:
            raise ArtifactError(
                f"{files.weights} adapts {module}, which is no module of this model. Is it the adapter of "
                f"another model? {_task(files)}"
            )
        for piece in pieces:
            found.update(_piece_changes(module, piece, own, settings, model))
    return found


def _piece_changes(
    module: str,
    piece: Piece,
    parts: Mapping[Part, TensorRange],
    settings: AdapterSettings,
    model: ModelModules,
) -> Iterator[tuple[str, Change]]:
    """Return what happens to the weight and the bias of a piece."""
    weight, bias = f"{piece.module}.weight", f"{piece.module}.bias"
    if len(model.weight_shape(module)) != 2 and not parts.keys() <= {Part.WEIGHT, Part.BIAS}:
        raise _misfit(module, parts, f"weight {list(model.weight_shape(module))} alone", settings)
    factors = _product(module, parts, settings, model)
    wants_magnitude = settings.dora and factors is not None
    if wants_magnitude is not (Part.MAGNITUDE in parts):
        raise _misfit(
            module, parts, f"{'a' if wants_magnitude else 'no'} {Part.MAGNITUDE}, as use_dora says", settings
        )
    tokens = _tokens(module, parts, settings, model)
    change = Change(
        replaced=_rows(parts.get(Part.WEIGHT), piece),
        products=() if factors is None else (_part_of(factors, piece),),
        magnitude=parts.get(Part.MAGNITUDE)
        if factors is not None and factors.transposed
        else _rows(parts.get(Part.MAGNITUDE), piece),
        tokens=tokens,
    )
    if tokens is not None and factors is not None:
        raise _misfit(module, parts, "either factors or single tokens", settings)
    _check_shapes(module, parts, settings, model)
    if change != Change():
        yield weight, change
    if Part.BIAS in parts or Part.B_BIAS in parts:
        added = _rows(parts.get(Part.B_BIAS), piece)
        yield (
            bias,
            Change(
                replaced=_rows(parts.get(Part.BIAS), piece),
                added=() if added is None else ((added, settings.scaling_of(module)),),
            ),
        )


def _product(
    module: str, parts: Mapping[Part, TensorRange], settings: AdapterSettings, model: ModelModules
) -> Product | None:
    """Return the product of a module's two factors, or None if it has none."""
    given = [part for part in FACTORS if part in parts]
    if not given:
        return None
    transposed = module == EMBEDDING_MODULE
    pair = (Part.EMBEDDING_A, Part.EMBEDDING_B) if transposed else (Part.A, Part.B)
    rows, columns = _shape(module, parts, model)
    if transposed:
        rows, columns = columns, rows
    rank = settings.rank_of(module)
    expected = {pair[0]: (rank, columns), pair[1]: (rows, rank)}
    if {part: parts[part].shape for part in given} != expected:
        shapes = " and ".join(f"{part} {list(parts[part].shape) if part in parts else []}" for part in pair)
        wanted = " and ".join(str(list(shape)) for shape in expected.values())
        raise ArtifactError(
            f"{parts[given[0]].path}: {module} has {shapes}, expected {wanted}; it is the adapter of another "
            f"model, or incomplete"
        )
    return Product(parts[pair[0]], parts[pair[1]], settings.scaling_of(module), transposed)


def _tokens(
    module: str, parts: Mapping[Part, TensorRange], settings: AdapterSettings, model: ModelModules
) -> TokenRows | None:
    """Return the single rows that an adapter replaces in an embedding or a head."""
    ids = next((ids for name, ids in settings.tokens.items() if f".{module}".endswith(f".{name}")), None)
    if Part.TOKENS not in parts:
        return None
    rows, columns = _shape(module, parts, model)
    if ids is None or f"{module}.weight" not in TABLES or any(token >= rows for token in ids):
        raise _misfit(
            module, parts, f"the trainable_token_indices of {CONFIG} to name its rows, below {rows}", settings
        )
    if parts[Part.TOKENS].shape != (len(ids), columns):
        raise _misfit(module, parts, f"{Part.TOKENS} {[len(ids), columns]}", settings)
    return TokenRows(ids, parts[Part.TOKENS])


def _check_shapes(
    module: str, parts: Mapping[Part, TensorRange], settings: AdapterSettings, model: ModelModules
) -> None:
    """Check what replaces or rescales a weight, and the biases.

    Only embedding and head may change in rows.
    """
    own = model.weight_shape(module)
    rows = _shape(module, parts, model)[0]
    lengths = own[1:] if module == EMBEDDING_MODULE else (rows,)
    bias = model.shapes.get(f"{model.pieces(module)[0].module}.bias")
    free_rows = f"{module}.weight" in TABLES
    for part, source in parts.items():
        if part is Part.WEIGHT and source.shape != own and not (free_rows and source.shape[1:] == own[1:]):
            raise _misfit(module, parts, f"weight {list(own)}", settings)
        if part is Part.MAGNITUDE and source.shape != lengths:
            raise _misfit(module, parts, f"{part} {list(lengths)}", settings)
        if part is Part.BIAS and (bias is None or source.shape != (rows,)):
            raise _misfit(module, parts, "no bias" if bias is None else f"bias {[rows]}", settings)
        if part is Part.B_BIAS and (not settings.lora_bias or source.shape != (rows,)):
            raise _misfit(module, parts, f"lora_B.bias {[rows]}, with lora_bias true", settings)
    if settings.lora_bias and Part.B in parts and Part.B_BIAS not in parts:
        raise _misfit(module, parts, f"lora_B.bias {[rows]}, as lora_bias says", settings)


def _shape(module: str, parts: Mapping[Part, TensorRange], model: ModelModules) -> tuple[int, ...]:
    """Return the shape of a module's weight, after it was replaced."""
    replaced = parts.get(Part.WEIGHT)
    own = model.weight_shape(module)
    return replaced.shape if replaced is not None and len(replaced.shape) == len(own) else own


def _part_of(product: Product, piece: Piece) -> Product:
    return Product(product.a, product.b.rows(piece.start, piece.stop), product.factor, product.transposed)


def _rows(source: TensorRange | None, piece: Piece) -> TensorRange | None:
    return None if source is None else source.rows(piece.start, piece.stop)


def _misfit(
    module: str, parts: Mapping[Part, TensorRange], expected: str, settings: AdapterSettings
) -> ArtifactError:
    held = ", ".join(f"{part} {list(source.shape)}" for part, source in parts.items())
    path = next(iter(parts.values())).path
    return ArtifactError(
        f"{path}: {module} has {held}, expected {expected}; it does not fit this model or {settings.origin}. "
        f"If it does elsewhere, {MERGE_FIRST}"
    )


def _task(files: AdapterFiles) -> str:
    """Return what the config says the adapter is for, if that is no language model."""
    task = files.config.get("task_type")
    return "" if task in (None, "CAUSAL_LM") else f"Its task_type is {str(task)[:40]}."
