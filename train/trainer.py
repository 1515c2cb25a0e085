"""The trainer: one jitted step over a mesh, checkpoints that resume bit for bit, metrics, export.

The objective is `train.objective`, the data `train.packing`; here they are put in a loop.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from d3d_jax.drafter import Drafter, Params, save_drafter
from d3d_jax.errors import D3DError, StoppedError
from d3d_jax.train import objective
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.config import TrainConfig
from d3d_jax.train.dataset import ResponseDataset
from d3d_jax.train.packing import PackedBatches
from d3d_jax.train.responses import write_atomic

State = dict[str, Any]
Report = Callable[[dict[str, Any]], None]


def schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up, then cosine down to `final_lr_fraction` of the peak."""
    warmup = min(config.warmup_steps, max(config.steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        # Not from 0: the first step would be spent on nothing.
        config.learning_rate / (warmup + 1),
        config.learning_rate,
        warmup,
        max(config.steps, warmup + 1),
        config.learning_rate * config.final_lr_fraction,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with global-norm clipping; norms and the mask vector are not decayed."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 2),
        ),
    )


def draft_index(drafter: Drafter, params: Params) -> np.ndarray | None:
    """[V] place of every token in the draft vocabulary, −1 where it has none."""
    if "draft_vocab" not in params:
        return None
    index = np.full((drafter.model.vocab_size,), -1, np.int32)
    index[np.asarray(params["draft_vocab"])] = np.arange(len(params["draft_vocab"]))
    return index


