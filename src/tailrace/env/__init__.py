"""Gymnasium environments: routing decisions of simulated clusters, one by one or many at once.

Importing this package registers ``tailrace/Router-v0``. It needs the extra ``tailrace[train]``.
"""

from tailrace.errors import TailraceError

ENV_ID = "tailrace/Router-v0"

try:
    import gymnasium
except ModuleNotFoundError as error:
    if error.name != "gymnasium":
        raise
    raise TailraceError("the environments need gymnasium: pip install 'tailrace[train]'") from None

if ENV_ID not in gymnasium.registry:
    gymnasium.register(
        id=ENV_ID,
        entry_point="tailrace.env.single_env:RouterEnv",
        vector_entry_point="tailrace.env.vector_env:RouterVectorEnv",
        disable_env_checker=True,  # it would slow every step down; the tests run it
        order_enforce=False,
    )
