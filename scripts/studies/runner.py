"""
What a study is, and how it is run.

A study has factors, such as sets, splits and methods, and a function that fits one combination of their values, a cell,
and returns figures. `run` goes through the cells, keeps their records in a file and does not repeat those that are
there; `tables` has a row for each combination of the factors, with means and standard errors over splits and seeds,
and what is gained over one value of a factor in the same split. The options of the command line are the factors and the
settings.

A module of this folder defines ``STUDIES``, studies by their names on the command line.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Arguments, command, moments, one_blas_thread, plus_minus, table, write_json, write_picture

Records = list[dict[str, Any]]
#: Factors over which a table has means.
REPEATED = ("split", "seed")


@dataclass(frozen=True)
class Study:
    """
    :param doc: what is done and why, for ``--help``; the first line is a title.
    :param run: ``run(args, **cell)``, the figures of a cell; or a list of them, each with further keys that tell them
        apart. ``args`` has the settings, and all values of the factors.
    :param factors: the values of each, by its name; the first changes slowest.
    :param figures: title and digits of the columns of the table.
    :param settings: numbers and words that are the same for all cells; a type in place of a value means `None`.
    :param rows: the keys that tell rows of the table apart; the factors but for splits and seeds if not given.
    :param against: a key, and the value of it over which gains are printed.
    :param lower: figures of which less is better.
    :param choices: values that a factor of words may have, where those of ``factors`` are not all; any if empty.
    :param quick: what ``--quick`` changes; ``full``: the same of published sizes.
    :param picture: a factor of numbers, or a figure, along the axis, and figures, a panel each.
    :param show: further tables, from the records and whether they are to be Markdown.
    :param note: what the figures are.
    :param x64: in double precision.
    """

    doc: str
    run: Callable[..., dict[str, Any] | Records]
    factors: Mapping[str, Sequence[Any]]
    figures: Mapping[str, tuple[str, int]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] | None = None
    against: tuple[str, Any] | None = None
    lower: tuple[str, ...] = ("rmse", "nlpd", "error", "mae")
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    full: Mapping[str, Any] = field(default_factory=dict)
    picture: tuple[str, tuple[str, ...]] | None = None
    show: Callable[[Records, bool], str] | None = None
    note: str = ""
    x64: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        return self.rows or tuple(name for name in self.factors if name not in REPEATED)


def studies() -> dict[str, Study]:
    """All of them, by name."""
    found: dict[str, Study] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = importlib.import_module(f"studies.{path.stem}") if "STUDIES" in path.read_text() else None
        found |= getattr(module, "STUDIES", {})
    return found


def parse(name: str, study: Study, argv: Sequence[str]) -> argparse.Namespace:
    """The settings, and the values of the factors."""
    parser = Arguments(study.doc, prog=f"study.py {name}")
    for factor, values in study.factors.items():
        allowed = study.choices.get(factor, values)
        words = {"choices": list(allowed)} if allowed and isinstance(allowed[0], str) else {}
        plural = factor if factor.endswith("s") or len(factor) == 1 else f"{factor}s"
        kind = type(values[0])
        parser.add_argument(f"--{plural}", dest=factor, nargs="+", type=kind, default=list(values), **words)
    for setting, value in study.settings.items():
        option, empty = f"--{setting.replace('_', '-')}", isinstance(value, type)
        if value is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(value, tuple):
            parser.add_argument(option, nargs="+", type=type(value[0]), default=list(value))
        else:
            parser.add_argument(option, type=value if empty else type(value), default=None if empty else value)
    parser.shared("quick", "full", "json", "cpu-time", out=dict(help="folder of the picture (out)"))
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    args = parser.read(argv, study.quick)
    for setting, value in (study.full if args.full else {}).items():
        setattr(args, setting, value)
    return args


def run(study: Study, args: argparse.Namespace, line: str = "") -> Records:
    """Do what the file of ``--json`` does not have; the records of these cells."""
    settings = {name: getattr(args, name) for name in study.settings}
    settings = json.loads(json.dumps(settings | {"quick": args.quick}))
    kept = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    records: Records = kept["records"] if kept.get("settings") == settings else []
    wanted = []
    for values in itertools.product(*(getattr(args, factor) for factor in study.factors)):
        cell = dict(zip(study.factors, values, strict=True))
        wanted.append(cell)
        if any(_agrees(record, cell) for record in records):
            continue
        began = time.perf_counter()
        found = study.run(args, **cell)  # nothing where it has nothing to say
        for figures in found if isinstance(found, list) else [found]:
            bad = [key for key, value in figures.items() if isinstance(value, float) and not math.isfinite(value)]
            if bad:
                raise FloatingPointError(f"{cell}: not finite are {', '.join(bad)}.")
            records.append(cell | figures)
            shown = {key: figures[key] for key in figures if key in study.figures or key in study.keys}
            print(*cell.values(), {k: round(v, 4) if isinstance(v, float) else v for k, v in shown.items()}, flush=True)
        report = {"command": line, "settings": settings, "records": records}
        write_json(args.json, report, say=False)
        print(f"    {time.perf_counter() - began:.1f} s", flush=True)
    return [record for record in records if any(_agrees(record, cell) for cell in wanted)]


def _agrees(record: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    return all(record[key] == value for key, value in cell.items())


# ---------------------------------------------------------------------------------------------------------------
# What people look at


def summarize(records: Records, by: Sequence[str], figures: Iterable[str]) -> Records:
    """Means and standard errors (``…_error``) of figures over the records that agree in these keys."""
    groups: dict[tuple, Records] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in by), []).append(record)
    rows = []
    for keys, members in groups.items():
        row = dict(zip(by, keys, strict=True)) | {"fits": len(members)}
        for key in figures:
            row[key], row[f"{key}_error"] = moments(member.get(key) for member in members)
        rows.append(row)
    return rows


def means(study: Study, records: Records, markdown: bool) -> str:
    """A row for each combination of the keys."""
    lines = [
        [*(row[key] for key in study.keys)]
        + [plus_minus(row[key], row[f"{key}_error"], digits) for key, (_, digits) in study.figures.items()]
        + [row["fits"]]
        for row in summarize(records, study.keys, study.figures)
    ]
    heads = [*study.keys, *(title for title, _ in study.figures.values()), "fits"]
    return table(heads, lines, left=range(len(study.keys)), markdown=markdown)


def gains(study: Study, records: Records, markdown: bool) -> str:
    """What is gained over one value of a key, all else the same; positive is better, and in how many it is."""
    assert study.against is not None
    key, base = study.against
    same = [name for name in (*study.keys, *study.factors) if name != key]
    bases = {tuple(record[name] for name in same): record for record in records if record[key] == base}
    differences: dict[tuple, dict[str, list[float]]] = {}
    for record in records:
        other = bases.get(tuple(record[name] for name in same))
        if other is None or record[key] == base:
            continue
        row = differences.setdefault(tuple(record[name] for name in study.keys), {})
        for figure in study.figures:
            if None not in (record.get(figure), other.get(figure)):
                sign = -1.0 if figure in study.lower else 1.0
                row.setdefault(figure, []).append(sign * (record[figure] - other[figure]))
    lines = []
    for names, row in differences.items():
        cells = [
            f"{plus_minus(*moments(each), digits, sign='+')} ({sum(gain > 0 for gain in each)}/{len(each)})"
            if (each := row.get(figure))
            else ""
            for figure, (_, digits) in study.figures.items()
        ]
        lines.append([*names, *cells])
    heads = [*study.keys, *(title for title, _ in study.figures.values())]
    return table(heads, lines, left=range(len(study.keys)), markdown=markdown) if lines else ""


def tables(study: Study, records: Records, markdown: bool = False) -> str:
    text = [means(study, records, markdown)]
    if study.against is not None and (compared := gains(study, records, markdown)):
        key, base = study.against
        text += [f"Gains over {key} {base} (positive is better), and in how many fits:", compared]
    if study.show is not None:
        text.append(study.show(records, markdown))
    return "\n\n".join([*text, study.note])


def draw(study: Study, records: Records, path: Path) -> None:
    """Figures along a factor of numbers: means and standard errors, a line for each value of the other keys."""
    from npgp.plots.figures import COLORS, MARKERS, subplots

    assert study.picture is not None
    along, figures = study.picture
    others = [key for key in study.keys if key != along]
    lines: dict[tuple, Records] = {}
    for row in summarize(records, study.keys, {*figures, along} & study.figures.keys()):
        lines.setdefault(tuple(row[key] for key in others), []).append(row)
    figure, axes = subplots(1, len(figures), figsize=(4.2 * len(figures), 3.6 + 0.1 * len(lines)), squeeze=False)
    for ax, key in zip(axes[0], figures, strict=True):
        for i, (names, rows) in enumerate(lines.items()):
            style = dict(color=COLORS[i % len(COLORS)], marker=MARKERS[i % len(MARKERS)], ms=4, lw=1.3, capsize=2)
            errors = [row[f"{key}_error"] or 0.0 for row in rows]
            ax.errorbar(
                [row[along] for row in rows],
                [row[key] for row in rows],
                errors,
                label=", ".join(map(str, names)),
                **style,
            )
        ax.set(xlabel=study.figures.get(along, (along,))[0], ylabel=study.figures[key][0])
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    write_picture(path, figure)


def main(argv: Sequence[str] | None = None) -> Records:
    import jax

    argv = sys.argv[1:] if argv is None else list(argv)
    every = studies()
    if not argv or argv[0] not in every:
        width = max(map(len, every))
        for name, study in every.items():
            print(f"{name:{width}}  {study.doc.strip().splitlines()[0]}")
        if argv and argv[0] not in ("-h", "--help"):
            raise SystemExit(f"There is no study {argv[0]!r}.")
        return []
    name, study = argv[0], every[argv[0]]
    args, line = parse(name, study, argv[1:]), command(str(Path(__file__).parents[1] / "study.py"), argv)
    with jax.enable_x64(study.x64), one_blas_thread():
        records = run(study, args, line)
    print(f"\n{tables(study, records)}")
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        title = study.doc.strip().splitlines()[0].rstrip(".")
        args.markdown.write_text(f"# {title}\n\n    {line}\n\n{tables(study, records, True)}\n", encoding="utf-8")
        print(f"wrote {args.markdown}")
    if study.picture is not None:
        draw(study, records, args.out / f"{name}.png")
    return records
