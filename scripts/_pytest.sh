# Sourced after _env.sh by what runs tests, in the environment that `environment` names, .venv if none is:
# `in_parallel OPTION...` runs pytest with a worker for each core. `flags_in_use` has XLA's flags for tests of how
# programs are compiled, `quick_flags` those for all other tests.

environment=${environment:-.venv}

export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 # per worker: BLAS threads would fight XLA's
# Programs of several files: workers share them. To look for the smallest takes longer than to compile them.
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.05 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# Collecting takes half the time where pytest has written down the tests with their assertions.
unset PYTHONDONTWRITEBYTECODE
export JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 # programs without the lines of Python that they are of: sooner written

run() {
  echo "== $*"
  "$environment/bin/python" -m "$@"
}

# ArviZ notes the day in a file when it is first imported on it: of two workers that do so at once, one fails.
"$environment/bin/python" -W ignore -c 'import arviz'

in_parallel() {
  local workers
  workers=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  workers="$((workers < 2 ? 2 : workers > 8 ? 8 : workers))"
  run pytest -n "$workers" --dist loadfile "$@"
}

# Of some flags, those that this version of XLA has: it stops at one that it does not know.
known_of() {
  local flag flags=()
  if ! _starts_with "$@"; then
    for flag in "$@"; do
      if _starts_with "$flag"; then flags+=("$flag"); fi
    done
    set -- "${flags[@]}"
  fi
  echo "$*"
}

_starts_with() {
  XLA_FLAGS="$*" "$environment/bin/python" -c 'import jax; jax.devices()' >/dev/null 2>&1
}

# Each worker has one core, and need not cut programs into parts to compile these at the same time (6.3 s in place of
# 7.9 for one large program). Most of the time of all other tests would go into compiling programs that then run for
# milliseconds, so the compiler is told not to optimize. `XLA_FLAGS= scripts/test` compiles all as in use.
flags_in_use=${XLA_FLAGS-} quick_flags=${XLA_FLAGS-}
if [ -z "${XLA_FLAGS+set}" ] && [ "$JAX_PLATFORMS" = cpu ]; then
  flags_in_use=$(known_of --xla_cpu_parallel_codegen_split_count=1)
  quick_flags=$(known_of --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
    --xla_cpu_parallel_codegen_split_count=1 --xla_llvm_disable_expensive_passes=true)
fi
