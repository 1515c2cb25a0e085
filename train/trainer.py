"""The trainer: the loop of steps, what the host reads of them, checkpoints, export.

One step is `train.step`, its objective `train.objective`, the data `train.packing`; files are
`train.run_folder`.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax import flops
from d3d_jax.drafter import Drafter, Params, save_drafter
from d3d_jax.errors import D3DError, StoppedError
from d3d_jax.memory import enough_memory
from d3d_jax.models import parameters, sharding
from d3d_jax.processes import others_reached
from d3d_jax.signals import noted
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.config import TrainConfig
from d3d_jax.train.dataset import ResponseDataset, check_data
from d3d_jax.train.distillation import Teacher
from d3d_jax.train.gauges import Gauges
from d3d_jax.train.guard import LossGuard
from d3d_jax.train.packing import PackedBatches
from d3d_jax.train.run_folder import EXPORT_NAME, RunFolder
from d3d_jax.train.step import (
    State,
    abstract_state,
    cast,
    draft_index,
    fingerprint,
    initial_state,
    make_optimizer,
    make_step,
    place,
    resolved,
    split,
    state_shardings,
)

Report = Callable[[dict[str, Any]], None]


# What helps where memory is too little; a run that has begun may go on with all of it.
MORE_ROOM = "give more micro_batches, remat=full, or more devices to split weights over"


@dataclasses.dataclass
class Trainer:
    """Trains a drafter in a run folder (`train.run_folder`) and exports it to its `drafter/`.

    Attributes:
      drafter, params: from `drafter.init_drafter` or `read_drafter`, stacked: NumPy arrays, or
        arrays on the mesh, which the run takes over.
      dataset, validation: opened splits of one dataset.
      run: the run's folder; an interrupted run in it is continued, on any mesh.
      report: called with the metrics of every step, for a progress display.
      mesh: of `sharding.make_mesh`; None: all devices, each with its own rows.
      teacher: a drafter to learn the distributions of (stacked NumPy arrays); None: the responses.

    Raises:
      D3DError: responses of another target than the drafter's, rows that the mesh cannot split,
        limits that no response meets, a run folder of other settings, or a teacher that drafts
        other blocks or holds arrays which the run takes over.
    """

    drafter: Drafter
    params: Params
    config: TrainConfig
    dataset: ResponseDataset
    validation: ResponseDataset
    run: Path
    report: Report = lambda metrics: None
    mesh: Mesh | None = None
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        self.mesh = sharding.model_mesh(self.mesh or sharding.make_mesh(), self.drafter.model)
        self.config = resolved(self.config, self.mesh)
        check_data(self.drafter.drafter, self.dataset)
        trained = split(self.drafter, self.params)[1]
        ours = _drafts(self.drafter, self.params)
        taught = self.teacher and _drafts(self.teacher.drafter, self.teacher.params)
        if taught is not None and taught != ours:
            raise D3DError(
                "the teacher's distributions are over another vocabulary, of another target, or "
                "blocks of another size"
            )
        if self.teacher is not None and _arrays(trained) & _arrays(self.teacher.params):
            raise D3DError(
                "the teacher shares arrays with the parameters to train, which the run takes over: "
                "give it copies"
            )
        self._whole = NamedSharding(self.mesh, PartitionSpec())
        self._rows, self._batches = packed_batches(self.config, self.dataset, self.mesh)
        self._folder = RunFolder(self.run, self._settings(), self.config.keep_checkpoints)

    def _settings(self) -> dict[str, Any]:
        """A run folder belongs to one configuration, dataset and start: others would mix runs."""
        taught = None
        if self.teacher is not None:
            own = split(self.teacher.drafter, self.teacher.params)[1]
            taught = {"parameters": fingerprint(own), "margin": self.teacher.margin}
        return {
            "train": dataclasses.asdict(self.config),
            "model": dataclasses.asdict(self.drafter.model),
            "drafter": dataclasses.asdict(self.drafter.drafter),
            "data": {"digest": self.dataset.digest, **self.dataset.manifest.to_json()},
            "initial_parameters": fingerprint(split(self.drafter, self.params)[1]),
            "teacher": taught,
        }

    @enough_memory(MORE_ROOM)
    def train(self) -> Path:
        """Runs to `config.steps`, continuing from the last checkpoint, and exports the drafter.

        A run that has ended is left as it is, whatever of its checkpoints is still there.

        Returns:
          The exported drafter's folder.

        Raises:
          D3DError: the loss left all bounds, the run was asked to stop (it is saved first), a
            device has too little memory, or another process of it is gone.
        """
        with self._folder.held():
            if not self._folder.ended:
                self._export(self._train())
            return self.run / EXPORT_NAME

    def _train(self) -> Params:
        """The parameters to export."""
        assert self.mesh is not None
        optimizer = make_optimizer(self.config)
        frozen, trained = split(self.drafter, self.params)
        index = draft_index(self.drafter, self.params)
        shardings = state_shardings(optimizer, trained, self.mesh)
        like = abstract_state(optimizer, trained, shardings)
        step = make_step(self.drafter, self.config, optimizer, shardings)
        given, frozen = frozen, self._placed(frozen)
        teacher = self._teacher(given, frozen)
        index = None if index is None else place(index, self._whole)
        asked_to_stop = noted(signal.SIGTERM, signal.SIGINT)
        with self._folder.checkpoints() as manager, asked_to_stop as came, others_reached():
            if manager.latest_step() is None:
                state = initial_state(optimizer, trained, shardings)
            else:
                _delete(trained)
                state = self._folder.restore(manager, like)
            gauges = Gauges(self.mesh.devices.flatten().tolist(), self.config.compute)
            loop = _Loop(self, manager, frozen, gauges, start=int(state["step"]))
            batches = self._batches.iterate(loop.start)
            for number in range(loop.start + 1, self.config.steps + 1):
                with gauges.waiting("input"):
                    batch = next(batches)
                inputs = (frozen, index, *self._place_inputs(batch, came()), number, teacher)
                if not gauges.model_flops:
                    # What is computed a second time to save memory is no work of the model.
                    plain = dataclasses.replace(self.config, remat="none")
                    same = plain == self.config
                    once = step if same else make_step(self.drafter, plain, optimizer, shardings)
                    gauges.model_flops = flops.count(once.trace(state, *inputs).jaxpr)
                state, metrics = step(state, *inputs)
                loop.after(number, state, metrics)
            if self.config.export == "best":
                _delete(state)
                state = self._folder.restore(manager, like, best=True)
        return {**state["params"], **frozen}

    def _teacher(self, given: Params, frozen: Params) -> Teacher | None:
        """The teacher on the mesh; what it shares with the drafter is not held twice.

        Args:
          given, frozen: the drafter's own frozen parameters as given and as placed.
        """
        if self.teacher is None:
            return None
        params = self.teacher.params
        shared = {name: frozen[name] for name in given if params.get(name) is given[name]}
        others = {name: leaf for name, leaf in params.items() if name not in shared}
        return dataclasses.replace(self.teacher, params={**self._placed(others), **shared})

    def _placed(self, params: Params) -> Params:
        """Parameters that are not trained."""
        assert self.mesh is not None
        return place(cast(params, self.config.compute), parameters.shardings(params, self.mesh))

    def _place_inputs(
        self, batch: dict[str, np.ndarray], signal_number: int
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """A step's global batch and signals, of which this process gives its own parts."""

        def rows(local: np.ndarray) -> jax.Array:
            shape = (self.config.batch_rows, *local.shape[1:])
            return jax.make_array_from_process_local_data(self._rows, local, shape)

        assert self.mesh is not None
        devices = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        signals = jax.make_array_from_callback(
            (self.mesh.size,), devices, lambda _: np.array([signal_number], np.int32)
        )
        return {name: rows(local) for name, local in batch.items()}, signals

    def _export(self, params: Params) -> None:
        config = dataclasses.replace(
            self.drafter.drafter,
            num_anchors=self.config.anchors_per_document,
            # Temperatures measured on other parameters.
            calibration=None,
        )
        drafter = Drafter(self.drafter.model, config)
        save_drafter(self.run / EXPORT_NAME, drafter, params, dtype=jnp.bfloat16)


