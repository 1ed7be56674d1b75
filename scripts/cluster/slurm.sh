#!/usr/bin/env bash
# Two nodes with four GPUs each: sbatch scripts/cluster/slurm.sh
#SBATCH --job-name=npgp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail

# One process per node holds all its GPUs; JAX learns addresses and numbers of the processes from SLURM. Two minutes
# before the time is up SLURM sends SIGTERM, upon which fit writes a checkpoint and leaves; so it does when the job is
# preempted. Requeued, or submitted again, the same command goes on from there.
export JAX_COMPILATION_CACHE_DIR="$SLURM_SUBMIT_DIR/.jax_cache"
srun --kill-on-bad-exit=1 python scripts/cluster/train.py data/X.npy data/y.npy run1 --distributed
