"""A run's folder: its settings, the metrics of its steps, its checkpoints.

    config.json      what the run goes by; another run is refused
    metrics.jsonl    a line a step
    tensorboard/     the same figures as curves
    checkpoints/     the newest, and the one with the best τ
    diverged/        the state in which a run was given up
    drafter/         what an ended run exports
    .lock            held while a run works in the folder

With several processes all open it, on one file system, and the first writes.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from d3d_jax.errors import D3DError, LostProcessError
from d3d_jax.files import hold, write_json, write_text
from d3d_jax.processes import first_does, is_first, told_by_first
from d3d_jax.settings import difference
from d3d_jax.train.config import ADJUSTABLE
from d3d_jax.train.curves import Curves
from d3d_jax.train.step import State

EXPORT_NAME = "drafter"


class RunFolder:
    """Opens a run's folder, new or interrupted.

    Args:
      settings: everything that makes the run what it is, as JSON types; of a run that is continued,
        and has not ended, those in `config.ADJUSTABLE` may be others than before.
      keep: how many of the newest checkpoints are kept.

    Raises:
      D3DError: the folder cannot be written, holds a run with other settings, or one is at work.
    """

    def __init__(self, path: Path, settings: dict[str, Any], keep: int) -> None:
        self.path, self._keep = path, keep
        self._metrics = path / "metrics.jsonl"
        self._curves: Curves | None = None
        file = path / "config.json"
        settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file

        def write() -> None:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise D3DError(f"cannot write the run folder {path}: {error}") from None
            ended = (path / EXPORT_NAME).exists()
            if ended and not file.exists():
                raise D3DError(f"no run made {path / EXPORT_NAME}: choose another folder")
            ignored = () if ended else ADJUSTABLE
            with hold(path, alone=True):
                if file.exists() and (other := difference(_settings(file), settings, ignored)):
                    what = "an ended run" if ended else "a run"
                    raise D3DError(f"{path} holds {what} with {other}; choose another folder")
                write_json(file, settings)

        first_does(write, f"cannot write the run folder {path}")
        if other := difference(_settings(file), settings):
            raise D3DError(f"the first process of this run has {other}")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other runs out of the folder.

        Raises:
          D3DError: another run is working in the folder.
        """
        held = functools.partial(hold, self.path, alone=True)
        lock = first_does(held, f"cannot use the run folder {self.path}")
        with lock or contextlib.nullcontext():
            yield

    @property
    def ended(self) -> bool:
        """Whether the run has exported its drafter."""
        return told_by_first((self.path / EXPORT_NAME).exists())

    @contextlib.contextmanager
    def checkpoints(self) -> Iterator[ocp.CheckpointManager]:
        """Its checkpoints, written in the background; at the end all are whole."""
        policies = [
            managers.LatestN(self._keep),
            managers.BestN(get_metric_fn=_tau, n=1, keep_checkpoints_without_metrics=False),
        ]
        options = ocp.CheckpointManagerOptions(
            best_fn=_tau, preservation_policy=managers.AnyPreservationPolicy(policies)
        )
        manager = ocp.CheckpointManager((self.path / "checkpoints").absolute(), options=options)
        # Orbax logs with a traceback what it then raises.
        loud = absl.logging.get_verbosity()
        absl.logging.set_verbosity(absl.logging.FATAL)
        try:
            yield manager
        except LostProcessError:
            raise  # closing would wait for that process
        except BaseException:
            # What ended the run is said, and not what else went wrong in the background.
            with contextlib.suppress(D3DError), self._writing():
                manager.close()
            raise
        else:
            with self._writing():
                manager.close()
        finally:
            absl.logging.set_verbosity(loud)

    def save(
        self,
        manager: ocp.CheckpointManager,
        number: int,
        state: State,
        tau: float | None,
        wait: bool = False,
    ) -> None:
        """Begins to write the state after a step; returns when the state may be given away.

        Args:
          wait: return when it is written.

        Raises:
          D3DError: it cannot be written, or the one before could not; those there are whole.
        """
        with self._writing():
            manager.save(number, args=ocp.args.StandardSave(state), metrics={"tau": tau or 0.0})
            if wait:
                manager.wait_until_finished()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise  # of devices and processes, not of files
        except (OSError, RuntimeError, ValueError) as error:
            # The storage library gives what the system said at the end, then its own places.
            reason = str(error).rpartition(": ")[2].partition(" [")[0]
            raise D3DError(
                f"no checkpoint can be written to {self.path / 'checkpoints'} ({reason}); those in "
                "it are whole: when there is room the same command continues from the last"
            ) from error

    def restore(self, manager: ocp.CheckpointManager, like: State, best: bool = False) -> State:
        """The state of the newest checkpoint, of which there must be one.

        Args:
          like: of `step.abstract_state`.
          best: of the checkpoint with the best τ instead.

        Raises:
          D3DError: the checkpoint is damaged.
        """
        with self._writing():
            manager.wait_until_finished()
        step = manager.best_step() if best else manager.latest_step()
        try:
            return manager.restore(step, args=ocp.args.StandardRestore(like))
        except (ValueError, KeyError, OSError) as error:
            raise D3DError(
                f"the checkpoint {self.path / 'checkpoints' / str(step)} cannot be read; remove "
                f"that folder to go on from the one before, or the run to begin again ({error})"
            ) from error

    def save_diverged(self, number: int, state: State) -> Path:
        """Writes a state to look at, apart from those that a run continues from."""
        path = self.path / "diverged" / str(number)
        with self._writing(), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path.absolute(), state, force=True)
        return path

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drops logged steps after a checkpoint, which will be run again; returns the others."""
        if not self._metrics.exists():
            return []
        # A killed run may have left half a line at the end.
        lines = [line for line in self._metrics.read_text().splitlines() if line.endswith("}")]
        records = [record for line in lines if (record := json.loads(line))["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in records)
        first_does(lambda: write_text(self._metrics, text), f"cannot write {self._metrics}")
        return records

    def log(self, record: dict[str, Any]) -> None:
        """Adds a step's line, and its points to the curves.

        Raises:
          D3DError: they cannot be written.
        """
        if not is_first():
            return
        try:
            with self._metrics.open("a") as file:
                file.write(json.dumps(record) + "\n")
            if self._curves is None:
                self._curves = Curves(self.path / "tensorboard", record["step"])
            self._curves.add(record)
        except OSError as error:
            raise D3DError(
                f"cannot write the metrics in {self.path} ({error.strerror}); the same command "
                "continues from the last checkpoint"
            ) from error


def _settings(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise D3DError(f"cannot read {file}: {error}") from None


def _tau(metrics: dict[str, float]) -> float:
    return metrics["tau"]
