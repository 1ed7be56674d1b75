"""The automatic guide: q(ε) for every GP of a model, and guides of the user's choice for all else."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import lax
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoDAIS,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoSemiDAIS,
)
from numpyro.infer.initialization import init_to_median

from npgp import checks, linalg
from npgp.context import under
from npgp.contract import Handler, Message, base_of, is_auxiliary, plate_draws, under_predictive
from npgp.model.coupling import Coupling, Spread, Structure, TrainedRows, UnknownRows, correlations, spreads
from npgp.model.gaussians import Beside, Gaussians, normal_quantiles
from npgp.model.given_rows import (
    GivenRows,
    Group,
    Numbers,
    Part,
    blocks_of,
    by_rows,
    dear,
    dependent,
    in_parts,
    meet_in,
    meetings,
    said_of_rows,
    sampled_into,
    survey,
)
from npgp.model.latent import NoArray
from npgp.model.sites import (
    CHOSEN,
    NOTHING,
    ROWS_TRAINED_ON,
    AllRows,
    Followed,
    Hidden,
    Rerun,
    SameRows,
    Trained,
    check_cover,
    info_of,
    is_gp_site,
    is_inducing,
    is_latent,
    is_no_parameter,
    is_observation,
    is_restated,
    name_of,
    traced_inside,
    trained,
)
from npgp.programs.compiled import one_model_at_a_time, one_program
from npgp.programs.tracing import is_traced
from npgp.variational.parameterizations import COUPLING, LOC, PSEUDO_DATA, has_pseudo_data

#: In minibatches the rows whose pseudo-observations give q(ε): at least so many, and so many for each inducing feature.
MIN_ROWS, ROWS_PER_FEATURE = 500, 2

#: What lets components share one q(ε).
SHARED_IF = (
    'let npgp.observe state their sum, f(X) + g(X), of whitened SparseGPs whose first block is "dense", drawn outside '
    "loops, in one latent value and beside no discrete site, in batches of more rows than inducing features"
)

_OF_KERNEL = "q(ε) is given by pseudo-data, so that it depends on the kernel, which the model says"


class AutoSparseGP:
    """
    A guide derived from a model with :class:`~npgp.SparseGP` components:

    .. code-block:: python

        guide = npgp.AutoSparseGP(model)
        svi = SVI(model, guide, npgp.adam(0.01), TraceMeanField_ELBO())

    Each component gets its structured q(ε), which follows the other latent sites; these are left to other guides::

        AutoSparseGP(model, partial(AutoNormal, init_scale=0.05))               an autoguide, and its options
        AutoSparseGP(model, [hand_written, AutoNormal])                         by hand for the sites that this samples
        AutoSparseGP(model, [AutoDelta(handlers.block(model, expose=["lengthscale"])), AutoNormal])

    By default one Gaussian in unconstrained space is for the smallest of the sites that q(ε) can follow, as long as
    these have 200 entries together (50 where no q(ε) is given rows), in the model's order (parameters ``joint_loc`` and
    ``joint_scale_tril``), and a normal distribution for each entry of the rest (``name_auto_loc``,
    ``name_auto_scale``), or of all if q(ε) is independent. These keep no arrays, so the guide may run inside ``jit``
    and ``vmap``. They start at medians of the prior (of one without draws, such as ``ImproperUniform``, where
    ``init_to_uniform`` does), and at the mode of what else is observed where something is, in the same plate: inputs
    with errors at their measurements. NumPyro's autoguides compute and keep some arrays at their first call, which
    therefore is outside; they start at medians of the prior unless their ``init_loc_fn`` is given.

    Use ``TraceMeanField_ELBO``, which takes KL divergences in closed form; ``Trace_ELBO`` is right too, and noisier. To
    start NUTS where SVI ended: ``NUTS(model, init_strategy=init_to_value(values=guide.median(params, X, y)))``, with
    ``handlers.substitute(model, params)`` for the model if it has ``numpyro.param`` hyperparameters.

    **Dependence.** A level and the mean of f trade off in the posterior, and so do a kernel's hyperparameters and f's
    values, and components that are summed. Where q(ε) is independent of them, intervals are far too narrow. So the
    other continuous sites are drawn first, and q(ε) follows them:

    - ``"sites"``, the default where there is something to follow or components meet: q(ε) is the posterior of all
      components given a pseudo-observation of each row's whole predictor, be it a sum, a mix or an effect of groups,
      in any order of drawing; it follows all other sites by that posterior's own algebra, those in plates over rows
      too. For Gaussian noise the data themselves are the pseudo-observations, and nothing of q(ε) is trained; else
      parameters are two numbers a row, ``y.site_loc`` and ``y.site_scale`` in units of ``y.site_unit``, which start at
      the likelihood's modes. In minibatches these are of some rows: ``npgp.fit`` chooses 500, or twice as many as there
      are inducing features if these are more; by ``SVI`` alone they are those of the guide's first call. Each stands
      for others too, by the noise that is learned for it; for Gaussian noise that is in units of the likelihood's. For
      predictions the guide takes the rows trained on, which ``npgp.fit`` puts among the parameters (:meth:`with_rows`).
      Of several blocks the first are jointly Gaussian if they are dense, and each other block is by itself.
    - ``"pseudo-data"``, for components that do not have that: those in minibatches of fewer rows than inducing
      features, inside ``jit``, or with latent sites in the plate that is subsampled; those whose values
      :func:`npgp.sample` samples, of which the data alone do not say what they are (``dependence="sites"`` gives them
      sites too); and those whose kernel, or statement's numbers, depend on a GP (``print(guide)`` says which, and
      why). q(ε) is the posterior given a value for each inducing value, and these values' noise, under the prior that
      the hyperparameters drawn make. The values, and the logarithm of the noise's scale, are affine in t, the other
      sites' unconstrained values less their guide's mean, in the model's order. Parameters are ``name.u.pseudo_loc``,
      ``pseudo_scale``, ``pseudo_lower`` (of dense blocks), ``unit``, ``coupling`` and ``noise_coupling``. Blocks that
      move the mean only, unwhitened components and :class:`~npgp.VNNGP` have coupled means instead. Training takes ten
      thousand steps where it takes hundreds with sites.
    - ``"coupled"``: the mean is ``m + C t``, with parameters C, ``name.u.coupling`` of shape (M, T), beside
      ``name.u.loc`` and ``name.u.scale_tril``; t are divided by their guide's standard deviation where that is
      Gaussian. For where a step may cost no more.
    - ``"independent"``: ``name.u.loc`` and ``name.u.scale_tril`` alone; so it is by default if there is nothing to
      follow, and no component to share q(ε) with.

    Components that are not given rows are independent given t: where these meet in a sum, or functions of a plate are
    mixed by a matrix, intervals may be several times too narrow, and a ``UserWarning`` at the guide's first call names
    them and the way out. So it does where values sampled by :func:`npgp.sample` of one component are in the offset of
    another, or those of several in one parameter of an observation by ``numpyro.sample``; but not in a ``scan``.

    Sites that q(ε) does not follow where it is not given rows:

    - those in plates over rows of data: plates at ``dim=-1`` around ``npgp.observe`` and ``npgp.sample``, subsampled
      ones, and, unless a site is named in ``couple``, plates with as many members as these, and sites of more than 50
      entries with as many, such as those of a scan over rows;
    - where t would have more than 200 entries, sites with more than 50, unless named in ``couple``: a warning says so;
    - and never discrete sites, those without a spread (``AutoDelta``), and those whose prior depends on a GP.

    **New rows.** Latent sites in the plate over rows of data have an autoguide's posterior for the rows trained on.
    Where nothing in that plate is observed, as in ``Predictive(model, guide=guide, params=params)(key, X_new)``, rows
    are new, as many as there are, and the model draws these sites from their prior; :func:`npgp.posterior` needs none.
    For the rows trained on give their observations too: ``Predictive(model, guide.sample_posterior(key, params, X, y,
    sample_shape=(1000,)), params=params)(key, X)``. With all that was observed in training, rows are taken for these,
    and other observations are an error where the rows trained on are among ``params``;
    with some of it, an autoguide's sites are unknown, which is an error. A guide by hand is run with whatever rows
    there are, as an encoder. A site outside that plate with as many members as there are rows keeps its trained values,
    and a warning says so where nothing is observed.

    NumPyro's autoguides by themselves, ``AutoNormal(model)`` say, take ε for ordinary latent values. The bound is then
    on the evidence of what the model says without a guide, as under NUTS: ``p(y_n | ε)`` row by row (FITC), which may
    be above the GP's.

    :param model: the model.
    :param guide: for the other latent sites: an autoguide class (or a partial of one), a guide for these sites, written
        by hand or an autoguide's instance, or a list of guides, each for its own sites, where only the last may be a
        class: it is made for the model with its GPs, and the sites of the guides before it, hidden.
    :param dependence: how q(ε) follows the other sites: ``"sites"``, ``"pseudo-data"``, ``"coupled"``, or
        ``"independent"``; the first where there is something to follow if omitted. ``"sites"`` itself gives every
        component that may have it the posterior given rows, though there be nothing to follow.
    :param couple: names of the sites that q(ε) follows; all that it can if omitted.
    :param joint: whether components that meet in one sum share one q(ε). False gives each its own, by pseudo-data, and
        accepts that without a warning.
    :raises TypeError: if ``guide`` is none of these, or an autoguide that uses the model's density; if ``couple``
        is no list of names; and if ``joint`` is neither true nor false.
    :raises ValueError: for another word for the dependence, and for ``couple`` where q(ε) is independent. At the first
        call, for an ``observe`` of a component beside sampled values of the same one: its ELBO would be no bound.
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable | Sequence[Callable] | None = None,
        *,
        dependence: str | None = None,
        couple: Sequence[str] | None = None,
        joint: bool = True,
    ):
        self.model = model
        if dependence is not None:
            checks.one_of(dependence, "dependence", ("pseudo-data", "sites", "coupled", "independent"))
        if couple is not None and dependence == "independent":
            raise ValueError(
                'couple names sites for q(ε) to follow, but dependence="independent" says that it is to none.'
            )
        #: How q(ε) depends on the other sites, as asked for; ``None`` for the default.
        self.dependence = dependence
        kernel = dependence in (None, "pseudo-data", "sites")
        self._coupling = None if dependence == "independent" else Coupling(couple, kernel)
        self._by_rows = joint and dependence in (None, "sites")
        self._always = dependence == "sites"  # by rows, though there be nothing to follow
        if not isinstance(joint, bool):
            raise TypeError(f"joint is {checks.shown(joint)}; it must be True or False.")
        self._joint = joint and dependence != "independent"
        self._covered: set[str] = set()
        self.hidden_model = Hidden(under(unseen=True)(model), self._is_hidden)
        #: The guide of npgp's own for all other sites, which keeps nothing; ``None`` for guides of the user's.
        self._own: type[Beside] | None = None
        if guide is None or (isinstance(guide, type) and issubclass(guide, Beside)):
            self._own, guide = guide or Gaussians, ()
        parts: list[Any] = list(guide) if isinstance(guide, (list, tuple)) else [guide]
        for i, part in enumerate(parts):
            _check_part(part, last=i + 1 == len(parts))
        #: The autoguide for what is left, if there is one.
        self._auto: AutoGuide | None = None
        if parts and _is_factory(parts[-1]):
            self._auto = _made(parts.pop(), self.hidden_model)
        self._parts = parts
        #: What is known of the model, since the first call.
        self._structure: Structure | None = None
        #: By first site, why a component has no q(ε) given rows.
        self._why: dict[str, str] = {}
        #: In minibatches, the rows whose pseudo-observations give q(ε).
        self._rows: TrainedRows | None = None
        #: Sites of a part of their rows in each step of a training, though the guide's first call may have all.
        self._in_parts: set[str] = set()

    def _is_hidden(self, msg: Message) -> bool:
        """What the autoguide for what is left must not see."""
        if msg["type"] == "deterministic":  # for its sake the autoguide would keep the arguments of its first call
            return True
        return msg["type"] == "sample" and (is_gp_site(msg) or is_observation(msg) or msg["name"] in self._covered)

    def _known(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Structure, UnknownRows]:
        """What is known of the model, looked at in the first call; and the sites whose rows at hand are unknown."""
        new = self._structure is None
        structure = self._setup(*args, **kwargs) if self._structure is None else self._structure
        guides = any(isinstance(part, _AUTOMATIC) for part in (self._auto, *self._parts))
        if not (guides and (structure.local or structure.like_rows) and under_predictive("guide")):
            return structure, UnknownRows(set(), {}, set(), set())
        try:
            return structure, structure.unknown_rows(survey(self.model, {}, args, kwargs), new)
        except ValueError:
            if new:
                self._structure = None  # it counts as no call
            raise

    def _setup(self, *args, **kwargs) -> Structure:
        """Find the component sites, and which latent sites the model has beside them; nothing is computed."""
        apart: list[str] = []
        structure: Any = None
        given_rows: list[Group] = []

        def look():
            nonlocal apart, structure, given_rows
            with Hidden(), handlers.trace() as sites, handlers.seed(rng_seed=0), under(unseen=True):
                self.model(*args, **kwargs)
            for name, msg in sites.items():
                if msg["type"] == "deterministic" and isinstance(msg["value"], NoArray):
                    raise TypeError(
                        f"numpyro.deterministic {name!r} is {msg['value']!r}; it must be an array, as "
                        f"npgp.sample({name!r}, f(X)) gives one; Predictive has the values of an observe as 'y.latent'."
                    )
            if self._coupling is not None:
                self._coupling.look(self.model, sites, args, kwargs)
            sampled = sampled_into(self.model, sites, args, kwargs)
            if self._by_rows:
                follows = self._always or (self._coupling is not None and self._coupling.any)
                groups = self._given_rows(sites, args, kwargs, sampled)
                given_rows = [group for group in groups if follows or meet_in(group, sites)]
            members = {site for group in given_rows for site in group.sites}
            apart = self._independent(sites, sampled, members) if self._joint else []
            apart += [sentence for group in given_rows if (sentence := dear(group, sites)) is not None]
            structure = Structure.of(sites, given_rows, self._own is not None)

        jax.eval_shape(look)
        for sentence in apart:
            warnings.warn(sentence, UserWarning, stacklevel=2)
        if self._own is not None:
            together = self._coupling.together(bool(given_rows)) if self._coupling and self._own is Gaussians else ()
            self._parts = [self._own(self.model, structure.beside, together)]
        self._structure = structure
        return structure

    def _given_rows(
        self, sites: dict[str, Message], args: tuple, kwargs: dict[str, Any], sampled: dict[str, Numbers]
    ) -> list[Group]:
        """The components whose q is given by the rows of their statements; :attr:`_why` says why others' is not."""
        draws = {names[0]: info_of(sites[names[0]]).function for names in blocks_of(sites).values()}
        after_gp = dependent(self.model, draws, args, kwargs) if len(draws) > 1 else set()
        numbers = {name: numbers.all for name, numbers in sampled.items()}
        parts = self._in_parts | in_parts(sites)
        # Of latent values in a subsample of a plate a later step has others.
        latent = sorted(parts - said_of_rows(sites).keys())
        unknown = f"{latent[0]} has a part of its entries in each step" if latent else ""
        if any(map(is_traced, jax.tree.leaves((args, kwargs)))):
            unknown = "the guide's first call, which has a part of the rows, is inside jit"
        excluded = dict.fromkeys(parts, unknown) if unknown else {}
        found, self._why = by_rows(sites, after_gp, numbers, observed=not self._always, excluded=excluded)
        if found and parts and not unknown:
            self._rows = TrainedRows.of_call(self.model, args, kwargs)
        return found

    def _independent(self, sites: dict[str, Message], sampled: dict[str, Numbers], shared: set[str]) -> list[str]:
        """Sentences about components that share no q though they meet."""
        latent = {name for name, msg in sites.items() if msg["type"] == "sample" and not msg["is_observed"]}
        way_out = "leave dependence at its default" if not self._by_rows else SHARED_IF
        return [
            f"q(ε) takes for independent {words}: intervals may be far too narrow. To mend it, {way_out}; to accept "
            "it, AutoSparseGP(model, joint=False)."
            for words in dict.fromkeys(meetings(sites, latent, shared, sampled))
        ]

    def __repr__(self):
        words = [f"AutoSparseGP of {name_of(self.model)}"]
        if (structure := self._structure) is None:
            return f"<{words[0]}, not called yet>"
        shared = [[site.rsplit(".", 1)[0] for site in group.sites] for group in structure.by_rows]
        what = "the rows" if self._rows is None else "some rows"
        words += [f"{', '.join(names)}: one q(ε), the posterior given {what} of their statements" for names in shared]
        own = [name for name in self.components if not any(name in names for names in shared)]
        why = {site.rsplit(".", 1)[0]: f", because {reason}" for site, reason in self._why.items()}
        words += [f"{name}: a q(ε) of its own{why.get(name, '')}" for name in own]
        if own and self._coupling is not None and self._coupling.sizes:
            words.append(f"q(ε) of its own follows {', '.join(self._coupling.sizes)}")
        if structure.others:
            words.append(f"other sites, by {', '.join(map(name_of, self._all_parts()))}: {', '.join(structure.others)}")
        return "\n  ".join(words)

    @property
    def components(self) -> list[str]:
        """Names of the model's GP components; none before the first call."""
        sites = () if self._structure is None else self._structure.whitened
        return list(dict.fromkeys(site.rsplit(".", 1)[0] for site in sites))

    def __call__(self, *args, **kwargs) -> dict[str, jax.Array]:
        """
        Run the guide with the model's arguments.

        :return: the values of the latent sites.
        :raises ValueError: for a latent site that no guide covers, that two do, or that is not the model's.
        """
        sites = self._run(*args, **kwargs)
        return {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}

    def _run(self, *args, **kwargs) -> dict[str, Message]:
        """Run the guide: its sites, and the model's deterministic ones."""
        structure, rows = self._known(args, kwargs)

        def choose(name: str, key: jax.Array) -> jax.Array:
            return survey(self.model, {}, args, kwargs)[name]["value"]

        points = {n: numpyro.param(n, partial(choose, n), **{CHOSEN: True}) for n in structure.chosen}
        with handlers.substitute(data=points):  # all runs of the model have the same, in a training's first call too
            return self._run_at_points(structure, rows, args, kwargs)

    def _run_at_points(
        self, structure: Structure, rows: UnknownRows, args: tuple, kwargs: dict[str, Any]
    ) -> dict[str, Message]:
        rest, known = self._run_parts(structure, args, kwargs)
        by_auto = {n for n, site in rest.items() if isinstance(site["part"], _AUTOMATIC)}
        of_rows = {name: site["value"] for name, site in rest.items() if site["type"] == "sample"}
        rest = {n: site for n, site in rest.items() if n not in rows.left_out or n not in by_auto}
        for name in sorted(rows.unclear.keys() & by_auto):
            raise ValueError(rows.unclear[name])
        taken = sorted(rows.taken & by_auto)
        if taken and (key := TrainedRows.given(self.model).unlike(args, kwargs)):
            name = taken[0]
            raise ValueError(
                f"{name!r} is local to rows, and {key} has other observations than in training, whose rows alone an "
                f"autoguide knows: leave {key} out for new rows, which have {name!r} from the prior, or write a guide "
                f"of {name!r} by hand, an encoder."
            )
        for name in sorted(rows.perhaps & by_auto):
            warnings.warn(
                f"{name!r} has as many members as there are rows, and its values are those trained: if it is local to "
                "rows and these are new, they are wrong. Then sample it in the plate around the observations, and new "
                "rows have theirs from the prior.",
                UserWarning,
                stacklevel=2,
            )
        followed = NOTHING
        own = structure.whitened.keys() - {site for group in structure.by_rows for site in group.sites}
        if own and self._coupling is not None and (t := self._coupling.values(rest, known)) is not None:
            followed = Followed(t, self._coupling.pseudo_data)
        samples = {name: site["value"] for name, site in rest.items() if site["type"] == "sample"}

        def hidden(msg: Message) -> bool:
            if msg["type"] == "sample":
                return msg["is_observed"] or not (is_gp_site(msg) or msg["name"] in samples)
            # ``inspect`` asks whether all is masked, and questions of ours have a dot.
            return msg["type"] not in ("param", "plate", "mutable", "inspect") and "." not in msg["type"]

        # Substituted as well, for the sake of sites inside NumPyro's control flow.
        drawn: dict[str, Part] = {}
        if structure.by_rows:
            other = sorted(rows.left_out | rows.unclear.keys() | rows.perhaps)
            seen = self._trained_on(structure, rest, of_rows, other, args, kwargs)
            for share in structure.by_rows:
                drawn |= GivenRows(share, seen).draw()
        rerun = Rerun(handlers.substitute(self.model, data=samples), rest, {n: part.value for n, part in drawn.items()})
        with Hidden(hides=hidden), handlers.trace() as sites, under(followed=followed, shared=drawn):
            rerun(*args, **kwargs)
        if not under_predictive("guide"):  # under Predictive, what was observed is latent
            check_cover(rest, rerun.latent)
        return {n: site for n, site in sites.items() if site["type"] == "deterministic" or not hidden(site)}

    def _trained_on(
        self,
        structure: Structure,
        rest: dict[str, Message],
        values: dict[str, jax.Array],
        other: list[str],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> dict[str, Message]:
        """
        The survey of the rows trained on: those among the parameters, or of this call if these have none.

        :param structure: what is known of the model.
        :param rest: what other guides have sampled.
        :param values: all that they have sampled, of the rows trained on.
        :param other: sites that say that this call's rows are, or may be, others.
        """
        model, stored = self.model, TrainedRows.given(self.model)
        stored = self._rows if stored.arguments is None and self._rows is not None else stored
        if stored.arguments is not None:
            # Inside jit the guide knows numbers that are traced among the parameters.
            args, kwargs = stored.in_call(*(self._rows or stored).in_call(args, kwargs))
            by_hand = [n for n in structure.local if n in rest and not isinstance(rest[n]["part"], _AUTOMATIC)]
            if by_hand:  # an encoder has other values for them
                others = {name: value for name, value in values.items() if name not in by_hand}
                with Hidden(hides=is_no_parameter), handlers.substitute(data=others):
                    again, _ = self._run_parts(structure, args, kwargs)
                values = values | {name: again[name]["value"] for name in by_hand}
        else:
            model = Rerun(model, rest)
        if stored.arguments is not None or not other:
            seen = survey(model, values, args, kwargs)
            latent = [name for name, msg in seen.items() if msg["type"] == "sample" and not msg["is_observed"]]
            known = {*values, *structure.others}
            other = [n for n in latent if not (n in known or is_gp_site(seen[n]) or is_auxiliary(seen[n]))]
        if other:
            raise ValueError(
                f"{other[0]!r} is not observed here, or of other rows, and q(ε) is the posterior given the rows "
                "trained on, which params has not: take params of npgp.fit's result, or guide.with_rows(params, X, y) "
                "with the rows trained on."
            )
        if stored.arguments is None and (batches := in_parts(seen) & said_of_rows(seen).keys()):
            raise ValueError(
                f"{min(batches)!r} has a part of its rows here, and q(ε) is the posterior given all, as the guide's "
                "first call had: train by npgp.fit, or take a new guide whose first call has a part of the rows, too."
            )
        return seen

    @property
    def given_rows(self) -> bool:
        """Whether the q(ε) of any component is the posterior given pseudo-observations of rows."""
        return self._structure is not None and bool(self._structure.by_rows)

    def with_rows(self, params: Mapping[str, Any], *args, **kwargs) -> dict[str, Any]:
        """
        Trained parameters together with the rows trained on, which ``dependence="sites"`` needs where a call has
        others, as for predictions at new rows. ``npgp.fit`` does this itself.

        :param params: parameters, from ``svi.get_params(state)``.
        :param args: the model's arguments in training, observations included.
        :return: the parameters, and under ``"auto_rows"`` the arguments that have arrays or are whole numbers, by name;
            the same parameters where q(ε) needs no rows.
        :raises RuntimeError: before the guide's first call.
        """
        self._known_by_now("with_rows")
        if not self.given_rows:
            return dict(params)
        rows = TrainedRows.of_call(self.model, args, kwargs) if self._rows is None else self._rows
        return {**params, ROWS_TRAINED_ON: rows.arguments}

    def choose_rows(
        self, first_rows: Callable | None, stored: Mapping[str, Any] | None, static_kwargs: Mapping[str, Any]
    ) -> None:
        """
        Choose the rows whose pseudo-observations give q(ε) in minibatches, where a training begins.

        :param first_rows: arguments of the model with so many of the first steps' rows; ``None`` where steps take all.
        :param stored: the rows of the training that this one goes on from.
        :param static_kwargs: further arguments of the model.
        """
        if first_rows is None:
            if self._rows is not None:  # of an earlier training
                self._structure, self._rows, self._in_parts = None, None, set()
            return
        self._structure, self._rows = None, None
        found: list[tuple[int, bool]] = []

        def call(count: int) -> tuple[tuple, dict[str, Any]]:
            args, kwargs = first_rows(count)
            return args, {**kwargs, **static_kwargs}

        def look():
            sites = survey(self.model, {}, *call(1))
            size = sum(jnp.size(msg["value"]) for msg in sites.values() if is_inducing(msg))
            self._in_parts = in_parts(sites)
            found.append((size, any(plate_draws(msg) for msg in sites.values() if msg["type"] == "plate")))

        jax.eval_shape(look)
        ((size, draws),) = found
        args, kwargs = call(1 if draws else max(MIN_ROWS, ROWS_PER_FEATURE * size))
        if stored is not None:
            args, kwargs = TrainedRows(self.model, stored).in_call(args, kwargs)
        self._setup(*args, **kwargs)

    def of_other_sites(self, *args, **kwargs) -> None:
        """Run the guides for other sites alone."""
        structure, _ = self._known(args, kwargs)
        self._run_parts(structure, args, kwargs)

    def _run_parts(
        self, structure: Structure, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[dict[str, Message], dict[str, Spread]]:
        """The sites of all other guides, each with its guide under ``"part"``; and what q(ε) has to know of them."""
        rest: dict[str, Message] = {}
        known: dict[str, Spread] = {}
        for part in [*self._parts, *([] if self._auto is None else [self._auto])]:
            if part is self._auto:
                self._covered |= {name for name, site in rest.items() if is_latent(site)}
                if self._covered.issuperset(structure.others):
                    continue
            # NumPyro would check the factors it has made itself, each operation of it a program.
            unchecked = numpyro.validation_enabled(False) if isinstance(part, AutoContinuous) else nullcontext()
            with Hidden(hides=is_restated), handlers.trace() as sites, unchecked:
                try:
                    SameRows(part, rest)(*args, **kwargs)
                except NotImplementedError as error:
                    unknown = [sentence for name, sentence in structure.without_bijection.items() if name not in rest]
                    raise (ValueError(unknown[0]) if unknown else error) from None
            twice = [name for name, site in sites.items() if is_latent(site) and name in rest]
            if twice:
                raise ValueError(f"{name_of(rest[twice[0]]['part'])} and {name_of(part)} both sample {twice[0]!r}.")
            rest |= {
                name: {**site, "part": part}
                for name, site in sites.items()
                if site["type"] == "plate" or is_latent(site)
            }
            if self._coupling is not None:
                known |= spreads(part, sites)
        return rest, known

    def sample_posterior(self, rng_key, params, *args, sample_shape: tuple[int, ...] = (), **kwargs):
        """
        Draws from the guide: whitened values ε, the other latent sites, and what of the model is deterministic given
        these. Plates that draw a subsample of their rows take all of them, so that draws line up row by row.

        Latent sites in the plate over rows of data are of the rows trained on, and among the draws if these come with
        their observations. Without observations rows are new ones, and such sites are left to the model's prior.

        :param rng_key: random key.
        :param params: parameters, from ``svi.get_params(state)``.
        :param args: the model's arguments.
        :param sample_shape: shape put before each site's own.
        :raises KeyError: for a parameter that ``params`` lacks.
        """

        given = trained(params)

        def draw(key):
            guide = Trained(handlers.seed(self._run, key), traced_inside(given))
            sites = AllRows(handlers.mask(guide, mask=False))(*args, **kwargs)
            return {name: site["value"] for name, site in sites.items() if site["type"] in ("sample", "deterministic")}

        if not sample_shape:
            checks.random_key(rng_key)
        size = math.prod(sample_shape)
        # Given rows, each draw has the projections of all of them.
        by_rows = (self._structure or self._setup(*args, **kwargs)).by_rows
        together = max(n for n in range(1, 17) if size % n == 0) if by_rows else size

        def draws():
            if not sample_shape:
                return draw(rng_key)
            keys = jax.random.split(rng_key, sample_shape)
            keys = keys.reshape(-1, *keys.shape[len(sample_shape) :])
            found = jax.vmap(draw)(keys) if together == size else lax.map(draw, keys, batch_size=together)
            return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), found)

        set_up(self, args, kwargs)
        return one_program(draws)

    def median(self, params, *args, **kwargs) -> dict[str, jax.Array]:
        """
        Posterior medians of the latent sites; of the whitened values, these are the means. Where q(ε) is given by
        pseudo-data, the means where the other sites have their medians.

        :param params: parameters, from ``svi.get_params(state)``.
        :param args: the model's arguments, which means given by pseudo-data need.
        :raises NotImplementedError: if one of the guides offers none, for unwhitened components, and if q(ε) follows a
            site that is not Gaussian in unconstrained space.
        :raises TypeError: without the model's arguments where they are needed.
        """
        structure = self._known_by_now("median")
        found = self._of_parts("median", "median(params, ...)", (params,), args, kwargs)
        blocks = self._blocks("median", params)
        found |= {site: params[f"{site}.{LOC}"] for site in blocks if not self._of_kernel(params, site)}
        given_data = [site for site in blocks if self._of_kernel(params, site)]
        if not given_data:
            return found
        self._need_arguments("median(params, ...)", args, kwargs)
        given = trained(params)

        def means() -> dict[str, jax.Array]:
            of_others = {name: found[name] for name in structure.others}
            guide = handlers.substitute(Trained(handlers.seed(self._run, 0), traced_inside(given)), data=of_others)
            sites = AllRows(handlers.mask(guide, mask=False))(*args, **kwargs)
            return {site: base_of(sites[site]["fn"]).loc for site in given_data}

        return found | one_program(means)

    def quantiles(self, params, quantiles: ArrayLike, *args, **kwargs) -> dict[str, jax.Array]:
        """
        Posterior quantiles of the latent sites, along a leading axis. Where q(ε) follows other sites, those of the
        whitened values are over all values of these: of coupled means ``N(m, S + C R Cᵀ)`` with R the correlations of
        t; given pseudo-data they are of 1000 draws, always the same.

        :param params: parameters, from ``svi.get_params(state)``.
        :param quantiles: numbers between 0 and 1. A block that moves the mean only has the prior's standard deviation,
            1, as in its draws, beside what it follows.
        :param args: the model's arguments, which draws given pseudo-data need.
        :raises NotImplementedError: as :meth:`median`.
        :raises TypeError: as :meth:`median`.
        """
        levels = jnp.atleast_1d(jnp.asarray(quantiles, jnp.result_type(float)))
        structure, call = self._known_by_now("quantiles"), "quantiles(params, levels, ...)"
        found = self._of_parts("quantiles", call, (params, levels), args, kwargs)
        if any(self._of_kernel(params, site) for site in structure.whitened):
            blocks = self._blocks("quantiles", params)
            self._need_arguments(call, args, kwargs)
            draws = self.sample_posterior(jax.random.key(0), params, *args, sample_shape=(1000,), **kwargs)
            return found | {site: jnp.quantile(draws[site], levels, axis=0) for site in blocks}
        sizes = {} if self._coupling is None else self._coupling.sizes
        R = correlations(self._all_parts(), params, sizes)
        for site in self._blocks("quantiles", params):
            loc, suffix = params[f"{site}.{LOC}"], structure.scales[site]
            scale = 1.0 if suffix is None else params[f"{site}.{suffix}"]
            if suffix == "scale_tril":
                scale = jnp.linalg.norm(scale, axis=-1)
            if sizes:
                C = params[f"{site}.{COUPLING}"]
                scale = jnp.sqrt(jnp.square(scale) + jnp.sum(linalg.matmul(C, R) * C, axis=-1))
            found[site] = normal_quantiles(loc, scale, levels)
        return found

    def _of_parts(self, method: str, call: str, given: tuple, args: tuple, kwargs: dict) -> dict[str, jax.Array]:
        structure = self._known_by_now(method)
        every = all(self._of_kernel(given[0], site) for site in structure.whitened)
        if self._coupling is not None and self._coupling.unknown and not every:
            raise NotImplementedError(
                f"{method}: q(ε) follows {self._coupling.unknown[0]!r}, which is not Gaussian in unconstrained space; "
                "take those of draws from sample_posterior."
            )
        found: dict[str, jax.Array] = {}
        for part in self._all_parts():
            if isinstance(part, Gaussians):
                if part.needs_arguments:
                    self._need_arguments(call, args, kwargs, "supports of sites depend on them")
                found |= getattr(part, method)(*given, *args, **kwargs)
                continue
            try:
                if not hasattr(part, method):
                    raise NotImplementedError
                found |= getattr(part, method)(*given)
            except NotImplementedError:
                raise NotImplementedError(
                    f"{method}: {name_of(part)}, a guide for other sites, offers none (hand-written ones may); take "
                    "those of draws from sample_posterior."
                ) from None
        return {name: value for name, value in found.items() if name in structure.others}

    def _known_by_now(self, method: str) -> Structure:
        if self._structure is None:
            raise RuntimeError(f"{method}: the guide does not know its sites yet; call it once, as svi.init does.")
        return self._structure

    def _all_parts(self) -> list[Any]:
        """The guides for other sites that have any."""
        others = () if self._structure is None else self._structure.others
        left = self._auto is not None and not self._covered.issuperset(others)
        return [*self._parts, *([self._auto] if left else [])]

    def _need_arguments(self, call: str, args: tuple, kwargs: dict[str, Any], why: str = _OF_KERNEL) -> None:
        if not (args or kwargs) and inspect.signature(self.model).parameters:
            raise TypeError(f"{call} lacks the model's arguments: {why}.")

    def _of_kernel(self, params, site: str) -> bool:
        """Whether q(ε) of a site depends on the kernel."""
        by_rows = () if self._structure is None else self._structure.by_rows
        return has_pseudo_data(params, site) or any(site in group.sites for group in by_rows)

    def _blocks(self, method: str, params) -> list[str]:
        structure = self._known_by_now(method)
        coupled = self._coupling is not None and bool(self._coupling.sizes)
        for site, whitened in structure.whitened.items():
            if not (whitened or self._of_kernel(params, site)):
                raise NotImplementedError(
                    f"{method}: the parameters of {site} are unwhitened, so the {method} of its values depends on the "
                    "kernel; use npgp.posterior(...).q."
                )
            suffixes: list[Any] = [LOC, structure.scales[site], coupled and COUPLING]
            if self._of_kernel(params, site):
                suffixes = list(PSEUDO_DATA) if has_pseudo_data(params, site) else []
            for name in (f"{site}.{suffix}" for suffix in suffixes if suffix):
                if name not in params:
                    raise KeyError(f"{method}: params has no {name!r}.")
        return list(structure.whitened)


