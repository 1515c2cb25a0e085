#!/usr/bin/env bash
# Trains on all hosts of a TPU slice, here 16 chips of a v5e with 16 GiB each:
#
#   TPU=my-slice ZONE=us-west4-a SHARED=/mnt/shared bash train/launch/tpu_pod.sh
#
# SHARED is one file system that every host has mounted (Filestore, NFS): it holds the checkout, the
# data of `d3d respond`, the untrained drafter of `d3d init-drafter` (DRAFTER), and the run (RUN).
# Given again, the same command continues the run, on a slice of another size too if its chips divide
# the rows of a micro-batch (here 16) and FSDP is set to fit.
set -euo pipefail
: "${TPU:?name of the TPU slice}" "${ZONE:?its zone}" "${SHARED:?folder that all hosts share}"
TARGET=${TARGET:-Qwen/Qwen3-8B}
CONFIG=${CONFIG:-qwen3-1.7b}
DRAFTER=${DRAFTER:-drafter-0}
RUN=${RUN:-run}
# Weights and moments are split over FSDP chips; 256 rows a step, one a chip and micro-batch.
FSDP=${FSDP:-16}
MICRO_BATCHES=${MICRO_BATCHES:-16}

on() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker="$1" --command "$2"
}

# Built once: hosts that build in one checkout at the same time get in each other's way.
on 0 "pip wheel --quiet --no-deps --wheel-dir '$SHARED/wheels' '$SHARED/d3d_jax'"
on all "pip install --quiet --find-links '$SHARED/wheels' 'd3d_jax[tpu]'"
# A changed checkout has the same version.
on all "pip install --quiet --no-index --find-links '$SHARED/wheels' --no-deps --force-reinstall d3d_jax"
# --distributed: each host learns from the slice's metadata which of how many it is.
on all "d3d train --config '$CONFIG' --target '$TARGET' --drafter '$SHARED/$DRAFTER' \
  --data '$SHARED/data/dataset' --out '$SHARED/$RUN' --distributed --fsdp $FSDP \
  micro_batches=$MICRO_BATCHES"
