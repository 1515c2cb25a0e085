"""Packing: every document once an epoch, limits kept, anchors valid, batches a function of step."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_jax.errors import D3DError
from d3d_jax.train.packing import (
    PackedBatches,
    build_row,
    count_anchors,
    plan_rows,
    sample_anchors,
    shuffled_order,
)


class Lengths(NamedTuple):
    total: np.ndarray
    prompt: np.ndarray


class Documents:
    """A dataset in memory; token values are unique, so a row can be traced to its documents."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        total = np.array([prompt + response for prompt, response in shapes], np.int32)
        self.lengths = Lengths(total, np.array([prompt for prompt, _ in shapes], np.int32))
        self._first = 1 + np.concatenate([[0], np.cumsum(total)])

    def __len__(self) -> int:
        return len(self.lengths.total)

    def __getitem__(self, position: int) -> dict[str, Any]:
        tokens = np.arange(self._first[position], self._first[position + 1], dtype=np.int32)
        return {"tokens": tokens, "prompt_length": int(self.lengths.prompt[position])}

    def position_of(self, token: int) -> int:
        return int(np.searchsorted(self._first, token, side="right")) - 1


# No deadline: a shared machine is slow at times. Derandomised: a failure is seen by everyone.
steady = settings(deadline=None, derandomize=True)
shape_lists = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=40)
MIXED = Documents([(3 + i % 5, 2 + (7 * i) % 13) for i in range(50)])


def batches(documents: Documents = MIXED, **changes: Any) -> PackedBatches:
    options = {
        "max_tokens": 32,
        "max_blocks": 8,
        "anchors_per_document": 4,
        "batch_rows": 4,
        "seed": 0,
    }
    return PackedBatches(documents, **{**options, **changes})


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@steady
@given(st.integers(1, 30), st.integers(1, 60), st.integers(1, 70), st.integers(0, 9))
def test_anchors_are_distinct_sorted_response_tokens_with_a_label(
    prompt: int, response: int, max_anchors: int, epoch: int
) -> None:
    total = prompt + response
    anchors = sample_anchors(prompt, total, max_anchors, 5, epoch, 17)
    assert anchors.dtype == np.int32
    assert np.all(np.diff(anchors) > 0)
    assert np.all((anchors >= prompt) & (anchors + 1 < total))
    assert len(anchors) == min(max_anchors, response - 1)
    assert len(anchors) == count_anchors(prompt, total, max_anchors)
    np.testing.assert_array_equal(anchors, sample_anchors(prompt, total, max_anchors, 5, epoch, 17))


def test_anchors_differ_by_seed_epoch_and_document_and_cover_all_places() -> None:
    def draw(*key: int) -> tuple[int, ...]:
        return tuple(sample_anchors(10, 110, 8, *key).tolist())

    keys = list(itertools.product(range(4), repeat=3))
    assert len({draw(*key) for key in keys}) == len(keys)
    drawn = {anchor for epoch in range(200) for anchor in draw(0, epoch, 0)}
    assert drawn == set(range(10, 109))


def test_a_prompt_that_fills_the_document_has_no_anchor() -> None:
    assert len(sample_anchors(10, 10, 4, 0, 0, 0)) == 0
    assert len(sample_anchors(10, 8, 4, 0, 0, 0)) == 0
    assert count_anchors(10, 8, 4) == 0


