"""Settings that were renamed: the old name works, and a warning names the new one."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import ClassVar

import pytest

from tailrace.config import Settings, current_key, parse, with_current_names
from tailrace.errors import RenamedSettingWarning, TailraceError


class Inner(Settings):
    RENAMED: ClassVar = {"trace": "gae_lambda"}

    gae_lambda: float = 0.95


class Outer(Settings):
    RENAMED: ClassVar = {"parts": "stages"}

    inner: Inner = Inner()
    maybe: Inner | None = None
    stages: tuple[Inner, ...] = ()
    table: dict[str, float] | None = None


WARNING = "^setting trace is now called gae_lambda; the old name still works$"


def test_a_former_name_gives_the_setting_and_a_warning():
    with pytest.warns(RenamedSettingWarning, match=WARNING):
        assert Inner(trace=0.5) == Inner(gae_lambda=0.5)
    with pytest.warns(RenamedSettingWarning, match=WARNING):
        assert parse(Outer, {"inner": {"trace": 0.5}}).inner.gae_lambda == 0.5
    with pytest.warns(RenamedSettingWarning, match=WARNING):
        assert parse(Outer, {"maybe": {"trace": 0.25}}).maybe == Inner(gae_lambda=0.25)


def test_the_warning_is_given_once_by_default():
    """As outside of pytest, which shows every one of them."""
    code = "from test_config import Inner; [Inner.model_validate({'trace': 1}) for _ in 'abc']"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("is now called gae_lambda") == 1


def test_old_names_in_lists_and_of_lists():
    with pytest.warns(RenamedSettingWarning):
        found = parse(Outer, {"parts": [{"trace": 0.5}, {}]})
    assert found.stages == (Inner(gae_lambda=0.5), Inner())


def test_new_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(Outer, {"inner": {"gae_lambda": 0.5}}).inner.gae_lambda == 0.5


def test_both_names_are_an_error():
    with pytest.raises(TailraceError, match=r"^inner: trace is now called gae_lambda: give only"):
        parse(Outer, {"inner": {"trace": 0.5, "gae_lambda": 0.5}})


def test_an_unknown_name_is_still_an_error():
    with pytest.raises(TailraceError, match=r"unknown setting 'inner.gae_lamda'"):
        parse(Outer, {"inner": {"gae_lamda": 0.5}})


def test_plain_data_gets_new_names_before_it_is_put_over_other_data():
    data = {"inner": {"trace": 0.5}, "parts": [{"trace": 1.0}], "table": {"trace": 1.0}, "odd": 3}
    with pytest.warns(RenamedSettingWarning):
        found = with_current_names(Outer, data)
    stages = [{"gae_lambda": 1.0}]
    assert found == {
        "inner": {"gae_lambda": 0.5}, "stages": stages, "table": {"trace": 1.0}, "odd": 3,
    }  # fmt: skip
    assert data["inner"] == {"trace": 0.5}
    assert with_current_names(Outer, {"inner": 3}) == {"inner": 3}  # validation tells what is wrong


@pytest.mark.parametrize(
    ("key", "now"),
    [
        ("inner.trace", "inner.gae_lambda"),
        ("maybe.trace", "maybe.gae_lambda"),
        ("parts.0.trace", "stages.0.gae_lambda"),
        ("inner.gae_lambda", "inner.gae_lambda"),
        ("table.trace", "table.trace"),
        ("odd.trace.0", "odd.trace.0"),
    ],
)
def test_a_path_gets_new_names(key, now):
    with warnings.catch_warnings():
        warnings.simplefilter("error" if key == now else "ignore")
        assert current_key(Outer, key) == now
