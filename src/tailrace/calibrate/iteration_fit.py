"""Fit the cost model to profiling tables in Vidur's layout or to measured iterations.

All coefficients are found by non-negative least squares on relative errors, so a 10 ms decode
counts as much as a 300 ms prefill. The knots of the token part are chosen from a fixed grid.
"""

import csv
import lzma
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from tailrace.config import CostModel
from tailrace.errors import TailraceError

Floats = NDArray[np.float64]
Curve = tuple[Floats, Floats]  # tokens in the batch, ms per layer
Row = tuple[int, list[str]]  # line in the file, cells

MAX_KNOTS = 4
KNOT_GRID = tuple(2.0**k * part for k in range(4, 15) for part in (1.0, 1.25, 1.5, 1.75))
#: A further knot must make the error smaller by this share, or it only follows the noise.
KNOT_GAIN = 0.02
#: A base of zero would let a simulated server iterate without time passing.
MIN_BASE_MS = 1e-3

SMALL_BATCH = 32  # requests
SHORT_PREFILL = 512  # tokens
REGIMES = ("decode_small", "decode_large", "prefill_short", "prefill_long", "mixed")
FIELDS = ("base_ms", "per_token_ms", "per_context_ms", "per_prefill_ms")

MIXED_ITERATIONS = 4000  # pairs of a decode and a prefill row put together
ALL_REDUCE_LAUNCH_MS = 0.02  # Vidur's default

# `time_stats.NAME.median` of mlp.csv; Vidur takes 0 where an optional one is missing
MLP_OPERATORS = (
    *("attn_pre_proj", "attn_rope", "attn_post_proj"),
    *("mlp_up_proj", "mlp_act", "mlp_down_proj"),
)
MLP_OPTIONAL = ("input_layernorm", "post_attention_layernorm", "add")
MODEL_SHAPE = ("n_embd", "n_kv_head")


@dataclass(frozen=True)
class RegimeError:
    """Relative errors of a fit over one kind of iteration."""

    count: int
    mean: float  # 0.01 = 1 %
    max: float


@dataclass(frozen=True)
class FitResult:
    """A fitted cost model and how well it fits."""

    model: CostModel
    errors: dict[str, RegimeError]  # by regime, see REGIMES; those without data are left out
    undetermined: tuple[str, ...]  # coefficients the data say nothing about


def regimes_of(tokens: Floats, context: Floats, prefill_work: Floats) -> NDArray[np.int64]:
    """Return the kind of each iteration [n] as an index into REGIMES."""
    decode = np.where(tokens <= SMALL_BATCH, 0, 1)
    prefill = np.where(tokens <= SHORT_PREFILL, 2, 3)
    return np.where(prefill_work == 0, decode, np.where(context == 0, prefill, 4))


def predicted_ms(
    model: CostModel, tokens: ArrayLike, context: ArrayLike, prefill_work: ArrayLike
) -> Floats:
    """Return the model's iteration times [n] in ms, for T, K and W of each iteration."""
    total, before, work = (np.asarray(x, np.float64) for x in (tokens, context, prefill_work))
    ms = model.base_ms + model.per_token_ms * total
    for knot, slope in model.knots:
        ms = ms + slope * np.maximum(total - knot, 0.0)
    return ms + model.per_context_ms * before + model.per_prefill_ms * work


def fit_iterations(
    tokens: ArrayLike,
    context: ArrayLike,
    prefill_work: ArrayLike,
    ms: ArrayLike,
    *,
    max_knots: int = MAX_KNOTS,
    balance: bool = False,
) -> FitResult:
    """Fit the cost model to measured iterations.

    ``tokens``, ``context``, ``prefill_work`` [n] are the T, K and W of each iteration, ``ms`` [n]
    its time. ``balance`` gives every regime the same weight, however many iterations it has.
    """
    total, before, work, times = _checked(tokens, context, prefill_work, ms)
    kind = regimes_of(total, before, work)
    weight = 1.0 / times
    if balance:
        weight = weight / np.sqrt(np.bincount(kind, minlength=len(REGIMES))[kind])
    linear = np.column_stack([np.ones_like(total), total, before, work])
    knots = candidate_knots(total)
    hinges = [np.maximum(total - knot, 0.0) for knot in knots]
    problem = Problem(np.column_stack([linear, *hinges]) * weight[:, None], times * weight)
    chosen = choose_knots(problem, len(FIELDS), len(knots), min(max_knots, MAX_KNOTS))
    values, _ = problem.solve([*range(len(FIELDS)), *chosen])
    model = cost_model(values, [knots[j - len(FIELDS)] for j in chosen], values[len(FIELDS) :])
    off = np.abs(predicted_ms(model, total, before, work) / times - 1.0)
    return FitResult(model, _errors(kind, off), undetermined_fields(linear * weight[:, None]))


