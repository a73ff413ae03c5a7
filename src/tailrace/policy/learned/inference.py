"""Forward pass of a learned policy in compiled code, without torch.

Weights and working memory lie in one array: the vector of
:func:`~tailrace.policy.learned.architecture.pack` viewed as float32. The functions below take
offsets into it, which its header holds. Replicas are computed TILE_ROWS at a time (see
policy/learned/tiles.py); the last tile is padded with rows that attention masks out.
"""

import numpy as np

from tailrace.compiled import vectorised, vectorised_finite
from tailrace.policy.learned import architecture as a
from tailrace.policy.learned.tiles import NARROW, TILE_ROWS, multiply

f32 = np.float32
HALF, ONE = f32(0.5), f32(1.0)
LEAST = f32(-1e30)
LAYER_NORM_EPS = f32(1e-5)
#: GELU in its tanh form: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
GELU_SCALE, GELU_CUBE = f32(np.sqrt(2 / np.pi)), f32(0.044715)
#: tanh as a quotient of polynomials on [-7.9, 7.9] (Eigen's): within 4e-7, and it vectorises.
TANH_RANGE = f32(7.90531110763549805)
T13, T11, T9 = f32(-2.76076847742355e-16), f32(2.00018790482477e-13), f32(-8.60467152213735e-11)
T7, T5, T3 = f32(5.12229709037114e-08), f32(1.48572235717979e-05), f32(6.37261928875436e-04)
T1 = f32(4.89352455891786e-03)
U6, U4 = f32(1.19825839466702e-06), f32(1.18534705686654e-04)
U2, U0 = f32(2.26843463243900e-03), f32(4.89352518554385e-03)


@vectorised
def _tanh_quotient(x):
    x = min(max(x, -TANH_RANGE), TANH_RANGE)
    s = x * x
    over = ((((((s * T13 + T11) * s + T9) * s + T7) * s + T5) * s + T3) * s + T1) * x
    under = ((s * U6 + U4) * s + U2) * s + U0
    return over, under


@vectorised
def _tanh(x):
    over, under = _tanh_quotient(x)
    return over / under


@vectorised
def _exp(x):
    """Exponential of a number that is not positive, within 4e-7: (1 + tanh x/2) / (1 - tanh x/2).

    Unlike the library's, it vectorises.
    """
    over, under = _tanh_quotient(HALF * x)
    return (under + over) / (under - over)


@vectorised
def _gelu(values):
    for i in range(values.size):
        x = values[i]
        values[i] = HALF * x * (ONE + _tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x)))


@vectorised
def _multiply(f, x, n, inputs, weight, outputs, y):
    """Add ``x`` [n, inputs] times ``weight`` [inputs, outputs] to ``y`` [n, outputs]."""
    multiply(f, x, inputs, n, inputs, weight, outputs, outputs, y, outputs)


@vectorised
def _multiply_one(f, x, inputs, weight, outputs, y):
    """Add the vector ``x`` [inputs] times ``weight`` [inputs, outputs] to ``y`` [outputs]."""
    target = f[y : y + outputs]
    for k in range(inputs):
        w = f[weight + k * outputs : weight + (k + 1) * outputs]
        value = f[x + k]
        for o in range(outputs):
            target[o] += value * w[o]


@vectorised
def _copy(f, source, size, target):
    old, new = f[source : source + size], f[target : target + size]
    for k in range(size):
        new[k] = old[k]


@vectorised
def _layer_norm(f, y, n, size, gain, bias):
    g, b = f[gain : gain + size], f[bias : bias + size]
    for i in range(n):
        row = f[y + i * size : y + (i + 1) * size]
        total = f32(0)
        for k in range(size):
            total += row[k]
        mean = total / f32(size)
        squares = f32(0)
        for k in range(size):
            squares += (row[k] - mean) * (row[k] - mean)
        scale = ONE / np.sqrt(squares / f32(size) + LAYER_NORM_EPS)
        for k in range(size):
            row[k] = (row[k] - mean) * scale * g[k] + b[k]


