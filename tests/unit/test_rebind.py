"""Rebinding names: checked before anything is changed, all or none, and undone whole."""

import sys
import types

import pytest

from zorse_megatron.adapter.patches.rebind import Rebinding, Registry
from zorse_megatron.errors import SeamError

MODULE = "a_rebound_library"


@pytest.fixture
def library(monkeypatch):
    """A module for names to be rebound in."""

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


def registry(version="0.19.0", **parameters):
    """Records of names of the library, by their last part, and the parameters they are to have."""
    records = {
        name.rpartition(".")[2]: Rebinding(
            target=name if ":" in name else f"{MODULE}:{name}",
            becomes="Another one.",
            why="stock will not do",
            test="this file",
            delete_when="it does",
            parameters=of,
        )
        for name, of in parameters.items()
    }
    return Registry(records, installed=lambda: version)


FUNCTION = {"function": ("x", "y")}
METHOD = {"Thing.method": ("self", "x")}


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
    restore = registry(**FUNCTION).apply({"function": marked})
    assert library.function(1) == "ours, stock 1 0"
    restore()
    assert library.function is stock


def test_a_block_undoes_also_where_it_fails(library):
    stock = library.function
    with pytest.raises(KeyError), registry(**FUNCTION).applied({"function": marked}):
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
    with registry(**{name: parameters}).applied({name.rpartition(".")[2]: marked}):
        assert call(library) == f"ours, {answer}"
        assert library.Base().inherited() == "stock"  # nobody else's
    assert call(library) == answer
    # A static method is one again, and what is inherited is not there twice.
    assert dict(vars(library.Thing)) == before


def test_a_class_is_rebound(library):
    ours = type("Ours", (library.Thing,), {})
    with registry(Thing=()).applied({"Thing": lambda _stock: ours}):
        assert library.Thing is ours


def test_a_wrong_signature_is_refused(library):
    records = registry(function=("x", "z"))
    facts = "('x', 'y')", "('x', 'z')", "stock will not do"
    error = refused(records, {"function": marked}, *facts)
    assert error.title == "Megatron has changed where zorse-megatron hooks into it"


@pytest.mark.parametrize(
    "target",
    [*(f"{MODULE}:{name}" for name in ("gone", "Gone.gone", "Thing.gone")), "nowhere:gone"],
)
def test_a_missing_name_is_refused(library, target):
    records = registry(**{target: ("x", "y")})
    (name,) = records.records
    refused(records, {name: marked}, target, "no such name")


@pytest.mark.parametrize("version", ["0.18.9", "0.20", None])
def test_a_wrong_version_is_refused(library, version):
    stock = library.function
    records = registry(version, **FUNCTION)
    found = f"megatron-core {version}" if version else "no megatron-core"
    refused(records, {"function": marked}, found, ">=0.19,<0.20")
    assert library.function is stock


@pytest.mark.parametrize("version", ["0.19", "0.19.3", "0.19.1rc1", "0.19.0+cpu", "0.19.2a0+git12"])
def test_versions_and_release_candidates_that_are_known(library, version):
    with registry(version, **FUNCTION).applied({"function": marked}):
        assert library.function(1) == "ours, stock 1 0"


def test_all_or_none_and_all_problems_at_once(library):
    stock = library.function
    records = registry(**FUNCTION, **{"gone": ("x", "y"), "Thing.method": ("x",)})
    error = refused(records, dict.fromkeys(records.records, marked))
    named = [problem.where for problem in error.problems]
    assert named == [f"{MODULE}:gone", f"{MODULE}:Thing.method"]
    assert library.function is stock
    # Nothing of it counts as applied.
    records.apply({"function": marked})()


def test_none_where_a_replacement_cannot_be_made(library):
    stock = library.function

    def fails(_stock):
        raise KeyError("it is not to be")

    records = registry(**FUNCTION, **METHOD)
    with pytest.raises(KeyError):
        records.apply({"function": marked, "method": fails})
    assert library.function is stock
    records.apply({"function": marked, "method": marked})()


def test_a_record_is_applied_once_at_a_time(library):
    records = registry(**FUNCTION)
    restore = records.apply({"function": marked})
    refused(records, {"function": marked}, "function", "applied already")
    assert library.function(1) == "ours, stock 1 0"
    restore()
    restore = records.apply({"function": marked})
    assert library.function(1) == "ours, stock 1 0"
    restore()


def test_an_unknown_record_is_refused(library):
    stock = library.function
    refused(registry(**METHOD), {"function": marked}, "function: found a name without a record")
    assert library.function is stock


def test_two_records_of_one_name_lie_on_each_other(library):
    """As the emulated clock and the report of losses do on `train_step`."""
    (below,) = registry(**FUNCTION).records.values()
    records = Registry({"below": below, "above": below}, installed=lambda: "0.19.0")
    stock = library.function
    with (
        records.applied({"below": lambda stock: lambda x, y=0: f"below {stock(x, y)}"}),
        records.applied({"above": marked}),
    ):
        assert library.function(1) == "ours, below stock 1 0"
    assert library.function is stock