def cost_model(fields: Floats, knots: Sequence[float], slopes: Floats) -> CostModel:
    """Return the model of the coefficients of FIELDS and of the knots; those of no slope go."""
    base_ms, per_token_ms, per_context_ms, per_prefill_ms = fields[: len(FIELDS)].tolist()
    found = sorted(zip(knots, slopes.tolist(), strict=True))
    return CostModel(
        base_ms=max(base_ms, MIN_BASE_MS),
        per_token_ms=per_token_ms,
        knots=tuple((knot, slope) for knot, slope in found if slope > 0.0),
        per_context_ms=per_context_ms,
        per_prefill_ms=per_prefill_ms,
    )


def _checked(*columns: ArrayLike) -> tuple[Floats, Floats, Floats, Floats]:
    """Return tokens, context, prefill work and ms as arrays of one length, or say what is wrong."""
    names = ("tokens", "context", "prefill_work", "ms")
    arrays = [np.asarray(column, np.float64) for column in columns]
    sizes = {array.shape for array in arrays}
    if len(sizes) != 1 or arrays[0].ndim != 1 or not arrays[0].size:
        raise TailraceError(
            "a fit needs four columns of one length, at least one iteration; got shapes "
            + ", ".join(f"{name} {a.shape}" for name, a in zip(names, arrays, strict=True))
        )
    for name, array, least in zip(names, arrays, (1.0, 0.0, 0.0, 1e-6), strict=True):
        bad = np.flatnonzero(~(np.isfinite(array) & (array >= least)))
        if bad.size:
            raise TailraceError(
                f"{name} of iteration {bad[0]} is {array[bad[0]]:g}; expected at least {least:g}"
            )
    return arrays[0], arrays[1], arrays[2], arrays[3]


def candidate_knots(tokens: Floats) -> list[float]:
    """Return the knots of the grid that have two distinct batch sizes on either side."""
    sizes = np.unique(tokens)
    return [knot for knot in KNOT_GRID if (sizes <= knot).sum() >= 2 and (sizes > knot).sum() >= 2]


class Problem:
    """Least squares over subsets of the columns of one matrix.

    The matrix is reduced once to its triangular factor, so trying a subset costs microseconds
    whatever the number of rows.
    """

    def __init__(self, matrix: Floats, target: Floats) -> None:
        norm = np.linalg.norm(matrix, axis=0)
        self.scale = np.where(norm > 0.0, norm, 1.0)
        self.size = float(np.linalg.norm(target))
        whole = np.column_stack([matrix / self.scale, target])
        factor: Floats = np.asarray(np.linalg.qr(whole, mode="r"))
        self.factor, self.target = factor[:, :-1], factor[:, -1]
        self._added: dict[tuple[tuple[int, ...], range], tuple[float, int]] = {}

    def best_added(self, columns: Sequence[int], pool: range) -> tuple[float, int]:
        """Return the least residual with one more column of ``pool``, and that column.

        Remembered, because a search that exchanges columns comes back to the same sets.
        """
        key = (tuple(columns), pool)
        if key not in self._added:
            self._added[key] = min(
                (self.solve([*columns, j])[1], j) for j in pool if j not in columns
            )
        return self._added[key]

    def solve(self, columns: Sequence[int]) -> tuple[Floats, float]:
        """Return the non-negative coefficients of some columns and the size of the residual."""
        values, residual = nnls(self.factor[:, columns], self.target)
        return values / self.scale[columns], float(residual)


def choose_knots(problem: Problem, fixed: int, candidates: int, most: int) -> list[int]:
    """Return the columns of the best knots: add the best one, then exchange, until it is enough."""
    always = list(range(fixed))
    pool = range(fixed, fixed + candidates)
    chosen: list[int] = []
    residual = problem.solve(always)[1]
    while len(chosen) < min(most, candidates) and residual > 1e-9 * problem.size:
        found, column = problem.best_added([*always, *chosen], pool)
        trial = [*chosen, column]
        # the first knot alone sits between the true ones: let each move once others are there
        for place in [*range(len(trial))] * 3:
            kept = trial[:place] + trial[place + 1 :]
            moved, column = problem.best_added([*always, *kept], pool)
            if moved < found:
                found = moved
                trial[place] = column
        if found > (1.0 - KNOT_GAIN) * residual:
            break
        chosen, residual = trial, found
    return chosen


