"""Runs of steps out of the profiler's events, by known answers."""

from d3d_jax.infer.timeline import _MODULE, Span, spans

MS = 1e6


def test_operations_become_runs_of_their_step():
    # Two rounds. The target verifies on two devices, whose operations overlap; the drafter has
    # long gaps between its own, and its next packed pass begins before the next verification.
    events = [
        ("verify", 10 * MS, 12 * MS),
        ("prepare", 10.5 * MS, 11 * MS),
        ("verify", 11 * MS, 14 * MS),
        ("verify", 13 * MS, 13.5 * MS),
        ("prepare", 12.5 * MS, 13 * MS),
        ("resolve", 14.5 * MS, 15 * MS),
        ("resolve", 15 * MS, 15.5 * MS),
        ("prepare", 16 * MS, 17 * MS),
        ("verify", 16.5 * MS, 20 * MS),
        ("resolve", 21 * MS, 22 * MS),
    ]
    expected = [
        Span("verify", 0, 4),
        Span("prepare", 0.5, 3),
        Span("resolve", 4.5, 5.5),
        Span("prepare", 6, 7),
        Span("verify", 6.5, 10),
        Span("resolve", 11, 12),
    ]
    assert spans(events) == expected
    assert spans(reversed(events)) == expected
    assert spans([]) == []


def test_synchronous_steps_alternate():
    events = [("verify", 0, MS), ("draft", MS, 2 * MS), ("verify", 2 * MS, 3 * MS)]
    assert [(span.step, span.start) for span in spans(events)] == [
        ("verify", 0),
        ("draft", 1),
        ("verify", 2),
    ]


def test_a_program_is_known_by_its_name():
    found = {
        name: bool(match) and match[1]
        for name in ("jit__verify_step", "jit__draft_step(123)", "jit__verify_steps", "jit_grow")
        for match in [_MODULE.match(name)]
    }
    assert list(found.values()) == ["verify", "draft", False, False]
