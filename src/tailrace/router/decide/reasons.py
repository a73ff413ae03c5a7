"""What speaks most for a decision, in words."""

from collections.abc import Callable

#: Phrases that are remembered: the same few come most of the time.
_MOST = 4096

#: By the number of the reason in kernels.py; the figures are the chosen replica's and the other's.
_PHRASES: tuple[Callable[[float, float], str], ...] = (
    lambda _a, _b: "the only replica available",
    lambda _a, _b: "as good as the next, chosen at random",
    lambda a, b: f"more of the prompt cached ({a:.0f} against {b:.0f} tokens)",
    lambda a, b: f"shorter queue ({a:.0f} against {b:.0f} tokens)",
    lambda a, b: f"faster replica ({a:.0f} against {b:.0f} prompt tokens/s)",
    lambda a, b: f"fewer requests in flight ({a:.0f} against {b:.0f})",
    lambda a, b: f"more KV memory free ({1 - a:.0%} against {1 - b:.0%})",
    lambda a, b: f"earlier first token predicted ({a:.2f} against {b:.2f} s)",
    lambda _a, _b: "better score of the policy as a whole",
)
_known: dict[tuple[int, float, float], str] = {}


def phrase(reason: int, ours: float, theirs: float) -> str:
    """Return a reason in words, with the figures of the chosen replica and the other."""
    found = _known.get((reason, ours, theirs))
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[reason, ours, theirs] = _PHRASES[reason](ours, theirs)
    return found