def set_up(guide: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """
    Call a guide once, outside programs, if it keeps arrays that it computes at its first call, as autoguides do.

    That is known of NumPyro's autoguides that have not been called. Of objects of other classes it is supposed.

    :param guide: any guide.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    """
    if is_traced(jax.device_put(0.0)) or not any(map(_keeps, _made_of(guide))):
        return
    call = getattr(guide, "of_other_sites", guide)
    with one_model_at_a_time, Hidden(), handlers.mask(mask=False):  # no density is wanted
        handlers.seed(call, 0)(*args, **kwargs)


def _made_of(guide: Any) -> list[Any]:
    """The guides that a guide is made of, as far as that can be seen."""
    while isinstance(guide, (Handler, partial)):
        guide = guide.func if isinstance(guide, partial) else guide.fn
    if isinstance(guide, AutoSparseGP):
        return [x for part in (*guide._parts, guide._auto) if part is not None for x in _made_of(part)]
    if inspect.isfunction(guide):
        names = inspect.getclosurevars(guide)
        return [x for x in (*names.nonlocals.values(), *names.globals.values()) if isinstance(x, AutoGuide)]
    if inspect.ismethod(guide):
        return [x for x in vars(guide.__self__).values() if isinstance(x, AutoGuide)]
    return [guide]


def _keeps(guide: Any) -> bool:
    if isinstance(guide, AutoGuide):
        return guide.prototype_trace is None
    return not (isinstance(guide, Beside) or inspect.isroutine(guide))


#: Guides for other sites that draw them without regard to the model's arguments.
_AUTOMATIC = (AutoGuide, Beside)


#: Autoguides that follow the model's log density.
_USE_DENSITY = (AutoDAIS, AutoSemiDAIS, AutoLaplaceApproximation)


def _is_factory(part: Any) -> bool:
    return isinstance(part.func if isinstance(part, partial) else part, type)


def _made(factory: Callable, model: Callable) -> AutoGuide:
    """
    An autoguide, which starts at the prior's medians if it is not told where.

    NumPyro's own start is uniform in unconstrained space: scales of 1/7 to 7, whatever their prior, from which
    exponential likelihoods do not find back.
    """
    told = isinstance(factory, partial) and "init_loc_fn" in factory.keywords
    takes = "init_loc_fn" in inspect.signature(factory).parameters
    return factory(model, init_loc_fn=init_to_median) if takes and not told else factory(model)


def _check_part(part: Any, last: bool) -> None:
    if not callable(part) or (_is_factory(part) and not last):
        raise TypeError(
            f"guide has {checks.shown(part)}; it must be an autoguide class (or a partial of one), a guide for some "
            "sites, or a list of guides of which the last may be a class."
        )
    made = part.func if isinstance(part, partial) else part
    if isinstance(made, _USE_DENSITY) or (isinstance(made, type) and issubclass(made, _USE_DENSITY)):
        raise TypeError(
            f"{name_of(made)} uses the model's density, of which it would not see the GPs and their observations; take "
            "AutoMultivariateNormal, a flow, or another guide that does not."
        )
