#!/usr/bin/env bash
# What one would publish, dist/: made, checked, installed in an empty environment, and README's first model run from there.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_env.sh

rm -rf dist
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$(find_python)
"$python" -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install -qq --disable-pip-version-check build twine
"$folder/tools/bin/python" -m build
"$folder/tools/bin/python" -m twine check --strict dist/*

"$python" -m venv "$folder/empty"
"$folder/empty/bin/python" -m pip install -qq --disable-pip-version-check dist/*.whl
first_model >"$folder/first_model.py"
echo "== README's first model, from the wheel: $(wc -l <"$folder/first_model.py") lines"
began=$SECONDS
(cd "$folder" && JAX_PLATFORMS=cpu empty/bin/python first_model.py)
echo "== $((SECONDS - began)) s"
