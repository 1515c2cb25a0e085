"""Promise 4 without clocks: the host is never on the critical path.

A step waits on the device for a flag in host memory, which is set only once the host has dispatched
the next round. Were the host to wait for that step on the way, the flag would never be set, the
step would give up, and the reply would be wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import array

from d3d_jax.config import DecodeConfig
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.target import Target
from tests.infer import test_meshes
from tests.infer.test_decoding import LENGTH, PROMPTS, expected, roles

# About half a minute of waiting; a host that is not blocked needs milliseconds.
GIVE_UP = 300_000


class Flag:
    """One word of host memory that a program on a CPU device reads in place."""

    def __init__(self, device):
        memory = np.zeros(64, np.int32)
        start = -memory.ctypes.data % 64 // memory.itemsize  # XLA wants 64-byte alignment
        self._words = memory[start : start + 16]
        seen = jax.dlpack.from_dlpack(self._words, copy=False)
        assert seen.unsafe_buffer_pointer() == self._words.ctypes.data
        self.array = seen

    def set(self):
        self._words[0] = 1


@jax.jit
def wait_for(flag, x):
    """x once the flag is set; −7 everywhere if that takes too long."""

    # The product keeps XLA from running the loop as one kernel that reads the flag once.
    def turn(carry):
        return carry[0] + 1, jnp.tanh(carry[1] @ carry[1])

    turns, product = jax.lax.while_loop(
        lambda carry: (flag[0] == 0) & (carry[0] < GIVE_UP), turn, (0, jnp.ones((128, 128)))
    )
    turns = turns + (product[0, 0] * 0).astype(turns.dtype)
    return jnp.where(turns < GIVE_UP, x, -7)


def test_a_flag_that_is_set_late_is_seen_and_one_that_is_not_is_given_up(monkeypatch):
    x, late = jnp.arange(3), Flag(jax.devices()[0])
    result = wait_for(late.array, x)
    assert not result.is_ready()
    late.set()
    assert result.tolist() == [0, 1, 2]
    monkeypatch.setattr("tests.infer.test_overlap.GIVE_UP", 100)
    give_up = jax.jit(lambda flag, x: wait_for.__wrapped__(flag, x))
    assert give_up(Flag(jax.devices()[0]).array, x).tolist() == [-7, -7, -7]


@pytest.fixture
def gated(monkeypatch):
    """Every verification's report waits until the host has dispatched the next one."""
    flags: list[Flag] = []
    verify = Target.verify

    def run(self, state, settings, handover):
        report, state = verify(self, state, settings, handover)
        if flags:
            flags[-1].set()
        flags.append(Flag(jax.devices()[0]))
        return wait_for(flags[-1].array, report), state

    monkeypatch.setattr(Target, "verify", run)
    yield flags
    for flag in flags:
        flag.set()


@pytest.mark.parametrize("mode, devices", [("plain", 1), ("sync", 2), ("async", 1), ("async", 2)])
def test_promise_4_the_next_round_is_dispatched_before_a_report_is_there(mode, devices, gated):
    target, drafter = roles(devices=devices)
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=LENGTH))
    assert [reply.token_ids for reply in decoding.generate(PROMPTS)] == expected()
    assert len(gated) == decoding.timing.rounds > 5


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_split_target_is_dispatched_before_its_drafts_are_there(mode, monkeypatch):
    flags: list[Flag] = []
    verify = Target.verify

    def run(self, *args):
        outcome = verify(self, *args)
        if flags:
            flags[-1].set()
        return outcome

    def late(step):
        def run(*args):
            handover, state = step(*args)
            flags.append(Flag(jax.devices()[0]))
            return wait_for(flags[-1].array, handover), state

        return run

    monkeypatch.setattr(Target, "verify", run)
    for name in ("draft", "resolve"):
        monkeypatch.setattr(DrafterRole, name, late(getattr(DrafterRole, name)))
    target, drafter = test_meshes.roles((1, 2, 3, 4), 4, (0,))
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=test_meshes.LENGTH))
    replies = decoding.generate(test_meshes.PROMPTS)
    assert [reply.token_ids for reply in replies] == test_meshes.models()[1]
    assert len(flags) == decoding.timing.rounds > 5
    flags[-1].set()


def test_both_roles_read_a_prompt_at_once(monkeypatch):
    """The drafter has read it before the target says its first token."""
    flags: list[Flag] = []
    read, read_target = DrafterRole.prefill, Target.prefill

    def late(*args):
        report, state = read_target(*args)
        flags.append(Flag(jax.devices()[0]))
        return wait_for(flags[-1].array, report), state

    def done(*args):
        state = read(*args)
        jax.block_until_ready(state.cache)
        flags[-1].set()
        return state

    monkeypatch.setattr(Target, "prefill", late)
    monkeypatch.setattr(DrafterRole, "prefill", done)
    decoding = Decoder(*roles(), DecodeConfig("async", LENGTH))
    assert [reply.token_ids for reply in decoding.generate(PROMPTS)] == expected()
    assert len(flags) == len(PROMPTS)


@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_promise_4_the_host_reads_no_array_that_is_not_ready(mode, monkeypatch):
    """It waits for a report in one place, and then reads what is there."""
    unready, reads = [], 0

    def look(x):
        nonlocal reads
        reads += 1
        if not x.is_ready():
            unready.append(x.shape)

    value, asarray = array.ArrayImpl._value, np.asarray

    def read(self):
        look(self)
        return value.fget(self)

    def convert(x, *args, **kwargs):
        if isinstance(x, jax.Array):
            look(x)
        return asarray(x, *args, **kwargs)

    target, drafter = roles()
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=LENGTH))
    said = [reply.token_ids for reply in decoding.generate(PROMPTS)]
    monkeypatch.setattr(array.ArrayImpl, "_value", property(read))
    monkeypatch.setattr(np, "asarray", convert)
    assert [reply.token_ids for reply in decoding.generate(PROMPTS)] == said
    assert unready == []
    assert reads >= decoding.timing.rounds - 1
    slow = jax.jit(lambda: jnp.ones((900, 900)) @ jnp.ones((900, 900)))
    assert np.asarray(slow())[0, 0] == int(slow()[0, 0]) == 900
    assert len(unready) > 0  # such reads are counted
