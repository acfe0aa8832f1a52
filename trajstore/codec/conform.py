"""Owns bringing given Arrow columns to a schema without loss; must not judge values (check.py does)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from trajstore.errors import SchemaError


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch in the columns and types of `schema`; nothing is cast with a loss.

    Nullable columns that are not there become null. Integers become wider or narrower integers or
    floats when every value fits; floats become narrower (float64 lists are stored as float32) when none
    overflows; other changes of kind (floats or text into integers, integers into text or bools) are
    refused.

    Raises:
        SchemaError: a column is missing, unknown, or of a type that would lose values.
    """
    names = batch.schema.names
    unknown = [name for name in names if name not in schema.names]
    if unknown:
        raise SchemaError(
            f"column {unknown[0]!r} is not in the store",
            hint="declare it at create (extra=[Column(...)]), or put it under metadata",
        )
    twice = [name for name in schema.names if names.count(name) > 1]
    if twice:
        raise SchemaError(f"column {twice[0]!r} is there more than once", hint="drop or rename one of them")
    return pa.record_batch([_cast(batch, field) for field in schema], schema=schema)


def _cast(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names:
        if not field.nullable:
            raise SchemaError(f"column {field.name!r} is missing", hint=f"give it as {field.type}")
        return pa.nulls(batch.num_rows, field.type)
    array = batch.column(field.name)
    if array.type.equals(field.type, check_metadata=True):  # names too: readers address `tokens.list.element`
        return array
    if array.null_count == len(array):
        return pa.nulls(len(array), field.type)
    if _is_list(array.type):
        array = _visible(array)
    wanted, found = _element(field.type), _element(array.type)
    values = array.flatten() if _is_list(array.type) else array
    try:
        if _is_list(field.type) != _is_list(array.type) or not _keeps(found, wanted):
            raise pa.ArrowInvalid(f"{found} values in a column of {wanted}")
        if _is_list(field.type) and values.null_count:
            raise pa.ArrowInvalid("an element is null")
        cast = array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise SchemaError(
            f"column {field.name!r} has type {array.type}, which does not fit {field.type}: {error}",
            hint="cast it yourself, so that nothing is lost unseen",
        ) from error
    if pa.types.is_floating(wanted) and pa.types.is_floating(found) and wanted.bit_width < found.bit_width:
        after = cast.flatten() if _is_list(cast.type) else cast
        # NaN counts as not finite on both sides; nulls compare as null and are left out.
        lost = pc.and_(pc.is_finite(values), pc.invert(pc.is_finite(after)))
        if pc.any(lost).as_py():
            at = pc.index(lost, True).as_py()
            raise SchemaError(
                f"column {field.name!r} holds {values[at].as_py()!r}, which does not fit {wanted}",
                hint="cast it yourself, so that nothing is lost unseen",
            )
    return cast


def _visible(array: pa.Array) -> pa.Array:
    """The list array without what slices and null rows hide: a cast would look at those values too."""
    hidden = len(array.values) - len(array.flatten())
    return array.take(pa.array(range(len(array)), pa.int64())) if hidden else array


def _keeps(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a checked cast between two element types can only fail loudly, never change a value."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_null(found) or found == wanted:
        return True
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(found) or pa.types.is_boolean(found))
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_integer(found) or pa.types.is_floating(found))
    return _kind(found) == _kind(wanted) and _kind(wanted) != ""


def _kind(type: pa.DataType) -> str:
    kinds = {
        "text": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "bool": (pa.types.is_boolean,),
        "time": (pa.types.is_timestamp,),
        "struct": (pa.types.is_struct,),
    }
    return next((name for name, tests in kinds.items() if any(test(type) for test in tests)), "")


def _is_list(type: pa.DataType) -> bool:
    return bool(pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type))


def _element(type: pa.DataType) -> pa.DataType:
    return type.value_type if _is_list(type) else type
