"""
Natural gradients for q(ε): an optimizer that steps in the natural parameters of every block's Gaussian.

A step of rate ρ in the natural parameters of ``N(m, S)``, against the gradient of the loss ℓ = −ELBO in the expectation
parameters, is (Hensman et al. 2012, 2013; Salimbeni, Eleftheriadis & Hensman 2018)

    S'⁻¹ = S⁻¹ + 2ρ ∂ℓ/∂S,        m' = m − ρ S' ∂ℓ/∂m.

It does not depend on how S is parameterized, and for one block, Gaussian noise and all rows, ρ = 1 is the optimum.
Blocks have covariances of their own, but their means are coupled: the optimal ones solve one system for all blocks
stacked (docs/theory.md, section 5), which steps block by block would reach slowly. So ``m' = m − ρ δ`` with δ the
solution of

    H δ = ∂ℓ/∂m,        H = (1 − ρ) blockdiag(S⁻¹) + ρ ∂²ℓ/∂m²,

over all blocks of all components, by conjugate gradients preconditioned with blockdiag(S'). With one dense block H is
``S'⁻¹`` for every likelihood whose expectation is exact (Bonnet's and Price's theorems), one iteration solves it, and
this is the natural gradient.

Steps of a q(ε) given pseudo-data (parameterizations.py), whose q(u) depends on a draw of the hyperparameters θ, come
second. Given θ and t, q(u) has the precision ``Λ + K(θ)⁻¹`` and the natural mean ``Λ z(t)``. Its Fisher information
depends on θ, the parameters do not. Natural steps at each draw, averaged, would take all draws for equally telling,
though one with a K(θ) of nearly no rank says next to nothing of Λ. So gradients, as they come from the draws, are
preconditioned by the Fisher information of one Gaussian that no draw decides on: ``N(m̄, S̄)``, ``S̄⁻¹ = Λ + K̄⁻¹``,
``S̄⁻¹ m̄ = Λ z``, with K̄ the average of K over draws of steps before. Where θ is a point the step is the natural one.

The gradient in z is the ELBO's. That in Λ is its part through the covariance of q(u | θ). The other part, through the
mean, is the average over draws of the gradient in the mean times how far the prior pulls the mean away from z. At the
optimum it vanishes if K does not depend on θ, and is small if it does; far from there it is large, of either sign, and
drives Λ to where the loss of one draw forgets z.

All is done in ``v = Rᵀ u`` for the present root R of Λ, in which Λ is I. With ``T = Rᵀ K̄ R`` the reference's
covariance is ``Q⁻¹`` there, ``Q = I + T⁻¹``, and its mean is less than ``Rᵀ z`` by ``n = (I + T)⁻¹ Rᵀ z``. Let g be the
gradient in the natural mean, and G that in the precision. A step of rate ρ is

    W = I + ρ X,    X = −2 Q G Q,        R' R'ᵀ = R W Rᵀ,        z' = z − ρ R⁻ᵀ W⁻¹ (Q g + X n).

T has :data:`DAMPING` added: where the prior says a thousand times as much as the pseudo-data, these matter little, K̄
may be far from K(θ), and Q would be large.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from numpyro.distributions import biject_to, constraints
from numpyro.optim import Minimize, optax_to_numpyro

from npgp import checks, linalg
from npgp.context import under
from npgp.contract import Optimizer
from npgp.programs import Operations
from npgp.variational.blocks import SCALE_CONSTRAINTS, SCALE_NAMES
from npgp.variational.parameterizations import LOC, LOWER, SCALE, UNIT, VALUES, Slot, parts, precision_root

#: Times that a rate is halved, within one step, before q(ε) is left as it is.
MAX_HALVINGS = 12
#: Rise of the loss that may be rounding, relative to the loss and the dtype's resolution.
ROUNDING = 100.0


def natural_gradient(
    rate: float | Callable[[ArrayLike], ArrayLike],
    others: Any = None,
    *,
    sites: Sequence[str] | None = None,
    max_iterations: int = 20,
) -> Optimizer:
    """
    Natural gradients for q(ε), and another optimizer for all other parameters, for the ``optim`` of NumPyro's ``SVI``:

    .. code-block:: python

        svi = SVI(
            model, guide, npgp.natural_gradient(0.1, npgp.adam(0.01)), TraceMeanField_ELBO()
        )

    With Gaussian noise and all rows a rate of 1 is right: each step takes q(ε) to its optimum for the present
    hyperparameters. Otherwise start at 0.1 to 0.5; with minibatches, and where hyperparameters are sampled, let a
    schedule end low, to average over batches and draws. A step that would give a covariance that is not positive
    definite, or a higher loss for the same rows and noise, is taken at half the rate, and half again; if nothing helps
    q(ε) stays. Gradients that are not finite, or of which rounding leaves no direction, make the parameters NaN, for
    the training loop to see.

    **Given rows**, as :class:`~npgp.AutoSparseGP` has it by default where the model samples more than its GPs and takes
    all rows at once, q(ε) is exact for Gaussian noise and has no parameters; pseudo-observations of other likelihoods
    are left to ``others``.

    **Given pseudo-data** steps are in the natural parameters of the pseudo-data,
    ``f.u.pseudo_loc``, ``pseudo_scale`` and ``pseudo_lower``, and ``f.u.unit`` is held:

    .. code-block:: python

        rate = optax.cosine_decay_schedule(0.5, 1000)
        optim = npgp.natural_gradient(rate, npgp.adam(0.05, 1000))
        guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
        svi = SVI(model, guide, optim, TraceMeanField_ELBO())

    How these follow other sites, ``f.u.coupling`` and ``noise_coupling``, is left to ``others``. Blocks given
    pseudo-data step each by itself, and need reverse-mode gradients.

    Beside what a step of Adam costs, a step takes one more evaluation of the loss, but for what q(ε) has no part in
    (the kernel's factors), a Cholesky factorization per dense block, and products of the projections with vectors;
    given pseudo-data three factorizations and some ten products of M × M matrices. The loss must be −ELBO, not a
    multiple of it.

    :param rate: ρ in (0, 1], or a schedule: a function of the step's number, such as those of optax.
    :param others: optax or NumPyro optimizer of the other parameters: hyperparameters, inducing inputs, the guides of
        other latent variables. It may be left out where there are none; ``optax.set_to_zero()`` holds them fixed.
    :param sites: names of the whitened sites to treat so, such as ``["f.u", "f.v"]``; those of all components if
        omitted. The rest go to ``others``.
    :param max_iterations: most iterations of conjugate gradients, for the means, in a step. A solution cut short is a
        smaller step.
    :raises TypeError: for a rate or an optimizer of another type.
    :raises ValueError: for a rate outside (0, 1]; when training starts, if there are other parameters and
        no optimizer for them; for forward-mode gradients of a site given pseudo-data.
    """
    return _NaturalGradient(rate, others, sites, max_iterations)


class _NaturalGradient(Optimizer):
    """
    State: the step count, and (parameters of q(ε) by name, unconstrained; average covariances of inducing values by
    site given pseudo-data; state of the other optimizer).
    """

    def __init__(self, rate, others, sites, max_iterations):
        if not callable(rate):
            if isinstance(rate, (bool, str)) or jnp.ndim(rate) != 0:
                raise TypeError(f"rate is {rate!r}; it must be a number or a schedule, a function of the step.")
            checks.require_positive(rate, "rate")
            if not checks.is_traced(rate) and rate > 1:
                raise ValueError(f"rate is {rate}; it must be at most 1, a full step.")
        if isinstance(sites, str):
            raise TypeError(f"sites is {sites!r}; it must be a list of site names such as [{sites!r}].")
        if max_iterations < 1:
            raise ValueError(f"max_iterations is {max_iterations}; it must be at least 1.")
        self.rate = rate if callable(rate) else lambda step: rate
        self.others = _as_optimizer(others)
        self.sites = None if sites is None else tuple(sites)
        self.max_iterations = max_iterations

    def init(self, params):
        given_data = [site for site in sites_of(params) if self.sites is None or site in self.sites]
        blocks = _find_blocks(params, self.sites, given_data)
        names = {*blocks, *blocks.values()}.union(*(held(site, params) for site in given_data))
        q = {name: value for name, value in params.items() if name in names}
        rest = {name: value for name, value in params.items() if name not in names}
        if rest and self.others is None:
            raise ValueError(
                f"others is None, but there are parameters beside those of q(ε): {sorted(rest)}. "
                "Give an optimizer for them; optax.set_to_zero() holds them fixed."
            )
        averages = {site: start_average(site, q) for site in given_data}
        return jnp.array(0), (q, averages, self.others.init(rest) if rest else ())

    def get_params(self, state):
        q, _, rest = state[1]
        return {**q, **(self.others.get_params(rest) if rest else {})}

    def update(self, g, state, value=None):
        raise TypeError("natural_gradient needs the loss itself, not its gradient: call eval_and_update.")

    def eval_and_update(self, fn, state, forward_mode_differentiation=False):
        output, state, _ = self._step(fn, state, forward_mode_differentiation)
        return output, state

    def eval_and_stable_update(self, fn, state, forward_mode_differentiation=False):
        (loss, aux), new, finite = self._step(fn, state, forward_mode_differentiation)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return (jnp.where(finite, loss, jnp.nan), aux), new

    def _step(self, fn, state, forward_mode):
        """The loss and its auxiliary output, the new state, and whether loss and gradients were finite."""
        count, (q, averages, rest) = state
        params = self.get_params(state)
        if not q:
            output, rest = self.others.eval_and_update(fn, rest, forward_mode) if rest else (fn({}), rest)
            finite = jnp.isfinite(output[0]) & _all_finite(self.others.get_params(rest) if rest else {})
            return output, (count + 1, (q, averages, rest)), finite
        given_data = sites_of(q)
        blocks = _find_blocks(q, self.sites, given_data)
        if averages and forward_mode:
            raise ValueError(
                f"natural_gradient steps {next(iter(averages))!r}, which is given by pseudo-data, by reverse-mode "
                "gradients: leave out forward_mode_differentiation, or name other sites."
            )
        slots = {site: slot_for(site, q, averages[site]) for site in given_data}
        told, again = _in_two(fn, q, slots, {name: value for name, value in params.items() if name not in q})
        value_and_grad = _value_and_grads(told, forward_mode)

        def mean_gradient(means):
            output, grads, reports = value_and_grad({**params, **means}, slots)
            return {name: grads[name] for name in means}, (output, grads, reports)

        # One pass gives the loss, all gradients, and products with the Hessian of the means, in which the kernel's
        # factors and the projections are constants.
        means = {loc: q[loc] for loc in blocks}
        if means:
            mean_grads, hessian, (output, grads, reports) = jax.linearize(mean_gradient, means, has_aux=True)
        else:
            output, grads, reports = value_and_grad(params, slots)
        loss, (aux, kept) = output
        scales = {loc: _scale(name, q, loc) for loc, name in blocks.items()}
        scale_grads = {loc: _scale_grad(name, scales[loc], grads) for loc, name in blocks.items()}
        new_averages = {site: average(averages[site], reports[site], count) for site in averages}
        # The first step has no draws before it, and takes its own.
        known = jax.tree.map(lambda a, b: jnp.where(count == 0, a, b), new_averages, averages)
        directions = [Direction(site, q, grads, reports[site].precision, known[site]) for site in given_data]

        def attempt(rate):
            new_scales = {loc: _natural_scale(means[loc], scales[loc], scale_grads[loc], rate) for loc in means}

            def system(v):
                damping = {loc: (1.0 - rate) * _precision_times(scales[loc], v[loc]) for loc in v}
                return jax.tree.map(lambda a, b: a + rate * b, damping, hessian(v))

            def precondition(v):
                return {loc: _covariance_times(new_scales[loc], v[loc]) for loc in v}

            new = dict(q)
            if means:
                delta = _conjugate_gradients(system, precondition, mean_grads, self.max_iterations)
                new |= {loc: means[loc] - rate * delta[loc] for loc in means}
            for loc, name in blocks.items():
                if name is not None:
                    new[name] = _transform(name).inv(new_scales[loc])
            for direction in directions:
                new |= direction.step(rate)
            return new

        def retry(carry):
            tries, rate, _, _ = carry
            new = attempt(rate)
            new_loss = again(kept, new)
            slack = ROUNDING * jnp.finfo(loss.dtype).eps * jnp.abs(loss)
            ok = _all_finite(new) & jnp.isfinite(new_loss) & (new_loss <= loss + slack)
            return tries + 1, 0.5 * rate, new, ok

        q_grads = {name: grads[name] for name in q}
        rate = jnp.asarray(self.rate(count), jnp.result_type(*q.values()))
        start = (jnp.where(_all_finite(q_grads), 0, MAX_HALVINGS + 1), rate, q, jnp.asarray(False))
        _, _, new, ok = lax.while_loop(lambda carry: (carry[0] <= MAX_HALVINGS) & ~carry[3], retry, start)
        new = {name: jnp.where(ok, new[name], q[name]) for name in q}
        computed = {name: jnp.isfinite(gradient) for name, gradient in q_grads.items()}
        computed |= {n: computed[n] & d.finite for d in directions for n in held(d.site, q)}
        new = {name: jnp.where(computed[name], new[name], jnp.nan) for name in q}
        if rest:
            rest_grads = {name: value for name, value in grads.items() if name not in q}
            rest = self.others.update(rest_grads, rest, value=loss)
        return (loss, aux), (count + 1, (new, new_averages, rest)), jnp.isfinite(loss) & _all_finite(grads)


# ---------------------------------------------------------------------------------------------------------------
# The loss: in two parts, with its gradients and the reports that blocks make


def _in_two(fn: Callable, q: dict[str, Any], slots: Any, others: dict[str, Any]) -> tuple[Callable, Callable]:
    """
    The loss in two, so that the loss of another q(ε) takes no more than q(ε) has a part in: the kernel's factors and
    the projections are at hand.

    :param fn: from parameters to the loss and its auxiliary output.
    :param q: parameters of q(ε) by name.
    :param slots: for reports, by site.
    :param others: all other parameters.
    :return: a function of parameters and slots, to the loss and (auxiliary output, what is kept); and one of what was
        kept and another q(ε), to its loss.
    """
    moving = len(jax.tree.leaves((q, slots)))
    leaves, structure = jax.tree.flatten((q, slots, others))

    def results(*leaves):
        q, slots, others = jax.tree.unflatten(structure, leaves)
        with under(slots=slots):
            loss, aux = fn({**others, **q})
        return {"loss": loss, "aux": aux}

    before, after = Operations(results, *leaves).divided(range(moving))

    def told(params, slots):
        leaves = jax.tree.leaves(({name: params[name] for name in q}, slots, {name: params[name] for name in others}))
        kept = before(*leaves)
        found = after(kept, *leaves)
        return found["loss"], (found["aux"], kept)

    def again(kept, new):
        return after(kept, *jax.tree.leaves((new, slots, others)))["loss"]

    return told, again


def _value_and_grads(fn: Callable, forward_mode: bool) -> Callable:
    """A function of parameters and slots: the loss and its auxiliary output, gradients, and what slots are told."""

    def reverse(params, slots):
        output, (grads, reports) = jax.value_and_grad(fn, (0, 1), has_aux=True)(params, slots)
        return output, grads, reports

    def forward(params, slots):
        def repeated(params):
            output = fn(params, slots)
            return output[0], output

        grads, output = jax.jacfwd(repeated, has_aux=True)(params)
        return output, grads, slots

    return forward if forward_mode else reverse


# ---------------------------------------------------------------------------------------------------------------
# Which parameters


def _as_optimizer(others: Any) -> Any:
    if others is None or (isinstance(others, Optimizer) and not isinstance(others, Minimize)):
        return others
    if isinstance(others, optax.GradientTransformation):
        return optax_to_numpyro(others)
    raise TypeError(
        f"others is a {type(others).__name__}; it must be an optax or NumPyro optimizer that steps along gradients."
    )


def _find_blocks(
    params: dict[str, Any], sites: Collection[str] | None, given_data: Collection[str]
) -> dict[str, str | None]:
    """
    The name of each block's mean, and that of its scale: ``None`` for a block that moves the mean only. Sites given by
    pseudo-data have neither.
    """
    found = parts(params, sites)
    blocks: dict[str, str | None] = {}
    for site in found if sites is None else sites:
        loc, own = f"{site}.{LOC}", found.get(site, {})
        if site in given_data or (sites is None and LOC not in own):
            continue
        if LOC not in own:
            raise ValueError(f"sites has {site!r}, but there is no parameter {loc!r} among {sorted(params)}.")
        shape = jnp.shape(own[LOC])
        scales = [part for part in SCALE_CONSTRAINTS if part in own]
        for part in scales:
            expected = shape + shape[-1:] if part == SCALE_NAMES["dense"] else shape
            if len(scales) > 1 or not shape or jnp.shape(own[part]) != expected:
                raise ValueError(
                    f"{loc} has shape {shape} and {site}.{part} shape {jnp.shape(own[part])} (unconstrained); natural "
                    "gradients are for loc (..., M) with scale_tril (..., M, M) or scale (..., M) as SparseGP declares."
                )
        blocks[loc] = f"{site}.{scales[0]}" if scales else None
    return blocks


def _transform(name: str):
    return biject_to(SCALE_CONSTRAINTS[name.rpartition(".")[2]])


def _scale(name: str | None, params: dict[str, Any], loc: str) -> jax.Array:
    return jnp.ones_like(params[loc]) if name is None else _transform(name)(params[name])


def _scale_grad(name: str | None, scale: jax.Array, grads: dict[str, Any]) -> jax.Array:
    """The gradient in the scale, from that in its unconstrained value; 0 keeps a scale as it is."""
    return jnp.zeros_like(scale) if name is None else jax.vjp(_transform(name).inv, scale)[1](grads[name])[0]


def _all_finite(tree) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)], bool))


# ---------------------------------------------------------------------------------------------------------------
# The step. A scale is a factor L (..., M, M), or standard deviations (..., M): ones for a block left at S = I.


def _natural_scale(mean: jax.Array, scale: jax.Array, grad: jax.Array, rate: jax.Array) -> jax.Array:
    """
    The scale of S', where ``S'⁻¹ = S⁻¹ + 2ρ ∂ℓ/∂S``; NaN where that is not positive definite.

    With ``S = L Lᵀ`` the new precision is ``L⁻ᵀ W L⁻¹``, ``W = I + ρ (Φ + Φᵀ)``, Φ the lower triangle of ``Lᵀ ∂ℓ/∂L``
    with its diagonal halved. With ``W = U Uᵀ``, U upper triangular, the new factor is ``L U⁻ᵀ``: S is not inverted, and
    near the optimum W is near I however badly conditioned S may be.
    """
    if scale.ndim == mean.ndim:
        return scale / jnp.sqrt(1.0 + rate * scale * grad)
    transposed = jnp.swapaxes(scale, -1, -2)
    product = linalg.matmul(transposed, grad)
    lower, identity = jnp.tril(product, -1), jnp.eye(scale.shape[-1], dtype=scale.dtype)
    W = identity + rate * (lower + jnp.swapaxes(lower, -1, -2) + product * identity)
    # Reversing rows and columns turns an upper factor into a lower one.
    reversed_factor = linalg.plain_cholesky(jnp.flip(W, (-2, -1)))
    return jnp.swapaxes(jnp.flip(linalg.solve_lower(reversed_factor, jnp.flip(transposed, -2)), -2), -1, -2)


def _covariance_times(scale: jax.Array, v: jax.Array) -> jax.Array:
    """``S v`` over the last axis."""
    if scale.ndim == v.ndim:
        return jnp.square(scale) * v
    half = linalg.matmul(jnp.swapaxes(scale, -1, -2), v[..., None])
    return linalg.matmul(scale, half)[..., 0]


def _precision_times(scale: jax.Array, v: jax.Array) -> jax.Array:
    """``S⁻¹ v`` over the last axis."""
    if scale.ndim == v.ndim:
        return v / jnp.square(scale)
    return linalg.solve_lower(scale, linalg.solve_lower(scale, v[..., None]), transpose=True)[..., 0]


def _conjugate_gradients(system: Callable, precondition: Callable, rhs: Any, max_iterations: int) -> Any:
    """
    Solve ``H x = rhs`` for trees of arrays; stops at the first direction in which H does not curve upwards.

    Like a truncated Newton method (Nocedal & Wright 2006, algorithm 7.1): H is not positive definite for likelihoods
    that are not log-concave, or for noisy gradients. If the first direction is such, the preconditioned ``rhs`` is the
    answer. The residual is measured in the norm of the preconditioner, which knows the scales of the problem; it
    need not come below what rounding leaves.
    """
    flat_rhs, unravel = ravel_pytree(rhs)
    tolerance = float(jnp.finfo(flat_rhs.dtype).eps) ** (2.0 / 3.0)

    def times(operator, v):
        return ravel_pytree(operator(unravel(v)))[0]

    first = times(precondition, flat_rhs)
    start_norm = jnp.vdot(flat_rhs, first)

    def unfinished(carry):
        step, _, _, _, norm, stopped = carry
        return (step < max_iterations) & (norm > tolerance**2 * start_norm) & ~stopped

    def body(carry):
        step, x, residual, direction, norm, _ = carry
        image = times(system, direction)
        curvature = jnp.vdot(direction, image)
        upwards = curvature > 0.0
        length = norm / jnp.where(upwards, curvature, 1.0)
        x = jnp.where(upwards, x + length * direction, jnp.where(step == 0, first, x))
        residual = residual - length * image
        new = times(precondition, residual)
        new_norm = jnp.vdot(residual, new)
        return step + 1, x, residual, new + (new_norm / norm) * direction, new_norm, ~upwards

    start = (0, jnp.zeros_like(flat_rhs), flat_rhs, first, start_norm, jnp.asarray(False))
    return unravel(lax.while_loop(unfinished, body, start)[1])


#: What is added to T, the prior covariance in units of the pseudo-data's noise.
# ---------------------------------------------------------------------------------------------------------------
# Steps of a q(ε) given pseudo-data

DAMPING = 1e-3
#: The number of steps that K̄ is the average of.
WINDOW = 20.0

_positive = biject_to(constraints.positive)


def sites_of(params: Mapping[str, Any]) -> list[str]:
    """The sites given by pseudo-data."""
    return [site for site, own in parts(params).items() if VALUES in own]


def held(site: str, params: Mapping[str, Any]) -> list[str]:
    """
    The parameters of a site that steps are about, by name. The unit stays as it is: were it to move, so would all
    values. What goes with t is not among them: a single draw of t says too little of it.
    """
    return [name for part in (VALUES, SCALE, LOWER, UNIT) if (name := f"{site}.{part}") in params]


# ---------------------------------------------------------------------------------------------------------------
# The average covariance


def start_average(site: str, q: Mapping[str, jax.Array]) -> jax.Array:
    """K̄ before any draw: of independent inducing values as wide as the prior was at the start; (..., M, M)."""
    return linalg.diagonal_matrix(jnp.square(_unit(site, q)))


def _unit(site: str, q: Mapping[str, jax.Array]) -> jax.Array:
    """Of each value the unit, (..., M)."""
    return jnp.broadcast_to(_positive(q[f"{site}.{UNIT}"]), q[f"{site}.{VALUES}"].shape)


def slot_for(site: str, q: Mapping[str, jax.Array], covariance: jax.Array) -> Slot:
    """The slot for a site's report."""
    like = covariance if f"{site}.{LOWER}" in q else q[f"{site}.{SCALE}"]
    return Slot(jnp.zeros_like(like), jnp.zeros_like(covariance), jnp.zeros((), covariance.dtype))


def average(covariance: jax.Array, report: Slot, step: jax.Array) -> jax.Array:
    """K̄ after a step; as it is if nobody has reported, or a number is not finite."""
    weight = jnp.maximum(1.0 / (step + 1.0), 1.0 / WINDOW).astype(covariance.dtype)
    new = covariance + weight * (report.covariance / jnp.maximum(report.draws, 1.0) - covariance)
    return jnp.where((report.draws > 0.0) & jnp.all(jnp.isfinite(new)), new, covariance)


# ---------------------------------------------------------------------------------------------------------------
# The step


class Direction:
    """
    Where the steps from a point lead, whatever their rate.

    :param site: the whitened site.
    :param q: unconstrained parameters, with those of :func:`held`.
    :param grads: gradients of the loss in these.
    :param in_precision: G, the gradient in W of a report.
    :param covariance: K̄, (..., M, M).
    """

    def __init__(
        self,
        site: str,
        q: Mapping[str, jax.Array],
        grads: Mapping[str, jax.Array],
        in_precision: jax.Array,
        covariance: jax.Array,
    ):
        self.site, self.dense = site, f"{site}.{LOWER}" in q
        self.unit, self.values = _unit(site, q), q[f"{site}.{VALUES}"]
        self.root = root = precision_root(_positive(q[f"{site}.{SCALE}"]), q.get(f"{site}.{LOWER}"))
        if self.dense:
            half = linalg.lower_matmul(root, covariance, transpose=True)
            T = linalg.lower_matmul(root, linalg.transposed(half), transpose=True)
        else:
            T = root[..., None] * covariance * root[..., None, :]
        identity = jnp.broadcast_to(jnp.eye(T.shape[-1], dtype=T.dtype), T.shape)
        # Rounding in T is relative to |R|ᵀ |K̄| |R|, which is at most v vᵀ, and much more than T where values that the
        # prior has nearly equal are known by their differences.
        deviation = jnp.sqrt(linalg.diagonal(covariance))
        v = _times(linalg.transposed(jnp.abs(root)), deviation) if self.dense else root * deviation
        damping = DAMPING + jnp.finfo(T.dtype).eps * jnp.sum(jnp.square(v), axis=-1)
        T = 0.5 * (T + linalg.transposed(T)) + damping[..., None, None] * identity
        inverse = linalg.gram(linalg.transposed(linalg.solve_lower(linalg.cholesky(T, jitter=0.0)[0], identity)))
        prior = linalg.cholesky(identity + T, jitter=0.0)[0]
        pull = _solve_twice(prior, self._transposed_times(self.unit * self.values))  # n
        slope = self._solve(grads[f"{site}.{VALUES}"] / self.unit)  # g
        slope = slope + _times(inverse, slope)
        if self.dense:
            half = in_precision + linalg.matmul(inverse, in_precision)
            half = half + linalg.matmul(half, inverse)
            self.X = -(half + linalg.transposed(half))
            self.shift = slope + _times(self.X, pull)
        else:
            # Of a diagonal W the Fisher information is ½ Q⁻¹ ∘ Q⁻¹, where Q⁻¹ = I − (I + T)⁻¹.
            left = linalg.gram(linalg.transposed(linalg.solve_lower(prior, identity)))
            information = linalg.cholesky(jnp.square(identity - left), jitter=0.0)[0]
            self.X = -2.0 * _solve_twice(information, in_precision)
            self.shift = slope + self.X * pull
        #: Without it no step is, at any rate.
        self.finite = jnp.all(jnp.isfinite(self.X)) & jnp.all(jnp.isfinite(self.shift))

    def step(self, rate: jax.Array) -> dict[str, jax.Array]:
        """Unconstrained parameters after a step; NaN if its precision is not positive definite."""
        if self.dense:
            factor = linalg.plain_cholesky(jnp.eye(self.X.shape[-1], dtype=self.X.dtype) + rate * self.X)
            root = linalg.lower_matmul(self.root, jnp.tril(factor))
            shift, noise = _solve_twice(factor, self.shift), 1.0 / linalg.diagonal(root)
        else:
            W = 1.0 + rate * self.X
            root, shift = self.root * jnp.sqrt(W), self.shift / W
            noise = 1.0 / root
        values = self.values - rate * self._solve(shift, transpose=True) / self.unit
        new = {f"{self.site}.{VALUES}": values, f"{self.site}.{SCALE}": _positive.inv(noise)}
        if self.dense:
            new[f"{self.site}.{LOWER}"] = jnp.tril(noise[..., None] * root, -1)
        return new

    def _transposed_times(self, x: jax.Array) -> jax.Array:
        """``Rᵀ x``."""
        return _times(linalg.transposed(self.root), x) if self.dense else self.root * x

    def _solve(self, x: jax.Array, transpose: bool = False) -> jax.Array:
        """``R⁻¹ x``, or ``R⁻ᵀ x``."""
        return _solve(self.root, x, transpose) if self.dense else x / self.root


def _times(A: jax.Array, x: jax.Array) -> jax.Array:
    return linalg.matmul(A, x[..., None])[..., 0]


def _solve(F: jax.Array, x: jax.Array, transpose: bool = False) -> jax.Array:
    return linalg.solve_lower(F, x[..., None], transpose=transpose)[..., 0]


def _solve_twice(F: jax.Array, x: jax.Array) -> jax.Array:
    """``(F Fᵀ)⁻¹ x``."""
    return _solve(F, _solve(F, x), transpose=True)
