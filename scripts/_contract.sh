#!/usr/bin/env bash
# What npgp relies on in NumPyro and JAX beyond their documentation (npgp/contract.py, npgp/programs), tested with the oldest
# versions that pyproject.toml allows, of every dependency, and with the newest to be had; with the newest also what npgp
# does with other libraries. _contract.sh [oldest|newest], both if neither is said. CI runs this; each has an environment
# of its own.
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

contract() { # NAME PYTHON REQUIREMENT..., npgp among them
  local folder=.venv-$1 python=$2 key
  shift 2
  key=$({ cat pyproject.toml; pwd; echo "$@"; } | cksum)
  if ! grep -qsxF "$key" "$folder/npgp-contract"; then
    "$python" -m venv --clear "$folder"
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check "pip>=25.1" # the first that knows groups
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-compile pytest "$@"
    echo "$key" >"$folder/npgp-contract"
  fi
  echo "== the contract with $("$folder/bin/python" -c '
import jax, numpyro, sys
print(f"jax {jax.__version__}, numpyro {numpyro.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}")')"
  # By itself: the settings and fixtures of all other tests want packages that are not here.
  JAX_PLATFORMS=cpu "$folder/bin/python" -m pytest -q -c /dev/null --rootdir . --noconftest -p no:cacheprovider tests/ground/test_contract.py tests/ground/test_divided_functions.py
  echo "== README's first model"
  first_model | JAX_PLATFORMS=cpu "$folder/bin/python" -
}

lowest() { # each dependency, and each of the extras, at its lowest version
  "$1" -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = ("plots", "data", "parquet", "checkpoints", "encoder", "tinygp")
every = sum((project["optional-dependencies"][extra] for extra in extras), project["dependencies"])
for requirement in every:
    print(requirement.replace(">=", "=="))
'
}

with_other_libraries() { # ArviZ, matplotlib, Optax, Orbax, PyArrow, scikit-learn, SciPy; and XLA
  environment=.venv-newest
  . scripts/_pytest.sh
  XLA_FLAGS=$flags_in_use in_parallel tests/ground/test_compiler.py tests/ground/test_programs.py tests/likelihoods/test_large_averages.py
  XLA_FLAGS=$quick_flags in_parallel tests/datasets tests/inducing/test_inducing.py tests/io/test_inference_data.py tests/plots \
    tests/training/test_checkpoints.py tests/training/test_sources.py tests/training/test_trust.py \
    -k "not test_kills and (khat or not test_trust)" # of checking posteriors what ArviZ does
}

oldest() {
  local python requirements
  python=$(find_python)
  mapfile -t requirements < <(lowest "$python")
  [ ${#requirements[@]} -gt 0 ] || exit 1
  contract oldest "$python" -e . "${requirements[@]}"
}

newest() {
  contract newest "$(newest_python)" -e . --group test
}

case ${1:-both} in
  oldest) oldest ;;
  newest)
    newest
    with_other_libraries
    ;;
  both) # at once, as each keeps one core busy
    said=$(mktemp)
    oldest >"$said" 2>&1 &
    newest
    wait $! || { cat "$said" && exit 1; }
    cat "$said"
    with_other_libraries
    ;;
  *) echo "usage: $0 [oldest|newest]" >&2 && exit 2 ;;
esac
