#!/usr/bin/env python
"""Hundreds of attempts to break npgp: bad arguments, odd models, damaged files, hard numbers.

Each attempt (``attempts/``) says what a right outcome is; ``attempt.py`` says how what became of it is judged. They
run in processes of their own, one theme after the other, which are ended where they stop: an attempt that uses no
processor for ``--idle`` seconds, with no thread that waits for its turn, or more than ``--limit`` seconds of it, is a
hang. Neither depends on what else the machine does.

    python scripts/studies/safety/break.py                          all of them
    python scripts/studies/safety/break.py --themes files plates    some themes
    python scripts/studies/safety/break.py --only "masked"          those with a word in their name
    python scripts/studies/safety/break.py --json out/break.json --markdown scripts/benchmarks/results/break.md

The exit status is 1 if anything was wrong in silence, hung or refused what is right, or if more than five errors were
unclear.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, command, table, write_json

#: More unclear errors than this are too many.
MOST_UNCLEAR = 5


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--themes", nargs="+", help="files of attempts/, without on_ (all)")
    parser.add_argument("--only", metavar="WORDS", help="attempts whose name has these words")
    parser.add_argument("--item", help="attempts of this item")
    parser.add_argument("--list", action="store_true", help="print the names, and stop")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of the processor that one may take (300)")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds without work that are a hang (60)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.shared("json")
    return parser.read(argv)


# ---------------------------------------------------------------------------------------------------------------
# The process that attempts


def child(names: list[str], path: Path) -> None:
    """Make attempts; a line of JSON before and after each."""
    import jax

    jax.config.update("jax_traceback_filtering", "off")
    from studies.safety.attempt import outcome
    from studies.safety.attempts import load

    registry = load()
    with open(path, "a", buffering=1) as file:
        for name in names:
            file.write(json.dumps({"began": name}) + "\n")
            found = outcome(registry[name])
            line = {"name": name, "class": found.kind, "said": found.said, "seconds": round(found.seconds, 2)}
            file.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------------------------------------------------------
# The process that watches


def cpu_seconds(pid: int) -> float:
    """What a process has used of the processor; time that passes, where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waits_for_its_turn(pid: int) -> bool:
    """Whether a thread would go on if the machine let it: it runs, or would run, or waits for a disk."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(stat.read_text().rpartition(")")[2].split()[0])
        except OSError:  # the thread has ended
            pass
    return any(state in "RD" for state in states)


def attempted(names: Sequence[str], limit: float, idle: float) -> list[dict[str, Any]]:
    """What became of these attempts, in processes that are started anew after one that had to be ended."""
    done: list[dict[str, Any]] = []
    left = list(names)
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"} | {"TQDM_DISABLE": "1"}
    while left:
        with tempfile.TemporaryDirectory() as folder:
            report, wanted, errors = (Path(folder, name) for name in ("report.jsonl", "wanted.json", "errors.txt"))
            report.touch()
            wanted.write_text(json.dumps(left))
            line = [sys.executable, __file__, "--child", str(wanted), "--json", str(report)]
            with open(errors, "wb") as file:
                process = subprocess.Popen(
                    line, stdout=file, stderr=file, cwd=folder, env=environment, start_new_session=True
                )
                ended = _watch(process, report, limit, idle)
            entries = [json.loads(text) for text in report.read_text().splitlines()]
            done += [entry for entry in entries if "name" in entry]
            finished = {entry["name"] for entry in done}
            running = [e["began"] for e in entries if "began" in e and e["began"] not in finished]
            if running:  # it hung, or took the process with it
                said = ended or f"the process died with status {process.returncode}: {_tail(errors)}"
                kind = "hang" if ended else "unclear error"
                done.append({"name": running[0], "class": kind, "said": said, "seconds": None})
            elif not entries:
                raise RuntimeError(f"no attempt could be made: {_tail(errors)}")
            finished = {entry["name"] for entry in done}
            left = [name for name in left if name not in finished]
    return done


def _watch(process: subprocess.Popen, report: Path, limit: float, idle: float) -> str | None:
    """Wait for a process to end, and end it if an attempt gets nowhere; then in words why."""
    size, since, used, active = -1, 0.0, 0.0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        now, spent = report.stat().st_size, cpu_seconds(process.pid)
        if now != size:
            size, since, used, active = now, spent, spent, time.monotonic()
        if spent > used + 0.2 or waits_for_its_turn(process.pid):
            used, active = spent, time.monotonic()
        reason = None
        if spent - since > limit:
            reason = f"no end after {limit:.0f} s of the processor"
        elif time.monotonic() - active > idle:
            reason = f"nothing done for {idle:.0f} s"
        if reason is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return reason
    return None


def _tail(path: Path) -> str:
    return " ".join(path.read_text(errors="replace").split()[-30:])


# ---------------------------------------------------------------------------------------------------------------
# What is said about it


def report_of(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, by theme and in all."""
    counts = Counter(entry["class"] for entry in entries)
    themes: dict[str, Counter] = {}
    for entry in entries:
        themes.setdefault(entry["theme"], Counter())[entry["class"]] += 1
    return {"attempts": len(entries), "counts": dict(counts), "themes": {k: dict(v) for k, v in themes.items()}}


