"""Plans: the speed model by known answers, and the command on tiny models."""

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3d_jax import cli
from d3d_jax.branches import BestFirst, Rectangle
from d3d_jax.commands.plan import block_sizes, choose_policies
from d3d_jax.commands.plan_report import best_of, measured_figures, print_check
from d3d_jax.errors import D3DError
from d3d_jax.infer.benchmark import Answer, Point
from d3d_jax.infer.measure_rounds import Decoded, timed_policies
from d3d_jax.infer.plan import Profile, Setting, StepTime, Times, drafting, predict, recommend
from d3d_jax.train.acceptance import Acceptance
from tests.tiny_folders import write_drafter, write_target

LAYERS = 2
POLICY = BestFirst(3, 4)  # a packed pass of 16 rows
# Milliseconds, by step and rows.
STEPS = {
    "verify": {1: 10, 4: 20, 8: 30},
    "draft": {8: 5, 16: 9},
    "prepare": {8: 6, 16: 8, 32: 12},
    "resolve": {4: 1, 8: 1},
    "miss": {4: 4, 8: 6},
}
TIMES = Times(
    tuple(
        StepTime(step, batch, rows, ms / 1e3 * batch, None if step == "verify" else LAYERS)
        for batch in (1, 2)
        for step, by_rows in STEPS.items()
        for rows, ms in by_rows.items()
    )
)
PROFILE = Profile(LAYERS, {4: (0.8, 0.5, 0.2)}, {4: {"best-first:3": 0.6}})


def speed(mode, *, profile=PROFILE, times=TIMES, separate=False, batch=1, **changes):
    if mode != "plain":
        changes = {"block_size": 4, "policy": POLICY if mode == "async" else None, **changes}
    return predict(times, profile, Setting(mode, batch, **changes), separate=separate)


def test_known_answers_at_batch_1():
    assert speed("plain").tokens_per_second == pytest.approx(1 / 0.010)
    # τ = 1 + 0.8 + 0.5 + 0.2; a round is T_v(4) + T_d' of 8 rows.
    sync = speed("sync")
    assert (sync.tau, sync.round_seconds) == (pytest.approx(2.5), pytest.approx(0.025))
    assert sync.tokens_per_second == pytest.approx(100) and sync.speedup == pytest.approx(1.0)
    # max(20, 8) + 1 + 0.4 · (4 − 1) and 20 + 8 + 1 + 0.4 · (4 − 1), in ms.
    apart, shared = speed("async", separate=True), speed("async")
    assert apart.round_seconds == pytest.approx(0.0222)
    assert apart.tokens_per_second == pytest.approx(2.5 / 0.0222)
    assert apart.speedup == pytest.approx(2.5 * 10 / 22.2)
    assert shared.round_seconds == pytest.approx(0.0302)
    assert (shared.hit_rate, shared.layers) == (0.6, LAYERS)


def test_a_slow_packed_pass_decides_on_separate_devices():
    slow = dataclasses.replace(
        TIMES,
        steps=tuple(
            dataclasses.replace(t, seconds=0.05) if t.step == "prepare" else t for t in TIMES.steps
        ),
    )
    assert speed("async", times=slow, separate=True).round_seconds == pytest.approx(0.0522)


def test_any_row_that_misses_holds_up_the_batch():
    two = speed("async", batch=2, separate=True)
    # All times are twice those of batch 1; m = 1 − 0.6².
    assert two.round_seconds == pytest.approx(0.040 + 0.002 + (1 - 0.36) * 0.006)
    assert two.tokens_per_second == pytest.approx(2 * 2.5 / two.round_seconds)
    assert two.speedup == pytest.approx(2.5 * 0.020 / two.round_seconds)


