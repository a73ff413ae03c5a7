import sys

import pytest

from tailrace.errors import TailraceError
from tailrace.policy.base import BuiltinPolicy, Policy, call_hook
from tailrace.policy.rules import RULES


class Mine(Policy):
    name = "mine"

    def sent(self, replica):
        """Take too few arguments."""

    def first_token(self, replica, request_id, now):
        raise KeyError(request_id)

    def finished(self, replica, request_id, now):
        sys.exit(3)

    def failed(self, replica, request_id, now):
        raise TailraceError("said well")


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("sent", r"^policy mine \(sent\) failed: TypeError: .*takes 2 positional arguments"),
        (
            "first_token",
            r"^policy mine \(first_token\) failed: KeyError: 7 \(test_hooks.py, line 1\d\)$",
        ),
        ("finished", r"^policy mine \(finished\) failed: SystemExit: 3 \(test_hooks.py, line"),
        ("failed", "^said well$"),
    ],
)
def test_a_mistake_in_a_hook_is_one_sentence(hook, message):
    with pytest.raises(TailraceError, match=message):
        call_hook(Mine(), hook, 0, 7, 1.5)


def test_hooks_are_called_and_our_own_bugs_keep_their_trace():
    call_hook(Mine(), "reset", 4, 0)
    with pytest.raises(TypeError):
        call_hook(BuiltinPolicy(RULES[0]), "sent")
