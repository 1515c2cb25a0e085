"""What a run says of its speed, on devices and clocks that are made up."""

import types

import pytest

from d3d_jax.train import gauges as module
from d3d_jax.train.gauges import Gauges


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests turn: clock.now."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


def device(process, kind="TPU v5 lite", stats=None):
    client = types.SimpleNamespace(process_index=lambda: 0)
    return types.SimpleNamespace(
        device_kind=kind, process_index=process, client=client, memory_stats=lambda: stats
    )


def test_shares_of_time_count_from_the_first_step_on(clock):
    gauges = Gauges([device(0)], "float32")
    with gauges.waiting("input"):
        clock.now += 50  # before the first step: not counted
    gauges.read(10, 60)
    for seconds, what in ((1, "input"), (3, "checkpoint"), (1, "input")):
        with gauges.waiting(what):
            clock.now += seconds
    clock.now += 15
    figures = gauges.read(40, 20)
    assert figures["input_wait"] == 2 / 20 and figures["checkpoint_wait"] == 3 / 20
    assert figures["tokens_per_second"] == 2.0
    assert "utilisation" not in figures and "peak_bytes" not in figures


def test_utilisation_is_of_all_devices_and_memory_of_the_fullest_here(clock):
    stats = [{"peak_bytes_in_use": n} for n in (5, 7, 9)]
    devices = [device(0, stats=stats[0]), device(0, stats=stats[1]), device(1, stats=stats[2])]
    gauges = Gauges(devices, "bfloat16")
    gauges.model_flops = 3 * 197e12
    figures = gauges.read(1, 4.0)
    assert figures["utilisation"] == 0.25 and figures["peak_bytes"] == 7
    assert "utilisation" not in Gauges([device(0, "cpu")], "bfloat16").read(1, 1.0)
