"""Signals that are noted until work looks, also by work within other work."""

import os
import signal

from d3d_jax.signals import noted


def send(number):
    os.kill(os.getpid(), number)


def test_a_signal_is_known_within_and_without_whenever_it_came():
    default = signal.getsignal(signal.SIGTERM)
    with noted(signal.SIGTERM) as outer:
        assert outer() == 0
        with noted(signal.SIGTERM, signal.SIGINT) as inner:
            assert inner() == outer() == 0
            send(signal.SIGTERM)
            assert inner() == outer() == signal.SIGTERM
        assert outer() == signal.SIGTERM
        with noted(signal.SIGTERM) as later:
            assert later() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is default
    with noted(signal.SIGTERM) as fresh:
        assert fresh() == 0


def test_a_second_signal_acts_as_before():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with noted(signal.SIGTERM) as came:
            send(signal.SIGTERM)
            assert came() == signal.SIGTERM and not seen
            send(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
