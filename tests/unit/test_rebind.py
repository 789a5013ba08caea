"""Rebinding names: checked before anything is changed, all or none, and undone whole."""

import dataclasses
import sys
import types

import pytest

from zorse_megatron.adapter.patches.rebind import Rebinding, Registry
from zorse_megatron.errors import SeamError

MODULE = "a_rebound_library"


@pytest.fixture
def library(monkeypatch):
    """A module as of a library in version 1.5, for names to be rebound in."""

    class Base:
        def inherited(self):
            return "stock"

    class Thing(Base):
        def method(self, x):
            return f"stock {x}"

        @staticmethod
        def static(x):
            return f"stock {x}"

        @classmethod
        def of_class(cls, x):
            return f"stock {x} of {cls.__name__}"

    class Sub(Thing):
        pass

    module = types.ModuleType(MODULE)
    module.function = lambda x, y=0: f"stock {x} {y}"
    module.Base, module.Thing, module.Sub = Base, Thing, Sub
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def record(name, parameters=("x", "y"), **changes):
    return dataclasses.replace(
        Rebinding(
            target=f"{MODULE}:{name}",
            becomes="Another one.",
            why="stock will not do",
            versions=">=1.4,<2",
            test="this file",
            delete_when="it does",
            parameters=parameters,
        ),
        **changes,
    )


FUNCTION = record("function", ("x", "y"))
METHOD = record("Thing.method", ("self", "x"))


def registry(*records, version="1.5"):
    return Registry(records, installed={MODULE: version}.get)


def marked(stock):
    return lambda *args, **kwargs: "ours, " + stock(*args, **kwargs)


def refused(records, replacements, *facts):
    with pytest.raises(SeamError) as raised:
        records.apply(replacements)
    for fact in facts:
        assert fact in str(raised.value)
    return raised.value


def test_a_function_is_rebound_and_put_back(library):
    stock = library.function
    restore = registry(FUNCTION).apply({FUNCTION: marked})
    assert library.function(1) == "ours, stock 1 0"
    restore()
    assert library.function is stock


def test_a_block_undoes_also_where_it_fails(library):
    stock = library.function
    with pytest.raises(KeyError), registry(FUNCTION).applied({FUNCTION: marked}):
        assert library.function is not stock
        raise KeyError
    assert library.function is stock


@pytest.mark.parametrize(
    ("name", "parameters", "call", "answer"),
    [
        ("Thing.method", ("self", "x"), lambda lib: lib.Thing().method(1), "stock 1"),
        ("Thing.static", ("x",), lambda lib: lib.Thing.static(1), "stock 1"),
        ("Thing.static", ("x",), lambda lib: lib.Thing().static(1), "stock 1"),
        ("Thing.of_class", ("cls", "x"), lambda lib: lib.Thing.of_class(1), "stock 1 of Thing"),
        (
            "Thing.of_class",
            ("cls", "x"),
            lambda lib: lib.Sub().of_class(1),
            "stock 1 of Sub",
        ),
        ("Thing.inherited", ("self",), lambda lib: lib.Thing().inherited(), "stock"),
    ],
)
def test_methods_of_each_kind(library, name, parameters, call, answer):
    before = dict(vars(library.Thing))
    of = record(name, parameters)
    with registry(of).applied({of: marked}):
        assert call(library) == f"ours, {answer}"
        assert library.Base().inherited() == "stock"  # nobody else's
    assert call(library) == answer
    # A static method is one again, and what is inherited is not there twice.
    assert dict(vars(library.Thing)) == before


def test_a_class_is_rebound(library):
    of = record("Thing", ())
    ours = type("Ours", (library.Thing,), {})
    with registry(of).applied({of: lambda _stock: ours}):
        assert library.Thing is ours


def test_a_wrong_signature_is_refused(library):
    of = record("function", ("x", "z"))
    error = refused(registry(of), {of: marked}, "('x', 'y')", "('x', 'z')", "stock will not do")
    assert error.title == "Megatron has changed where zorse-megatron hooks into it"


@pytest.mark.parametrize("name", ["gone", "Gone.method", "Thing.gone"])
def test_a_missing_name_is_refused(library, name):
    refused(registry(of := record(name)), {of: marked}, f"{MODULE}:{name}", "no such name")


def test_a_missing_module_is_refused():
    of = record("x", target="a_module_that_is_nowhere:x")
    records = Registry([of], installed=lambda _distribution: "1.5")
    refused(records, {of: marked}, "a_module_that_is_nowhere:x", "no such name")


@pytest.mark.parametrize("version", ["1.3.9", "2.0", None])
def test_a_wrong_version_is_refused(library, version):
    stock = library.function
    refused(
        registry(FUNCTION, version=version),
        {FUNCTION: marked},
        f"{MODULE} {version or 'not installed'}",
        ">=1.4,<2",
    )
    assert library.function is stock


@pytest.mark.parametrize("version", ["1.4", "1.9.3", "1.5rc1", "1.5.0+cpu", "1.5.0a0+git12"])
def test_versions_and_release_candidates_that_are_known(library, version):
    with registry(FUNCTION, version=version).applied({FUNCTION: marked}):
        assert library.function(1) == "ours, stock 1 0"


def test_all_or_none_and_all_problems_at_once(library):
    stock = library.function
    gone, other = record("gone"), record("Thing.method", ("x",))
    records = registry(FUNCTION, gone, other)
    error = refused(records, {FUNCTION: marked, gone: marked, other: marked})
    assert [problem.where for problem in error.problems] == [gone.target, other.target]
    assert library.function is stock
    # Nothing of it counts as applied.
    records.apply({FUNCTION: marked})()


def test_none_where_a_replacement_cannot_be_made(library):
    stock = library.function

    def fails(_stock):
        raise KeyError("it is not to be")

    records = registry(FUNCTION, METHOD)
    with pytest.raises(KeyError):
        records.apply({FUNCTION: marked, METHOD: fails})
    assert library.function is stock
    records.apply({FUNCTION: marked, METHOD: marked})()


def test_a_record_is_applied_once_at_a_time(library):
    records = registry(FUNCTION)
    restore = records.apply({FUNCTION: marked})
    refused(records, {FUNCTION: marked}, FUNCTION.target, "applied already")
    assert library.function(1) == "ours, stock 1 0"
    restore()
    restore = records.apply({FUNCTION: marked})
    assert library.function(1) == "ours, stock 1 0"
    restore()


def test_an_unknown_record_is_refused(library):
    stock = library.function
    refused(registry(METHOD), {FUNCTION: marked}, FUNCTION.target, "not in the registry")
    assert library.function is stock


def test_two_records_of_one_name_lie_on_each_other(library):
    """As the emulated clock and the report of losses do on `train_step`."""
    below, above = FUNCTION, record("function", why="another reason")
    records = registry(below, above)
    stock = library.function
    with (
        records.applied({below: lambda stock: lambda x, y=0: f"below {stock(x, y)}"}),
        records.applied({above: marked}),
    ):
        assert library.function(1) == "ours, below stock 1 0"
    assert library.function is stock
