"""A learned policy as a rule: compiled, without torch, at full speed inside the simulator."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, jit, vectorised
from tailrace.errors import TailraceError
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned import architecture as a
from tailrace.policy.learned.architecture import NetworkConfig, Tensors, pack
from tailrace.policy.learned.inference import forward, run_listed
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES, observe
from tailrace.policy.rules import LEARNED, score
from tailrace.view.records import View

#: Bound of a prior's standardised scores, which infinite scores are set to.
PRIOR_LIMIT = 10.0
#: Scores whose deviation is below this share of their mean differ by rounding only.
PRIOR_EQUAL = 1e-12


@inner
def learned_scores(view, params, scores):
    """Fill ``scores`` [n] with minus the logits of the network packed into ``params``."""
    n = view.replicas.size
    features = np.int64(params[a.FEATURES])
    if n > params[a.MOST]:
        raise ValueError("more replicas than a learned policy has room for")
    f = params.view(np.float32)
    x, g = np.int64(params[a.X]), np.int64(params[a.G])
    replica_obs = f[x : x + n * features].reshape((n, features))
    observe(view, replica_obs, f[g : g + np.int64(params[a.GLOBALS])])
    prior, mask = np.int64(params[a.PRIOR]), np.int64(params[a.MASK])
    prior_scores(view, params, scores)
    for i in range(n):
        f[prior + i] = scores[i]
        f[mask + i] = 1.0 if view.replicas[i]["available"] != 0 else 0.0
    run_listed(params, f, n)
    logits = np.int64(params[a.LOGITS])
    for i in range(n):
        scores[i] = -f[logits + i] if view.replicas[i]["available"] != 0 else np.inf


@inner
def prior_scores(view, params, out):
    """Fill ``out`` [n] with the standardised scores of the network's prior; 0 without one."""
    code = np.int64(params[a.PRIOR_CODE])
    if code == a.NO_PRIOR:
        out[:] = 0.0
        return
    count = np.int64(params[a.PRIOR_COUNT])
    score(code, view, params[a.PRIOR_PARAMS : a.PRIOR_PARAMS + count], out)
    standardise(view.replicas, out)


@inner
def standardise(replicas, scores):
    """Standardise the finite scores [n] of available replicas to mean 0, deviation 1, in place.

    Equal scores become 0. An infinite score becomes PRIOR_LIMIT with its sign, NaN (the worst)
    PRIOR_LIMIT, and that of an unavailable replica 0.
    """
    total, count = 0.0, 0
    for i in range(scores.size):
        if replicas[i]["available"] != 0 and np.isfinite(scores[i]):
            total += scores[i]
            count += 1
    mean = total / max(1, count)
    squares = 0.0
    for i in range(scores.size):
        if replicas[i]["available"] != 0 and np.isfinite(scores[i]):
            squares += (scores[i] - mean) ** 2
    deviation = np.sqrt(squares / max(1, count))
    if deviation <= PRIOR_EQUAL * abs(mean):
        deviation = np.inf
    for i in range(scores.size):
        if replicas[i]["available"] == 0:
            scores[i] = 0.0
        elif np.isnan(scores[i]):
            scores[i] = PRIOR_LIMIT
        elif np.isinf(scores[i]):
            scores[i] = np.copysign(PRIOR_LIMIT, scores[i])
        else:
            standard = (scores[i] - mean) / deviation
            scores[i] = min(max(standard, -PRIOR_LIMIT), PRIOR_LIMIT)


@jit
def forward_many(params, replica_obs, request_obs, masks, priors, memory, logits):
    """Fill ``logits`` [B, n] of many states; ``memory`` [B, M] is read and updated.

    ``replica_obs`` [B, n, F], ``request_obs`` [B, G], ``masks`` and ``priors`` [B, n].
    """
    f = params.view(np.float32)
    m = np.int64(params[a.M])
    for b in range(masks.shape[0]):
        for k in range(np.int64(params[a.MEMORY])):
            f[m + k] = memory[b, k]
        forward(params, replica_obs[b], request_obs[b], masks[b], priors[b], logits[b])
        for k in range(np.int64(params[a.MEMORY])):
            memory[b, k] = f[m + k]