def make_step(
    drafter: Drafter, config: TrainConfig, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """The train step `(state, frozen, index, batch) → (state, metrics)`.

    The batch's rows are processed in `micro_batches` parts whose gradients are summed: the
    denominators are the whole batch's, so the result is that of one big batch.
    """

    def step(state: State, frozen: Params, index: jax.Array | None, batch: objective.Batch):
        labels = objective.make_labels(
            batch,
            block_size=drafter.drafter.block_size,
            label_shift=drafter.drafter.label_shift,
            gamma=config.gamma,
            draft_index=index,
        )
        denominators = objective.denominators(labels)

        def loss(params: Params, batch: objective.Batch, labels: objective.Labels):
            return objective.drafter_loss(
                drafter,
                {**params, **frozen},
                batch,
                labels,
                denominators,
                config.ar_weight,
                remat=config.remat,
            )

        gradient = jax.grad(loss, has_aux=True)

        def split(x: jax.Array) -> jax.Array:
            # Strided, so that every micro-batch keeps rows of every device's shard.
            return x.reshape(-1, config.micro_batches, *x.shape[1:]).swapaxes(0, 1)

        def micro(total, part):
            return jax.tree.map(jnp.add, total, gradient(state["params"], *part)), None

        parts = jax.tree.map(split, (batch, labels))
        shapes = jax.eval_shape(gradient, state["params"], *jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (grads, metrics), _ = jax.lax.scan(micro, zeros, parts)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics["loss"] = metrics["diffusion"] + config.ar_weight * metrics["ar"]
        metrics["grad_norm"] = optax.tree.norm(grads)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics

    return jax.jit(step, donate_argnums=0)


class _Stop:
    """Turns the first SIGTERM or SIGINT into a request to save and stop after the current step."""

    def __init__(self) -> None:
        self.requested: str | None = None

    def __enter__(self) -> _Stop:
        self._old = {s: signal.signal(s, self._set) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _set(self, number: int, frame: Any) -> None:
        self.requested = signal.Signals(number).name
        signal.signal(number, self._old[signal.Signals(number)])

    def __exit__(self, *exception: Any) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)


@dataclasses.dataclass
class Trainer:
    """Trains a drafter in a run folder: `checkpoints/`, `metrics.jsonl`, `config.json`, `drafter/`.

    Attributes:
      drafter, params: from `drafter.init_drafter` or `read_drafter` (stacked NumPy arrays).
      dataset, validation: opened splits of one dataset.
      run: the run's folder; an interrupted run in it is continued.
      report: called with the metrics of every step, for a progress display.
      devices: what to train on; None: all there are.
    """

    drafter: Drafter
    params: Params
    config: TrainConfig
    dataset: ResponseDataset
    validation: ResponseDataset
    run: Path
    report: Report = lambda metrics: None
    devices: list[Any] | None = None

    def __post_init__(self) -> None:
        devices = self.devices or jax.devices()
        if (self.config.batch_rows // self.config.micro_batches) % len(devices):
            raise D3DError(
                f"batch_rows / micro_batches = "
                f"{self.config.batch_rows // self.config.micro_batches} must be a multiple of the "
                f"{len(devices)} devices"
            )
        mesh = Mesh(np.array(devices, dtype=object), ("data",), axis_types=(AxisType.Auto,))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        self._batches = PackedBatches(
            self.dataset,
            max_tokens=self.config.max_tokens,
            max_blocks=self.config.max_blocks,
            anchors_per_document=self.config.anchors_per_document,
            batch_rows=self.config.batch_rows,
            seed=self.config.seed,
        )
        self._check_settings()

    def split(self, params: Params) -> tuple[Params, Params]:
        """The frozen and the trained parameters."""
        names = self.drafter.frozen(params)
        frozen = {name: leaf for name, leaf in params.items() if name in names}
        return frozen, {name: leaf for name, leaf in params.items() if name not in names}

    def _check_settings(self) -> None:
        """A run folder belongs to one configuration, dataset and start: others would mix runs."""
        path = self.run / "config.json"
        digest = hashlib.blake2b(digest_size=16)
        for leaf in jax.tree.leaves(self.split(self.params)[1]):
            digest.update(np.ascontiguousarray(leaf).tobytes())
        settings = {
            "train": dataclasses.asdict(self.config),
            "model": dataclasses.asdict(self.drafter.model),
            "drafter": dataclasses.asdict(self.drafter.drafter),
            "data": {"documents": len(self.dataset), **self.dataset.manifest.to_json()},
            "initial_parameters": digest.hexdigest(),
        }
        text = json.dumps(settings, indent=2) + "\n"
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_atomic(path, text)
            present = path.read_text()
        except OSError as error:
            raise D3DError(f"cannot write the run folder {self.run}: {error}") from None
        if present != text:
            raise D3DError(
                f"{self.run} holds a run with other settings, data or initial drafter; choose "
                "another folder"
            )

    def train(self) -> Path:
        """Runs to `config.steps`, continuing from the last checkpoint, and exports the drafter.

        Returns:
          The exported drafter's folder.

        Raises:
          D3DError: the loss is not finite, or the run was asked to stop (it is saved first).
        """
        optimizer = make_optimizer(self.config)
        frozen, trained = self.split(self.params)
        index = draft_index(self.drafter, self.params)
        frozen, index = jax.device_put((frozen, index), self._replicated)
        trained = jax.device_put(trained, self._replicated)
        state = {
            "params": trained,
            "opt": optimizer.init(trained),
            "step": jnp.zeros((), jnp.int32),
        }
        state = jax.device_put(state, self._replicated)
        step = make_step(self.drafter, self.config, optimizer)
        acceptance = OfflineAcceptance(self.drafter, self.validation, self.config.eval_documents)
        options = ocp.CheckpointManagerOptions(max_to_keep=self.config.keep_checkpoints)
        path = (self.run / "checkpoints").absolute()
        with ocp.CheckpointManager(path, options=options) as manager, _Stop() as stop:
            if (latest := manager.latest_step()) is not None:
                state = self._restore(manager, latest, state)
            start = int(state["step"])
            self._forget_after(start)
            for number, metrics in self._steps(step, state, frozen, index, start):
                state = metrics.pop("state")
                # Read once: a signal that comes later must not stop a step not saved for it.
                done, stopped_by = number == self.config.steps, stop.requested
                if number % self.config.eval_every == 0 or done:
                    metrics |= acceptance.measure({**state["params"], **frozen}).summary()
                if number % self.config.checkpoint_every == 0 or done or stopped_by:
                    manager.save(number, args=ocp.args.StandardSave(state))
                self._log(metrics)
                if stopped_by and not done:
                    manager.wait_until_finished()
                    raise StoppedError(
                        f"stopped by {stopped_by} at step {number}; saved: the same command "
                        "continues",
                        signal.Signals[stopped_by],
                    )
        return self._export({**state["params"], **frozen})

    def _steps(
        self, step, state, frozen, index, start: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (step number, host metrics with the new state)."""
        clock = time.perf_counter()
        remaining = range(start, self.config.steps)
        for number, batch in zip(remaining, self._batches.iterate(start), strict=False):
            tokens = int(np.count_nonzero(batch["segments"]))
            state, metrics = step(state, frozen, index, jax.device_put(batch, self._rows))
            host = jax.device_get(metrics)
            if not np.isfinite(host["loss"]):
                raise D3DError(f"loss is {host['loss']} at step {number + 1}; lower learning_rate")
            now = time.perf_counter()
            accuracy = host["hits"] / np.maximum(host["counts"], 1)
            yield (
                number + 1,
                {
                    "step": number + 1,
                    "loss": float(host["loss"]),
                    "diffusion": float(host["diffusion"]),
                    "ar": float(host["ar"]),
                    "grad_norm": float(host["grad_norm"]),
                    "accuracy": [round(float(a), 4) for a in accuracy],
                    "epoch": round(self._batches.epoch_at(number + 1), 3),
                    "tokens_per_second": round(tokens / (now - clock), 1),
                    "state": state,
                },
            )
            clock = time.perf_counter()

    def _restore(self, manager: ocp.CheckpointManager, step: int, like: State) -> State:
        try:
            return manager.restore(step, args=ocp.args.StandardRestore(like))
        except (ValueError, KeyError, OSError) as error:
            raise D3DError(
                f"the checkpoint {self.run / 'checkpoints' / str(step)} cannot be read; remove "
                f"that folder to go on from the one before, or the run to begin again ({error})"
            ) from error

    def _forget_after(self, step: int) -> None:
        """Drops logged steps that the checkpoint does not hold: they will be run again."""
        path = self.run / "metrics.jsonl"
        if path.exists():
            # A killed run may have left half a line at the end.
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            write_atomic(path, "".join(line + "\n" for line in kept))

    def _log(self, metrics: dict[str, Any]) -> None:
        with (self.run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        self.report(metrics)

    def _export(self, params: Params) -> Path:
        out = self.run / "drafter"
        if not out.exists():
            config = dataclasses.replace(
                self.drafter.drafter, num_anchors=self.config.anchors_per_document
            )
            host = jax.device_get(params)
            save_drafter(out, Drafter(self.drafter.model, config), host, dtype=jnp.bfloat16)
        return out
