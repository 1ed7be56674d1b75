#!/usr/bin/env python
"""Run a study: fits of every combination of some factors, with a table of them, and a picture.

    python scripts/study.py                                what studies there are
    python scripts/study.py power-ep --help                what one does, and its options
    python scripts/study.py power-ep --splits 0 1 --json out/power_ep.json --markdown out/power_ep.md

With ``--json`` every record is written when it is there, and a later run with the same settings does those that are
missing. ``--quick`` is a check that it runs. Most studies need data sets in the folder that ``NPGP_DATA`` names.
``studies/runner.py`` says what a study is made of.
"""

from studies.runner import main

if __name__ == "__main__":
    main()
