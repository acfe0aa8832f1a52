"""Errors say what, where and what to do, specialise the built-ins, and cross process borders whole."""

from __future__ import annotations

import pickle

import pytest

from trajstore import errors
from trajstore.errors import LengthMismatchError, StorageError, TrajstoreError, ValidationError


def every(kind: type[TrajstoreError]) -> set[type[TrajstoreError]]:
    return {kind}.union(
        *(every(child) for child in kind.__subclasses__() if child.__module__ == errors.__name__)
    )


ALL = sorted(every(TrajstoreError), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", ALL)
def test_errors_pickle_with_their_hint(kind: type[TrajstoreError]) -> None:
    error = kind("what and where", hint="what to do")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error) == "what and where\n  hint: what to do"
    assert (again.message, again.hint, again.args) == (error.message, error.hint, error.args)
    assert "hint" not in str(kind("what and where"))


def test_a_validation_error_pickles_its_place() -> None:
    error = LengthMismatchError("has 3", row=4, id="x", column="values", hint="align it")
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert (again.row, again.id, again.column, again.reason) == (4, "x", "values", "has 3")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({}, "has 3"),
        ({"row": 0}, "trajectory 0: has 3"),
        ({"row": 4, "id": "x"}, "trajectory 4 (id 'x'): has 3"),
        ({"id": "x"}, "trajectory 'x': has 3"),
        ({"column": "values"}, "column 'values': has 3"),
        ({"row": 4, "id": "x", "column": "values"}, "trajectory 4 (id 'x'), column 'values': has 3"),
    ],
)
def test_a_validation_error_names_its_place(place: dict[str, object], text: str) -> None:
    assert str(ValidationError("has 3", **place)) == text  # type: ignore[arg-type]  # a table of arguments


def test_moved_counts_from_another_row() -> None:
    error = LengthMismatchError("has 3", row=4, id="x", column="values", hint="align it")
    moved = error.moved(100)
    assert type(moved) is LengthMismatchError
    assert (moved.row, moved.id, moved.column, moved.hint) == (104, "x", "values", "align it")
    assert str(moved).startswith("trajectory 104 (id 'x'), column 'values': has 3")
    assert ValidationError("no row").moved(5).row is None


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ValidationError, ValueError),
        (errors.SchemaError, TypeError),
        (errors.QueryError, ValueError),
        (errors.StoreNotFoundError, FileNotFoundError),
        (errors.StoreExistsError, FileExistsError),
        (errors.ConflictError, RuntimeError),
        (errors.CorruptFileError, OSError),
    ],
)
def test_each_also_is_the_builtin_it_specialises(
    kind: type[TrajstoreError], builtin: type[Exception]
) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, TrajstoreError)


def test_what_a_caller_can_mend_is_an_input_error() -> None:
    assert not issubclass(errors.ConflictError, errors.InputError)
    assert not issubclass(errors.CorruptFileError, errors.InputError)


def test_colours_of_a_library_stay_out_of_messages() -> None:
    error = StorageError("Generic S3 error \x1b[31m↳\x1b[0m no route", hint="look")
    assert str(error) == "Generic S3 error ↳ no route\n  hint: look"
    assert error.args == (error.message,)
