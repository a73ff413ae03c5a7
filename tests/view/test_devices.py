import pytest

from tailrace.config import CostModel, Replica
from tailrace.errors import TailraceError
from tailrace.view import devices
from tailrace.view.cost_model import cost_rows, iteration_s

HARDWARE = {
    "a100-llama3-8b": (devices.A100, devices.LLAMA3_8B),
    "h100-llama2-7b": (devices.H100, devices.LLAMA2_7B),
    "a40-llama2-7b": (devices.A40, devices.LLAMA2_7B),
    "a100-llama2-70b-tp4": (devices.A100, devices.LLAMA2_70B_TP4),
    "h100-llama2-70b-tp4": (devices.H100, devices.LLAMA2_70B_TP4),
    "h100-llama3-70b-tp4": (devices.H100, devices.LLAMA3_70B_TP4),
    "h100-qwen3-30b-a3b": (devices.H100, devices.QWEN3_30B_A3B),
}


def test_reference_preset_is_the_published_one():
    device = devices.get("a100-llama3-8b")
    assert device.cost == CostModel(
        base_ms=10.3,
        per_token_ms=0.042,
        knots=((128, 0.023), (512, 0.047)),
        per_context_ms=8.8e-5,
        per_prefill_ms=4.0e-6,
    )
    assert device.num_blocks == 30_208
    assert device.derived == ()


def test_reference_is_the_default_of_a_replica():
    assert Replica().device == devices.names()[0]


def test_every_preset_has_hardware_and_its_own_name():
    assert set(devices.names()) == set(HARDWARE)
    assert all(devices.get(name).name == name for name in devices.names())


def test_formulas_reproduce_the_reference():
    gpu, model = HARDWARE["a100-llama3-8b"]
    cost = devices.get("a100-llama3-8b").cost
    assert devices.derived_per_context_ms(gpu, model) == pytest.approx(
        cost.per_context_ms, rel=0.01
    )
    assert devices.derived_per_prefill_ms(gpu, model) == pytest.approx(
        cost.per_prefill_ms, rel=0.01
    )
    assert devices.planned_blocks(gpu, model) == 30_208


# by hand: 64.36e9 B / 524 288 B = 122 751 tokens = 29 requests, and so on
@pytest.mark.parametrize(
    ("name", "num_blocks", "per_context_ms", "per_prefill_ms"),
    [
        ("h100-llama2-7b", 29 * 256, 2.14e-4, 1.26e-6),
        ("a40-llama2-7b", 14 * 256, 1.03e-3, 8.34e-6),
        ("a100-llama2-70b-tp4", 128 * 256, 5.50e-5, 5.00e-6),
        ("h100-llama2-70b-tp4", 128 * 256, 3.35e-5, 1.58e-6),
        ("h100-llama3-70b-tp4", 128 * 256, 3.35e-5, 1.58e-6),
        # 77.31e9 - 59.79e9 B of weights, 98 304 B per token: 43 requests
        ("h100-qwen3-30b-a3b", 43 * 256, 4.02e-5, 1.89e-6),
    ],
)
def test_derived_figures(name, num_blocks, per_context_ms, per_prefill_ms):
    device = devices.get(name)
    assert device.derived[-3:] == ("per_context_ms", "per_prefill_ms", "num_blocks")
    assert ("base_ms" in device.derived) == (name == "h100-qwen3-30b-a3b")
    assert device.num_blocks == num_blocks
    assert device.cost.per_context_ms == pytest.approx(per_context_ms, rel=1e-9)
    assert device.cost.per_prefill_ms == pytest.approx(per_prefill_ms, rel=1e-9)


@pytest.mark.parametrize("name", devices.names())
def test_no_preset_beats_its_hardware(name):
    gpu, model = HARDWARE[name]
    cost = devices.get(name).cost
    read_weights_ms = model.weight_bytes / gpu.bandwidth * 1e3
    assert 0.4 < read_weights_ms / cost.base_ms < 0.9
    # 2 FLOP per 2-byte weight and token
    compute_ms = model.active_bytes / gpu.peak_flops * 1e3
    marginal_ms = cost.per_token_ms + sum(slope for _, slope in cost.knots)
    assert 0.35 < compute_ms / marginal_ms < 0.9


def test_presets_run_in_the_compiled_cost():
    rows = cost_rows([devices.get(name).cost for name in devices.names()])
    # 10.3 + 600*.042 + 472*.023 + 88*.047 + 1000*8.8e-5 + 1e6*4e-6 ms
    assert iteration_s(rows[0], 600.0, 1000.0, 1e6, 1.0) == pytest.approx(54.58e-3)


def test_cost_of_prefers_the_replicas_own():
    own = CostModel(base_ms=1.0, per_token_ms=0.1)
    assert devices.cost_of(Replica(cost=own, device="no-such-device")) == own
    assert devices.cost_of(Replica(device="a40-llama2-7b")).base_ms == 24.3


@pytest.mark.parametrize(
    ("block_size", "num_blocks"),
    [(16, 30_208), (32, 15_104), (1, 483_328), (4096, 118), (1000, 483)],
)
def test_num_blocks_scale_with_the_block_size(block_size, num_blocks):
    assert devices.num_blocks_of(Replica(block_size=block_size)) == num_blocks


def test_num_blocks_of_prefers_the_replicas_own():
    assert devices.num_blocks_of(Replica(num_blocks=7, block_size=32, device="nowhere")) == 7


@pytest.mark.parametrize("call", [devices.cost_of, devices.num_blocks_of])
def test_unknown_device_names_the_nearest(call):
    with pytest.raises(TailraceError, match=r"unknown device 'a100-lama3-8b'.*a100-llama3-8b"):
        call(Replica(device="a100-lama3-8b"))


def test_a_mixture_of_experts_reads_all_weights_and_multiplies_some():
    cost = devices.get("h100-qwen3-30b-a3b").cost
    assert devices.QWEN3_30B_A3B.weight_bytes == 96 * (2048 * 128 * 72 + 3 * 2048 * 768 * 128)
    assert devices.QWEN3_30B_A3B.active_bytes == 96 * (2048 * 128 * 72 + 3 * 2048 * 768 * 8)
    assert (cost.base_ms, cost.per_token_ms) == (25.5, 0.011)


@pytest.mark.parametrize(
    ("asked", "found"),
    [("h100", "h100-llama2-7b"), ("a40", "a40-llama2-7b"), ("llama3-8b", "a100-llama3-8b")],
)
def test_half_a_name_is_the_first_preset_with_it(asked, found):
    assert devices.get(asked).name == found
