"""Runs of a tiny drafter on responses that it can learn in a few steps."""

import dataclasses

import jax

from d3d_jax.models.sharding import make_mesh
from d3d_jax.train.config import TrainConfig
from d3d_jax.train.dataset import build_dataset, open_dataset
from d3d_jax.train.responses import Manifest, ResponseWriter
from d3d_jax.train.trainer import Trainer
from tests.tiny_models import VOCAB, tiny_config, tiny_drafter, tiny_params

CONFIG = TrainConfig(
    steps=6,
    batch_rows=2,
    max_tokens=48,
    max_blocks=12,
    anchors_per_document=6,
    learning_rate=1e-2,
    gamma=3.0,
    warmup_steps=2,
    eval_every=3,
    eval_documents=2,
    checkpoint_every=2,
)


def make_dataset(folder):
    """Responses that count upwards."""
    manifest = Manifest(
        target="tiny",
        tokenizer_fingerprint="t",
        template_fingerprint="c",
        vocab_size=VOCAB,
        stop_ids=(),
        sampling={"greedy": True},
        max_new_tokens=12,
        prompts="counting",
    )
    with ResponseWriter(folder / "responses", manifest) as writer:
        for i in range(20):
            ids = [(i * 3 + j) % VOCAB for j in range(16)]
            writer.add(i, ids[:4], ids[4:], "length", "validation" if i % 5 == 4 else "train")
    return build_dataset(folder / "responses", folder / "dataset")


def make_trainer(
    run, dataset, report=lambda metrics: None, *, mesh=None, seed=0, drafter=None, **changes
):
    """A trainer on two devices, or on a mesh.

    Args:
      seed: of the initial parameters.
      drafter: changes to the drafter's configuration, or one that was read with its parameters;
        the others are to `CONFIG`.
    """
    if isinstance(drafter, tuple):
        made, params = drafter
    else:
        config = tiny_config()
        params = tiny_params(config, seed, scale=1.0)
        made, params = tiny_drafter(config, params, **(drafter or {}))
        params = jax.device_get(params)
    return Trainer(
        made,
        params,
        dataclasses.replace(CONFIG, **changes),
        open_dataset(dataset, "train"),
        open_dataset(dataset, "validation"),
        run,
        report,
        mesh or make_mesh(jax.devices()[:2]),
    )
