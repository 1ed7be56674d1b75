"""Checks of a model's observed statements: that batches are scaled to all rows, and that y is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from numpyro import handlers
from numpyro.infer import SVI

from npgp.context import under
from npgp.contract import Handler, Message, base_of, plates_around
from npgp.likelihoods.base import impossible
from npgp.model.given_rows import present_rows
from npgp.model.observation import LatentObservation
from npgp.model.sites import Hidden, info_of, is_observation
from npgp.programs.compiled import QUICK, Program
from npgp.programs.operations import Operations
from npgp.training.data import Data, Layout, is_array
from npgp.training.step import cached

#: Scales that differ by less are taken for equal.
_SAME = 1e-3


class Statement(NamedTuple):
    """An observed statement: its message; name, members and members taken of each plate around."""

    message: Message
    plates: tuple[tuple[str, int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is observed; of the terms of a ``numpyro.factor``."""
        fn = self.message["fn"]
        return fn.batch_shape if self.is_factor else jnp.shape(self.message["value"])

    @property
    def is_factor(self) -> bool:
        return isinstance(base_of(self.message["fn"]), dist.Unit) and not is_observation(self.message)


class Statements(Handler):
    """Keeps the observed statements of a model."""

    def __init__(self, model: Callable) -> None:
        super().__init__(model)
        self.found: dict[str, Statement] = {}

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            plates = ((plate.name, plate.size, plate.subsample_size) for plate in plates_around())
            self.found[msg["name"]] = Statement(msg, tuple(plates))


def wrong_scale(statement: Statement, scale: Any, rows: int, size: int | None) -> str | None:
    """
    A sentence, if a statement about the rows of a step does not weigh them as all rows.

    It is taken for one about the rows if what it observes has an axis as long as these, or some times as long. The
    terms of a ``numpyro.factor`` outside plates are taken as they are: its author scales them.

    :param scale: what the statement is multiplied by, with its values; ``None`` for 1.
    :param rows: number of rows of a step.
    :param size: number of all rows, if known.
    """
    name = statement.message["name"]
    lengths = {length for length in statement.shape if length and length % rows == 0}
    around = [(plate, members / taken) for plate, members, taken in statement.plates if taken in lengths]
    if not lengths or (statement.is_factor and not around):
        return None
    times = np.asarray(1.0 if scale is None else scale)
    said = f"{float(times):.6g}" if times.size == 1 else "weights"
    if size is None:
        if any(ratio > 1 for _, ratio in around) or not np.all(times == 1):
            return None
        return (
            f"{name} does not scale up the {rows} rows of a step, and the source does not tell how many rows there "
            f"are: state it in npgp.plate('rows', N, rows={rows}), where N is their number, or give the source "
            f"num_rows={rows} if a batch is all there is."
        )
    wanted = size / rows
    wrong = [(plate, ratio) for plate, ratio in around if abs(ratio / wanted - 1) > _SAME]
    if len(wrong) < len(around):
        others = np.prod([members / taken for _, members, taken in statement.plates])
        if size == rows or not np.allclose(times, wanted * others, rtol=_SAME):
            return None  # what more there is are weights
        return (
            f"{name} is scaled by {size} / {rows} twice, by its plate and by handlers.scale: leave the latter out, as "
            "the plate scales a batch up to all rows by itself."
        )
    if (size == rows and not wrong) or (times.size == 1 and abs(times / wanted - 1) <= _SAME):
        return None
    of = "".join(f"; plate {plate!r} is one of {ratio * rows:.6g}" for plate, ratio in wrong)
    return (
        f"{name} scales the {rows} rows of a step by {said}, but they stand for {size} rows, so the ELBO needs "
        f"{wanted:.6g}: state it in npgp.plate('rows', {size}, rows={rows}){of}."
    )


