"""The network's forward and backward pass for training, faster than torch's own.

The same function of the same weights as ``policy.learned.network.Network``, without memory: matrix
products are those of torch's libraries, and what lies between them is compiled
(learn/improve/fused_kernels.py). A
minibatch passes in tiles that stay in the processor's cache, forwards and at once backwards, in
memory that is allocated once; gradients are added up by hand, since autograd would take longer than
a tile. The tests hold values and gradients to the network's. With torch's own pass a whole PPO
update takes 1.8 times the CPU time, and so it does with torch.compile's
(docs/results/bench_passes.json).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as fn

from tailrace.learn.improve import fused_kernels as kernels
from tailrace.policy.learned.network import Head, Network, Trunk

Array = NDArray[Any]
Space = TypeVar("Space", "_TrunkSpace", "_HeadSpace", "_PoolSpace")

_numba: Any = numba
#: Interpreted, the kernels would be far slower than torch.
COMPILED = not _numba.config.DISABLE_JIT
#: Replicas of all states of a tile: with 64 hidden units an array takes a megabyte.
TILE_ROWS = 4096
#: Shapes of tiles whose memory is kept; minibatches of one update have a few.
MOST_SHAPES = 8
#: oneDNN's product. Torch itself takes MKL's, which is less than half as fast on processors of AMD:
#: with it an update takes 1.25 times as long (bench_train.py). Some builds of torch lack oneDNN.
_onednn: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def tiles(states: int, replicas: int) -> Iterator[slice]:
    """Yield the tiles of this many states with this many replicas each."""
    step = max(1, TILE_ROWS // replicas)
    for start in range(0, states, step):
        yield slice(start, min(start + step, states))


@torch.no_grad()
def forward(
    network: Network, replica_obs: Tensor, request_obs: Tensor, mask: Tensor, prior: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits [B, n] and values [B], as the network itself does, without gradients."""
    through = NetworkPass(network)
    logits, values = torch.empty(mask.shape), torch.empty(len(mask))
    for rows in tiles(*mask.shape):
        logits[rows], values[rows] = through.forward(
            replica_obs[rows], request_obs[rows], mask[rows], None if prior is None else prior[rows]
        )
    return logits, values