@vectorised
def _at(params, part):
    """Offset of a part in the array of float32, or a size."""
    return np.int64(params[part])


@vectorised
def _rows_of(f, start, n, size, bias):
    """Begin a layer: set each of ``n`` rows at ``start`` to the bias."""
    for i in range(n):
        _copy(f, bias, size, start + i * size)


@vectorised
def _clear(f, start, size):
    part = f[start : start + size]
    for k in range(size):
        part[k] = f32(0)


@vectorised
def _encode(params, f, n):
    """Embed each replica on its own: X and G to H."""
    hidden = _at(params, a.HIDDEN)
    features = _at(params, a.FEATURES)
    shared, first, h = _at(params, a.SHARED), _at(params, a.FIRST), _at(params, a.H)
    _copy(f, _at(params, a.INPUT_BIAS), hidden, shared)
    weight = _at(params, a.REQUEST_WEIGHT)
    _multiply_one(f, _at(params, a.G), _at(params, a.GLOBALS), weight, hidden, shared)
    _rows_of(f, first, n, hidden, shared)
    _multiply(f, _at(params, a.X), n, features, _at(params, a.REPLICA_WEIGHT), hidden, first)
    _layer_norm(f, first, n, hidden, _at(params, a.NORM_GAIN), _at(params, a.NORM_BIAS))
    _gelu(f[first : first + n * hidden])
    _rows_of(f, h, n, hidden, _at(params, a.HIDDEN_BIAS))
    _multiply(f, first, n, hidden, _at(params, a.HIDDEN_WEIGHT), hidden, h)
    _gelu(f[h : h + n * hidden])


