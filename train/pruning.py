"""Progressive pruning: remove the least harmful layer, recover by distillation, measure, repeat.

A pruning's folder:

    pruning.json       what it was started with and every finished step
    depth-11/          the step that leaves 11 layers: the run folder of its recovery training
        ranking.json     what removing each layer would come to
        drafter/         the pruned drafter as it came out of recovery
    drafter/           the shallowest drafter that kept enough of its acceptance length

A finished step keeps its drafter and gives up its checkpoints; an interrupted one continues where
it stopped. One process prunes, on all of its devices.
D3D paper, section on pruning; which layer goes is `train.importance`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from d3d_jax.drafter import Drafter, Params, read_drafter, save_drafter
from d3d_jax.errors import D3DError, StoppedError
from d3d_jax.files import hold, write_json
from d3d_jax.memory import enough_memory
from d3d_jax.models import parameters, sharding
from d3d_jax.settings import difference
from d3d_jax.signals import noted
from d3d_jax.train import importance
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.config import ADJUSTABLE, TrainConfig
from d3d_jax.train.dataset import ResponseDataset
from d3d_jax.train.distillation import MARGIN, Teacher
from d3d_jax.train.importance import Criterion, Ranking
from d3d_jax.train.step import cast, fingerprint, place, resolved, split
from d3d_jax.train.trainer import MORE_ROOM, Trainer, packed_batches

# How a drafter is trained after a removal: on the unpruned drafter's distributions, made to prefer
# the response's token by a margin, or as they are; on the responses alone; not at all.
Recovery = Literal["margin", "plain", "responses", "none"]


@dataclasses.dataclass(frozen=True)
class PruneConfig:
    """How far and how a drafter is pruned.

    Attributes:
      layers: depth to stop at.
      keep: stops when τ after recovery is below this fraction of the unpruned drafter's.
      criterion: what decides which layer goes.
      recovery: what a drafter is trained on after a removal.
      documents: validation documents that τ is measured on; 0 for all.
    """

    layers: int = 1
    keep: float = 0.99
    criterion: Criterion = "tau"
    recovery: Recovery = "margin"
    documents: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise D3DError(f"keep must be between 0 and 1, found {self.keep}")

    def check_depth(self, layers: int) -> None:
        """Refuses to prune a drafter of so many layers to this depth (`D3DError`)."""
        if not 1 <= self.layers < layers:
            raise D3DError(
                f"the drafter has {layers} layers: the depth to prune it to must be at least 1 and "
                f"below that, found {self.layers}"
            )


@dataclasses.dataclass(frozen=True)
class Step:
    """A finished step.

    Attributes:
      depth: layers left.
      removed: index of the removed layer in the unpruned drafter.
      tau_removed, tau: after the removal and after recovery.
      ranking_seconds, recovery_seconds: what the two took; of an interrupted recovery the last run.
      candidates: what removing each layer would have come to, by index as text.
    """

    depth: int
    removed: int
    tau_removed: float
    tau: float
    ranking_seconds: float
    recovery_seconds: float
    candidates: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished pruning.

    Attributes:
      tau: of the unpruned drafter.
      steps: all of them, also one that lost too much.
      exported: layers of the drafter that was exported.
    """

    tau: float
    steps: list[Step]
    exported: int


def layers_left(drafter: Drafter) -> list[int]:
    """Indices, in the drafter before any pruning, of the layers that it has."""
    gone = drafter.drafter.pruned_layers
    return [i for i in range(drafter.model.num_hidden_layers + len(gone)) if i not in gone]


def without(drafter: Drafter, params: Params, layer: int) -> tuple[Drafter, Params]:
    """The drafter without one of the layers of `layers_left`; its parameters are stacked."""
    place = layers_left(drafter).index(layer)
    layers = jax.tree.map(lambda leaf: np.delete(np.asarray(leaf), place, 0), params["layers"])
    own = drafter.drafter
    config = dataclasses.replace(
        own,
        source_layers=own.source_layers[:place] + own.source_layers[place + 1 :],
        pruned_layers=(*own.pruned_layers, layer),
        calibration=None,
    )
    depth = drafter.model.num_hidden_layers - 1
    model = dataclasses.replace(drafter.model, num_hidden_layers=depth)
    return Drafter(model, config), {**params, "layers": layers}


