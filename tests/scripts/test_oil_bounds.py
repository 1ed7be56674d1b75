"""oil_bounds.py: its numbers against each other and against the formula, and that it runs."""

import json

import jax
import loading
import numpy as np
import pytest
from figures import assert_picture

import npgp
from studies.gplvm.bounds import EVALUATION_DRAWS
from studies.gplvm.training import oil_flow

# The draws of x are all but its means, so that the bounds are compared at the same inputs.
TINY = ["--rows", "24", "--inducing", "4", "--latent-dim", "2", "--latent-scale", "1e-6", "--conditional", "prior"]
TINY += ["tight", "--seeds", "1", "--steps", "6", "--continue-steps", "2", "--draws", "2"]


@pytest.fixture
def study(tmp_path):
    """The script as a module."""
    return loading.script("oil_bounds")


def test_bounds_are_compared_at_equal_settings_and_at_equal_parameters(study, tmp_path, monkeypatch):
    path = tmp_path / "figures" / "report.json"
    arguments = [*TINY, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    report = study.main([*arguments, "--json", str(path)])
    assert json.loads(path.read_text()) == report
    for stage in ("independent", "continued"):
        assert list(report[stage]) == ["prior", "tight"]
        for conditional, (fit,) in report[stage].items():
            here = fit["bounds_here"]
            assert fit["elbo_per_row"] == pytest.approx(here[conditional])
            assert fit["gain_here"] > 0.1
            assert here["tight"] - here["prior"] == pytest.approx(fit["gain_here"], rel=1e-4)
            assert 0 <= fit["nn_errors"] <= 24 and 1 <= fit["relevant_dims"] <= 2
    # Two steps from where six have led are further than six.
    assert report["continued"]["prior"][0]["elbo_per_row"] > report["independent"]["prior"][0]["elbo_per_row"]
    assert_picture(tmp_path / "oil_bounds.png", least=300)

    # Runs are kept, and not used for other settings.
    def refuse(*args, **kwargs):
        raise RuntimeError("trains")

    monkeypatch.setattr(study.npgp, "fit", refuse)
    assert study.main(arguments) == report
    with pytest.raises(RuntimeError, match="trains"):
        study.main([*arguments, "--noise-start", "0.1"])


@pytest.mark.filterwarnings("ignore:CollapsedGPLVM.fit has not converged:RuntimeWarning")
def test_collapsed_bounds_at_equal_parameters(study, float64, tmp_path):
    args = study.parse([*TINY, "--runs", str(tmp_path), "--collapsed-steps", "6"])
    data = oil_flow(args)
    evaluate = study.collapsed_evaluator(args, data.Y)
    figures, params = study.fit_collapsed(args, data, evaluate, 0, "tight")
    here = figures["bounds_here"]
    assert list(here) == list(study.COLLAPSED) and len(figures["trace"]) == 7
    assert figures["elbo_per_row"] == here["tight"] == pytest.approx(figures["trace"][-1])
    assert figures["trace"][-1] > figures["trace"][0]
    # The last form loses nothing by Jensen's inequality, so that the formula, an average over draws, is about it.
    assert here["prior"] < here["tight"] < here["tight, m(x)"]
    gain = here["tight, m(x)"] - here["prior"]
    _, share, many = evaluate(params, jax.random.split(jax.random.key(1), 500))
    # The bound takes the first term, ½ D d/σ², in closed form, whose noise does not cancel that of the other then.
    noise = np.std(many) + 0.5 * data.Y.shape[1] * np.std(share)
    assert abs(np.mean(many) - gain) < 4 * noise / np.sqrt(EVALUATION_DRAWS)
    # Continued, from these parameters.
    more, _ = study.fit_collapsed(args, data, evaluate, 0, "prior", params)
    assert more["trace"][0] == pytest.approx(here["prior"]) and more["steps"] == 2


def test_gains_are_paired_by_seed(study, capsys):
    def fits(*bounds):
        rest = {"noise_variance": 0.1, "residual_over_noise": 0.2, "nn_errors": 1, "relevant_dims": 2}
        return [{"elbo_per_row": bound} | rest for bound in bounds]

    study.compare("title", {"prior": fits(5.0, 6.0, 7.0), "tight": fits(5.25, 6.5, 7.75)})
    # Differences .25, .5 and .75: their standard error is .25 / √3, where that of each bound is over .5.
    assert "+0.500 ± 0.144" in capsys.readouterr().out


def test_what_is_free_in_a_positive_parameter(study):
    args = study.parse(["--positive", "log", "--noise-start", "0.3", "--latent-dim", "2", "--inducing", "3"])
    assert args.latent_positive == "log"
    gplvm = study.make(args, np.random.default_rng(0).normal(size=(9, 3)), 0, "tight")
    assert gplvm.positive is study.POSITIVE["log"] and gplvm.latents.constraint is study.POSITIVE["log"]
    assert gplvm.start.noise_variance == 0.3 and type(gplvm.conditional) is npgp.Tight
