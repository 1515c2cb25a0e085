"""`d3d report` by known figures, and `d3d sweep` on tiny models."""

import json
import re
from pathlib import Path

from d3d_jax import cli
from d3d_jax.commands import sweep
from d3d_jax.commands.benchmark_options import KIND
from d3d_jax.commands.loading import open_decoder
from d3d_jax.commands.option_groups import Decoding
from d3d_jax.commands.sweep import axes_of
from d3d_jax.commands.sweep_options import Sweep
from d3d_jax.errors import D3DError
from d3d_jax.infer.benchmark import Answer, Point
from d3d_jax.infer.benchmark_summary import DEFINITIONS, summarise
from tests.test_cli import models, one_error, responses  # noqa: F401
from tests.tiny_folders import write_drafter

PNG = b"\x89PNG"


def point(decode: float, rounds: list[int]) -> Point:
    tokens = list(range(1 + sum(rounds)))
    answer = Answer(0, 0, [1], tokens, rounds, first_seconds=0.1, seconds=1.0)
    return Point([answer], 1.0, decode, outside=0.001 * decode, peak_bytes=[2 * 10**9, None])


def write_benchmark(folder: Path, decode: float, concurrency: tuple[int, ...] = (1,)) -> Path:
    """A benchmark of ten tokens, said plainly in 10 s and in `decode` seconds by sync."""
    plain, sync = [point(10.0, [1] * 10)], [point(decode, [4, 4, 2])]
    rows = []
    for size in concurrency:
        for task in ("gsm8k", "mbpp"):
            place = {"temperature": 0.0, "concurrency": size, "task": task}
            rows.append({**place, "mode": "plain", **summarise(plain, plain, 1)})
            found = summarise(sync, plain, 2) | {"compared": 1, "identical": 1}
            rows.append({**place, "mode": "sync", **found, "divergences": []})
    place = {"temperature": 0.0, "concurrency": 1, "task": "mbpp", "mode": "async"}
    rows.append({**place, "failed": "out of memory: 9 bytes"})
    names = ("drafter", "block_size", "policy", "dtype", "max_new_tokens")
    settings = {**dict.fromkeys(names), "target": "t", "concurrency": list(concurrency)}
    settings["machine"] = {"devices": ["cpu cpu"], "jax": "1.2.3", "commit": None}
    steps = {"plain": {"median": 5.0, "iqr": 0.0}}
    spans = [("verify", 0, 5), ("draft", 5, 6), ("verify", 6, 11)]
    traced = [dict(zip(("step", "start", "end"), span, strict=True)) for span in spans]
    result = {
        "timelines": {"sync": traced, "async": "out of memory: 9 bytes"},
        "kind": KIND,
        "definitions": list(DEFINITIONS),
        "settings": settings,
        "step_ms": {"1": steps},
        "results": rows,
    }
    folder.mkdir()
    (folder / "benchmark.json").write_text(json.dumps(result))
    return folder / "benchmark.json"


def test_runs_stand_side_by_side_with_plots(tmp_path, capsys):
    fast = write_benchmark(tmp_path / "fast", 2.5, (1, 2))
    slow = write_benchmark(tmp_path / "slow", 20.0)
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "loss": 3}\n{"step": 2, "tau": 1.5}\n{"step": 4, "tau": 1.25}\n'
    )
    (tmp_path / "pruned").mkdir()
    speeds = {"sync": 1.5, "async": 1.25}
    depth = {"layers": 5, "tau": 2.0, "draft_ms": 3.0, "measured": speeds, "predicted": speeds}
    report = tmp_path / "pruned/report.json"
    report.write_text(json.dumps({"depths": [depth, {**depth, "layers": 4}]}))
    files = map(str, (fast, slow, metrics, report))
    assert cli.main(["report", *files, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out/report.md")
    text = (tmp_path / "out/report.md").read_text()
    assert "| task | fast: sync | slow: sync | fast: async | slow: async |" in text or (
        "| task | fast: sync | fast: async | slow: sync | slow: async |" in text
    )
    assert "| gsm8k | 4.00 × (τ 4.00) |  | 0.50 × (τ 4.00) |" in text
    assert "| 0.10% | 2.00 |" in text
    assert "failed: out of memory: 9 bytes" in text and "### Temperature 0, 2 at a time" in text
    assert "| run | 1.500 | 2 | 1.250 | 4 |" in text
    assert "| 5 | 2.000 | 3.00 | 1.50 | 1.25 | 1.50 | 1.25 |" in text
    assert "published" not in text
    names = ("speedup", "acceptance", "position", "concurrency", "timeline", "training", "depth")
    for name in names:
        assert f"({name}.png)" in text
        assert (tmp_path / f"out/{name}.png").read_bytes().startswith(PNG)


def test_published_figures_are_marked_and_never_of_other_settings(tmp_path, capsys):
    file = write_benchmark(tmp_path / "fast", 2.5, (1, 2))
    assert cli.main(["report", str(file), "--out", str(tmp_path / "out"), "--published"]) == 0
    text = (tmp_path / "out/report.md").read_text()
    alone, together = text.split("### Temperature 0, 2 at a time")
    heading = "D3D, Qwen3-32B; published, not measured here"
    assert heading in alone and heading not in together.split("arXiv")[0]
    (row,) = [line for line in alone.splitlines() if line.startswith("| gsm8k")]
    assert "4.00 × (τ 4.00)" in row and "7.48 ×" in row and "5.15 × (τ 6.54)" in row
    assert "| average as published |  |" in alone and "5.71 × (τ 7.73)" in alone


def test_what_is_committed_can_be_reported(tmp_path):
    results = Path(__file__).parents[1] / "results"
    files = [*results.glob("benchmark-*.json"), *results.glob("sweep-*.json")]
    assert len(files) >= 3
    for file in files:
        copy = tmp_path / file.stem / file.name
        copy.parent.mkdir()
        copy.write_bytes(file.read_bytes())
    copies = [str(tmp_path / file.stem / file.name) for file in files]
    assert cli.main(["report", *copies, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/report.md").read_text()
    assert all(f"{file.stem}: sync" in text for file in files if "sweep" not in file.name)
    # With an interval over repeats.
    assert re.search(r"\d\.\d\d \(\d\.\d\d–\d\.\d\d\) × \(τ", text)


def test_what_a_report_refuses(tmp_path, capsys):
    good = write_benchmark(tmp_path / "good", 2.5)
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "cut.json").write_text('{"kind"')
    (tmp_path / "empty.jsonl").write_text('{"step": 1, "loss": 3}\n')
    for files, said in (
        (["nonesuch.json"], "cannot read"),
        ([tmp_path / "other.json"], "is neither benchmark.json, sweep.json"),
        ([tmp_path / "cut.json"], "is not JSON"),
        ([tmp_path / "empty.jsonl"], "holds no step with a τ"),
        ([good, good], "a file is named twice"),
    ):
        out = ["--out", str(tmp_path / "out")]
        assert said in one_error(capsys, cli.main(["report", *map(str, files), *out]))
        assert not (tmp_path / "out").exists()


def test_drafters_are_compared_by_depth(models, tmp_path):  # noqa: F811
    paths = [models / "drafter", write_drafter(tmp_path / "other", models / "target")]
    options = Sweep(str(models / "target"), tmp_path, tmp_path, drafter=tuple(map(str, paths)))
    files = [
        open_decoder(options.target, Decoding(name, "async"), options.placement)
        for name in options.drafter
    ]
    (cases,) = axes_of(options, files).values()
    assert [(case.value, case.drafter, case.drafter_name) for case in cases] == [
        (1, 0, "drafter"), (1, 0, "drafter"), (1, 1, "other"), (1, 1, "other"),
    ]  # fmt: skip


def test_a_sweep_measures_beside_the_plan(
    models,  # noqa: F811
    responses,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
):
    out = tmp_path / "out"
    common = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    common += ["--data", str(responses / "dataset"), "--out", str(out), "--samples", "2"]
    sizes = ["--c", "2", "--f", "1", "2", "--concurrency", "2", "--max-new-tokens", "8"]
    sizes += ["--repeats", "2"]
    assert cli.main(["sweep", *common, *sizes]) == 0
    assert "tokens/s planned" in capsys.readouterr().out
    axes = json.loads((out / "sweep.json").read_text())["axes"]
    assert [row["value"] for row in axes["C"]] == [2, 2]
    assert [row["policy"] for row in axes["F"]] == ["rectangle:2,1", "rectangle:2,2"]
    assert [row["mode"] for row in axes["concurrency"]] == ["sync", "async"]
    for row in (row for rows in axes.values() for row in rows):
        assert row["identical"] == row["compared"] == 2 * 2
        assert row["predicted"]["tokens_per_second"] > 0 < row["tokens_per_second"]["median"]
        low, high = row["speedup"]["interval"]
        assert low <= row["speedup"]["median"] <= high  # of two repeats it is the mean
        assert 1 <= row["tau"] <= 4 and 1 <= row["predicted"]["tau"] <= 4
    for axis in ("C", "F", "concurrency"):
        assert (out / f"sweep-{axis}.png").read_bytes().startswith(PNG)
    assert cli.main(["report", str(out / "sweep.json"), "--out", str(tmp_path / "report")]) == 0
    assert "## out: concurrency" in (tmp_path / "report/report.md").read_text()
    capsys.readouterr()

    # What was measured is not measured again, and what was under way when it was interrupted is.
    decode, calls = sweep.decode, []
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "decode", None)
        patch.setattr(sweep, "measure_times", None)
        assert cli.main(["sweep", *common, *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axes"] == axes
    (out / "decoded-0-1.json").unlink()
    (out / "decoded-0-2.json").unlink()

    def interrupted(target, role, settings, *args):
        calls.append(settings[0].batch)
        if calls == [1, 2]:
            raise KeyboardInterrupt
        if calls == [1, 2, 2]:
            raise D3DError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
        return decode(target, role, settings, *args)

    monkeypatch.setattr(sweep, "decode", interrupted)
    assert cli.main(["sweep", *common, *sizes]) == 130
    assert "keeps what was measured" in capsys.readouterr().err
    assert cli.main(["sweep", *common, *sizes]) == 0 and calls == [1, 2, 2]
    assert "2 at a time is left out, out of memory: RESOURCE" in capsys.readouterr().err
    result = json.loads((out / "sweep.json").read_text())
    assert len(result["failed"]) == 1 and not result["axes"]["concurrency"]
    assert len(result["axes"]["C"]) == 2
    assert "sweep with c [2], and this one has [3]" in one_error(
        capsys, cli.main(["sweep", *common, "--c", "3", *sizes[2:]])
    )

    for args, said in (
        ([], "name an axis"),
        (["--c", "2"], "--c and --f go together"),
        (["--c", "5", "--f", "1"], "C = 5"),
        (["--block-size", "5"], "block size 5 is above the 4"),
        (["--concurrency", "3"], "--concurrency 3 needs as many --samples"),
    ):
        assert said in one_error(capsys, cli.main(["sweep", *common, *args]))
    many = ["--samples", "9", "--branches", "1"]
    assert "at most 3, the responses there are" in one_error(
        capsys, cli.main(["sweep", *common[:-2], *many])
    )