class _Loop:
    """What the host does between steps.

    It reads a step's metrics while the next one runs, so that the devices never wait for it; only
    where the state itself is needed, to save or measure it, does it read them at once.
    """

    def __init__(
        self,
        trainer: Trainer,
        manager: ocp.CheckpointManager,
        frozen: Params,
        gauges: Gauges,
        start: int,
    ) -> None:
        self.start, self._gauges = start, gauges
        self._trainer, self._config, self._folder = trainer, trainer.config, trainer._folder
        self._manager, self._frozen = manager, frozen
        self._acceptance = OfflineAcceptance(
            trainer.drafter, trainer.validation, self._config.eval_documents, mesh=trainer.mesh
        )
        self._guard = LossGuard(self._config.spike_factor, self._config.spike_steps)
        for record in self._folder.rewind(start):
            self._guard.judge(record["loss"], record["grad_norm"])
        self._unread: tuple[int, dict[str, jax.Array]] | None = None
        self._clock = time.perf_counter()

    def after(self, number: int, state: State, metrics: dict[str, jax.Array]) -> None:
        """Follows the dispatch of a step; `state` is what it will give.

        Raises:
          StoppedError: a signal; the state is saved.
          D3DError: the loss left all bounds; the state is saved apart.
        """
        late, self._unread = self._unread, (number, metrics)
        signalled = self._log(self._read(*late, number, state)) if late else 0
        done = number == self._config.steps
        measured = done or number % self._config.eval_every == 0
        if not (measured or signalled or number % self._config.checkpoint_every == 0):
            return
        self._unread = None
        record = self._read(number, metrics, number, state)
        signalled = record["signal"] or signalled
        if measured and (done or not signalled):  # who asks to stop may not wait for it
            params = cast(state["params"], self._config.compute)
            record |= self._acceptance.measure({**params, **self._frozen}).summary()
        self._log(record)
        ends = bool(signalled) and not done
        # What a run is given up for must not take the place of what it could go on from.
        if ends or done or not self._guard.spiking:
            with self._gauges.waiting("checkpoint"):
                self._folder.save(self._manager, number, state, record.get("tau"), wait=ends)
        if ends:
            raise StoppedError(
                f"stopped by {signal.Signals(signalled).name} at step {number}; saved: the same "
                "command continues",
                signalled,
            )
        self._clock = time.perf_counter()

    def _read(
        self, number: int, metrics: dict[str, jax.Array], newest: int, state: State
    ) -> dict[str, Any]:
        """Waits for a step and judges it; `newest` is the step that `state` comes after."""
        host = jax.device_get(metrics)
        now, before = time.perf_counter(), self._clock
        self._clock = now
        if wrong := self._guard.judge(float(host["loss"]), float(host["grad_norm"])):
            spike = np.isfinite(host["loss"]) and np.isfinite(host["grad_norm"])
            # A step without numbers was not taken, nor what was dispatched since (`make_step`).
            last = int(state["step"])
            where = self._folder.save_diverged(last, state)
            raise D3DError(
                f"{wrong} at step {number}; the state after step {last} is in {where}, good ones "
                f"in {self._folder.path / 'checkpoints'}; lower learning_rate in a new run"
                + (", or go on with spike_factor=0" if spike else "")
            )
        accuracy = host["hits"] / np.maximum(host["counts"], 1)
        return {
            "step": number,
            **{name: float(host[name]) for name in ("loss", "diffusion", "ar", "grad_norm")},
            "accuracy": [round(float(a), 4) for a in accuracy],
            "epoch": round(self._trainer._batches.epoch_at(number), 3),
            **self._gauges.read(float(host["tokens"]), now - before),
            "signal": int(host["signal"]),
        }

    def _log(self, record: dict[str, Any]) -> int:
        """Writes and reports a step's metrics; returns the signal that came with them, or 0."""
        signalled = record.pop("signal")
        self._folder.log(record)
        self._trainer.report(record)
        return signalled


