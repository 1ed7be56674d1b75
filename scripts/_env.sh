# Sourced by demo and test, which stand in the repository's root.
# `ensure_env GROUP...` sees to it that .venv exists and holds npgp with those dependency groups of pyproject.toml.

unset PYTHONDONTWRITEBYTECODE # packages are compiled where they are first imported
# Compiled programs are kept between runs.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0.2}"

find_python() {
  local python
  for python in python3 python3.13 python3.12 python3.11; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$python"
      return
    fi
  done
  echo "npgp needs Python 3.11 or newer with its venv module (Debian and Ubuntu: apt install python3-venv)." >&2
  return 1
}

ensure_env() {
  local stamp=.venv/npgp-groups key group python have=yes
  key=$({ cat pyproject.toml; pwd; } | cksum) # of the folder too: the installation points to it
  for group in "$@"; do
    grep -qsxF "$group $key" "$stamp" || have=no
  done
  [ "$have" = no ] || return 0

  if ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python)
    "$python" -m venv --clear .venv
  fi
  .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
  echo "Installing npgp and what these need into .venv: $* (about a minute, first time only)"
  .venv/bin/python -m pip install -qq --disable-pip-version-check "pip>=25.1" # the first that knows groups
  # What is never imported need not be compiled.
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile -e . "${@/#/--group=}"
  for group in "$@"; do
    echo "$group $key" >>"$stamp"
  done
}

first_model() { # the first program of README.md
  sed -n '/^```python$/,/^```$/p' README.md | sed '1d;/^```$/,$d'
}