@pytest.mark.parametrize(("rate", "ms"), [(1.0, 21), (0.0, 24)])
def test_limits_of_the_hit_rate(rate, ms):
    profile = dataclasses.replace(PROFILE, hit_rates={4: {"best-first:3": rate}})
    for batch in (1, 2):
        found = speed("async", profile=profile, separate=True, batch=batch)
        assert found.round_seconds == pytest.approx(ms / 1e3 * batch)


def test_reuse_never_waits_and_needs_a_tau_of_its_own():
    with pytest.raises(D3DError, match=r"τ of reuse of best-first:3 .* is not predicted"):
        speed("async", miss="reuse")
    known = dataclasses.replace(PROFILE, reuse_tau={4: {"best-first:3": 2.1}})
    reuse = speed("async", profile=known, miss="reuse", separate=True)
    assert (reuse.tau, reuse.round_seconds) == (2.1, pytest.approx(0.021))
    assert [s.miss for s in drafting(known, 1)] == ["stall", "stall", "reuse"]


def test_a_drafter_that_is_never_right_makes_decoding_slower():
    profile = Profile(LAYERS, {4: (0.0, 0.0, 0.0)}, {4: {"best-first:3": 0.0}})
    assert speed("sync", profile=profile).tau == 1
    for separate, second in ((False, "sync"), (True, "async")):
        found = recommend(TIMES, [profile], [1], separate=separate)
        assert [p.setting.mode for p in found[:2]] == ["plain", second]


@given(st.tuples(st.floats(0, 1), st.floats(0, 1)), st.booleans(), st.sampled_from([1, 2]))
def test_more_hits_and_more_accepted_drafts_are_never_slower(pair, separate, batch):
    low, high = sorted(pair)

    def of(hit_rate, reached):
        profile = Profile(LAYERS, {4: (reached, reached / 2, 0)}, {4: {"best-first:3": hit_rate}})
        return speed("async", profile=profile, separate=separate, batch=batch).tokens_per_second

    assert of(low, 0.5) <= of(high, 0.5) * (1 + 1e-12)
    assert of(0.5, low) <= of(0.5, high)
    assert of(low, low) > 0


def test_times_are_linear_in_rows_between_those_measured():
    assert TIMES.seconds("verify", 1, 6) == pytest.approx(0.025)
    assert TIMES.seconds("prepare", 2, 24, LAYERS) == pytest.approx(0.020)
    # Above, on with the last slope; below, the smallest.
    assert TIMES.seconds("verify", 1, 12) == pytest.approx(0.040)
    assert TIMES.seconds("prepare", 1, 6, LAYERS) == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("verify", 1, 13), "13 rows of verify at batch 1 are too far from .* \\[1, 4, 8\\]"),
        (("prepare", 1, 5, LAYERS), "5 rows of prepare at batch 1 are too far"),
        (("verify", 4, 8), "no time of verify at batch 4, only at \\[1, 2\\]"),
        (("draft", 1, 8, 3), "3 drafter layers of draft at batch 1 are too far from .* \\[2\\]"),
    ],
)
def test_times_too_far_from_those_measured_are_refused(asked, sentence):
    with pytest.raises(D3DError, match=sentence):
        TIMES.seconds(*asked)


def test_times_are_affine_in_the_drafters_depth():
    deeper = tuple(
        dataclasses.replace(t, layers=6, seconds=2 * t.seconds) for t in TIMES.steps if t.layers
    )
    times = Times(TIMES.steps + deeper)
    assert times.seconds("draft", 1, 8, 2) == pytest.approx(0.005)
    assert times.seconds("draft", 1, 8, 4) == pytest.approx(0.0075)
    assert times.seconds("draft", 1, 8, 8) == pytest.approx(0.0125)
    deep = Profile(4, {4: (0.9, 0.8, 0.7)}, {})
    found = recommend(times, [PROFILE, deep], [1], separate=False)
    best = {p.layers: p for p in reversed(found) if p.setting.mode == "sync"}
    assert best[4].round_seconds == pytest.approx(0.0275) and best[4].tau == pytest.approx(3.4)
    assert found[0] == best[4] and sum(p.setting.mode == "plain" for p in found) == 1