@dataclasses.dataclass
class Pruning:
    """Prunes a drafter in a folder; an interrupted pruning in it is continued.

    Attributes:
      drafter, params: from `drafter.read_drafter` (stacked NumPy arrays); also the teacher.
      training: of each recovery.
      dataset, validation: opened splits of one dataset of the drafter's target.
      target_folder: the target's, for what the drafter shares with it.
      report: called with what is being done and `step` of `steps` that it takes (candidates to
        measure, training steps); in recovery among the step's metrics.
      mesh: of `sharding.make_mesh`; None: all devices.

    Raises:
      D3DError: a depth that is not below the drafter's, or a folder of another pruning.
    """

    drafter: Drafter
    params: Params
    config: PruneConfig
    training: TrainConfig
    dataset: ResponseDataset
    validation: ResponseDataset
    target_folder: Path
    out: Path
    report: Callable[[str, dict[str, Any]], None] = lambda doing, metrics: None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        self.config.check_depth(self.drafter.model.num_hidden_layers)
        if jax.process_count() > 1:
            raise D3DError("pruning runs in one process")
        self.mesh = sharding.model_mesh(self.mesh or sharding.make_mesh(), self.drafter.model)
        self.training = resolved(self.training, self.mesh)
        packed_batches(self.training, self.dataset, self.mesh)  # refuses what recovery would
        self._offline: dict[int, OfflineAcceptance] = {}
        self._acceptance(self.drafter)
        self._came: Callable[[], int] = lambda: 0
        settings = self._settings()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise D3DError(f"cannot write {self.out}: {error.strerror}") from None
        with hold(self.out, alone=True):
            self._record = _Record(self.out, settings)
            self._record.save()

    @enough_memory(MORE_ROOM)
    def run(self) -> Outcome:
        """Prunes until the depth or the loss of acceptance asked for, and exports the result.

        Raises:
          D3DError: what `Trainer.train` raises; another pruning is working in the folder; SIGTERM,
            after which the same pruning continues: also candidates that were measured are kept.
        """
        with hold(self.out, alone=True), noted(signal.SIGTERM) as self._came:
            return self._run()

    def _run(self) -> Outcome:
        whole, steps = self.drafter.model.num_hidden_layers, self._record.steps
        if self._record.tau is None:
            self.report("measuring", {"step": 0, "steps": 1})
            self._record.tau = self._tau(self.drafter, self.params)
            self._record.save()
            self._look()
        enough = self.config.keep * self._record.tau
        while not steps or (steps[-1].tau >= enough and steps[-1].depth > self.config.layers):
            steps.append(self._step(*self._read(steps[-1].depth if steps else whole)))
            self._record.save()
            shutil.rmtree(self.out / f"depth-{steps[-1].depth}/checkpoints", ignore_errors=True)
            self._look()
        exported = min((step.depth for step in steps if step.tau >= enough), default=whole)
        if not (self.out / "drafter").exists():
            save_drafter(self.out / "drafter", *self._read(exported), dtype=jnp.bfloat16)
        return Outcome(self._record.tau, steps, exported)

    def _step(self, drafter: Drafter, params: Params) -> Step:
        """Removes one layer and recovers."""
        depth = drafter.model.num_hidden_layers - 1
        folder = self.out / f"depth-{depth}"
        folder.mkdir(parents=True, exist_ok=True)
        ranking, ranked = self._ranking(folder / "ranking.json", drafter, params)
        pruned, own = without(drafter, params, ranking.least)
        before = self._tau(pruned, own)
        self._look()
        clock = time.perf_counter()
        if not (folder / "drafter").exists():
            if self.config.recovery == "none":
                save_drafter(folder / "drafter", pruned, own)
            else:
                self._trainer(pruned, own, folder).train()
        seconds = time.perf_counter() - clock
        # What was exported, whose weights are rounded.
        tau = self._tau(*self._read(depth))
        scores = {str(layer): score for layer, score in ranking.scores.items()}
        return Step(depth, ranking.least, before, tau, ranked, seconds, scores)

    def _trainer(self, pruned: Drafter, params: Params, folder: Path) -> Trainer:
        teacher = None
        if self.config.recovery != "responses":
            margin = MARGIN if self.config.recovery == "margin" else None
            teacher = Teacher(self.drafter, self.params, margin)
        doing = f"recovering {pruned.model.num_hidden_layers} layers"
        return Trainer(
            pruned,
            params,
            self.training,
            self.dataset,
            self.validation,
            folder,
            lambda metrics: self.report(doing, metrics | {"steps": self.training.steps}),
            self.mesh,
            teacher,
        )

    def _ranking(self, file: Path, drafter: Drafter, params: Params) -> tuple[Ranking, float]:
        """What removing each layer would come to, and the seconds it took to find out."""
        layers = layers_left(drafter)
        if self.config.criterion in ("even", "last"):
            return importance.by_place(self.config.criterion, layers), 0.0
        found, spent = Ranking(None, {}), 0.0
        if file.exists():
            raw = json.loads(file.read_text())
            spent = raw["seconds"]
            scores = {int(layer): score for layer, score in raw["scores"].items()}
            found = Ranking(raw["whole"], scores)
        if found.whole is not None and len(found.scores) == len(layers):
            return found, spent
        clock, measure = time.perf_counter() - spent, self._measure(drafter)

        def tell(found: Ranking) -> None:
            measured = {"step": len(found.scores), "steps": len(layers)}
            self.report(f"ranking {len(layers)} layers", measured)

        tell(found)

        def keep(found: Ranking) -> None:
            nonlocal spent
            spent = round(time.perf_counter() - clock, 2)
            write_json(file, dataclasses.asdict(found) | {"seconds": spent})
            self._look()
            tell(found)

        return importance.by_measure(measure, self._placed(params), layers, found, keep), spent

    def _look(self) -> None:
        """Ends the pruning where a signal has asked for it; a recovery notices by itself."""
        if number := self._came():
            raise StoppedError(
                f"stopped by {signal.Signals(number).name}; what was measured is kept: the same "
                "command continues",
                number,
            )

    def _measure(self, drafter: Drafter) -> importance.Measure:
        if self.config.criterion == "tau":
            return importance.of_acceptance(self._acceptance(drafter))
        assert self.mesh is not None
        teacher = Teacher(self.drafter, self._placed(self.params), None)
        return importance.of_divergence(
            drafter, teacher, self.validation, self.training, self.config.documents, self.mesh
        )

    def _acceptance(self, drafter: Drafter) -> OfflineAcceptance:
        """Compiled once for each depth."""
        depth, documents = drafter.model.num_hidden_layers, self.config.documents
        if depth not in self._offline:
            self._offline[depth] = OfflineAcceptance(
                drafter, self.validation, documents, mesh=self.mesh
            )
        return self._offline[depth]

    def _tau(self, drafter: Drafter, params: Params) -> float:
        return self._acceptance(drafter).measure(self._placed(params)).tau

    def _placed(self, params: Params) -> Params:
        assert self.mesh is not None
        # In the type of recovery's computations, in which it decodes on most hardware.
        own = cast(params, self.training.compute)
        return place(own, parameters.shardings(own, self.mesh))

    def _read(self, depth: int) -> tuple[Drafter, Params]:
        """The drafter of a finished step, or the unpruned one."""
        if depth == self.drafter.model.num_hidden_layers:
            return self.drafter, self.params
        folder = self.out / f"depth-{depth}" / "drafter"
        pruned, params = read_drafter(folder, self.target_folder, stacked=True, dtype=np.float32)
        # The same arrays, so that the teacher and it share them on devices, too.
        frozen = pruned.frozen(params)
        return pruned, params | {name: self.params[name] for name in frozen}

    def _settings(self) -> dict[str, Any]:
        """A folder belongs to one pruning of one drafter."""
        return {
            "pruning": dataclasses.asdict(self.config),
            "training": dataclasses.asdict(self.training),
            "model": dataclasses.asdict(self.drafter.model),
            "drafter": dataclasses.asdict(self.drafter.drafter),
            "data": {"digest": self.dataset.digest, **self.dataset.manifest.to_json()},
            "validation": self.validation.digest,
            "parameters": fingerprint(split(self.drafter, self.params)[1]),
        }


class _Record:
    """The file `pruning.json`: what the pruning is, τ of the unpruned drafter, finished steps."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.file = folder / "pruning.json"
        # As it comes back from the file.
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.tau: float | None = None
        self.steps: list[Step] = []
        if not self.file.exists():
            return
        try:
            found = json.loads(self.file.read_text())
        except (OSError, ValueError) as error:
            raise D3DError(f"{self.file} cannot be read: {error}") from None
        if other := difference(found["settings"], self.settings, ADJUSTABLE):
            raise D3DError(f"{folder} holds a pruning with {other}; choose another folder")
        self.tau = found["tau"]
        self.steps = [Step(**step) for step in found["steps"]]

    def save(self) -> None:
        """Writes the file."""
        steps = [dataclasses.asdict(step) for step in self.steps]
        write_json(self.file, {"settings": self.settings, "tau": self.tau, "steps": steps})