@jit
def forward_and_pool(params, replica_obs, request_obs, masks, priors, logits, pooled):
    """Like :func:`forward_many`, for a network without memory.

    Also fills ``pooled`` [B, 2 hidden] with what the value is computed from: mean and maximum of
    the embeddings of the available replicas, 0 without any.
    """
    f = params.view(np.float32)
    h, size = np.int64(params[a.H]), np.int64(params[a.HIDDEN])
    for b in range(masks.shape[0]):
        forward(params, replica_obs[b], request_obs[b], masks[b], priors[b], logits[b])
        _pool(f, h, masks[b], pooled[b, :size], pooled[b, size:])


@vectorised
def _pool(f, h, mask, mean, most):
    """Mean and maximum [k] of the rows [n, k] at ``h`` where ``mask`` [n] is true."""
    size, count = mean.size, np.float32(0)
    mean[:] = np.float32(0)
    most[:] = np.float32(0)
    for i in range(mask.size):
        if not mask[i]:
            continue
        row, is_first = f[h + i * size : h + (i + 1) * size], count == 0
        count += np.float32(1)
        for k in range(size):
            mean[k] += row[k]
        for k in range(size):
            most[k] = row[k] if is_first or row[k] > most[k] else most[k]
    share = np.float32(1) / max(count, np.float32(1))
    for k in range(size):
        mean[k] *= share


class LearnedPolicy(BuiltinPolicy):
    """A trained network as a policy; see policy/learned/checkpoint.py for its file.

    ``params`` holds scratch space and the memory of the current run: one policy object must not
    serve two runs at once. :meth:`copy` gives another.
    """

    def __init__(
        self,
        config: NetworkConfig,
        tensors: Tensors,
        name: str = LEARNED.name,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a network's tensors; ``about`` is what its file says of it (see checkpoint.py)."""
        check_tensors(config, tensors, N_REPLICA_FEATURES, N_REQUEST_FEATURES)
        self.rule = LEARNED
        self.name = name
        self.lowest_id_wins = False
        self.own_order = config.order
        self.config = config
        self.tensors = dict(tensors)
        self.about = dict(about or {})
        self.params = pack(config, tensors)

    def reset(self, n_replicas: int, seed: int) -> None:  # noqa: ARG002
        """Empty the memory."""
        self.memory[:] = 0

    @property
    def memory(self) -> NDArray[np.float32]:
        """What it remembers of the current run [M]; a view of ``params``."""
        start = int(self.params[a.M])
        return self.params.view(np.float32)[start : start + self.config.memory]

    def observed(self, view: View) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[Any]]:
        """Return its inputs: of the replicas [n, F], of the request [G], and the prior [n]."""
        n = len(view.replicas)
        replica_obs = np.zeros((n, N_REPLICA_FEATURES), np.float32)
        request_obs = np.zeros(N_REQUEST_FEATURES, np.float32)
        observe(view, replica_obs, request_obs)
        prior = np.zeros(n)
        prior_scores(view, self.params, prior)
        return replica_obs, request_obs, prior

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return minus the logits [n]; advances the memory, if there is one."""
        out = np.empty(len(view.replicas))
        learned_scores(view, self.params, out)
        return out

    def copy(self) -> "LearnedPolicy":
        """Return a policy with the same weights and an empty memory of its own."""
        return LearnedPolicy(self.config, self.tensors, self.name, self.about)


def check_tensors(config: NetworkConfig, tensors: Tensors, features: int, globals_: int) -> None:
    """Raise unless these are the tensors of such a network, and all of them finite."""
    expected = a.tensor_shapes(config, features, globals_)
    if a.SKETCH in tensors:
        expected[a.SKETCH] = (features,)
    for name, shape in expected.items():
        if name not in tensors:
            raise TailraceError(f"the network has no tensor '{name}'")
        found, dtype = tensors[name].shape, str(tensors[name].dtype)
        if found != shape or dtype != "float32":
            raise TailraceError(
                f"tensor '{name}' of the network has shape {found} of {dtype}, "
                f"not {shape} of float32"
            )
        if not np.isfinite(tensors[name]).all():
            raise TailraceError(f"tensor '{name}' of the network holds numbers that are not finite")
        if name.endswith(".var") and (tensors[name] < 0).any():
            raise TailraceError(f"tensor '{name}' of the network holds a negative variance")
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise TailraceError(f"the network has a tensor '{extra[0]}' that does not belong to it")
