"""The notebooks: the sources run, and the committed files with outputs were made from these sources."""

import re
import warnings
from pathlib import Path

import jax.numpy as jnp
import jupytext
import nbformat
import numpy as np
import pytest
from loading import restored
from matplotlib import pyplot as plt
from numpyro import handlers

FOLDER = Path(__file__).parents[2] / "notebooks"
COURSE, GALLERY = sorted(FOLDER.glob("*.py")), sorted(FOLDER.glob("gallery/*.py"))

#: By notebook, passages and what stands in for them in a quick run.
SMALL = {
    name: [line.partition(" =>")[::2] for line in lines]
    for name, *lines in (
        block.splitlines() for block in (Path(__file__).parent / "small.txt").read_text().split("\n# ")[1:]
    )
}

each_notebook = pytest.mark.parametrize("source", COURSE + GALLERY, ids=lambda path: path.stem)


@pytest.fixture
def options():
    """Puts back what a notebook sets for the process: JAX's, matplotlib's, NumPy's and warnings' options."""
    with restored(), warnings.catch_warnings(), plt.rc_context(), np.printoptions():
        warnings.resetwarnings()  # a notebook's warnings are no errors
        yield


def small(source: Path) -> str:
    """A notebook's program with less data and fewer steps, of which its readers need not know."""
    text = source.read_text()
    for passage, instead in SMALL[source.stem]:
        assert text.count(passage) == 1, f"{source.name} has {passage!r} {text.count(passage)} times, small.txt once"
        text = text.replace(passage, instead.strip())
    return text


def test_passages_of_quick_runs_are_in_their_notebooks():
    assert sorted(SMALL) == [source.stem for source in COURSE]
    for source in COURSE:
        compile(small(source), source.name, "exec")


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.parametrize("source", COURSE, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(options, source, tmp_path, monkeypatch, capsys):
    # In this process, and not in one for each: imports, and the many small programs of all notebooks, happen once.
    monkeypatch.chdir(tmp_path)
    exec(compile(small(source), source.name, "exec"), {"__name__": "__main__"})
    assert not re.search(r"\bnan\b", capsys.readouterr().out)  # as a word: there is a data set called banana


@pytest.mark.parametrize("source", GALLERY, ids=lambda path: path.stem)
def test_the_gallery_has_data_and_a_model(options, source):
    """Up to the fit, which takes minutes: the model has a finite density of the data at draws from its prior."""
    page = source.read_text()
    names = {}
    exec(compile(page[: page.index("\ndata = (")], source.name, "exec"), names)
    (statement,) = re.findall(r"^data = \(.*\)$", page, re.MULTILINE)
    exec(statement, names)
    model, data = names["model"], names["data"]
    drawn = handlers.trace(handlers.seed(model, 1)).get_trace(*data)
    density = sum(jnp.sum(site["fn"].log_prob(site["value"])) for site in drawn.values() if site["type"] == "sample")
    assert np.isfinite(density)


@each_notebook
def test_committed_notebook_has_the_cells_of_the_source(source):
    def cells(notebook):
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    made = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    hint = f"run scripts/build_notebooks.py {source.stem}"
    assert cells(made) == cells(jupytext.read(source, fmt="py:percent")), hint


@each_notebook
def test_committed_notebook_was_executed_and_is_clean(source):
    path = source.with_suffix(".ipynb")
    assert path.stat().st_size < 400_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert all(cell.metadata == {} for cell in notebook.cells)
    assert "site-packages" not in path.read_text()


def test_every_committed_notebook_has_a_source():
    assert COURSE + GALLERY == sorted(path.with_suffix(".py") for path in FOLDER.rglob("*.ipynb"))
