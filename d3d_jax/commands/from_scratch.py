"""The whole road of `d3d demo --from-scratch`: responses, dataset, new drafter, training, τ.

Each stage leaves a folder that appears when it is done, so a second run skips it; responses and
training resume within theirs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import jax

from d3d_jax.commands import init_drafter, respond
from d3d_jax.commands.evaluate import load_checked, measure, print_figures
from d3d_jax.commands.option_groups import TargetPlacement
from d3d_jax.commands.options import InitDrafter
from d3d_jax.commands.respond_options import Respond
from d3d_jax.commands.runtime import duration, note
from d3d_jax.commands.train import train
from d3d_jax.files import check_folder
from d3d_jax.models import checkpoint
from d3d_jax.models.registry import resolve_model
from d3d_jax.models.sharding import make_mesh
from d3d_jax.train.config import load_config
from d3d_jax.train.dataset import open_dataset

CONFIG = "demo"
MAX_NEW_TOKENS, BATCH = 128, 24
# About as many words as one response set holds; the head over all 49,152 would cost as much as the
# drafter's layers.
DRAFT_VOCAB, BLOCK_SIZE = 6144, 8


def make_drafter(
    target: str,
    prompts: Path,
    work: Path,
    thinking: Literal["on", "off"] | None = None,
    placement: TargetPlacement | None = None,
) -> Path:
    """Makes responses, trains a drafter on them and measures it; continues what `work` holds.

    Args:
      thinking: whether the target thinks; None: as its chat template has it.
      placement: of the target while it answers; None: on the first device.

    Returns:
      The trained drafter's folder.

    Raises:
      D3DError: a folder that cannot be written or holds something else.
    """
    check_folder(work)
    began = time.perf_counter()
    note(f"1 of 4: {target} answers the built-in prompts ({work})")
    respond.make_responses(
        Respond(
            target=target,
            prompts=str(prompts),
            out=work / "responses",
            max_new_tokens=MAX_NEW_TOKENS,
            batch=BATCH,
            thinking=thinking,
            placement=placement or TargetPlacement(),
        )
    )
    data = respond.ensure_dataset(work / "responses")
    initial = work / "initial-drafter"
    if not initial.exists():
        note("2 of 4: a new drafter from layers of the target")
        vocab_size = checkpoint.read_config(resolve_model(target))[0].vocab_size
        init_drafter.run(
            InitDrafter(
                source=target,
                target=target,
                out=initial,
                block_size=BLOCK_SIZE,
                draft_vocab_size=min(DRAFT_VOCAB, vocab_size),
                vocab_from=data,
            )
        )
    note("3 of 4: training it")
    drafter, params = load_checked(initial, target)
    # One device: the second CPU device would only split the same cores.
    mesh = make_mesh(jax.devices()[:1])
    exported = train(drafter, params, load_config(CONFIG), data, work / "run", mesh)
    note("4 of 4: its acceptance length on held-out prompts, without running the target")
    trained, params = load_checked(exported, target)
    print_figures(measure(trained, params, open_dataset(data, "validation")))
    note(f"The drafter is ready; this run took {duration(time.perf_counter() - began)} to here.")
    return exported
