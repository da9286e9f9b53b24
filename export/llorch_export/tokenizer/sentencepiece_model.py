"""Read ``tokenizer.model``, the file in which SentencePiece keeps a vocabulary.

Input is the untrusted content of the file; output is a :class:`Vocabulary`. The file is a protobuf message;
the few fields that matter are declared here, so that protobuf's own bounded parser reads it.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from llorch_export.tokenizer.vocabulary import TokenKind, Vocabulary
from llorch_serve.errors import ArtifactError

_BPE: Final = 2
_MODEL_TYPES: Final = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

_Field = descriptor_pb2.FieldDescriptorProto
# message -> field -> (number, type, default); numbers as in sentencepiece_model.proto.
_SCHEMA: Final[dict[str, dict[str, tuple[int, Any, str]]]] = {
    "Piece": {
        # Bytes, since protobuf itself does not say which piece is no UTF-8.
        "piece": (1, _Field.TYPE_BYTES, ""),
        "score": (2, _Field.TYPE_FLOAT, "0"),
        "type": (3, _Field.TYPE_INT32, "1"),
    },
    "TrainerSpec": {
        "model_type": (3, _Field.TYPE_INT32, "1"),
        "treat_whitespace_as_suffix": (24, _Field.TYPE_BOOL, "false"),
        "unk_id": (40, _Field.TYPE_INT32, "0"),
        "bos_id": (41, _Field.TYPE_INT32, "1"),
        "eos_id": (42, _Field.TYPE_INT32, "2"),
    },
    "NormalizerSpec": {
        "precompiled_charsmap": (2, _Field.TYPE_BYTES, ""),
        "add_dummy_prefix": (3, _Field.TYPE_BOOL, "true"),
        "remove_extra_whitespaces": (4, _Field.TYPE_BOOL, "true"),
        "escape_whitespaces": (5, _Field.TYPE_BOOL, "true"),
    },
}


def read_sentencepiece(
    data: bytes, *, add_bos: bool, add_eos: bool, vocab_size: int, origin: str
) -> Vocabulary:
    """Parse the content of a ``tokenizer.model``.

    add_bos, add_eos: the file itself does not say; ``tokenizer_config.json`` does.
    Raises ArtifactError if it is damaged, is not of the BPE kind, or normalises text in ways that are not
    supported.
    """
    model = _model_class()()
    try:
        model.ParseFromString(data)
    except message.DecodeError as error:
        raise ArtifactError(f"{origin} is not a SentencePiece model: {error}; fetch it again") from error
    if not 0 < len(model.pieces) <= vocab_size:
        raise ArtifactError(
            f"{origin} has {len(model.pieces)} pieces, expected 1 to {vocab_size}, the rows of the embedding"
        )
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    unsupported = [
        what
        for what, present in {
            f"model type {_MODEL_TYPES.get(trainer.model_type, trainer.model_type)}": trainer.model_type
            != _BPE,
            "whitespace as suffix": trainer.treat_whitespace_as_suffix,
            "a normalisation table": bool(normalizer.precompiled_charsmap),
            "removal of extra whitespace": normalizer.remove_extra_whitespaces,
            "unescaped whitespace": not normalizer.escape_whitespaces,
        }.items()
        if present
    ]
    if unsupported:
        raise ArtifactError(
            f"{origin} uses {', '.join(unsupported)}, which is not converted here; make a tokenizer.json "
            f"with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), then export again"
        )
    count = len(model.pieces)
    return Vocabulary(
        tokens=[_text(piece.piece, index, origin) for index, piece in enumerate(model.pieces)],
        kinds=[_kind(piece.type, index, origin) for index, piece in enumerate(model.pieces)],
        bos=_piece_id(trainer.bos_id, count, f"{origin}: bos_id"),
        eos=_piece_id(trainer.eos_id, count, f"{origin}: eos_id"),
        unknown=_piece_id(trainer.unk_id, count, f"{origin}: unk_id"),
        add_bos=add_bos,
        add_eos=add_eos,
        scores=[piece.score for piece in model.pieces],
        space_prefix=normalizer.add_dummy_prefix,
        origin=origin,
    )


def _text(piece: bytes, index: int, origin: str) -> str:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(
            f"{origin}: piece {index} is {piece[:20]!r}, expected UTF-8 text; fetch the file again"
        ) from error


def _kind(number: int, index: int, origin: str) -> TokenKind:
    try:
        return TokenKind(number)
    except ValueError as error:
        raise ArtifactError(
            f"{origin}: piece {index} is of type {number}, expected 1 to {max(TokenKind)}; fetch the file "
            f"again"
        ) from error


def _piece_id(value: int, count: int, what: str) -> int | None:
    if value == -1:  # SentencePiece's "none"
        return None
    if not 0 <= value < count:
        raise ArtifactError(f"{what} is {value}, expected -1 to {count - 1}; fetch the file again")
    return value


@functools.cache
def _model_class() -> Any:  # protobuf makes message classes at run time
    file = descriptor_pb2.FileDescriptorProto(
        name="llorch/sentencepiece_model.proto", package="llorch.sentencepiece"
    )
    for name, fields in _SCHEMA.items():
        declared = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            declared.field.add(
                name=field, number=number, type=kind, label=_Field.LABEL_OPTIONAL, default_value=default
            )
    whole = file.message_type.add(name="Model")
    for number, (field, part, label) in enumerate(
        [
            ("pieces", "Piece", _Field.LABEL_REPEATED),
            ("trainer_spec", "TrainerSpec", _Field.LABEL_OPTIONAL),
            ("normalizer_spec", "NormalizerSpec", _Field.LABEL_OPTIONAL),
        ],
        start=1,
    ):
        whole.field.add(
            name=field,
            number=number,
            type=_Field.TYPE_MESSAGE,
            type_name=f".{file.package}.{part}",
            label=label,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Model"))