def test_recommendations_are_sorted_and_name_every_setting():
    profile = dataclasses.replace(
        PROFILE, reached={4: (0.8, 0.5, 0.2), 8: (0.8, 0.5, 0.2, 0.1, 0, 0, 0)}
    )
    found = recommend(TIMES, [profile], [1, 2], separate=True)
    speeds = [p.tokens_per_second for p in found]
    assert speeds == sorted(speeds, reverse=True)
    assert sorted(str(p.setting) for p in found) == [
        "--mode async --block-size 4 --policy best-first:3 --miss stall --batch 1",
        "--mode async --block-size 4 --policy best-first:3 --miss stall --batch 2",
        "--mode plain --batch 1",
        "--mode plain --batch 2",
        "--mode sync --block-size 4 --batch 1",
        "--mode sync --block-size 4 --batch 2",
        "--mode sync --block-size 8 --batch 1",
        "--mode sync --block-size 8 --batch 2",
    ]


def test_a_setting_is_spelled_as_generate_takes_it():
    setting = Setting("async", 3, 8, Rectangle(5, 2, 8), "reuse")
    decoding = cli._parse(["generate", "--target", "x", *str(setting).split()]).decoding
    assert (decoding.mode, decoding.batch, decoding.block_size) == ("async", 3, 8)
    assert (decoding.policy, decoding.miss) == ("rectangle:5,2", "reuse")


def test_tau_is_that_of_acceptance_where_no_reply_ends():
    accepted = np.array([3, 0, 1, 3, 2, 0, 1])
    room = np.full_like(accepted, 3)
    tokens, rounds = np.array([np.sum(accepted + 1)]), np.array([len(accepted)])
    acceptance = Acceptance(tokens, rounds, [accepted], [room], 4)
    profile = Profile(LAYERS, {4: tuple(acceptance.reached())}, {})
    assert profile.tau(4) == pytest.approx(acceptance.tau, abs=2e-4)
    # Blocks of 2 would have accepted the same first drafts.
    assert profile.tau(2) == pytest.approx(1 + np.mean(accepted >= 1), abs=1e-4)
    with pytest.raises(D3DError, match="block size 5 is above the 4"):
        profile.tau(5)


def test_files_read_back_what_was_written():
    profile = dataclasses.replace(PROFILE, reuse_tau={4: {"best-first:3": 2.0}}, about={"of": "x"})
    for value in (profile, TIMES):
        assert type(value).from_json(json.loads(json.dumps(value.to_json()))) == value


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (Profile, {"depth": 3}, "acceptance profile has no field 'depth'"),
        (Profile, {"layers": None}, "layers must be a whole number"),
        (Profile, {"reached": {}}, "reached names no block size"),
        (Profile, {"reached": {"4": [0.5]}}, "reached at block size 4 must be 3 probabilities"),
        (Profile, {"reached": {"2": [1.5]}}, "must be between 0 and 1, found 1.5"),
        (Profile, {"reached": {"two": [1.5]}}, "reached must be a JSON object by block size"),
        (Profile, {"hit_rates": {"4": {"best:3": 0.5}}}, "a policy is rectangle:C,F or"),
        (Profile, {"hit_rates": {"4": {"best-first:3": True}}}, "between 0 and 1, found True"),
        (Profile, {"hit_rates": {"4": 0.5}}, "figures by policy"),
        (Profile, {"reuse_tau": {"4": {"best-first:3": 5}}}, "must be between 1 and 4, found 5"),
        (Profile, {"about": []}, "about in an acceptance profile must be a JSON object"),
        (Times, {"steps": 3}, "steps must be a list"),
        (Times, {"steps": [{"step": "verify", "batch": 1, "rows": 1}]}, "lacks the field 'sec"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(kind, changes, sentence):
    good = (PROFILE if kind is Profile else TIMES).to_json()
    with pytest.raises(D3DError, match=sentence):
        kind.from_json(good | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"step": "sleep"}, "a step is one of verify, draft"),
        ({"rows": 0}, "rows of draft must be a whole number"),
        ({"layers": None}, "layers of draft must be a whole number"),
        ({"step": "verify"}, "layers are the drafter's"),
        ({"seconds": 0.0}, "must be above 0"),
        ({"seconds": float("nan")}, "must be above 0"),
    ],
)
def test_impossible_times_are_refused(changes, sentence):
    with pytest.raises(D3DError, match=sentence):
        StepTime(**{"step": "draft", "batch": 1, "rows": 8, "seconds": 0.1, "layers": 2} | changes)