def test_the_order_is_a_permutation_of_its_own_in_each_epoch() -> None:
    orders = [tuple(shuffled_order(40, 3, epoch).tolist()) for epoch in range(5)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len(set(orders)) == 5
    assert orders[2] == tuple(shuffled_order(40, 3, 2).tolist())


@steady
@given(shape_lists, st.integers(4, 60), st.integers(1, 12), st.integers(0, 3))
def test_plan_places_every_document_once_within_both_limits(
    shapes: list[tuple[int, int]], max_tokens: int, max_blocks: int, seed: int
) -> None:
    lengths = Documents(shapes).lengths
    totals = np.minimum(lengths.total, max_tokens)
    counts = count_anchors(lengths.prompt, totals, max_blocks)
    order = shuffled_order(len(shapes), seed, 0)
    rows = plan_rows(lengths.total, counts, order, max_tokens, max_blocks)
    np.testing.assert_array_equal(np.concatenate(rows), order)
    for row, following in itertools.zip_longest(rows, rows[1:]):
        tokens, blocks = totals[row].sum(), counts[row].sum()
        assert len(row) and tokens <= max_tokens and blocks <= max_blocks
        if following is not None:  # closed only because the next document did not fit
            overflow = tokens + totals[following[0]] > max_tokens
            assert overflow or blocks + counts[following[0]] > max_blocks


def test_plan_refuses_a_document_with_too_many_anchors() -> None:
    with pytest.raises(D3DError, match="5 anchors"):
        plan_rows(np.array([9]), np.array([5]), np.array([0]), 16, 4)


def test_row_by_hand() -> None:
    first = (np.array([11, 12, 13, 14]), 2, np.array([2], np.int32))
    second = (np.array([21, 22, 23]), 1, np.array([1], np.int32))
    row = build_row([first, second], 9, 4)
    expected = {
        "tokens": [11, 12, 13, 14, 21, 22, 23, 0, 0],
        "segments": [1, 1, 1, 1, 2, 2, 2, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 2, 0, 0],
        "starts": [0, 0, 0, 0, 4, 4, 4, 7, 8],
        "loss_mask": [False, False, True, True, False, True, True, False, False],
        "anchors": [2, 5, -1, -1],
    }
    assert {name: array.tolist() for name, array in row.items()} == expected
    assert {name: str(array.dtype) for name, array in row.items()} == {
        **dict.fromkeys(expected, "int32"),
        "loss_mask": "bool",
    }


def test_row_cuts_the_end_of_a_long_document_and_refuses_what_does_not_fit() -> None:
    long = (np.arange(1, 21), 3, np.array([3, 6], np.int32))
    assert build_row([long], 8, 2)["tokens"].tolist() == list(range(1, 9))
    one = (np.array([1]), 1, np.array([], np.int32))
    with pytest.raises(ValueError, match="do not fit"):
        build_row([long, one], 8, 2)
    with pytest.raises(ValueError, match="do not fit"):
        build_row([long], 8, 1)


def check_row(row: dict[str, np.ndarray], documents: Documents, max_tokens: int) -> list[int]:
    """Checks one row against its documents, token by token, and returns them."""
    found = []
    anchors = row["anchors"][row["anchors"] >= 0]
    assert np.all(row["anchors"][len(anchors) :] == -1)
    assert np.all(np.diff(anchors) > 0)
    # An anchor and its first label are response tokens of one document.
    for anchor in anchors:
        assert row["loss_mask"][anchor] and row["loss_mask"][anchor + 1]
        assert row["segments"][anchor] == row["segments"][anchor + 1] > 0
    for segment in range(1, row["segments"].max() + 1):
        (where,) = np.nonzero(row["segments"] == segment)
        position = documents.position_of(int(row["tokens"][where[0]]))
        document = documents[position]
        tokens = document["tokens"][:max_tokens]
        np.testing.assert_array_equal(row["tokens"][where], tokens)
        np.testing.assert_array_equal(row["positions"][where], np.arange(len(tokens)))
        assert np.all(row["starts"][where] == where[0])
        response = np.arange(len(tokens)) >= document["prompt_length"]
        np.testing.assert_array_equal(row["loss_mask"][where], response)
        found.append(position)
    (padding,) = np.nonzero(row["segments"] == 0)
    np.testing.assert_array_equal(row["starts"][padding], padding)
    assert not row["loss_mask"][padding].any() and not row["tokens"][padding].any()
    return found


@settings(steady, max_examples=60)
@given(
    shape_lists, st.integers(4, 48), st.integers(1, 6), st.integers(0, 6), st.sampled_from([1, 3])
)
def test_an_epoch_holds_every_usable_document_once(
    shapes: list[tuple[int, int]], max_tokens: int, anchors: int, spare: int, batch_rows: int
) -> None:
    documents = Documents(shapes)
    usable = [i for i, (prompt, _) in enumerate(shapes) if prompt < max_tokens]
    options = {
        "max_tokens": max_tokens,
        "max_blocks": anchors + spare,
        "anchors_per_document": anchors,
        "batch_rows": batch_rows,
        "seed": 1,
    }
    if not usable:
        with pytest.raises(D3DError, match="no document"):
            PackedBatches(documents, **options)
        return
    packed = PackedBatches(documents, **options)
    assert packed.skipped == len(shapes) - len(usable)
    rows_in_two_epochs = len(packed.plan(0)) + len(packed.plan(1))
    rows = []
    for step in range(-(-rows_in_two_epochs // batch_rows)):
        batch = packed.batch(step)
        for name, array in batch.items():
            width = anchors + spare if name == "anchors" else max_tokens
            assert array.shape == (batch_rows, width)
        rows += [{name: array[i] for name, array in batch.items()} for i in range(batch_rows)]
    found = [check_row(row, documents, max_tokens) for row in rows[:rows_in_two_epochs]]
    epochs = found[: len(packed.plan(0))], found[len(packed.plan(0)) :]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == usable


def test_every_document_has_its_full_number_of_anchors() -> None:
    packed = batches()
    counted = sum(
        int((packed.batch(step)["anchors"] >= 0).sum()) for step in range(len(packed.plan(0)))
    )
    one_row = batches(batch_rows=1)
    rows = len(one_row.plan(0))
    in_epoch = sum(int((one_row.batch(step)["anchors"] >= 0).sum()) for step in range(rows))
    lengths = MIXED.lengths
    assert in_epoch == count_anchors(lengths.prompt, lengths.total, 4).sum()
    assert counted >= in_epoch


def test_a_step_is_the_same_whatever_came_before() -> None:
    in_order = [batches().batch(step) for step in range(30)]
    packed = batches()
    for step in (29, 3, 17, 0, 28, 11):
        assert_same(packed.batch(step), in_order[step])
        assert_same(batches().batch(step), in_order[step])
    assert packed.epoch_at(29) > 4


def test_epochs_and_seeds_differ() -> None:
    one_row = batches(batch_rows=1)
    rows = len(one_row.plan(0))
    tokens = [one_row.batch(rows * 0)["tokens"], one_row.batch(rows)["tokens"]]
    tokens.append(batches(batch_rows=1, seed=1).batch(0)["tokens"])
    assert len({array.tobytes() for array in tokens}) == 3


def test_anchors_are_drawn_anew_in_each_epoch() -> None:
    one = batches(Documents([(3, 25)]), batch_rows=1)
    drawn = {one.batch(step)["anchors"].tobytes() for step in range(10)}
    assert len(drawn) > 5


@pytest.mark.parametrize("start", [0, 7])
def test_iterator_equals_batches_and_resumes(start: int) -> None:
    packed = batches()
    steps = packed.iterate(start)
    for step in range(start, start + 12):
        assert_same(next(steps), packed.batch(step))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_of_a_batch_make_up_the_batch(count: int) -> None:
    shards = [batches(shard_index=i, shard_count=count) for i in range(count)]
    for step in (0, 5, 13):
        parts = [shard.batch(step) for shard in shards]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert_same(joined, batches().batch(step))


def test_epoch_at() -> None:
    packed = batches(batch_rows=1)
    rows = [len(packed.plan(epoch)) for epoch in range(3)]
    assert packed.epoch_at(0) == 0
    assert packed.epoch_at(rows[0]) == 1
    assert packed.epoch_at(rows[0] + rows[1] + 1) == pytest.approx(2 + 1 / rows[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors_per_document": 9}, "more than the 8 blocks"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"shard_count": 3}, "shard 0 of 3"),
        ({"shard_index": 2, "shard_count": 2}, "shard 2 of 2"),
        ({"max_tokens": 3}, "no document has a response within 3 tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(D3DError, match=message):
        batches(**changes)


def test_the_module_imports_neither_jax_nor_grain() -> None:
    import subprocess
    import sys
    from pathlib import Path

    program = (
        "import sys, d3d_jax.train.packing, d3d_jax.train.responses\n"
        "print([name for name in ('jax', 'grain', 'tensorflow_datasets') if name in sys.modules])"
    )
    root = str(Path(__file__).resolve().parents[2])
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True
    )
    assert result.stdout == "[]\n"
