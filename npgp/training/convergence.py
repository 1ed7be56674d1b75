"""Warnings from the losses of a training."""

from __future__ import annotations

import numpy as np

#: Trainings of fewer steps are trials, of which nothing is said.
LEAST_STEPS = 500
#: What a loss may rise or fall by without a word: so much for each row, …
PER_ROW = 0.05
#: … this share of all that it moved by after the first tenth of the steps, …
SHARE = 0.15
#: … and so many of its own standard errors.
ERRORS = 5.0
#: What it may vary by from step to step for each row: batches of one row that a model fits vary by a few nats.
NOISE_PER_ROW = 10.0


class TrainingWarning(UserWarning):
    """
    A training that went nowhere, ended above where it had been or before the posterior had arrived, or had inducing
    points that are clearly too few.

    To do without: ``warnings.filterwarnings("ignore", category=npgp.training.TrainingWarning)``.

    .. code-block:: python

        import warnings

        with warnings.catch_warnings():
            # Stop where a training went nowhere.
            warnings.simplefilter("error", npgp.training.TrainingWarning)
            result = npgp.fit(svi, key, 50, X, y, progress=False)
    """


def verdict(losses: np.ndarray, num_rows: int) -> str | None:
    """
    A sentence, if a training went nowhere, or had not arrived yet.

    The loss is looked at as medians of tenths of the steps. It ended above where it had been if the last is above the
    least of them, and was still falling fast if it fell in the second half of the steps: in both cases by more than
    :data:`PER_ROW` for each row, one nat in all, a :data:`SHARE` of all that it moved by after the first tenth, and
    :data:`ERRORS` standard errors, from the differences of successive losses. If these are larger than
    :data:`NOISE_PER_ROW` for each row, it was astray all along.

    :param losses: negative ELBOs of all steps.
    :param num_rows: rows of the data; 0 if they are not known.
    """
    count = len(losses)
    if count < LEAST_STEPS:
        return None
    tenths = np.array_split(np.asarray(losses, np.float64), 10)
    levels = np.array([np.median(tenth) for tenth in tenths])
    deviations = np.array([_deviation(tenth) for tenth in tenths])
    errors = 1.2533 * deviations / np.sqrt(count / 10)  # of medians
    least = max(1.0, PER_ROW * num_rows, SHARE * np.ptp(levels[1:]))
    best, half, last = int(np.argmin(levels)), 5, 9

    def much(a: int, b: int) -> bool:
        return levels[a] - levels[b] > max(least, ERRORS * np.hypot(errors[a], errors[b]))

    if num_rows and deviations[last] > NOISE_PER_ROW * num_rows:
        return (
            f"after {count} steps the loss still varies by {deviations[last]:.3g} from one to the next, "
            f"{deviations[last] / num_rows:.3g} for each row, so gradients are noise: start nearer to the data, with a "
            "smaller init_scale, by init_params, or an init_loc_fn such as init_to_median; or take larger batches."
        )
    if much(last, best):
        then = (2 * best + 1) * count // 20
        return (
            f"the loss is {levels[last]:.6g} after {count} steps, and was {levels[best]:.6g} after {then}: take a "
            f"smaller learning rate, or one that decays, npgp.adam(rate, {count})."
        )
    if much(half, last):
        return (
            f"the loss was still falling after {count} steps, from {levels[half]:.6g} half-way to {levels[last]:.6g}: "
            "train on, with init_state=result.state; or start nearer to the data, with a smaller init_scale or by "
            "init_params; or take a higher learning rate."
        )
    return None


def _deviation(losses: np.ndarray) -> float:
    """Standard deviation of independent noise, robustly: trends and outliers do not count."""
    changes = np.diff(losses)
    return float(1.4826 * np.median(np.abs(changes - np.median(changes))) / np.sqrt(2))
