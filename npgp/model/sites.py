"""
The sites of this library in a NumPyro model: what marks them, how q reaches the model, and what handlers ask of them.

How q reaches the model. A guide samples the sites of a component's inducing values from q, and puts q in each site's
``infer`` dict; NumPyro's ``replay``, under which ``SVI`` runs the model, copies that dict from guide to model. So in
the model ``draw`` finds q there under SVI, and does not find it under NUTS or ``Predictive``. With q at hand a
statement stands for its share of the ELBO; without, for the generative model. Nothing variational is declared in the
model, which is complete by itself.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpyro

from npgp import checks
from npgp.contract import Handler, Message, ask, frames, mask_of, replayed
from npgp.sparse.conditionals import Conditional

# Keys of a site's ``infer`` dict.

#: Marks the latent sites of this library; holds q in a guide, and in the model under SVI.
Q = "npgp"
#: The draw that a site belongs to, for the model to share with the automatic guide, and for :func:`npgp.posterior`.
FUNCTION = "npgp.function"
#: Marks observations of GP values.
OBSERVATION = "npgp.observation"
#: Whether the parameters of q are those of whitened values.
WHITENED = "npgp.whitened"
#: Of a residual's site: the GP values that the automatic guide has computed from it.
VALUE = "npgp.value"
#: Of an observed site: its rows were one event, and are a dimension of the batch that no plate counts.
ROWS_OF_EVENT = "npgp.rows_of_event"

# Keys of the message of a row table's ``param`` statement.

#: The numbers of the rows wanted.
ROWS = "npgp.rows"
#: Whether the value is these rows alone.
GATHERED = "npgp.gathered"

# Types of the nameless messages by which statements ask what they run under.

#: Is this the automatic guide, which runs the model?
CONTEXT = "npgp.context"
#: Is f to be drawn jointly over rows where observations are simulated?
JOINT = "npgp.joint"


def conditional_parameter(name: str, conditional: Conditional) -> jax.Array | None:
    """Declare the parameter that the conditional of a statement learns, if it has one."""
    if conditional.parameter is None:
        return None
    suffix, start, constraint = conditional.parameter
    return numpyro.param(f"{name}.{suffix}", start, constraint=constraint)


def is_gp_site(msg: Message) -> bool:
    """Whether a message is one of this library's latent sites, which a guide for the rest of the model leaves out."""
    return msg["type"] == "sample" and Q in (msg.get("infer") or {})


def is_observation(msg: Message) -> bool:
    """Whether a message is an observation of GP values, which is no latent site even where no data are given."""
    return msg["type"] == "sample" and OBSERVATION in (msg.get("infer") or {})


class Catch(Handler):
    """Keeps the message of the statement it encloses, which every handler then completes."""

    message: Message

    def __init__(self, type: str):
        super().__init__()
        self.type = type

    def process_message(self, msg):
        if msg["type"] == self.type:
            self.message = msg


def in_automatic_guide() -> bool:
    """Whether the model runs as the guide of :class:`npgp.AutoSparseGP`."""
    return ask(CONTEXT)


def approximation(site: str, msg: Message) -> Any:
    """
    What the guide's site had for q; ``None`` without a guide that has it.

    :param site: the site's name where it is stated, which handlers such as ``scope`` may change.
    :param msg: its message.
    :raises RuntimeError: if the guide has q, and the model is given the guide's value without it.
    """
    q = msg["infer"].get(Q)
    if q is None and not msg["is_observed"]:
        source = replayed(site)
        if source is not None and (source.get("infer") or {}).get(Q) is not None:
            raise RuntimeError(
                f"{msg['name']} has the guide's value but not the guide's q, so training would maximize another "
                "density than the ELBO: NumPyro's replay should copy the infer dict of each site from guide to model "
                "(npgp.contract.replayed); check which NumPyro this is, and what handlers are between model and SVI."
            )
    return q


def check_draw_context(site: str, msg: Message) -> None:
    """Raise ``ValueError`` if a site is drawn where handlers around would change the prior of f."""
    rows = [frame.name for frame in frames(msg) if frame.dim == -1]
    if rows:
        raise ValueError(
            f"{site} is drawn inside plate {rows[0]!r} at dim=-1, which is the dimension of rows: draw f outside it, "
            "and put plates over functions at dim=-2 or below."
        )
    mask, scale = mask_of(msg["fn"]), msg["scale"]
    masked = mask is not True and mask is not False
    scaled = scale is not None and (checks.is_traced(scale) or np.any(np.asarray(scale) != 1.0))
    if masked or scaled:
        cause = "handlers.mask" if masked else "a subsampled plate or handlers.scale"
        raise ValueError(f"{site} is drawn inside {cause}, which would change the prior of f: draw f outside it.")