@vectorised
def _attend(params, f, n):
    """Add to H the attention of every replica over the available ones."""
    hidden, width = _at(params, a.HIDDEN), _at(params, a.ATTENTION)
    h, projected, mixed = _at(params, a.H), _at(params, a.PROJECTED), _at(params, a.MIXED)
    keys, weights = _at(params, a.KEYS), _at(params, a.WEIGHTS)
    stride = 3 * width
    columns = -(-n // NARROW) * NARROW  # whole tiles; what is beyond the replicas is not read
    _clear(f, projected, n * stride)
    _clear(f, mixed, n * width)
    _multiply(f, h, n, hidden, _at(params, a.PROJECTION_WEIGHT), stride, projected)
    _clear(f, keys, width * columns)
    for i in range(n):
        for k in range(width):
            f[keys + k * columns + i] = f[projected + i * stride + width + k]
    size = width // _at(params, a.HEADS)
    for i in range(0, n, TILE_ROWS):
        for column in range(0, width, size):
            query = projected + i * stride + column
            key = keys + column * columns
            _clear(f, weights, TILE_ROWS * columns)
            multiply(f, query, stride, TILE_ROWS, size, key, columns, columns, weights, columns)
            _softmax(params, f, n, columns)
            value = projected + 2 * width + column
            target = mixed + i * width + column
            multiply(f, weights, columns, TILE_ROWS, n, value, stride, size, target, width)
    _multiply(f, mixed, n, width, _at(params, a.OUTPUT_WEIGHT), hidden, h)


@vectorised_finite
def _largest(values, mask):
    """Largest of the values [n] whose mask is set; LEAST if none is."""
    most = LEAST
    for j in range(values.size):
        value = values[j] if mask[j] > 0 else LEAST
        most = value if value > most else most
    return most


@vectorised
def _softmax(params, f, n, columns):
    """Softmax of each row of WEIGHTS over the available replicas; zeros if there is none."""
    start, mask = _at(params, a.WEIGHTS), _at(params, a.MASK)
    available = f[mask : mask + n]
    for row in range(start, start + TILE_ROWS * columns, columns):
        weights = f[row : row + n]
        most = _largest(weights, available)
        for j in range(n):
            weights[j] -= most
    _exp_all(f[start : start + TILE_ROWS * columns])
    for row in range(start, start + TILE_ROWS * columns, columns):
        weights = f[row : row + n]
        total = f32(0)
        for j in range(n):
            weights[j] *= available[j]
            total += weights[j]
        scale = ONE / max(total, ONE)
        for j in range(n):
            weights[j] *= scale


@vectorised
def _exp_all(values):
    """Replace each value by its exponential; a positive one is taken as 0."""
    for i in range(values.size):
        values[i] = _exp(min(values[i], f32(0)))


@vectorised
def _remember(params, f, n):
    """Advance the memory by a GRU step on the mean embedding of the available replicas."""
    hidden, memory = _at(params, a.HIDDEN), _at(params, a.MEMORY)
    h, mask, pooled = _at(params, a.H), _at(params, a.MASK), _at(params, a.SHARED)
    _clear(f, pooled, hidden)
    count = f32(0)
    for i in range(n):
        count += f[mask + i]
    for i in range(n):
        share = f[mask + i] / max(count, ONE)
        for k in range(hidden):
            f[pooled + k] += share * f[h + i * hidden + k]
    gates, state = _at(params, a.GATES), _at(params, a.M)
    recurrent = gates + 3 * memory
    _copy(f, _at(params, a.GRU_INPUT_BIAS), 3 * memory, gates)
    _copy(f, _at(params, a.GRU_MEMORY_BIAS), 3 * memory, recurrent)
    _multiply_one(f, pooled, hidden, _at(params, a.GRU_INPUT_WEIGHT), 3 * memory, gates)
    _multiply_one(f, state, memory, _at(params, a.GRU_MEMORY_WEIGHT), 3 * memory, recurrent)
    for k in range(memory):
        reset = HALF + HALF * _tanh(HALF * (f[gates + k] + f[recurrent + k]))
        keep = gates + memory + k
        update = HALF + HALF * _tanh(HALF * (f[keep] + f[keep + 3 * memory]))
        new = gates + 2 * memory + k
        candidate = _tanh(f[new] + reset * f[new + 3 * memory])
        f[state + k] = (ONE - update) * candidate + update * f[state + k]


@vectorised
def _score(params, f, n):
    """One logit per replica, the prior included: H to LOGITS."""
    units, memory = _at(params, a.SCORER), _at(params, a.MEMORY)
    shared, s, logits = _at(params, a.SHARED), _at(params, a.S), _at(params, a.LOGITS)
    _copy(f, _at(params, a.SCORER_BIAS), units, shared)
    weight = _at(params, a.SCORER_MEMORY_WEIGHT)
    _multiply_one(f, _at(params, a.M), memory, weight, units, shared)
    _rows_of(f, s, n, units, shared)
    hidden = _at(params, a.HIDDEN)
    _multiply(f, _at(params, a.H), n, hidden, _at(params, a.SCORER_WEIGHT), units, s)
    _gelu(f[s : s + n * units])
    last = f[_at(params, a.LOGIT_WEIGHT) : _at(params, a.LOGIT_WEIGHT) + units]
    prior_weight = f32(params[a.PRIOR_WEIGHT])
    for i in range(n):
        row = f[s + i * units : s + (i + 1) * units]
        total = f32(0)
        for k in range(units):
            total += row[k] * last[k]
        total += f[_at(params, a.LOGIT_BIAS)]
        f[logits + i] = total - prior_weight * f[_at(params, a.PRIOR) + i]


@vectorised
def run(params, f, n):
    """From X, G, MASK and PRIOR of ``n`` replicas to LOGITS; ``f`` is ``params`` as float32."""
    rows = -(-n // TILE_ROWS) * TILE_ROWS
    for i in range(n, rows):  # padding
        features = _at(params, a.FEATURES)
        _clear(f, _at(params, a.X) + i * features, features)
        f[_at(params, a.MASK) + i] = f32(0)
        f[_at(params, a.PRIOR) + i] = f32(0)
    _encode(params, f, rows)
    _attend(params, f, rows)
    if params[a.MEMORY] > 0:
        _remember(params, f, rows)
    _score(params, f, rows)


@vectorised
def run_listed(params, f, n):
    """Like :func:`run`, but of a large cluster only the shortlist goes through the network.

    The other replicas get lower logits, in the order of their sketch scores. Overwrites X, MASK
    and PRIOR.
    """
    most = _at(params, a.SHORTLIST)
    if n <= most:
        run(params, f, n)
        return
    _sketch(params, f, n)
    count = _list(params, f, n, most)
    sketched, listed = _at(params, a.SKETCHED), _at(params, a.LISTED)
    if count > 0:
        run(params, f, count)
    logits = _at(params, a.LOGITS)
    least_logit, least_sketched = f32(0), f32(0)
    for j in range(count):
        value = f[sketched + np.int64(f[listed + j])]
        least_logit = min(least_logit, f[logits + j]) if j else f[logits + j]
        least_sketched = min(least_sketched, value) if j else value
    # From last to first: the index of a replica is never below its place on the list.
    j = count - 1
    for i in range(n - 1, -1, -1):
        if j >= 0 and np.int64(f[listed + j]) == i:
            f[logits + i] = f[logits + j]
            j -= 1
        else:
            f[logits + i] = least_logit + min(f[sketched + i] - least_sketched, f32(0))


@vectorised
def _sketch(params, f, n):
    """Score of every replica by the linear sketch; LEAST where it is not available."""
    x, features = _at(params, a.X), _at(params, a.FEATURES)
    weights = f[_at(params, a.SKETCH_WEIGHT) : _at(params, a.SKETCH_WEIGHT) + features]
    sketched, mask = _at(params, a.SKETCHED), _at(params, a.MASK)
    for i in range(n):
        row = f[x + i * features : x + (i + 1) * features]
        total = f32(0)
        for k in range(features):
            total += row[k] * weights[k]
        f[sketched + i] = total if f[mask + i] > 0 else LEAST


@vectorised
def _list(params, f, n, most):
    """Shortlist the ``most`` available replicas of highest sketch score.

    Moves their rows to the front and returns their number.
    """
    sketched, listed = _at(params, a.SKETCHED), _at(params, a.LISTED)
    count = 0
    for i in range(n):  # insertion into a list with the best first
        value = f[sketched + i]
        if value <= LEAST or (
            count == most and value <= f[sketched + np.int64(f[listed + most - 1])]
        ):
            continue
        j = count if count < most else most - 1
        while j > 0 and value > f[sketched + np.int64(f[listed + j - 1])]:
            f[listed + j] = f[listed + j - 1]
            j -= 1
        f[listed + j] = f32(i)
        count = min(count + 1, most)
    mask, chosen = _at(params, a.MASK), f32(2)
    for j in range(count):
        f[mask + np.int64(f[listed + j])] = chosen
    x, features, prior = _at(params, a.X), _at(params, a.FEATURES), _at(params, a.PRIOR)
    count = 0
    for i in range(n):  # back to the order of the cluster
        if f[mask + i] == chosen:
            f[listed + count] = f32(i)
            _copy(f, x + i * features, features, x + count * features)
            f[prior + count] = f[prior + i]
            f[mask + count] = ONE
            count += 1
    return count


@vectorised
def forward(params, replica_obs, request_obs, available, prior, logits):
    """Fill ``logits`` [n], -inf where ``available`` [n] is false, and advance the memory.

    ``replica_obs`` [n, features], ``request_obs`` [globals], ``prior`` [n] standardised scores.
    """
    n, features = replica_obs.shape
    if n > params[a.MOST] or features != params[a.FEATURES]:
        raise ValueError("too many replicas for this network, or another number of features")
    if request_obs.size != params[a.GLOBALS]:
        raise ValueError("another number of features of the request than this network has")
    f = params.view(np.float32)
    x, g = _at(params, a.X), _at(params, a.G)
    for k in range(request_obs.size):
        f[g + k] = request_obs[k]
    for i in range(n):
        for k in range(features):
            f[x + i * features + k] = replica_obs[i, k]
        f[_at(params, a.MASK) + i] = ONE if available[i] else f32(0)
        f[_at(params, a.PRIOR) + i] = prior[i]
    run_listed(params, f, n)
    for i in range(n):
        logits[i] = f[_at(params, a.LOGITS) + i] if available[i] else -np.inf
