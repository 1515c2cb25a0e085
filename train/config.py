"""Training settings: a frozen dataclass, read from the YAML files in `train/configs/`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, get_args

from d3d_jax.config import Remat
from d3d_jax.errors import D3DError

CONFIGS = Path(__file__).parent / "configs"
Compute = Literal["auto", "float32", "bfloat16"]
Export = Literal["last", "best"]
# What an interrupted run may go on with other values of: they decide where work is done and what
# is kept and watched, not what is trained, but for the order of sums.
ADJUSTABLE = (
    "micro_batches",
    "remat",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "export",
    "spike_factor",
    "spike_steps",
)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained.

    Attributes:
      steps: optimizer steps.
      batch_rows: B, packed rows of a step over all micro-batches and devices.
      micro_batches: parts a step's rows are processed in; gradients are summed.
      max_tokens, max_blocks: S and A of a packed row.
      anchors_per_document: K (the paper uses 128).
      learning_rate, warmup_steps, final_lr_fraction: linear warm-up, then cosine to the fraction.
      weight_decay, clip_norm, b1, b2: AdamW and global-norm clipping.
      gamma: γ of the position weights exp(−(i − 1) / γ).
      ar_weight: λ of the next-token loss on clean rows.
      compute: type of activations and of the weights they meet; master weights, the loss and sums
        of gradients are float32. `auto`: float32 on CPU, else bfloat16.
      remat: what the backward pass recomputes: nothing, whole layers (`full`), or all of a layer
        but its matrix products (`dots`).
      seed: of shuffling and anchors.
      eval_every, eval_documents: offline τ on that many validation documents, in steps.
      checkpoint_every, keep_checkpoints: in steps, and wherever τ is measured; how many of the
        newest are kept, besides the one with the best τ.
      export: which parameters become the drafter: the last ones, or those with the best τ that was
        measured.
      spike_factor, spike_steps: a run is given up when its loss is above that multiple of its
        running median for so many steps; a factor of 0 lets it go on.
    """

    steps: int
    batch_rows: int
    max_tokens: int
    max_blocks: int
    anchors_per_document: int
    learning_rate: float
    gamma: float
    warmup_steps: int = 50
    final_lr_fraction: float = 0.1
    micro_batches: int = 1
    ar_weight: float = 1.0
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    compute: Compute = "auto"
    remat: Remat = "none"
    seed: int = 0
    eval_every: int = 200
    eval_documents: int = 32
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    export: Export = "last"
    spike_factor: float = 3.0
    spike_steps: int = 20

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), _LEAST.get(field.name, 0)
            if choices := _CHOICES.get(field.name):
                if value not in choices:
                    raise D3DError(
                        f"training setting {field.name} must be one of {', '.join(choices)}, "
                        f"found {value!r}"
                    )
                continue
            kinds = {"int": (int,), "float": (int, float)}[str(field.type)]
            right = isinstance(value, kinds) and not isinstance(value, bool)
            if not right or not math.isfinite(value) or value < least:
                raise D3DError(
                    f"training setting {field.name} must be of type {field.type} and at least "
                    f"{least}, found {value!r}"
                )
        if self.gamma == 0:
            raise D3DError("training setting gamma must be above 0")
        if max(self.b1, self.b2) >= 1:
            raise D3DError(f"b1 and b2 must be below 1, found {self.b1} and {self.b2}")
        if self.batch_rows % self.micro_batches:
            raise D3DError(
                f"batch_rows {self.batch_rows} must be a multiple of "
                f"micro_batches {self.micro_batches}"
            )


_CHOICES = {"compute": get_args(Compute), "remat": get_args(Remat), "export": get_args(Export)}
# The least value of settings of which 0 makes no sense.
_LEAST = dict.fromkeys(
    (
        "steps",
        "batch_rows",
        "micro_batches",
        "max_tokens",
        "max_blocks",
        "anchors_per_document",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "spike_steps",
    ),
    1,
)


def load_config(name_or_path: str, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """Reads a shipped config by name or a YAML file, then applies `key=value` overrides.

    Raises:
      D3DError: no such config, an unknown or missing key, or a value of the wrong type.
    """
    import yaml

    shipped = CONFIGS / f"{name_or_path}.yaml"
    path = shipped if shipped.is_file() else Path(name_or_path)
    try:
        values: dict[str, Any] = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise D3DError(
            f"no training config {name_or_path!r}; give a YAML file or one of: {names}"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise D3DError(f"training config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise D3DError(f"training config {path} must be a mapping of settings")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise D3DError(f"override {override!r} must be of the form key=value")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise D3DError(f"override {override!r} has no readable value") from None
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    if unknown := sorted(set(values) - set(fields)):
        raise D3DError(f"unknown training setting {unknown[0]!r}; known: {', '.join(fields)}")
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise D3DError(f"training setting {missing[0]!r} is missing in {path}")
    # YAML reads 1e-3 as a string: only 1.0e-3 is a number there.
    for key, value in values.items():
        if fields[key].type == "float" and isinstance(value, str):
            try:
                values[key] = float(value)
            except ValueError:
                raise D3DError(
                    f"training setting {key} must be a number, found {value!r}"
                ) from None
    return TrainConfig(**values)