def test_two_times_of_one_size_are_refused():
    with pytest.raises(D3DError, match="two times of verify at batch 1 and 1 rows"):
        Times(TIMES.steps + TIMES.steps[:1])


def test_the_check_shows_speedups_over_plain_decoding_of_the_same_prompts(capsys):
    plan = recommend(TIMES, [PROFILE], [2], separate=True)
    best = best_of(plan, 2, lambda p: p.setting.mode)
    assert [p.setting.mode for p in best] == ["async", "plain", "sync"]
    # Two rows side by side take 20 rounds; the first tokens are the prefill's. Of τ the last rounds
    # of both are left out; the second repeat is a half slower, the third as much faster.
    said = [
        Answer(0, 0, [1], list(range(31)), [3] * 4 + [2] * 7 + [4], 3, 11),
        Answer(1, 0, [1], list(range(51)), [3] * 11 + [2] * 8 + [1], 9, 19),
    ]
    checked = [
        (p, Decoded(p.setting, [Point(said, 1.0, s * f, rounds=20) for f in (1, 1.5, 0.5)]))
        for p, s in zip(best, (1, 4, 2), strict=True)
    ]
    found = measured_figures(checked[0][1], checked)
    assert found == {
        "tau": 2.5,  # 12 + 14 + 33 + 16 tokens in 30 rounds
        "hit_rate": 0.4,
        "round_ms": 50.0,
        "tokens_per_second": 80.0,
        "speedup": 4.0,
    }
    assert measured_figures(checked[1][1], checked)["hit_rate"] is None
    print_check(checked)
    printed = capsys.readouterr().out
    assert printed.count(" predicted ") == 3 and "4.00" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_what_is_compared_and_timed():
    assert [block_sizes(n) for n in (2, 8, 10)] == [[2], [2, 4, 8], [2, 4, 8, 10]]
    usual = choose_policies((), [2, 4], 60)
    assert [str(p) for p in usual[4]] == [
        *(f"best-first:{n}" for n in (1, 2, 4, 8, 16)),
        "rectangle:4,1",
        "rectangle:4,2",
    ]
    asked = choose_policies(("rectangle:4,1", "best-first:2"), [2, 4], 60)
    assert asked == {2: [BestFirst(2, 2)], 4: [Rectangle(4, 1, 4), BestFirst(2, 4)]}
    assert choose_policies(("rectangle:4,1",), [2, 4], 60)[2] == [BestFirst(1, 2)]
    for text, sentence in {"best": "a policy is", "best-first:80": "more candidates"}.items():
        with pytest.raises(D3DError, match=sentence):
            choose_policies(("best-first:2", text), [2], 60)
    assert [p.num_branches for p in timed_policies(usual[4])] == [16, 1, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with `target`, its `drafter`, and in `data/dataset` what the target said."""
    folder = tmp_path_factory.mktemp("plan")
    write_drafter(folder / "drafter", write_target(folder / "target"))
    lines = [json.dumps({"turns": [f"the hello {i}"], "split": "validation"}) for i in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    common = ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    assert cli.main(["respond", *common, "--max-new-tokens", "16", "--out", f"{folder}/data"]) == 0
    return folder


def plan(folder, *args):
    models = ["--target", f"{folder}/target", "--drafter", f"{folder}/drafter"]
    return cli.main(["plan", *models, *args])


def test_the_command_measures_predicts_and_checks(folder, capsys):
    data = ["--data", f"{folder}/data/dataset", "--documents", "3", "--context", "8"]
    files = ["--save-times", f"{folder}/times.json", "--save-profile", f"{folder}/profile.json"]
    sizes = ["--batch", "2", "--block-size", "4", "--policy", "best-first:2", "rectangle:4,1"]
    capsys.readouterr()
    assert plan(folder, *data, *files, *sizes, "--check", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert str(folder) not in json.dumps(found)
    assert sorted(found["profiles"][0]["hit_rates"]["4"]) == ["best-first:2", "rectangle:4,1"]
    steps = {(t["step"], t["batch"]) for t in found["times"]["steps"]}
    assert steps == {(step, 2) for step in STEPS}
    # Plain, sync, and async with two policies.
    assert len(found["shared_hardware"]) == len(found["separate_devices"]) == 4
    # Of three prompts one group of two.
    assert [row["prompts"] for row in found["check"]] == [2, 2, 2]
    for row in found["check"]:
        predicted, measured = row["predicted"], row["measured"]
        assert predicted.keys() == measured.keys()
        assert (measured["hit_rate"] is None) == ("async" not in row["setting"])
        assert measured["tokens_per_second"] > 0 and measured["tau"] >= 1

    # The saved files give the same plan, without the models.
    given = ["--times", f"{folder}/times.json", "--profile", f"{folder}/profile.json"]
    assert cli.main(["plan", "--target", "elsewhere", *given, "--batch", "2", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [p["setting"] for p in again["separate_devices"]] == [
        p["setting"] for p in found["separate_devices"]
    ]
    assert cli.main(["plan", "--target", "elsewhere", *given, "--batch", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Both roles on this hardware" in printed and "Each role on devices of" in printed
    assert "d3d generate --target elsewhere --mode" in printed


def test_a_shallower_drafter_is_timed_for_its_profile(folder, capsys, tmp_path):
    (tmp_path / "deep.json").write_text(json.dumps(PROFILE.to_json()))
    assert plan(folder, "--profile", f"{tmp_path}/deep.json", "--context", "8") == 2
    assert "the drafter has 1 layers: no depth above" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "give --data to measure acceptance on, or --profile"),
        (["--profile", "a.json", "--check", "2"], "--check decodes prompts of --data"),
        (["--profile", "a.json"], "cannot read a.json"),
        (["--profile", "a.json", "--policy", "best-first:2"], "a profile has its own"),
        (["--data", "d", "--times", "t", "--layers", "1"], "leave out --times"),
        (["--data", "d", "--batch", "0"], "--batch must be at least 1"),
        (["--data", "DATA", "--check", "9"], "--check may be at most 4"),
        (["--data", "DATA", "--block-size", "8"], "block size 8 is above the 4"),
        (["--data", "DATA", "--layers", "9"], "the drafter has 1 layers"),
        (["--data", "DATA", "--save-times", "/nowhere/t.json"], "cannot write the file"),
        (["--data", "DATA", "--times", "SHORT"], "no time of verify at batch 1, only at \\[3\\]"),
    ],
)
def test_bad_input_is_one_sentence(folder, args, sentence, capsys, tmp_path):
    short = Times((StepTime("verify", 3, 1, 0.1),))
    (tmp_path / "short.json").write_text(json.dumps(short.to_json()))
    named = {"DATA": f"{folder}/data/dataset", "SHORT": f"{tmp_path}/short.json"}
    capsys.readouterr()
    try:
        status = plan(folder, *(named.get(a, a) for a in args))
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    # tyro frames what is wrong with the options themselves.
    assert re.search(sentence, " ".join(printed.err.replace("│", " ").split()))