class NetworkPass:
    """A network's passes over tiles, whose gradients add up."""

    def __init__(self, network: Network) -> None:
        """Prepare for the network as it is now."""
        self._network = network
        self._actor = _TrunkPass(network, network.actor)
        self._critic = None if network.critic is None else _TrunkPass(network, network.critic)
        self._scorer, self._value_head = _HeadPass(network.scorer), _HeadPass(network.value_head)
        self._pools: dict[tuple[int, ...], _PoolSpace] = {}
        self._pool: _PoolSpace | None = None
        self.read_norms()
        self.start()

    @torch.no_grad()
    def read_norms(self) -> None:
        """Take in the network's normalisers, which stay the same during an update."""
        for part in (self._actor, self._critic):
            if part is not None:
                part.read_norms()

    @torch.no_grad()
    def start(self) -> None:
        """Take in the network's present weights, and begin gradients anew."""
        for part in (self._actor, self._critic, self._scorer, self._value_head):
            if part is not None:
                part.start()

    @torch.no_grad()
    def forward(
        self, replica_obs: Tensor, request_obs: Tensor, mask: Tensor, prior: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, n] and values [B] of a tile; the next tile overwrites the latter."""
        states, n = mask.shape
        x, g = replica_obs.contiguous().view(states * n, -1), request_obs.contiguous()
        available = mask.contiguous().numpy()
        rows = self._actor.forward(x, g, available)
        scores = self._scorer.forward(rows.tensor)
        seen = rows if self._critic is None else self._critic.forward(x, g, available)
        pool = self._pool = _kept(self._pools, _PoolSpace, states, n, rows.array.shape[1])
        pool.mask = available
        kernels.pool(seen.array, available, pool.pooled.array, pool.highest)
        logits, config = scores.view(states, n), self._network.config
        if config.prior:
            if prior is None:
                raise ValueError(f"this network needs the scores of its prior {config.prior}")
            logits = logits - config.prior_weight * prior
        logits = logits.masked_fill(~mask, -torch.inf)
        return logits, self._value_head.forward(pool.pooled.tensor)

    @torch.no_grad()
    def backward(self, of_logits: Tensor, of_values: Tensor) -> None:
        """Add the gradients of the last tile, from those of its logits [B, n] and values [B].

        ``of_logits`` is 0 where the mask is false.
        """
        pool = self._pool
        assert pool is not None
        of_rows = self._scorer.backward(of_logits.reshape(-1))
        of_pooled = self._value_head.backward(of_values)
        of_seen = of_rows
        if self._critic is not None:
            of_seen = pool.of_rows
            of_seen.array[:] = 0
        kernels.pool_back(of_pooled.array, pool.mask, pool.highest, of_seen.array)
        if self._critic is not None:
            self._critic.backward(of_seen)
        self._actor.backward(of_rows)

    @torch.no_grad()
    def set_gradients(self) -> None:
        """Set the gradients of all parameters to the sums over the tiles since the start."""
        for part in (self._actor, self._critic, self._scorer, self._value_head):
            if part is not None:
                part.set_gradients()


class _TrunkPass:
    """A trunk: [B n, F], [B, G] and [B, n] to rows [B n, hidden]."""

    def __init__(self, network: Network, trunk: Trunk) -> None:
        self._network, self._trunk = network, trunk
        self._heads, self._size = trunk.heads, len(trunk.query.weight) // trunk.heads
        hidden, width = len(trunk.hidden.weight), self._heads * _lanes(self._size)
        self._hidden, self._width = hidden, width
        self._inputs = [network.features, network.globals_]
        self._of_first = torch.zeros(sum(self._inputs), hidden)
        self._of_replica, self._of_request = self._of_first.split(self._inputs)
        self._of_second = torch.zeros(hidden, hidden)
        self._of_projection = torch.zeros(3 * width, hidden)
        self._of_output = torch.zeros(width, hidden)
        self._of_gain, self._of_bias, self._of_second_bias = (_Buffer.of(hidden) for _ in range(3))
        self._of_first_bias = torch.zeros(hidden)
        self._spaces: dict[tuple[int, ...], _TrunkSpace] = {}

    def read_norms(self) -> None:
        norms = (self._network.replica_norm, self._network.request_norm)
        self._mean, self._std = (
            torch.cat([getattr(norm, name) for norm in norms]) for name in ("mean", "std")
        )

    def start(self) -> None:
        trunk = self._trunk
        first = trunk.input.weight / self._std  # the normaliser is multiplied in
        self._first_bias = trunk.input.bias - first @ self._mean
        self._first_replica = first[:, : self._inputs[0]].contiguous()
        self._first_request = first[:, self._inputs[0] :].T
        self._gain, self._bias = arrays(trunk.norm.weight, trunk.norm.bias)
        self._second, self._second_bias = trunk.hidden.weight.detach(), *arrays(trunk.hidden.bias)
        query = trunk.query.weight / math.sqrt(self._size)
        parts = (query, trunk.key.weight, trunk.value.weight)
        self._projection = torch.cat([_padded(part, self._heads) for part in parts])
        self._output = _padded(trunk.output.weight.T, self._heads).T
        sums = (self._of_first, self._of_second, self._of_projection, self._of_output)
        biases = (self._of_gain.tensor, self._of_bias.tensor, self._of_second_bias.tensor)
        for total in (*sums, *biases, self._of_first_bias):
            total.zero_()

    def forward(self, x: Tensor, g: Tensor, mask: Array) -> "_Buffer":
        shape = (*mask.shape, self._hidden, self._width, self._heads)
        s = self._last = _kept(self._spaces, _TrunkSpace, *shape)
        s.x, s.g = x, g
        torch.addmm(self._first_bias, g, self._first_request, out=s.shared.tensor)
        s.normal = _product(x, self._first_replica)
        kernels.first_layer(
            s.normal.array, s.shared.array, self._gain, self._bias, s.h1.array, s.slope1, s.scale
        )
        s.rows = _product(s.h1.tensor, self._second)
        kernels.hidden_layer(s.rows.array, self._second_bias, s.h2.array, s.slope2)
        s.projected = _product(s.h2.tensor, self._projection)
        flat, mixed = s.projected.array.reshape(-1), s.mixed.array.reshape(-1)
        kernels.attend(flat, mask, s.attention, mixed, self._heads)
        s.rows.tensor.add_(_product(s.mixed.tensor, self._output).tensor)
        return s.rows

    def backward(self, grad: "_Buffer") -> None:
        s = self._last
        of_mixed = _product(grad.tensor, self._output.T)
        kernels.attend_back(
            of_mixed.array.reshape(-1), s.projected.array.reshape(-1), s.attention,
            s.of_projected.array.reshape(-1), s.change, self._heads,
        )  # fmt: skip
        _add_product(self._of_output, s.mixed.tensor, grad.tensor)
        _add_product(self._of_projection, s.of_projected.tensor, s.h2.tensor)
        of_h2 = _product(s.of_projected.tensor, self._projection.T)
        kernels.hidden_layer_back(of_h2.array, grad.array, s.slope2, self._of_second_bias.array)
        _add_product(self._of_second, of_h2.tensor, s.h1.tensor)
        of_rows = _product(of_h2.tensor, self._second.T)
        kernels.first_layer_back(
            of_rows.array, s.slope1, s.normal.array, s.scale, self._gain,
            self._of_gain.array, self._of_bias.array, s.of_shared.array,
        )  # fmt: skip
        # This way round, since torch takes half as long again for an odd number of columns.
        _add_product(self._of_replica, s.x, of_rows.tensor)
        self._of_request.addmm_(s.g.T, s.of_shared.tensor)
        self._of_first_bias += s.of_shared.tensor.sum(0)

    def set_gradients(self) -> None:
        trunk, heads, size = self._trunk, self._heads, self._size
        of_query, of_key, of_value = (
            _unpadded(part, heads, size) for part in self._of_projection.split(self._width)
        )
        of_first = (self._of_first.T - self._of_first_bias[:, None] * self._mean) / self._std
        gradients = {
            trunk.input.weight: of_first,
            trunk.input.bias: self._of_first_bias,
            trunk.norm.weight: self._of_gain.tensor,
            trunk.norm.bias: self._of_bias.tensor,
            trunk.hidden.weight: self._of_second,
            trunk.hidden.bias: self._of_second_bias.tensor,
            trunk.query.weight: of_query / math.sqrt(size),
            trunk.key.weight: of_key,
            trunk.value.weight: of_value,
            trunk.output.weight: _unpadded(self._of_output, heads, size).T,
        }
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.contiguous()  # Adam takes them to lie as the weights do


class _HeadPass:
    """A head: [K, inputs] to [K]."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._units = len(head.hidden.weight)
        self._of_weight = torch.zeros(head.hidden.weight.shape)
        self._of_last, self._of_bias = _Buffer.of(self._units), _Buffer.of(self._units)
        self._of_last_bias = torch.zeros(1)
        self._spaces: dict[tuple[int, ...], _HeadSpace] = {}

    def start(self) -> None:
        hidden, output = self._head.hidden, self._head.output
        self._weight = hidden.weight.detach()
        self._bias, self._last, self._last_bias = arrays(
            hidden.bias, output.weight.view(-1), output.bias
        )
        sums = (self._of_weight, self._of_last.tensor, self._of_bias.tensor, self._of_last_bias)
        for total in sums:
            total.zero_()

    def forward(self, x: Tensor) -> Tensor:
        s = self._space = _kept(self._spaces, _HeadSpace, len(x), self._units)
        s.x = x
        rows = _product(x, self._weight)
        kernels.weigh(
            rows.array, self._bias, s.hidden, s.slope.array, self._last, self._last_bias,
            s.out.array,
        )  # fmt: skip
        return s.out.tensor

    def backward(self, grad: Tensor) -> "_Buffer":
        """Return the gradient of what came in."""
        s = self._space
        kernels.weigh_back(
            grad.numpy(), s.hidden, s.slope.array, self._last,
            self._of_last.array, self._of_bias.array,
        )  # fmt: skip
        _add_product(self._of_weight, s.slope.tensor, s.x)
        self._of_last_bias += grad.sum()
        return _product(s.slope.tensor, self._weight.T)

    def set_gradients(self) -> None:
        hidden, output = self._head.hidden, self._head.output
        hidden.weight.grad, hidden.bias.grad = self._of_weight, self._of_bias.tensor
        output.weight.grad, output.bias.grad = self._of_last.tensor[None], self._of_last_bias


