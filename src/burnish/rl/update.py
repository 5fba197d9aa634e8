"""The update step: packed micro-batches in, new weights and metrics out.

Gradients are summed over micro-batches (every loss share is already divided by the whole step's counts) and
applied once. Copies of the weights (mesh axis `data`) each sum for themselves and exchange sums once an update. Per
micro-batch there is one forward and one backward pass: no pass for old logprobs when there is one update per batch,
none for a reference unless its logprobs are asked for (`logprobs`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from burnish.errors import BurnishError
from burnish.models import decoder
from burnish.models.moe import Load, load_metrics
from burnish.models.params import Params, head
from burnish.models.spec import ModelSpec
from burnish.parallel import rules
from burnish.parallel.mesh import on, single_device_mesh
from burnish.rl import losses, optimizer
from burnish.rl.logprobs import selected_logprobs
from burnish.rl.losses import LossOptions, Metrics
from burnish.rl.optimizer import OptimizerOptions, TrainState
from burnish.rl.types import Denominators, PackedBatch, PackedStep

RematPolicy = Literal["full", "minimal", "none"]


class NonFiniteGradientsError(BurnishError):
    """Several updates in a row were skipped because their gradients were not finite."""


@dataclass(frozen=True)
class UpdateOptions:
    """All choices of the update. `temperature` is the sampling temperature, at which logprobs are scored; `dtype`
    the compute dtype; `grad_dtype` that of the sum over micro-batches."""

    loss: LossOptions
    optimizer: OptimizerOptions
    temperature: float = 1.0
    dtype: Any = jnp.float32
    grad_dtype: Any = jnp.float32
    remat: RematPolicy = "minimal"
    max_skipped_in_a_row: int = 5

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"logprobs are scored at the sampling temperature, which must be above 0 for training; "
                f"got decode_sampling_temperature={self.temperature}"
            )


def rematerialise(policy: RematPolicy) -> Callable[[Callable], Callable]:
    """Wraps the layer function: "none" keeps every intermediate for the backward pass, "minimal" the results of
    matrix products, "full" only the layer's input."""
    if policy == "none":
        return lambda f: f
    if policy == "minimal":
        keep = jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names("attention"),
        )
        return lambda f: jax.checkpoint(f, policy=keep, prevent_cse=False)
    if policy == "full":
        return lambda f: jax.checkpoint(f, prevent_cse=False)
    raise ValueError(f"remat_policy is {policy!r}; it must be 'full', 'minimal' or 'none'")


def batch_logprobs(
    spec: ModelSpec, params: Params, batch: PackedBatch, *, temperature: float, dtype: Any, remat: RematPolicy
) -> tuple[jax.Array, jax.Array, Load | None]:
    """(B, T) logprobs and entropies of the trained tokens, 0 beyond the lists; what experts got of the completions, if
    there are any."""
    completions = batch.branches > 0  # how often a prompt is read depends on how rows are filled; each of these is once
    hidden, load = decoder.forward_with_load(
        spec,
        params,
        batch.tokens,
        batch.positions,
        batch.segments,
        batch.branches,
        completions,
        dtype=dtype,
        remat=rematerialise(remat),
    )
    predicting = jnp.take_along_axis(hidden, batch.source[..., None], axis=1)
    lp, entropy = selected_logprobs(
        predicting, head(params), batch.targets, batch.count, temperature, spec.final_softcap
    )
    return lp, entropy, load