class Observed:
    """
    The observed statements of a model, which is run once on tracers.

    :param svi: of model and guide, initialized.
    :param params: parameters, constrained.
    :param args: positional arguments of a step.
    :param kwargs: its keyword arguments.
    :param rows: number of rows of a step: arrays with as many hold them.
    :param size: number of all rows, if known.
    :param uncut: arrays of ``args`` and ``kwargs`` that are not cut to the rows of a step, and a sentence about each.
    :raises ValueError: for a statement that does not scale the rows of a step up to all rows, and for one of an array
        that is as long as these, and not cut.
    """

    def __init__(
        self,
        svi: SVI,
        params: dict[str, Any],
        args: tuple,
        kwargs: dict,
        rows: int,
        size: int | None,
        uncut: dict[int, str],
    ):
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        values, names = jax.tree.flatten(params)
        first = 1 + len(values)
        statements = Statements(svi.model)
        self._words: dict[str, str] = {}

        def run(key: jax.Array, *operands: Any) -> dict[tuple[str, str], Any]:
            data, resident = jax.tree.unflatten(names, operands[: len(values)]), iter(operands[len(values) :])
            at_step, keywords = jax.tree.unflatten(structure, [next(resident) if is_array(x) else x for x in leaves])
            model = handlers.seed(handlers.substitute(statements, data=data), key)
            with Hidden(), under(unseen=True):  # no values have a part in what is asked, nor what guides say of them
                model(*at_step, **keywords, **svi.static_kwargs)
            results: dict[tuple[str, str], Any] = {}
            for name, (message, _) in statements.found.items():
                fn, y = message["fn"], message["value"]
                results[name, "scale"] = jnp.asarray(1.0 if message["scale"] is None else message["scale"])
                results[name, "y"] = [jnp.asarray(leaf) for leaf in jax.tree.leaves(y)]
                inputs = [term.X for part in getattr(info_of(message).latents, "parts", ()) for term in part.terms]
                results[name, "given"] = [leaf for leaf in jax.tree.leaves((y, fn, inputs)) if is_array(leaf)]
                if is_observation(message):
                    results[name, "wrong"], self._words[name] = _first_impossible(message)
            return results

        everything = [jax.random.key(0), *values, *arrays]
        operations = Operations(run, *everything)
        of_rows = {first + i for i, array in enumerate(arrays) if array.shape[:1] == (rows,)}
        self._first = first
        #: Which of the arrays of ``args`` and ``kwargs`` are observations under a mask.
        self.masked: set[int] = set()
        #: For each statement of GP values: where is a value that it cannot have. What draws have a part in is left out.
        self._wrong: dict[str, Callable] = {}
        for name, statement in statements.found.items():
            needs, compute = operations.part((name, "scale"))
            scale = np.full(2, np.nan) if 0 in needs else np.asarray(compute(*everything))
            sentence = wrong_scale(statement, scale, rows, size)
            if sentence and operations.part((name, "given"))[0] & of_rows:
                raise ValueError(sentence)
            from_arrays = {i - first for i in operations.part((name, "y"))[0] if i >= first}
            if from_arrays and from_arrays <= uncut.keys() and statement.shape[-1:] == (rows,):
                raise ValueError(f"{name} would have the same {rows} values at each step: {uncut[min(from_arrays)]}")
            message = statement.message
            if is_observation(message):
                masked = present_rows(message) is not None
            else:
                masked = getattr(base_of(message["fn"]), "has_mask", False)
            if masked:
                self.masked |= from_arrays
            if name in self._words:
                needs, compute = operations.part((name, "wrong"))
                if needs & of_rows and min(needs) >= first:
                    self._wrong[name] = compute
        statements.found.clear()  # of tracers

    def program(self, layout: Layout, sharding: Any = None) -> Callable[[list, Any], dict[str, Any]] | None:
        """
        A compiled function of arrays and chunk, for each statement to the place of the first impossible value in each
        step, counted along the rows of one output after the other, −1 if there is none; and the value.
        """

        def one(arrays: Any, item: Any) -> dict[str, Any]:
            leaves = [leaf for leaf in jax.tree.leaves(layout.call(arrays, item)) if is_array(leaf)]
            return {name: compute(*[None] * self._first, *leaves) for name, compute in self._wrong.items()}

        def run(arrays: Any, chunk: Any) -> dict[str, Any]:
            if chunk is None:
                return jax.tree.map(lambda x: x[None], one(arrays, None))
            return lax.map(lambda item: one(arrays, item), chunk)

        if not self._wrong:
            return None
        return Program(run, options=QUICK, out_shardings=sharding)

    def refuse(self, found: dict[str, Any], num_steps: int, row: Callable[[int, int], str]) -> None:
        """
        Raise ``ValueError`` for the first impossible value.

        :param found: what :meth:`program` returned.
        :param num_steps: of how many steps.
        :param row: what to call a row, from the step and its place in the batch.
        """
        for name, (positions, values) in jax.tree.map(np.asarray, found).items():
            bad = np.flatnonzero(positions[:num_steps] >= 0)
            if bad.size:
                where = row(int(bad[0]), int(positions[bad[0]]))
                raise ValueError(
                    f"{name} has the value {values[bad[0]]:g} in {where}; {self._words[name]}. Leave such rows out, or "
                    "mask them."
                )


