#!/usr/bin/env python
"""Make notebooks/**/*.ipynb from the .py beside them: run each from top to bottom and keep its outputs.

The .py files, in jupytext's percent format, are the source; edit those, not the .ipynb.

    .venv/bin/python scripts/build_notebooks.py            all notebooks
    .venv/bin/python scripts/build_notebooks.py 01         those whose name contains 01
    .venv/bin/python scripts/build_notebooks.py gallery    those of the gallery
"""

from __future__ import annotations

import base64
import io
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Arguments

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
#: Bytes; a larger file has pictures that are too fine, or too many of them.
MAX_SIZE = 400_000


def smaller(picture: str) -> str:
    """A PNG in base64, with a palette of 256 colors: a third of the bytes, and to the eye the same."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(written := io.BytesIO(), "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def build(source: Path) -> Path:
    """Run a notebook and write it with its outputs; the path written."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    folder = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=3600, resources=folder, record_timing=False, coalesce_streams=True).execute()
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec", "language_info")}
    notebook.metadata["language_info"] = {"name": "python"}
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i:02d}", {}
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise SystemExit(f"{source.name}, cell {i} writes to stderr:\n{output['text']}")
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = smaller(output["data"]["image/png"])
    text = nbformat.writes(notebook) + "\n"
    machine = [str(ROOT), str(Path.home()), sys.prefix]
    if found := [path for path in machine if len(path) > 1 and path in text]:
        raise SystemExit(f"{source.name}: the outputs name paths of this machine: {found}.")
    if len(text.encode()) > MAX_SIZE:
        raise SystemExit(f"{source.name}: {len(text.encode())} bytes, more than {MAX_SIZE}.")
    path = source.with_suffix(".ipynb")
    path.write_text(text)
    return path


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("name", nargs="?", default="", help="part of a notebook's name; all notebooks if omitted")
    name = parser.parse_args().name
    sources = [path for path in sorted(FOLDER.rglob("*.py")) if name in str(path.relative_to(FOLDER))]
    if not sources:
        raise SystemExit(f"no notebook in {FOLDER} has {name!r} in its path.")
    os.environ.pop("MPLBACKEND", None)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # factors of small matrices; several threads wait for each other
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # numpyro imports tqdm.auto, which wants ipywidgets
    for source in sources:
        began = time.perf_counter()
        path = build(source)
        seconds = time.perf_counter() - began
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size / 1000:.0f} kB, {seconds:.0f} s")


if __name__ == "__main__":
    main()