def _errors(kind: NDArray[np.int64], off: Floats) -> dict[str, RegimeError]:
    """Return mean and largest relative error per regime that occurs."""
    return {
        name: RegimeError(int(part.size), float(part.mean()), float(part.max()))
        for k, name in enumerate(REGIMES)
        if (part := off[kind == k]).size
    }


def undetermined_fields(linear: Floats) -> tuple[str, ...]:
    """Return the coefficients whose column [n, 4] is nil or made up of the other columns."""
    norm = np.linalg.norm(linear, axis=0)
    unit = linear / np.where(norm > 0.0, norm, 1.0)
    found = []
    for j, name in enumerate(FIELDS):
        others = np.delete(unit, j, axis=1)
        rest = unit[:, j] - others @ np.linalg.lstsq(others, unit[:, j], rcond=1e-9)[0]
        if np.linalg.norm(rest) < 1e-6:
            found.append(name)
    return tuple(found)


def fit_profiles(
    mlp_csv: Path,
    attention_csv: Path,
    *,
    layers: int,
    tensor_parallel: int = 1,
    all_reduce_csv: Path | None = None,
    max_tokens: int = 4096,
    block_size: int = 16,
    kv_cache_save: bool = True,
    decode_overhead: float = 0.1,
) -> FitResult:
    """Fit the cost model to profiles in the layout of Vidur's `data/profiling` (.csv or .csv.xz).

    Every attention row becomes one iteration of ``layers`` layers; pairs of rows become mixed ones.
    Batches beyond ``max_tokens`` are left out. As in Vidur, decodes of several requests of a
    grouped-query model cost ``decode_overhead`` more than profiled (their lengths differ), and each
    layer of a tensor-parallel model ends two of its parts with an all-reduce (``all_reduce_csv``).
    """
    if tensor_parallel > 1 and all_reduce_csv is None:
        raise TailraceError(
            f"tensor_parallel {tensor_parallel} needs all_reduce_csv, the profile of its network"
        )
    mlp = _Table(mlp_csv).where("num_tensor_parallel_workers", tensor_parallel)
    attention = _Table(attention_csv).where("num_tensor_parallel_workers", tensor_parallel)
    attention = attention.where("block_size", block_size)
    shape = mlp.the_one(MODEL_SHAPE)
    if attention.the_one(MODEL_SHAPE) != shape:
        raise TailraceError(f"{mlp_csv} and {attention_csv} are profiles of different models")
    curves = [_mlp_curve(mlp)]
    if all_reduce_csv is not None and tensor_parallel > 1:
        network = _Table(all_reduce_csv).where("num_workers", tensor_parallel)
        network = network.where("devices_per_node", tensor_parallel)
        curves.append(_all_reduce_curve(network, hidden=shape[0]))
    limit = min(max_tokens, *(sizes[-1] for sizes, _ in curves))
    rows = _attention_rows(attention, kv_cache_save, decode_overhead)
    rows = _with_mixed(rows[rows[:, 0] <= limit], limit)
    if not rows.size:
        raise TailraceError(f"{attention_csv} has no batch of at most {limit:g} tokens")
    tokens, context, work, attention_ms = rows.T
    layer_ms = attention_ms + sum(np.interp(tokens, *curve) for curve in curves)
    return fit_iterations(tokens, context, work, layers * layer_ms, balance=True)


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Return batch sizes in ascending order and the mean of the points of each."""
    by_tokens = defaultdict(list)
    for tokens, ms in points:
        by_tokens[tokens].append(ms)
    sizes = sorted(by_tokens)
    return np.array(sizes), np.array([np.mean(by_tokens[size]) for size in sizes])


def _median(operator: str) -> str:
    return f"time_stats.{operator}.median"


def _mlp_curve(table: "_Table") -> Curve:
    """Return the time of everything in a layer that depends on the number of tokens only."""
    table.require("num_tokens", *map(_median, MLP_OPERATORS))
    return _curve(
        (
            table.number(row, "num_tokens"),
            sum(table.number(row, _median(name)) for name in MLP_OPERATORS)
            + sum(table.number(row, _median(name), 0.0) for name in MLP_OPTIONAL),
        )
        for row in table.rows
    )


def _all_reduce_curve(table: "_Table", hidden: float) -> Curve:
    """Return the time of the two all-reduces of a layer; a token is ``hidden`` 16-bit values."""
    column = _median("all_reduce")
    table.require("size", column)
    return _curve(
        (
            table.number(row, "size") / (2 * hidden),
            2 * (table.number(row, column) + ALL_REDUCE_LAUNCH_MS),
        )
        for row in table.rows
    )


def _attention_rows(table: "_Table", kv_cache_save: bool, decode_overhead: float) -> Floats:
    """Return T, K, W and ms per layer [n, 4] of every profiled batch; K = 0 or W = 0 in each."""
    decode, prefill, save = map(_median, ("attn_decode", "attn_prefill", "attn_kv_cache_save"))
    sizes = ("batch_size", "prefill_chunk_size", "kv_cache_size", "n_q_head", "n_kv_head")
    table.require(*sizes, decode, prefill)
    found = []
    for row in table.rows:
        requests, chunk, before, q_heads, kv_heads = (table.number(row, name) for name in sizes)
        save_ms = table.number(row, save, 0.0) if kv_cache_save else 0.0
        if chunk > 0:  # a prefill; Vidur tells them apart in the same way
            work = requests * chunk * (before + chunk / 2)
            found.append((requests * chunk, 0.0, work, table.number(row, prefill) + save_ms))
        else:
            factor = 1.0 + decode_overhead if q_heads > kv_heads and requests > 1 else 1.0
            ms = factor * table.number(row, decode) + save_ms
            found.append((requests, requests * before, 0.0, ms))
    return np.array(found).reshape(-1, 4)


def _with_mixed(rows: Floats, limit: float) -> Floats:
    """Append batches [n, 4] made of one decode and one prefill row each, as far as they fit."""
    decodes, prefills = rows[rows[:, 2] == 0], rows[rows[:, 2] > 0]
    if not len(decodes) or not len(prefills):
        return rows
    rng = np.random.default_rng(0)
    left, right = (rng.integers(len(part), size=MIXED_ITERATIONS) for part in (decodes, prefills))
    mixed = decodes[left] + prefills[right]
    return np.concatenate([rows, mixed[mixed[:, 0] <= limit]])


class _Table:
    """A CSV file as text; cells turn into numbers on demand, so that errors name their place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        try:
            opened = lzma.open if path.suffix == ".xz" else open
            with opened(path, "rt", encoding="utf-8", newline="") as lines:
                reader = csv.reader(lines)
                self.columns = {name: i for i, name in enumerate(next(reader, []))}
                self.rows = [(reader.line_num, cells) for cells in reader if cells]
        except OSError as error:
            raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
        except (csv.Error, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
            raise TailraceError(f"{path} is not a CSV file: {error}") from None
        for line, cells in self.rows:
            if len(cells) != len(self.columns):
                raise TailraceError(
                    f"{path}, line {line}: {len(cells)} cells, expected {len(self.columns)}"
                )
        if not self.rows:
            raise TailraceError(f"{path} has no rows")

    def require(self, *names: str) -> None:
        """Raise an error that names every column that is not there."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise TailraceError(f"{self.path}: missing columns {', '.join(missing)}")

    def number(self, row: Row, column: str, default: float | None = None) -> float:
        """Return a cell as a number; ``default`` stands for a missing column or an empty cell."""
        line, cells = row
        text = cells[self.columns[column]].strip() if column in self.columns else ""
        if default is not None and text.lower() in ("", "nan"):
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0.0 <= value < math.inf:
            raise TailraceError(
                f"{self.path}, line {line}, column {column}: expected a number >= 0, got {text!r}"
            )
        return value

    def where(self, column: str, value: float) -> "_Table":
        """Keep the rows with a value in a column; it is an error if there are none."""
        self.require(column)
        kept = [row for row in self.rows if self.number(row, column) == value]
        if not kept:
            present = sorted({self.number(row, column) for row in self.rows})
            raise TailraceError(
                f"{self.path} has no rows with {column} {value:g}; "
                f"it has {', '.join(f'{x:g}' for x in present)}"
            )
        self.rows = kept
        return self

    def the_one(self, columns: Sequence[str]) -> tuple[float, ...]:
        """Return the values that all rows share in some columns."""
        self.require(*columns)
        found = {tuple(self.number(row, name) for name in columns) for row in self.rows}
        if len(found) != 1:
            raise TailraceError(f"{self.path} mixes models: {', '.join(columns)} differ by row")
        return found.pop()