def check_of_rows(svi: SVI, params: dict[str, Any], data: Data, step: int) -> Callable | None:
    """
    Check how the observed statements of a model scale the rows of a step, and the rows that are in memory.

    :param svi: of model and guide, initialized.
    :param params: parameters, constrained.
    :param data: the arguments.
    :param step: number of the first step.
    :return: what checks the rows that are read, if there are such: a function of chunk, chunk on the device, its number
        of steps, and the number of the first of them.
    :raises ValueError: for a wrong scale, and for a row with a value that is not possible; the latter where one process
        trains.
    """
    args, kwargs = data.first_call(step)
    if not data.step_rows:
        data.refuse_nan()
        return None

    def make() -> tuple[Observed, Callable | None]:
        observed = Observed(svi, params, args, kwargs, data.step_rows, data.num_rows or None, data.uncut())
        sharding = None if data.sharding is None else data.sharding.replicated
        return observed, observed.program(data.layout, sharding)

    shapes = tuple(map(jnp.shape, jax.tree.leaves((args, kwargs))))
    observed, program = cached(svi, ("observed", data.layout, shapes, data.step_rows, data.sharding), make)
    data.allow_nan_of(observed.masked)
    if program is None or jax.process_count() > 1:  # there each step's answer would be a message between processes
        return None

    def check(chunk: Any, placed: Any, num_steps: int, step: int) -> None:
        observed.refuse(program(data.arrays, placed), num_steps, lambda i, position: data.row(chunk, step, i, position))

    if data.reads:
        return check
    chunk = data.all_rows()
    check(chunk, data.place(chunk), 1 if chunk is None else len(chunk[0]), step)
    return None


def likelihood_not_finite(svi: SVI, params: dict[str, Any], args: tuple, kwargs: dict) -> str | None:
    """
    A sentence about the first likelihood whose share of the ELBO is not finite, or has no finite gradient, if any.

    :param params: parameters, constrained; with the arguments of a step.
    """
    statements = Statements(svi.model)
    try:
        with Hidden(), handlers.substitute(data=params), handlers.seed(rng_seed=0):
            # Guides of several draws at once have no values that a model can be replayed with.
            several = getattr(svi.loss, "multi_sample_guide", False)
            guide = {} if several else handlers.trace(svi.guide).get_trace(*args, **kwargs, **svi.static_kwargs)
            handlers.replay(statements, guide)(*args, **kwargs, **svi.static_kwargs)
        for name, (message, _) in statements.found.items():
            if isinstance(fn := base_of(message["fn"]), LatentObservation):
                if sentence := fn.why_not_finite(message["value"]):
                    return f"{name}: {sentence}"
    except (ArithmeticError, ValueError, TypeError):  # it is another error that is raised
        pass
    return None


def _first_impossible(msg: Message) -> tuple[tuple[jax.Array, jax.Array], str]:
    """Place along the rows of the first value that cannot be observed, and the value; and what it must be."""
    y = jnp.asarray(msg["value"], jnp.result_type(float))
    wrong, words = impossible(info_of(msg).likelihood, y)
    if (present := present_rows(msg)) is not None:
        wrong = wrong & present
    position = jnp.argmax(wrong)
    return (jnp.where(jnp.any(wrong), position % y.shape[-1], -1), jnp.ravel(y)[position]), words
