"""Gymnasium environments: routing decisions of clusters, one by one or many at once.

Importing this package registers three environments with the same spaces, arguments and reward:
``tailrace/Router-v0`` (one simulated cluster), ``tailrace/RouterVector-v0`` (many of them, one
compiled call per step) and ``tailrace/VidurRouter-v0`` (real Vidur; needs ``tailrace[vidur]``). It
needs the extra ``tailrace[train]``.
"""

from tailrace.errors import TailraceError

ENV_ID = "tailrace/Router-v0"
VECTOR_ENV_ID = "tailrace/RouterVector-v0"
VIDUR_ENV_ID = "tailrace/VidurRouter-v0"

try:
    import gymnasium
except ModuleNotFoundError as error:
    if error.name != "gymnasium":
        raise
    raise TailraceError("the environments need gymnasium: pip install 'tailrace[train]'") from None

_SINGLE, _VECTOR = "tailrace.env.single_env:RouterEnv", "tailrace.env.vector_env:RouterVectorEnv"
#: Entry points by name: ``gymnasium.make`` takes the first, ``make_vec`` the second if there is
#: one. Of the vector environment ``make`` gives a single cluster.
_ENTRY_POINTS: dict[str, tuple[str, str | None]] = {
    ENV_ID: (_SINGLE, _VECTOR),
    VECTOR_ENV_ID: (_SINGLE, _VECTOR),
    # A name, not an import: it is resolved when somebody makes the environment.
    VIDUR_ENV_ID: ("tailrace.integrations.vidur.registered:make", None),
}

for _name, (_entry_point, _vector_entry_point) in _ENTRY_POINTS.items():
    if _name not in gymnasium.registry:
        gymnasium.register(
            id=_name,
            entry_point=_entry_point,
            vector_entry_point=_vector_entry_point,
            disable_env_checker=True,  # it would slow every step down; the tests run it
            order_enforce=False,
        )
