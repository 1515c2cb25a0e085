"""One training step over a mesh: the optimizer, where its arrays lie, and the jitted function.

Parameters, float32 master weights and the optimizer's moments alike are split by the table of
`models.parameters`, batch rows over `data` and `fsdp`. The loop around it is `train.trainer`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax.drafter import Drafter, Params
from d3d_jax.models import parameters, sharding
from d3d_jax.train import objective
from d3d_jax.train.config import TrainConfig
from d3d_jax.train.distillation import Teacher

State = dict[str, Any]


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
    """AdamW with global-norm clipping, which decays the layers' matrices.

    Norms, the mask vector, and an embedding and head of the drafter's own are not decayed.
    """
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


def split(drafter: Drafter, params: Params) -> tuple[Params, Params]:
    """The frozen and the trained parameters."""
    names = drafter.frozen(params)
    frozen = {name: leaf for name, leaf in params.items() if name in names}
    return frozen, {name: leaf for name, leaf in params.items() if name not in names}


def resolved(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """The settings with the compute type that `auto` means on a mesh."""
    if config.compute != "auto":
        return config
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return dataclasses.replace(config, compute="float32" if on_cpu else "bfloat16")


def cast(params: Params, dtype: Any) -> Params:
    """Weights in another type; ids stay as they are."""

    def one(leaf: Any) -> Any:
        return leaf.astype(dtype)

    return {
        name: leaf if name == "draft_vocab" else jax.tree.map(one, leaf)
        for name, leaf in params.items()
    }


def place(tree: Any, shardings: Any) -> Any:
    """Arrays on their devices; every process gives its own devices what they hold.

    An array that lies there already is not copied, and on CPU one of the host may not be either.
    """

    def one(leaf: Any, where: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, where)
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, where, leaf.__getitem__)

    return jax.tree.map(one, tree, shardings)


def fingerprint(params: Params) -> str:
    """A digest of weights, the same however they are split over devices and processes.

    Sums modulo 2³², which no order changes, of each number's bits mixed with its place.
    """

    def one(leaf: jax.Array, seed: int) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        place = jnp.uint32(seed)
        for axis, size in enumerate(leaf.shape):
            index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            place = place * jnp.uint32(size % 2**32) + index
        mixed = bits ^ (place * jnp.uint32(0x9E3779B1))
        # The finaliser of MurmurHash3.
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
        return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)

    @jax.jit
    def sums(leaf: jax.Array) -> jax.Array:
        return jnp.stack([one(leaf, seed) for seed in range(4)])

    leaves = jax.tree.leaves(params)
    # Arrays of the host stay there: a device may have no room for a whole one. Only where JAX was
    # told of no CPU (JAX_PLATFORMS) do they go to a device, one at a time.
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        host = jax.local_devices()[0]
    found = []
    # One after the other: sums over processes that are under way at once may meet in other orders.
    for leaf in leaves:
        leaf = leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, host)
        found.append(np.asarray(sums(leaf)))
    found = np.stack(found)
    return hashlib.blake2b(found.tobytes(), digest_size=16).hexdigest()


def state_shardings(
    optimizer: optax.GradientTransformation, trained: Params, mesh: Mesh
) -> dict[str, Any]:
    """Where each leaf of the train state goes.

    Args:
      trained: arrays or `jax.ShapeDtypeStruct`s.
      mesh: of `sharding.model_mesh`.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    params = parameters.shardings(trained, mesh)
    opt = optax.tree.map_params(
        optimizer,
        lambda _, where: where,
        jax.eval_shape(optimizer.init, trained),
        params,
        transform_non_params=lambda _: whole,
    )
    return {"params": params, "opt": opt, "step": whole}


def abstract_state(
    optimizer: optax.GradientTransformation, trained: Params, shardings: State
) -> State:
    """The train state as `jax.ShapeDtypeStruct`s on its mesh; arguments as of `initial_state`."""
    step = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = {"params": trained, "opt": jax.eval_shape(optimizer.init, trained), "step": step}
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def initial_state(
    optimizer: optax.GradientTransformation, trained: Params, shardings: State
) -> State:
    """The state before the first step, on its mesh, from parameters on the host."""

    def rest(params: Params) -> tuple[Any, jax.Array]:
        return optimizer.init(params), jnp.zeros((), jnp.int32)

    params = place(trained, shardings["params"])
    opt, step = jax.jit(rest, out_shardings=(shardings["opt"], shardings["step"]))(params)
    return {"params": params, "opt": opt, "step": step}


def make_step(
    drafter: Drafter,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    shardings: State,
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """The train step `(state, frozen, index, batch, signals, number, teacher) → (state, metrics)`.

    The batch's rows are processed in `micro_batches` parts whose gradients are summed in float32:
    the denominators are the whole batch's, so the result is that of one big batch on one device.
    `signals` [devices] int32 only comes back as its maximum: so all processes learn in the same
    step that one of them is to stop. With a teacher the drafter learns its distributions.

    A step whose loss or gradient is not finite leaves the state as it was, and so does every one
    after it: step `number` only follows the state of step `number` − 1.

    Args:
      shardings: of the state (`state_shardings`); their mesh is what the step runs on.
    """
    mesh: Mesh = shardings["step"].mesh

    def step(
        state: State,
        frozen: Params,
        index: jax.Array | None,
        batch: objective.Batch,
        signals: jax.Array,
        number: int | jax.Array,
        teacher: Teacher | None = None,
    ) -> tuple[State, dict[str, jax.Array]]:
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
                compute=config.compute,
                teacher=teacher,
            )

        gradient = jax.grad(loss, has_aux=True)

        def split_rows(x: jax.Array) -> jax.Array:
            # Strided, so that every micro-batch keeps rows of every device's shard.
            return x.reshape(-1, config.micro_batches, *x.shape[1:]).swapaxes(0, 1)

        def micro(total: Any, part: Any) -> tuple[Any, None]:
            grads, sums = jax.tree.map(jnp.add, total, gradient(state["params"], *part))
            return (jax.lax.with_sharding_constraint(grads, shardings["params"]), sums), None

        parts = jax.tree.map(split_rows, (batch, labels))
        shapes = jax.eval_shape(gradient, state["params"], *jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (grads, metrics), _ = jax.lax.scan(micro, zeros, parts)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics["loss"] = metrics["diffusion"] + config.ar_weight * metrics["ar"]
        metrics["grad_norm"] = optax.tree.norm(grads)
        metrics["tokens"] = jnp.count_nonzero(batch["segments"])
        metrics["signal"] = jnp.max(signals)
        new = {"params": params, "opt": opt, "step": state["step"] + 1}
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        taken = finite & (new["step"] == number)
        return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, state), metrics

    return jax.jit(
        sharding.on_mesh(mesh, step),
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )
