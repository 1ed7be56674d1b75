"""Settings of the site, which ``scripts/docs`` builds. Every warning is an error there."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, ForwardRef

from sphinx.util import logging
from sphinx.util.nodes import make_refnode

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

project = "npgp"
copyright = "npgp developers"
author = "npgp developers"
release = version = importlib.import_module("npgp").__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "myst_nb",
]
# Formulas are set by MathJax: from files of the site, which this package of the group `docs` brings, so that the site
# reads the same without a network; else from the network.
if importlib.util.find_spec("sphinx-mathjax-offline") is not None:
    extensions.append("sphinx-mathjax-offline")
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "npgp"
html_static_path = ["_static"]
html_css_files = ["npgp.css"]
pygments_dark_style = "monokai"  # the theme's own underlines imports like links
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp"
copybutton_selector = "div:not(.output) > div.highlight pre"

# ---------------------------------------------------------------------------------------------------------------
# Pages in Markdown, and notebooks with the outputs that they are committed with

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True

# ---------------------------------------------------------------------------------------------------------------
# Docstrings

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
#: Types of others have no pages here.
OTHERS = "jax|jaxlib|numpy|np|numpyro|dist|optax|matplotlib|collections|typing|pathlib|os|arviz|threading"
THEIRS = (
    "Array|ArrayLike|NDArray|Callable|Sequence|Mapping|Iterable|Iterator|Path|PathLike|Figure|Any|Self|Method|SVI|SVIState"
    "|csr_array"
)
nitpick_ignore_regex = [(r"py:.*", rf"({OTHERS})\b.*"), (r"py:.*", f"({THEIRS})$")]


def copy_notebooks(app: Any = None) -> None:
    """Notebooks and tables of results live where they are made; the site's copies are not committed."""
    gallery, results = HERE / "gallery", HERE / "results"
    for folder in (gallery, results):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for path in sorted((ROOT / "notebooks").rglob("*.ipynb")):
        shutil.copy(path, gallery / path.name)
        picture = last_picture(path)
        if picture is not None:
            (gallery / f"{path.stem}.png").write_bytes(picture)
    for path in sorted((ROOT / "scripts" / "benchmarks" / "results").glob("*")):
        if path.suffix in (".md", ".png"):
            shutil.copy(path, results / path.name)