@dataclass
class Updater:
    """The compiled functions of one run's updates, on the devices of a mesh (by default the default device). State is
    passed in and out; `step` consumes (donates) it.

    Weights, moments and gradients are split as their logical axes say, rows of a micro-batch over the devices; metrics
    and logprobs are whole on every device. Where there are several copies of the weights, gradients have one more axis
    in front, with one sum for each copy, until they are applied. Raises MeshError where a size of the model can not be
    split.
    """

    spec: ModelSpec
    options: UpdateOptions
    mesh: Mesh = field(default_factory=single_device_mesh)
    num_compilations: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.state_shardings = optimizer.state_shardings(self.options.optimizer, self.spec, self.mesh)
        split, whole = self.state_shardings.params, rules.replicated(self.mesh)
        self.rows = rules.ways("batch", self.mesh.shape)
        """Rows of a micro-batch must be a multiple of this."""
        self._copies = rules.copies(self.mesh)
        if self._copies > 1:
            split = jax.tree.map(rules.stacked, split)
        self.gradient_shardings = split
        gradients_of = self._gradients_of if self._copies == 1 else self._gradients_of_copies
        self._gradients = jax.jit(self._counted(gradients_of), out_shardings=(split, whole, whole, whole))
        self._logprobs = jax.jit(self._counted(self._logprobs_of), out_shardings=whole)
        self._add = jax.jit(
            self._counted(lambda total, grads: jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)),
            donate_argnums=0,
            out_shardings=split,
        )
        self._apply = jax.jit(
            self._counted(self._applied if self._copies == 1 else self._applied_to_copies),
            donate_argnums=0 if self._copies == 1 else (0, 1),
            out_shardings=(self.state_shardings, whole, None if self._copies == 1 else split),
        )

    def init(self, params: Params) -> TrainState:
        """A fresh TrainState around master weights `params` (which `step` will consume), put where they belong unless
        they are there."""
        params = jax.device_put(params, self.state_shardings.params)
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        rest = replace(self.state_shardings, params={})

        def init(shapes: Params) -> TrainState:
            return replace(optimizer.init_state(self.options.optimizer, shapes), params={})

        return replace(jax.jit(partial(init, shapes), out_shardings=rest)(), params=params)

    def step(self, state: TrainState, packed: PackedStep) -> tuple[TrainState, Metrics, tuple[jax.Array, ...]]:
        """One optimizer update. Returns the new state, the step's metrics and, per micro-batch, the (B, T) logprobs
        that the loss saw, which are the old logprobs of further updates on the same batch (`with_logprobs`).

        A step without any trained token has gradient 0 and still moves weights by the optimizer's momentum, exactly
        as if its completions had been computed. Raises NonFiniteGradientsError after
        `max_skipped_in_a_row` skipped updates.
        """
        total: Params | None = None
        load: Load | None = None
        shares, logprobs = [], []
        for batch in packed.micro_batches:
            with on(self.mesh):
                grads, share, lp, batch_load = self._gradients(state.params, self._put(batch), packed.denominators)
                total = grads if total is None else self._add(total, grads)
            load = batch_load if load is None else jax.tree.map(jnp.add, load, batch_load)
            shares.append(share)
            logprobs.append(lp)
        if total is None:
            total = self._zeros(state.params)
        with on(self.mesh):
            state, metrics, _ = self._apply(state, total)
        skipped = int(state.skipped_in_a_row)
        if skipped >= self.options.max_skipped_in_a_row:
            raise NonFiniteGradientsError(
                f"the gradient was not finite in {skipped} updates in a row; the weights were left as they were. "
                "Lower learning_rate, set gradient_clipping_threshold, or use dtype=float32"
            )
        if load is not None:
            metrics |= load_metrics(self.spec, load)
        return state, (losses.combine(shares) if shares else {}) | metrics, tuple(logprobs)

    def logprobs(self, params: Params, packed: PackedStep) -> tuple[jax.Array, ...]:
        """Per micro-batch the (B, T) logprobs of the trained tokens under `params`, without gradients."""
        with on(self.mesh):
            return tuple(self._logprobs(params, self._put(batch)) for batch in packed.micro_batches)

    def _put(self, batch: PackedBatch) -> PackedBatch:
        """The micro-batch on the mesh: each device gets its rows. Arrays that are on devices already stay."""

        def put(x: Any) -> jax.Array:
            if isinstance(x, jax.Array):
                return x
            sharding = rules.sharding(("batch",) if np.ndim(x) else (), np.shape(x), self.mesh)
            return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])

        return jax.tree.map(put, batch)

    def _zeros(self, params: Params) -> Params:
        """A gradient of 0."""
        zeros = partial(jax.tree.map, lambda g: jnp.zeros(g.shape, g.dtype), self.gradient_shapes(params))
        return jax.jit(zeros, out_shardings=self.gradient_shardings)()

    def gradient_shapes(self, params: Params) -> Params:
        """Shapes, dtype and places of the gradients of (abstract) weights."""
        ahead = (self._copies,) if self._copies > 1 else ()
        return jax.tree.map(
            lambda p, s: jax.ShapeDtypeStruct((*ahead, *p.shape), self.options.grad_dtype, sharding=s),
            params,
            self.gradient_shardings,
        )

    def _gradients_of(
        self, params: Params, batch: PackedBatch, denominators: Denominators
    ) -> tuple[Params, Metrics, jax.Array, Load | None]:
        def objective(params: Params) -> tuple[jax.Array, tuple[Metrics, jax.Array, Load | None]]:
            lp, entropy, load = self._scores(params, batch)
            value, metrics = losses.loss(self.options.loss, lp, entropy, batch, denominators)
            return value, (metrics, jax.lax.stop_gradient(lp), load)

        grads, (metrics, lp, load) = jax.grad(objective, has_aux=True)(params)
        return jax.tree.map(lambda g: g.astype(self.options.grad_dtype), grads), metrics, lp, load

    def _gradients_of_copies(
        self, params: Params, batch: PackedBatch, denominators: Denominators
    ) -> tuple[Params, Metrics, jax.Array, Load | None]:
        """`_gradients_of`, but the gradients (copies, …) are those of each copy's rows."""

        def of_one(
            params: Params, batch: PackedBatch, denominators: Denominators
        ) -> tuple[Params, Metrics, jax.Array, Load | None]:
            grads, share, lp, load = self._gradients_of(params, batch, denominators)
            share = {
                name: rules.max_over_copies(x) if losses.is_maximum(name) else rules.sum_over_copies(x)
                for name, x in share.items()
            }
            return jax.tree.map(lambda g: g[None], grads), share, lp, jax.tree.map(rules.sum_over_copies, load)

        rows = jax.tree.map(lambda x: jnp.ndim(x) > 0, batch)
        return rules.per_copy(of_one, (False, rows, False), (True, False, True, False))(params, batch, denominators)

    def _applied(self, state: TrainState, grads: Params) -> tuple[TrainState, Metrics, None]:
        return *optimizer.apply_gradients(self.options.optimizer, state, grads), None

    def _applied_to_copies(self, state: TrainState, grads: Params) -> tuple[TrainState, Metrics, Params]:
        """`_applied` with the sum of the copies' gradients. That sum is a result only so that it can have the memory
        of `grads` (donated): the update of copies needs no more than that of one."""

        def summed(grads: Params) -> tuple[Params, Params]:
            total = jax.tree.map(lambda g: rules.sum_over_copies(g[0]), grads)
            return total, jax.tree.map(lambda g: g[None], total)

        total, held = rules.per_copy(summed, (True,), (False, True))(grads)
        return *optimizer.apply_gradients(self.options.optimizer, state, total), held

    def _logprobs_of(self, params: Params, batch: PackedBatch) -> jax.Array:
        return self._scores(params, batch)[0]

    def _scores(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, jax.Array, Load | None]:
        o = self.options
        return batch_logprobs(self.spec, params, batch, temperature=o.temperature, dtype=o.dtype, remat=o.remat)

    def _counted(self, f: Callable) -> Callable:
        """f, counting how often it is traced, that is compiled."""

        def traced(*args: Any) -> Any:
            self.num_compilations += 1
            return f(*args)

        return traced


def with_logprobs(
    packed: PackedStep,
    *,
    old: Sequence[jax.Array] | None = None,
    reference: Sequence[jax.Array] | None = None,
) -> PackedStep:
    """The same step with old-policy and/or reference logprobs in its micro-batches."""
    batches = packed.micro_batches
    if old is not None:
        batches = tuple(replace(b, old_logprobs=lp) for b, lp in zip(batches, old, strict=True))
    if reference is not None:
        batches = tuple(replace(b, reference_logprobs=lp) for b, lp in zip(batches, reference, strict=True))
    return replace(packed, micro_batches=batches)
