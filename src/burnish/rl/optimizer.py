"""The optimizer step: clip, AdamW or Adafactor, decay, write the weights; skipped when the gradient is not finite.

Master weights are float32, or bfloat16 with stochastic rounding, which keeps updates smaller than half a bfloat16
step from being lost (Zamirai et al. 2020, arXiv:2010.06192). The moments come from Optax.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from burnish.models.params import ParamInfo, Params, param_infos, param_shardings
from burnish.models.spec import ModelSpec
from burnish.parallel import rules
from burnish.rl.schedule import LearningRate


@dataclass(frozen=True)
class OptimizerOptions:
    """`clip` bounds the global norm of the gradient (0 = off); `mu_dtype` is that of Adam's first moment."""

    learning_rate: LearningRate
    kind: Literal["adamw", "adafactor"] = "adamw"
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.1
    mu_dtype: Any = jnp.float32
    seed: int = 0  # of stochastic rounding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that the next update depends on; saving and restoring it resumes a run bit by bit."""

    params: Params  # master weights
    opt_state: Any
    step: jax.Array  # () int32, updates made; random numbers and the learning rate derive from it
    skipped: jax.Array  # () int32, updates left out because the gradient was not finite
    skipped_in_a_row: jax.Array  # () int32


def transform(options: OptimizerOptions) -> optax.GradientTransformation:
    """From gradient to direction; learning rate and weight decay are applied by `apply_gradients`.

    Adafactor's usual scaling by the parameter's own size is left out, so that learning_rate means the same for both.
    """
    if options.kind == "adamw":
        return optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.eps, mu_dtype=options.mu_dtype)
    if options.kind == "adafactor":
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    raise ValueError(f"optimizer is {options.kind!r}; it must be 'adamw' or 'adafactor'")


def init_state(options: OptimizerOptions, params: Params) -> TrainState:
    """A fresh state around `params`. The second moment is float32 whatever the weights are."""
    like = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    step, skipped, skipped_in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))
    return TrainState(params, transform(options).init(like), step, skipped, skipped_in_a_row)


def state_shardings(options: OptimizerOptions, spec: ModelSpec, mesh: Mesh) -> TrainState:
    """The NamedSharding of each array of a TrainState: moments are split as the weights are that they belong to."""
    infos = param_infos(spec)
    is_info = lambda x: isinstance(x, ParamInfo)  # noqa: E731
    like = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, jnp.float32), infos, is_leaf=is_info)
    structure = jax.tree.structure(like)
    leaves = jax.tree.leaves(infos, is_leaf=is_info)

    def of(node: Any) -> Any:
        if jax.tree.structure(node) != structure:
            return rules.replicated(mesh)
        moments = zip(leaves, jax.tree.leaves(node), strict=True)
        return jax.tree.unflatten(
            structure, [rules.sharding(_moment_axes(i, m.shape), m.shape, mesh) for i, m in moments]
        )

    opt_state = jax.tree.map(
        of,
        jax.eval_shape(transform(options).init, like),
        is_leaf=lambda node: jax.tree.structure(node) == structure,
    )
    scalar = rules.replicated(mesh)
    return TrainState(param_shardings(spec, mesh), opt_state, scalar, scalar, scalar)  # type: ignore[arg-type]


def _moment_axes(info: ParamInfo, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Logical axes of a moment of this shape: those of the weights, without the one that Adafactor has averaged over,
    which is one of the two largest."""
    if shape == info.shape:
        return info.axes
    for axis in sorted(range(len(info.shape)), key=lambda a: -info.shape[a]):
        if shape == (*info.shape[:axis], *info.shape[axis + 1 :]):
            return (*info.axes[:axis], *info.axes[axis + 1 :])
    return ()  # a placeholder of one number


def decays(path: tuple[Any, ...]) -> bool:
    """Weight decay is for matrices: not for norms and biases."""
    name = jax.tree_util.keystr(path)
    return "norm" not in name and "bias" not in name


def global_norm(tree: Any) -> jax.Array:
    """float32 Euclidean norm over all leaves."""

    def squares(x: jax.Array) -> jax.Array:
        # Two stages: the first has many results and so runs on many threads.
        return jnp.sum(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(1, x.ndim))))

    return jnp.sqrt(sum(squares(x) for x in jax.tree.leaves(tree)))


def apply_gradients(
    options: OptimizerOptions, state: TrainState, grads: Params
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update. A gradient with a NaN or infinity leaves weights, moments and step as they are and is counted.

    Metrics: grad_norm (before clipping), update_norm, learning_rate, changed_fraction (share of weights whose stored
    value changed), skipped_updates.
    """
    norm = global_norm(grads)
    finite = jnp.isfinite(norm)
    factor = jnp.minimum(1.0, options.clip / jnp.maximum(norm, 1e-30)) if options.clip else 1.0
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) * factor, grads)
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
    directions, opt_state = transform(options).update(grads, state.opt_state, masters)
    lr = options.learning_rate(state.step)
    key = jax.random.fold_in(jax.random.key(options.seed), state.step)
    leaves, treedef = jax.tree.flatten_with_path(state.params)
    new_leaves, changed, squares = [], [], []
    for i, ((path, old), direction) in enumerate(zip(leaves, jax.tree.leaves(directions), strict=True)):
        master = old.astype(jnp.float32)
        delta = direction + options.weight_decay * master if options.weight_decay and decays(path) else direction
        new = _store(master - lr * delta, old.dtype, jax.random.fold_in(key, i))
        new = jnp.where(finite, new, old)
        new_leaves.append(new)
        rows = tuple(range(1, old.ndim))
        changed.append(jnp.sum(jnp.sum((new != old).astype(jnp.float32), axis=rows)))
        squares.append(jnp.sum(jnp.sum(jnp.square(new.astype(jnp.float32) - master), axis=rows)))
    bad = jnp.where(finite, 0, 1).astype(jnp.int32)
    new_state = TrainState(
        params=jax.tree.unflatten(treedef, new_leaves),
        opt_state=jax.tree.map(lambda new, old: jnp.where(finite, new, old), opt_state, state.opt_state),
        step=state.step + 1 - bad,
        skipped=state.skipped + bad,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * bad,
    )
    metrics = {
        "grad_norm": norm,
        "update_norm": jnp.sqrt(sum(squares)),
        "learning_rate": lr,
        "changed_fraction": sum(changed) / sum(old.size for _, old in leaves),
        "skipped_updates": new_state.skipped,
    }
    return new_state, metrics


def _store(value: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """float32 value in the master's dtype; bfloat16 is rounded up or down at random, right on average."""
    if dtype == jnp.float32:
        return value
    if dtype != jnp.bfloat16:
        return value.astype(dtype)
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    noise = jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    # A float32's upper half is the bfloat16 below it (in magnitude); the noise carries into it with probability
    # equal to the lower half's share of a step.
    rounded = jax.lax.bitcast_convert_type(((bits + noise) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(value), rounded, value.astype(jnp.bfloat16))
