"""`d3d plan`: which way to decode is fastest, reckoned from times of steps and from acceptance."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from d3d_jax.branches import BestFirst, Policy, parse_policy
from d3d_jax.commands.evaluate import load_checked
from d3d_jax.commands.loading import DecoderFiles, open_decoder
from d3d_jax.commands.option_groups import Decoding
from d3d_jax.commands.options import Plan
from d3d_jax.commands.plan_report import (
    Checked,
    Plans,
    best_of,
    print_check,
    print_plans,
    record,
)
from d3d_jax.commands.runtime import Bar, busy, note, start_jax
from d3d_jax.drafter import Drafter, Params, check_drafter_files
from d3d_jax.errors import D3DError
from d3d_jax.files import check_file, write_json
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.loading import DEFAULT_BRANCHES, DrafterFiles
from d3d_jax.infer.measure import share_hardware
from d3d_jax.infer.measure_rounds import decode, machine, measure_times
from d3d_jax.infer.plan import Profile, Times, drafting, recommend
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.dataset import ResponseDataset, check_data, open_dataset
from d3d_jax.train.outcomes import hit_rate

# What is compared where no policy is named: best-first of so many branches, and the paper's shape,
# rejection at every offset, with so wide a fan-out.
BRANCHES, FAN_OUTS = (1, 2, 4, 8, 16), (1, 2)
Policies = dict[int, list[Policy]]
_Kind = TypeVar("_Kind", Profile, Times)


def run(options: Plan) -> None:
    """Measures what is not given, predicts, recommends and, if asked to, checks."""
    profiles = [_read(Profile, path) for path in options.profile]
    times = None if options.times is None else _read(Times, options.times)
    for path in filter(None, (options.save_times, options.save_profile)):
        check_file(path)
    dataset = None if options.data is None else open_dataset(options.data, options.split)
    start_jax(cpu_devices=options.placement.num_devices)
    here = Here(options)
    if dataset is not None:
        here.check_data(dataset)
    policies = policies_of(profiles) if profiles else here.policies
    if times is None or options.check:
        here.check_sizes(policies, profiles)
    if times is not None:
        # Whether the times reach all sizes shows before acceptance is measured.
        recommend(times, profiles or [here.never_right()], options.batch, separate=False)
    if not profiles and dataset is not None:
        profiles = [here.measure_profile(dataset)]
        if options.save_profile is not None:
            _save(options.save_profile, profiles[0].to_json())
    if times is None:
        times = here.measure_times(policies, [profile.layers for profile in profiles])
        if options.save_times is not None:
            _save(options.save_times, times.to_json())
    plans = {
        separate: recommend(times, profiles, options.batch, separate=separate)
        for separate in (False, True)
    }
    checked = here.check(dataset, plans) if dataset is not None and options.check else []
    if options.json:
        print(json.dumps(record(options, profiles, times, plans, checked), ensure_ascii=False))
        return
    print_plans(options, plans)
    if checked:
        print_check(checked)


class Here:
    """The models on this machine: looked at, and loaded, when they are first needed."""

    def __init__(self, options: Plan):
        self.options = options

    @functools.cached_property
    def files(self) -> DecoderFiles:
        """Both models, checked as far as goes without reading weights."""
        decoding = Decoding(self.options.drafter, "sync")
        return open_decoder(self.options.target, decoding, self.options.placement)

    @property
    def drafter_files(self) -> DrafterFiles:
        """The drafter's."""
        assert self.files.drafter is not None
        return self.files.drafter

    @functools.cached_property
    def drafter(self) -> Drafter:
        """The drafter's configurations."""
        folders = self.drafter_files.folder, self.files.target.folder
        return Drafter(*check_drafter_files(*folders))

    @functools.cached_property
    def decoder(self) -> Decoder:
        """Both models, loaded."""
        with busy(f"loading {self.options.target} and the drafter"):
            return self.files.load(self.options.max_new_tokens)

    @functools.cached_property
    def policies(self) -> Policies:
        """What the options ask to compare, by block size."""
        config = self.drafter.drafter
        sizes = self.options.block_size or block_sizes(config.block_size)
        vocabulary = config.draft_vocab_size or self.drafter.model.vocab_size
        return choose_policies(self.options.policy, sizes, vocabulary)

    def check_data(self, dataset: ResponseDataset) -> None:
        """Refuses responses that acceptance cannot be measured on, or too few to check with."""
        check_data(self.drafter.drafter, dataset)
        OfflineAcceptance(self.drafter, dataset, block_size=max(self.policies))
        if self.options.check and not dataset.manifest.sampling.get("greedy"):
            raise D3DError("--check decodes greedily, and the responses of --data were sampled")
        if self.options.check > len(dataset):
            raise D3DError(f"--check may be at most {len(dataset)}, the responses there are")

    def check_sizes(self, policies: Policies, profiles: Sequence[Profile]) -> None:
        """Refuses what cannot be timed with this drafter: more layers, or larger blocks."""
        depth, largest = self.drafter.model.num_hidden_layers, self.drafter.drafter.block_size
        if max((*self.options.layers, *(p.layers for p in profiles)), default=0) > depth:
            raise D3DError(f"the drafter has {depth} layers: no depth above that can be timed")
        if max(policies) > largest:
            raise D3DError(
                f"block size {max(policies)} is above the {largest} that the drafter was trained "
                "for"
            )

    def never_right(self) -> Profile:
        """An acceptance profile of the sizes to compare, before acceptance has been measured."""
        reached = {width: (0.0,) * (width - 1) for width in self.policies}
        rates = {
            width: dict.fromkeys(map(str, of_size), 0.0)
            for width, of_size in self.policies.items()
            if self.drafter.drafter.label_shift == 1
        }
        return Profile(self.drafter.model.num_hidden_layers, reached, rates)

    def measure_profile(self, dataset: ResponseDataset) -> Profile:
        """Acceptance and hit rates on recorded responses; the target is not run."""
        drafter, params = load_checked(self.drafter_files.folder, self.options.target)
        if drafter.drafter.label_shift == 0:
            note("a drafter of label shift 0 has no offline hit rate: async is not predicted")
        documents = self.options.documents
        with busy("measuring acceptance on recorded responses"):
            return measure_profile(drafter, params, dataset, documents, self.policies)

    def measure_times(self, policies: Policies, depths: Sequence[int]) -> Times:
        """Times of both roles' steps at all sizes that policies and depths of profiles need."""
        target, drafter = self.decoder.target, self.decoder.drafter
        assert drafter is not None
        layers = {*(self.options.layers or (drafter.config.num_hidden_layers,)), *depths}
        with Bar("timing steps", 1) as bar:
            return measure_times(
                target,
                drafter,
                policies,
                self.options.batch,
                layers=sorted(layers),
                context=self.options.context,
                progress=bar.update_total,
            )

    def check(self, dataset: ResponseDataset, plans: Plans) -> Checked:
        """Decodes prompts of the dataset at the best setting of each mode, as placed here."""
        target, drafter = self.decoder.target, self.decoder.drafter
        assert drafter is not None
        depth = drafter.config.num_hidden_layers
        plan = [p for p in plans[not share_hardware(target, drafter)] if p.layers in (None, depth)]
        indices = np.linspace(0, len(dataset) - 1, self.options.check).round().astype(int)
        prompts = [recorded_prompt(dataset[int(index)]) for index in indices]
        self.decoder.check(prompts)
        checked: Checked = []
        for batch in dict.fromkeys(self.options.batch):
            best = best_of(plan, batch, lambda p: p.setting.mode)
            settings = [prediction.setting for prediction in best]
            # So many that every row of a batch is busy, as the prediction takes it to be.
            whole = prompts[: len(prompts) // batch * batch]
            with Bar(f"decoding at batch {batch}", 1) as bar:
                found = decode(
                    target, drafter, settings, whole, self.options.max_new_tokens, bar.update_total
                )
            checked += zip(best, found, strict=True)
        return checked


def measure_profile(
    drafter: Drafter,
    params: Params,
    dataset: ResponseDataset,
    documents: int,
    policies: Policies,
) -> Profile:
    """How often a drafter is right, measured with blocks of every size.

    Args:
      params: stacked arrays.
      documents: how many, evenly spread; 0 for all.
      policies: by block size; hit rates are measured of each where the drafter has any offline.
    """
    config, params = drafter.drafter, jax.device_put(params)
    reached: dict[int, tuple[float, ...]] = {}
    rates: dict[int, dict[str, float]] = {}
    for width, of_size in policies.items():
        offline = OfflineAcceptance(drafter, dataset, documents, width)
        documents = len(offline.indices)
        offsets = width - 1 + config.label_shift
        temperatures = np.array([config.calibration or (1.0,) * config.block_size])[:, :offsets]
        count = max(policy.num_candidates for policy in of_size)
        found, rounds = offline.observe(params, count, temperatures)
        reached[width] = tuple(found.reached())
        if config.label_shift == 1:
            log_probs = rounds.calibrated(np.zeros(offsets, int))
            rates[width] = {
                str(policy): round(hit_rate(policy, rounds, log_probs), 4) for policy in of_size
            }
    about = {"drafter_of": config.target, "split": dataset.split, "documents": documents}
    return Profile(drafter.model.num_hidden_layers, reached, rates, about=about | machine())


def block_sizes(largest: int) -> list[int]:
    """2, 4, 8, … and the largest itself."""
    return [2**i for i in range(1, largest.bit_length()) if 2**i < largest] + [largest]


def choose_policies(asked: Sequence[str], sizes: Sequence[int], vocabulary: int) -> Policies:
    """The policies to compare at each block size: those asked for that are possible there.

    Args:
      asked: as `parse_policy` reads them; none: a few best-first ones, and full rectangles.
      vocabulary: tokens the drafter can say, of which a policy may need no more as candidates.

    Raises:
      D3DError: no policy, or one that is possible at no block size.
    """
    found: Policies = {size: [] for size in sorted(set(sizes))}
    fits: set[str] = set()
    refused: dict[str, D3DError] = {}
    for size, of_size in found.items():
        usual = [f"best-first:{count}" for count in BRANCHES]
        usual += [f"rectangle:{size},{fan_out}" for fan_out in FAN_OUTS]
        for text in dict.fromkeys(asked or usual):
            try:
                policy = parse_policy(text, size)
                if policy.num_candidates > vocabulary:
                    raise D3DError(f"{text} needs more candidates than the vocabulary has tokens")
            except D3DError as error:
                refused[text] = error
            else:
                fits.add(text)
                of_size.append(policy)
    for text in asked:
        if text not in fits:
            raise refused[text]
    # A block size that none of them fits is still worth a look in sync mode.
    return {size: of_size or [BestFirst(1, size)] for size, of_size in found.items()}


def policies_of(profiles: Sequence[Profile]) -> Policies:
    """The policies that profiles have figures of, by block size; a usual one where none is."""
    found: Policies = {}
    for profile in profiles:
        for setting in drafting(profile, batch=1):
            of_size = found.setdefault(setting.block_size, [])
            if setting.policy is not None and setting.policy not in of_size:
                of_size.append(setting.policy)
    return {w: of_size or [BestFirst(DEFAULT_BRANCHES, w)] for w, of_size in found.items()}


def recorded_prompt(document: dict[str, Any]) -> list[int]:
    """Token ids of the prompt that a document of a dataset answers."""
    return document["tokens"][: document["prompt_length"]].tolist()


def _read(kind: type[_Kind], path: Path) -> _Kind:
    try:
        return kind.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise D3DError(f"cannot read {path}: {error}") from None
    except json.JSONDecodeError as error:
        raise D3DError(f"{path} is not JSON: {error}") from None
    except D3DError as error:
        raise D3DError(f"{path}: {error}") from None


def _save(path: Path, raw: dict[str, Any]) -> None:
    write_json(path, raw, indent=1)
    note(f"saved {path}")
