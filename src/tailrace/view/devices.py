"""Device and model presets: how long an iteration takes and how much KV cache a replica holds.

The token part of every preset (base, per token, knots) is fitted to public profiles. What the
profiles do not give is derived from data sheets by the three formulas below and listed in
``Device.derived``; expect derived values to be within 25 % or so.
"""

from dataclasses import dataclass
from functools import lru_cache

from tailrace.config import Cluster, CostModel, Replica
from tailrace.errors import unknown_name

#: Tokens per block in which ``Device.num_blocks`` counts.
PRESET_BLOCK_SIZE = 16

BYTES_PER_VALUE = 2  # weights and KV cache in 16 bits
MEMORY_SHARE = 0.9  # of the device memory; the rest is left for activations
PLANNED_REQUEST_TOKENS = 4096  # capacity is planned in whole requests of this length

# Shares of the data-sheet peaks that the attention kernels reach. Chosen so that the formulas give
# the fitted values of the reference preset (8.8e-5 and 4.0e-6 ms).
READ_EFFICIENCY = 0.73  # of the memory bandwidth, reading the context of decodes
MATH_EFFICIENCY = 0.42  # of the tensor peak, attention of prefills

# Shares of the peaks that whole iterations of the fitted presets reach: 0.62 to 0.74 of the
# bandwidth when they read the weights, 0.4 to 0.7 of the tensor peak per token of a large batch.
WEIGHT_READ_EFFICIENCY = 0.7
WEIGHT_MATH_EFFICIENCY = 0.5

DERIVED = ("per_context_ms", "per_prefill_ms", "num_blocks")
ALL_DERIVED = ("base_ms", "per_token_ms", *DERIVED)


@dataclass(frozen=True)
class Gpu:
    """Data sheet of one accelerator."""

    bandwidth: float  # bytes/s
    peak_flops: float  # FLOP/s, 16-bit tensor, dense
    memory_gib: float  # GiB that the driver reports