def _drafts(drafter: Drafter, params: Params) -> tuple[Any, ...]:
    """What two drafters must have in common for one to learn the other's distributions."""
    own = drafter.drafter
    shape = (own.block_size, own.label_shift, own.in_block, own.mask_token_id)
    vocabulary = np.asarray(params.get("draft_vocab", drafter.model.vocab_size)).tobytes()
    return (own.target, own.tokenizer_fingerprint, vocabulary, *shape)


def _delete(tree: Any) -> None:
    """Frees arrays on devices whose place others are to take: there may be no room for both."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def _arrays(params: Params) -> set[int]:
    """Which arrays on devices these parameters are."""
    return {id(leaf) for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)}


def packed_batches(
    config: TrainConfig, dataset: ResponseDataset, mesh: Mesh
) -> tuple[NamedSharding, PackedBatches]:
    """How a batch's rows are split over a mesh, and this process's part of the batches.

    Raises:
      D3DError: rows that cannot be split, or limits that no response meets.
    """
    rows = config.batch_rows // config.micro_batches
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % parts:
        raise D3DError(
            f"batch_rows / micro_batches = {rows} must be a multiple of the {parts} devices "
            "that rows are split over (data × fsdp)"
        )
    where = sharding.named("b.", (config.batch_rows, 1), mesh, sharding.ACTIVATION_RULES)
    shard_index, shard_count = _own_rows(where, config.batch_rows)
    batches = PackedBatches(
        dataset,
        max_tokens=config.max_tokens,
        max_blocks=config.max_blocks,
        anchors_per_document=config.anchors_per_document,
        batch_rows=config.batch_rows,
        seed=config.seed,
        shard_index=shard_index,
        shard_count=shard_count,
    )
    return where, batches


def _own_rows(rows: NamedSharding, count: int) -> tuple[int, int]:
    """Which part of a batch's rows this process makes, as (index, number of parts).

    Processes that hold parts of the same rows all make them; one whose rows do not lie together
    makes the whole batch.
    """
    held = rows.addressable_devices_indices_map((count, 1)).values()
    spans = {index[0].indices(count)[:2] for index in held if index is not None}
    first, end = min(start for start, _ in spans), max(stop for _, stop in spans)
    size = sum(stop - start for start, stop in spans)
    if end - first != size or count % size or first % size:
        return 0, 1
    return first // size, count // size