def last_picture(notebook: Path) -> bytes | None:
    """The last picture that a notebook shows."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [
        output.get("data", {}) for cell in cells for output in cell.get("outputs", [])
    ]
    found = [data["image/png"] for data in outputs if "image/png" in data]
    return base64.b64decode("".join(found[-1])) if found else None


copy_notebooks()

# ---------------------------------------------------------------------------------------------------------------
# What the code of pages prints and draws, as scripts/docs has kept it when it ran this code as tests

OUTPUTS = HERE / "_outputs"
KEPT = Path(os.environ.get("NPGP_PAGES") or ROOT / "out" / "pages")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Stands in the index for the first program of README.md, with what it prints.
_FIRST = "<!-- README: the first program -->"


def copy_outputs() -> None:
    shutil.rmtree(OUTPUTS, ignore_errors=True)
    OUTPUTS.mkdir()
    for picture in KEPT.glob("*.png"):
        shutil.copy(picture, OUTPUTS / picture.name)


copy_outputs()


def output_of(page: str, code: str, pictures: bool = True) -> str:
    """What a block of a page prints and draws, in Markdown; nothing if it was not run."""
    digest = hashlib.sha256(code.strip().encode()).hexdigest()[:12]
    kept = KEPT / f"{page}-{digest}.json"
    if not kept.is_file():
        return ""
    found = json.loads(kept.read_text())
    text = ""
    if found["printed"].strip():
        text += f"\n\n```{{code-block}} text\n:class: output\n\n{found['printed'].rstrip()}\n```"
    for picture in found["pictures"] if pictures else ():
        text += f"\n\n```{{image}} /_outputs/{picture}\n:alt: what the program draws\n:class: output\n```"
    return text


def show_outputs(app: Any, name: str, source: list[str]) -> None:
    """Below each block of Python its output. A page of how-to without any is a warning, which is an error."""
    if _FIRST in source[0]:
        code = _BLOCK.search((ROOT / "README.md").read_text())
        assert code is not None
        source[0] = source[0].replace(
            _FIRST, code[0] + output_of("README", code[1], pictures=False)
        )
        return
    if not Path(app.env.doc2path(name)).suffix == ".md" or name.startswith("results/"):
        return
    page = name.replace("/", "--")
    shown = [output_of(page, block[1]) for block in _BLOCK.finditer(source[0])]
    if (
        (name.startswith("howto/") and name != "howto/index") or name == "start"
    ) and not any(shown):
        logging.getLogger(__name__).warning(
            "%s shows no output of its code; scripts/docs runs it first", name
        )
    outputs = iter(shown)
    source[0] = _BLOCK.sub(lambda block: block[0] + next(outputs), source[0])


# Links from pages into the repository work where the repository is read. On the site, tables of results are pages,
# and other files are named without a link.
_RESULT = re.compile(r"\]\((?:\.\./)*scripts/benchmarks/results/([\w-]+\.(?:md|png))\)")
_NOTEBOOK = re.compile(r"\]\((?:\.\./)*notebooks/(?:gallery/)?([\w-]+\.ipynb)\)")
_FILE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:scripts|tests|npgp|notebooks)/[^)]*\)")


def adapt_links(app: Any, name: str, source: list[str]) -> None:
    text = _RESULT.sub(r"](/results/\1)", source[0])
    text = _NOTEBOOK.sub(r"](/gallery/\1)", text)
    source[0] = _FILE.sub(r"\1", text)


# Names in tables break at their dots, brackets and capitals, so that tables fit a phone.
_TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
_NAME = re.compile(r'(?<=<span class="pre">)[^<]*')
_BREAK = re.compile(r"(?<=[._(/=,])(?=\w)|(?<=[a-z])(?=[A-Z])")


def break_names(app: Any, name: str, template: str, context: Any, doctree: Any) -> None:
    def broken(table: re.Match[str]) -> str:
        return _NAME.sub(lambda name: _BREAK.sub("<wbr>", name[0]), table[0])

    context["body"] = _TABLE.sub(broken, context.get("body", ""))


# Docstrings say ``:class:`Prior``` or ``:func:`npgp.sample```, as their file knows an object. Whatever name it goes by,
# its page is found. What exists but is no public object is named without a link, and what does not exist is a warning.
def resolve_by_object(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    module, cls = node.get("py:module") or "npgp", node.get("py:class")
    found = False
    for name in (
        f"{module}.{cls}.{target}",
        f"{module}.{target}",
        f"npgp.{target}",
        target,
        *anywhere(target),
    ):
        names = spelled(name)
        found = found or bool(names)
        for documented in names:
            entry = env.get_domain("py").objects.get(documented)
            if entry is not None:
                return make_refnode(
                    app.builder,
                    node["refdoc"],
                    entry.docname,
                    entry.node_id,
                    contnode,
                    documented,
                )
    return contnode if found else None


def anywhere(name: str) -> list[str]:
    """A name without a module, in each file that has it."""
    first = name.split(".")[0]
    modules = [
        module
        for key, module in sys.modules.items()
        if key.startswith("npgp.") and hasattr(module, first)
    ]
    return [f"{module.__name__}.{name}" for module in modules]


def spelled(name: str) -> list[str]:
    """Names under which the object of this name may be documented, none if there is no such object."""
    parts = name.split(".")
    if parts[0] != "npgp":
        return []
    for k in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:k]))
        except ImportError:
            continue
        for part in parts[k:]:
            fields = getattr(found, "__dataclass_fields__", {})
            if not hasattr(found, part) and part not in fields:
                return []
            found = getattr(found, part, fields.get(part))
        module, qualified = (
            getattr(found, "__module__", None),
            getattr(found, "__qualname__", None),
        )
        if not (
            isinstance(module, str)
            and isinstance(qualified, str)
            and module.startswith("npgp")
        ):
            return [name]
        return [
            f"{module}.{qualified}",
            f"npgp.{qualified}",
            f"{'.'.join(module.split('.')[:2])}.{qualified}",
        ]
    return []


class AsWritten:
    """Text that a signature shows as it is."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def as_written(value: Any) -> Any:
    """An annotation, or a default, as the source has it: ``ArrayLike`` and not the ten types that it stands for."""
    if value is inspect.Signature.empty or value is None:
        return value
    if isinstance(value, (str, ForwardRef)):
        return AsWritten(getattr(value, "__forward_arg__", value))
    if inspect.isclass(value) or inspect.isfunction(value):
        return AsWritten(value.__name__)
    return AsWritten("...") if repr(value).startswith("<") else value


def signature_as_written(
    app: Any, what: str, name: str, found: Any, *rest: Any
) -> tuple[str, str] | None:
    """Also of classes whose arguments go by name, which are called through their metaclass."""
    if what not in ("class", "exception", "function", "method"):
        return None
    by_metaclass = inspect.isclass(found) and type(found).__call__ is not type.__call__
    try:
        own = inspect.signature(found.__init__ if by_metaclass else found)
    except (TypeError, ValueError):
        return None
    arguments = [
        argument.replace(
            # Another library's arguments may have types that are no longer as its source has them.
            annotation=as_written(argument.annotation)
            if isinstance(argument.annotation, (str, ForwardRef, type))
            else inspect.Parameter.empty,
            # A default that is text keeps its quotes.
            default=argument.default
            if isinstance(argument.default, str)
            else as_written(argument.default),
        )
        for argument in own.parameters.values()
        if argument.name not in ("self", "cls")
    ]
    returns = "" if inspect.isclass(found) else as_written(own.return_annotation)
    text = str(
        own.replace(parameters=arguments, return_annotation=inspect.Signature.empty)
    )
    return text, "" if returns in ("", inspect.Signature.empty) else repr(returns)


def skip_defaults(
    app: Any, what: str, name: str, found: Any, skip: bool, options: Any
) -> bool | None:
    """A class or function that is the default of a field is no member to tell of."""
    is_default = (
        inspect.isclass(found) or inspect.isfunction(found)
    ) and found.__name__ not in (name, "<lambda>")
    return True if is_default else None


def setup(app: Any) -> None:
    app.connect("autodoc-skip-member", skip_defaults)
    app.connect("autodoc-process-signature", signature_as_written)
    app.connect("source-read", show_outputs)
    app.connect("source-read", adapt_links)
    app.connect("html-page-context", break_names)
    app.connect("missing-reference", resolve_by_object)