# ---- matrix products ----------------------------------------------------------------------------


def _linear(rows: Tensor, weight: Tensor) -> Tensor:
    """Return [M, n]: ``rows`` [M, k] times the transposed ``weight`` [n, k]."""
    if _onednn is None:
        return rows @ weight.T
    made: Tensor = _onednn(rows, weight, None, "none", [], "")
    return made


def _product(rows: Tensor, weight: Tensor) -> "_Buffer":
    """Return [M, n]: ``rows`` [M, k] times the transposed ``weight`` [n, k]."""
    made = _linear(rows, weight)
    return _Buffer(made, made.numpy())


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the transposed ``left`` [M, n] times ``right`` [M, k] to ``total`` [n, k]."""
    total += _linear(left.T, right.T)


# ---- working memory -----------------------------------------------------------------------------


class _Buffer(NamedTuple):
    """The same float32 numbers for torch and for compiled code."""

    tensor: Tensor
    array: Array

    @classmethod
    def of(cls, *shape: int) -> "_Buffer":
        array = np.zeros(shape, np.float32)
        return cls(torch.from_numpy(array), array)


class _TrunkSpace:
    """What a trunk computes of ``states`` states with ``n`` replicas, in the order of the pass."""

    x: Tensor
    g: Tensor
    normal: "_Buffer"
    rows: "_Buffer"
    projected: "_Buffer"

    def __init__(self, states: int, n: int, hidden: int, width: int, heads: int) -> None:
        rows = states * n
        self.shared, self.of_shared = (_Buffer.of(states, hidden) for _ in range(2))
        self.h1, self.h2 = (_Buffer.of(rows, hidden) for _ in range(2))
        self.scale = np.zeros(rows, np.float32)
        self.slope1, self.slope2 = np.zeros((2, rows, hidden), np.float32)
        self.of_projected, self.mixed = _Buffer.of(rows, 3 * width), _Buffer.of(rows, width)
        self.attention = np.zeros(rows * heads * n, np.float32)
        self.change = np.zeros((n, n), np.float32)


class _HeadSpace:
    """What a head computes of ``rows`` inputs."""

    x: Tensor

    def __init__(self, rows: int, units: int) -> None:
        self.slope, self.out = _Buffer.of(rows, units), _Buffer.of(rows)
        self.hidden = np.zeros((rows, units), np.float32)


class _PoolSpace:
    """Mean and maximum over the replicas, and the gradients of the rows they were made of."""

    mask: Array

    def __init__(self, states: int, n: int, hidden: int) -> None:
        self.pooled, self.of_rows = _Buffer.of(states, 2 * hidden), _Buffer.of(states * n, hidden)
        self.highest = np.zeros((states, hidden), np.float32)


def _kept(spaces: dict[tuple[int, ...], Space], kind: type[Space], *shape: int) -> Space:
    """Return the memory for a shape, which is kept for the next tile of that shape."""
    found = spaces.get(shape)
    if found is None:
        if len(spaces) >= MOST_SHAPES:
            spaces.clear()
        found = spaces[shape] = kind(*shape)
    return found


def _lanes(size: int) -> int:
    """Return a size, filled up to a multiple of LANES."""
    return size + -size % kernels.LANES


def _padded(weight: Tensor, heads: int) -> Tensor:
    """Fill each head's rows of a weight [heads x size, k] up to a multiple of LANES with zeros."""
    size = len(weight) // heads
    if size == _lanes(size):
        return weight
    parts = weight.reshape(heads, size, weight.shape[1])
    return fn.pad(parts, (0, 0, 0, _lanes(size) - size)).flatten(0, 1)


def _unpadded(weight: Tensor, heads: int, size: int) -> Tensor:
    """Undo :func:`_padded`, for heads of ``size`` rows."""
    if len(weight) == heads * size:
        return weight
    return weight.view(heads, -1, weight.shape[1])[:, :size].flatten(0, 1)


def arrays(*tensors: Tensor) -> tuple[Array, ...]:
    """Return the same memory as NumPy arrays."""
    return tuple(tensor.detach().numpy() for tensor in tensors)
