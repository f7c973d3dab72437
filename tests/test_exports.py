"""The names that `import perco` offers are meant and documented, and no trio type shows in them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import perco

PUBLIC = sorted(name for name in vars(perco) if not name.startswith("_") and not inspect.ismodule(getattr(perco, name)))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(perco, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert inspect.getdoc(thing), f"perco.{name} has no docstring"


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(perco, name))])
def test_no_trio_type_is_in_a_public_signature(name: str) -> None:
    for method, function in inspect.getmembers(getattr(perco, name), inspect.isfunction):
        if method.startswith("_") or not function.__module__.startswith("perco"):
            continue
        for parameter in inspect.signature(function).parameters.values():
            assert "trio" not in str(parameter.annotation), f"perco.{name}.{method}({parameter})"
        assert "trio" not in str(inspect.signature(function).return_annotation), f"perco.{name}.{method}"


def test_errors_form_the_tree_that_the_module_draws() -> None:
    drawn = perco.errors.__doc__ or ""
    for name in PUBLIC:
        thing = getattr(perco, name)
        if inspect.isclass(thing) and issubclass(thing, perco.PercoError):
            assert name in drawn, f"{name} is missing from the drawing in errors.py"


def test_what_tests_need_is_there_when_asked_for_and_not_before() -> None:
    program = (
        "import sys, perco; assert 'perco.testing' not in sys.modules; "
        "print(perco.testing.record.__name__, hasattr(perco, 'tseting'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "record False\n", done.stderr