@dataclass(frozen=True)
class Model:
    """Shape of a Llama-like model and the number of devices it is split over."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int  # inner width of the gated MLP, or of one expert
    tensor_parallel: int = 1
    hidden: int = 0  # width of the layers; 0: q_heads * head_dim
    experts: int = 1
    active_experts: int = 1  # of those, how many a token passes

    @property
    def weight_bytes(self) -> int:
        """Weights of all layers on one device; embedding and output head are left out."""
        return self._layer_bytes(self.experts)

    @property
    def active_bytes(self) -> int:
        """Those of them that one token passes."""
        return self._layer_bytes(self.active_experts)

    def _layer_bytes(self, experts: int) -> int:
        hidden = self.hidden or self.q_heads * self.head_dim
        attention = hidden * self.head_dim * 2 * (self.q_heads + self.kv_heads)
        mlp = 3 * hidden * self.mlp_dim * experts
        return BYTES_PER_VALUE * self.layers * (attention + mlp) // self.tensor_parallel

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token on one device."""
        heads = -(-self.kv_heads // self.tensor_parallel)
        return 2 * BYTES_PER_VALUE * self.layers * heads * self.head_dim

    @property
    def flop_per_pair(self) -> int:
        """Work of one (query, key) pair on one device: two products of head_dim per head."""
        return 4 * self.layers * self.q_heads * self.head_dim // self.tensor_parallel


@dataclass(frozen=True)
class Device:
    """A preset of one device and model."""

    name: str
    description: str
    cost: CostModel
    num_blocks: int  # KV cache, blocks of PRESET_BLOCK_SIZE tokens
    derived: tuple[str, ...]  # fields derived from data sheets rather than fitted
    source: str

    @property
    def kv_tokens(self) -> int:
        """KV cache size in tokens."""
        return self.num_blocks * PRESET_BLOCK_SIZE


def derived_per_context_ms(gpu: Gpu, model: Model) -> float:
    """Time to read one token of context: a decode is bound by memory bandwidth."""
    return model.kv_bytes_per_token / (gpu.bandwidth * READ_EFFICIENCY) * 1e3


def derived_per_prefill_ms(gpu: Gpu, model: Model) -> float:
    """Time of one (query, key) pair of a prefill, which is bound by arithmetic."""
    return model.flop_per_pair / (gpu.peak_flops * MATH_EFFICIENCY) * 1e3


def derived_token_part(gpu: Gpu, model: Model) -> tuple[float, float]:
    """Return base and per token, ms: a batch reads all weights, a token multiplies its own.

    A mixture of experts is taken as read in full: 32 tokens of 8 out of 128 experts reach 87 % of
    them.
    """
    base = model.weight_bytes / (gpu.bandwidth * WEIGHT_READ_EFFICIENCY) * 1e3
    # 2 FLOP per weight of 2 bytes
    return base, model.active_bytes / (gpu.peak_flops * WEIGHT_MATH_EFFICIENCY) * 1e3


def planned_blocks(gpu: Gpu, model: Model) -> int:
    """Return the KV blocks that fit beside the weights, as Vidur's memory planner counts them."""
    room = gpu.memory_gib * 2**30 * MEMORY_SHARE - model.weight_bytes
    requests = int(room // (model.kv_bytes_per_token * PLANNED_REQUEST_TOKENS))
    return requests * PLANNED_REQUEST_TOKENS // PRESET_BLOCK_SIZE


A100 = Gpu(bandwidth=2.039e12, peak_flops=312e12, memory_gib=80)
H100 = Gpu(bandwidth=3.35e12, peak_flops=989e12, memory_gib=80)
A40 = Gpu(bandwidth=0.696e12, peak_flops=149.7e12, memory_gib=45)  # 48 GB less ECC

LLAMA3_8B = Model(layers=32, q_heads=32, kv_heads=8, head_dim=128, mlp_dim=14336)
LLAMA2_7B = Model(layers=32, q_heads=32, kv_heads=32, head_dim=128, mlp_dim=11008)
LLAMA2_70B_TP4 = Model(
    layers=80, q_heads=64, kv_heads=8, head_dim=128, mlp_dim=28672, tensor_parallel=4
)

#: Layers of the shape of Llama-2-70B's; Llama 3.1 and 3.3 are the same.
LLAMA3_70B_TP4 = LLAMA2_70B_TP4
QWEN3_30B_A3B = Model(
    layers=48, q_heads=32, kv_heads=4, head_dim=128, mlp_dim=768,
    hidden=2048, experts=128, active_experts=8,
)  # fmt: skip

REFERENCE = Device(
    name="a100-llama3-8b",
    description="Llama-3-8B on one A100 80 GB (reference)",
    cost=CostModel(
        base_ms=10.3,
        per_token_ms=0.042,
        knots=((128, 0.023), (512, 0.047)),
        per_context_ms=8.8e-5,
        per_prefill_ms=4.0e-6,
    ),
    num_blocks=30_208,
    derived=(),
    source="fitted to Vidur's public profiles; KV capacity is that of Vidur's memory planner",
)


def _derive(
    name: str,
    description: str,
    gpu: Gpu,
    model: Model,
    token_part: tuple[float, float, float, float] | None,
    source: str = "token part fitted to Vidur's public profiles, the rest derived from data sheets",
) -> Device:
    """Return a preset: token part (base, per token, knot, slope) fitted, the rest derived.

    None: the token part is derived too.
    """
    if token_part is None:
        base_ms, per_token_ms = map(_three_digits, derived_token_part(gpu, model))
        knots: tuple[tuple[float, float], ...] = ()
    else:
        base_ms, per_token_ms, *knot = token_part
        knots = ((knot[0], knot[1]),)
    return Device(
        name=name,
        description=description,
        cost=CostModel(
            base_ms=base_ms,
            per_token_ms=per_token_ms,
            knots=knots,
            per_context_ms=_three_digits(derived_per_context_ms(gpu, model)),
            per_prefill_ms=_three_digits(derived_per_prefill_ms(gpu, model)),
        ),
        num_blocks=planned_blocks(gpu, model),
        derived=ALL_DERIVED if token_part is None else DERIVED,
        source=source,
    )


def _three_digits(value: float) -> float:
    """Round to the precision of derived values."""
    return float(f"{value:.3g}")


_PRESETS = {
    device.name: device
    for device in (
        REFERENCE,
        _derive(
            "h100-llama2-7b",
            "Llama-2-7B on one H100 80 GB",
            H100,
            LLAMA2_7B,
            (5.34, 0.0147, 320, 0.0048),
        ),
        _derive(
            "a40-llama2-7b",
            "Llama-2-7B on one A40 48 GB",
            A40,
            LLAMA2_7B,
            (24.3, 0.0655, 192, 0.0541),
        ),
        _derive(
            "a100-llama2-70b-tp4",
            "Llama-2-70B on four A100 80 GB, tensor parallel",
            A100,
            LLAMA2_70B_TP4,
            (32.8, 0.1008, 96, 0.0801),
        ),
        _derive(
            "h100-llama2-70b-tp4",
            "Llama-2-70B on four H100 80 GB, tensor parallel",
            H100,
            LLAMA2_70B_TP4,
            (24.3, 0.0078, 128, 0.0553),
        ),
        _derive(
            "h100-llama3-70b-tp4",
            "Llama-3.3-70B on four H100 80 GB, tensor parallel",
            H100,
            LLAMA3_70B_TP4,
            (24.3, 0.0078, 128, 0.0553),
            "token part fitted to Vidur's public profiles of Llama-2-70B, whose layers have the "
            "same shape; the rest derived from data sheets",
        ),
        _derive(
            "h100-qwen3-30b-a3b",
            "Qwen3-30B-A3B, a mixture of 128 experts, on one H100 80 GB",
            H100,
            QWEN3_30B_A3B,
            None,
            "derived from data sheets and the model's published shape; calibrate before you rely "
            "on it",
        ),
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all presets, the reference first."""
    return tuple(_PRESETS)


def get(name: str) -> Device:
    """Return a preset, or raise an error that names the nearest ones.

    A device without a model (``h100``), or a model without a device, is the first preset with it.
    """
    if name in _PRESETS:
        return _PRESETS[name]
    for preset in _PRESETS.values():
        if preset.name.startswith(f"{name}-") or preset.name.partition("-")[2] == name:
            return preset
    raise unknown_name("device", name, _PRESETS)


def cost_of(replica: Replica) -> CostModel:
    """Return the replica's own cost model, or its preset's."""
    return replica.cost if replica.cost is not None else get(replica.device).cost


def num_blocks_of(replica: Replica) -> int:
    """Return the replica's KV blocks: its own number, or the preset's tokens in its block size."""
    if replica.num_blocks is not None:
        return replica.num_blocks
    return get(replica.device).kv_tokens // replica.block_size


@lru_cache(maxsize=256)  # every episode of a scenario asks again
def resolved(cluster: Cluster) -> tuple[Replica, ...]:
    """One entry per replica of a cluster, with cost model and KV memory filled in."""
    return tuple(
        replica.model_copy(update={"cost": cost_of(replica), "num_blocks": num_blocks_of(replica)})
        for replica in cluster.expanded()
    )
