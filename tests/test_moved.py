"""Import paths of earlier versions."""

import importlib
import sys

import pytest

from tailrace import moved


@pytest.mark.parametrize(("old", "new"), sorted(moved.MOVED.items()))
def test_old_paths_give_the_same_module_and_say_where_it_is(old, new):
    expected = importlib.import_module(new)
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"import {new}"):
        found = importlib.import_module(old)
    assert found is expected
    assert found.__spec__.name == new


def test_modules_below_a_moved_package_are_not_loaded_twice():
    expected = importlib.import_module("tailrace.integrations.vidur.limits")
    sys.modules.pop("tailrace.vidur.limits", None)
    with pytest.warns(DeprecationWarning, match=r"import tailrace\.integrations\.vidur"):
        found = importlib.import_module("tailrace.vidur.limits")
    assert found.nearest is expected.nearest


def test_names_that_never_existed_are_not_found():
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        importlib.import_module("tailrace.no_such")