def tables(report: dict[str, Any], markdown: bool = False) -> str:
    """The counts, and what was not right."""
    from studies.safety.attempt import CLASSES

    rows = [[theme, sum(c.values()), *(c.get(k) for k in CLASSES)] for theme, c in sorted(report["themes"].items())]
    rows.append(["all", report["attempts"], *(report["counts"].get(kind, 0) for kind in CLASSES)])
    text = table(["theme", "attempts", *CLASSES], rows, markdown=markdown)
    bad = [entry for entry in report["entries"] if not entry["right"]]
    if bad:
        lines = [(e["name"], e["item"], e["class"], e["said"].replace("\n", " ")[:200].replace("|", "/")) for e in bad]
        text += "\n\n" + table(
            ["not right", "item", "class", "it answered"], lines, left=(0, 1, 2, 3), markdown=markdown
        )
    return text


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.child is not None:
        child(json.loads(args.child.read_text()), args.json)
        return {}
    from studies.safety.attempt import FORBIDDEN
    from studies.safety.attempts import load

    chosen = [
        a
        for a in load().values()
        if (not args.themes or a.theme in args.themes)
        and (not args.only or args.only in a.name)
        and (not args.item or args.item == a.item)
    ]
    if args.list:
        print(table(["attempt", "item", "wants"], [(a.name, a.item, a.wants) for a in chosen], left=(0, 1, 2)))
        return {}
    themes = dict.fromkeys(a.theme for a in chosen)
    batches = [[a.name for a in chosen if a.theme == theme and not a.alone] for theme in themes]
    batches += [[a.name] for a in chosen if a.alone]
    found: dict[str, dict[str, Any]] = {}
    for batch in filter(None, batches):
        print(f"{batch[0].partition(':')[0]}: {len(batch)} attempts", file=sys.stderr, flush=True)
        found |= {entry["name"]: entry for entry in attempted(batch, args.limit, args.idle)}
    entries = []
    for a in chosen:
        entry = found[a.name]
        right = entry["class"] in ("right answer", "clear error", "clear warning")
        entries.append({"theme": a.theme, "item": a.item, "wants": a.wants, **entry, "right": right})
    report = {"command": command(__file__, argv), **report_of(entries), "entries": entries}
    print(tables(report))
    write_json(args.json, report)
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(f"# Attempts to break npgp\n\n`{report['command']}`\n\n{tables(report, True)}\n")
    counts = report["counts"]
    if any(counts.get(kind) for kind in FORBIDDEN) or counts.get("unclear error", 0) > MOST_UNCLEAR:
        sys.exit(1)
    return report


if __name__ == "__main__":
    main()
