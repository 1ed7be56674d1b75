#!/usr/bin/env bash
# What npgp relies on in NumPyro and JAX beyond their documentation (npgp/contract.py), tested with the oldest versions
# that pyproject.toml allows and with the newest that are to be had. CI runs this; each pair has an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_env.sh

newest_python() {
  local python
  for python in python3.14 python3.13 python3.12 "$(command -v pyenv >/dev/null && ls -d "$(pyenv root)"/versions/3.1[2-9]*/bin/python3 2>/dev/null | sort -V | tail -n 1)"; do
    if [ -n "$python" ] && "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
      echo "$python"
      return
    fi
  done
  find_python
}

contract() { # NAME PYTHON REQUIREMENT...
  local folder=.venv-$1 python=$2 key
  shift 2
  key=$({ cat pyproject.toml; pwd; echo "$@"; } | cksum)
  if ! grep -qsxF "$key" "$folder/npgp-contract"; then
    "$python" -m venv --clear "$folder"
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check -e . pytest "$@"
    echo "$key" >"$folder/npgp-contract"
  fi
  echo "== the contract with $("$folder/bin/python" -c '
import jax, numpyro, sys
print(f"jax {jax.__version__}, numpyro {numpyro.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}")')"
  # By itself: the settings and fixtures of all other tests want packages that are not here.
  JAX_PLATFORMS=cpu "$folder/bin/python" -m pytest -q -c /dev/null --rootdir . --noconftest -p no:cacheprovider tests/ground/test_contract.py
  echo "== README's first model"
  sed -n '/^```python$/,/^```$/p' README.md | sed '1d;/^```$/,$d' | JAX_PLATFORMS=cpu "$folder/bin/python" -
}

oldest=$(sed -n 's/^dependencies = .*"jax>=\([0-9.]*\)", "numpyro>=\([0-9.]*\)".*/jax==\1.0 numpyro==\2.0/p' pyproject.toml)
[ -n "$oldest" ] || { echo "pyproject.toml names no oldest versions of jax and numpyro" >&2; exit 1; }
read -r -a oldest <<<"$oldest"
contract oldest "$(find_python)" "${oldest[@]}"
contract newest "$(newest_python)"
