#!/bin/bash
# TPU=my-tpu ZONE=us-central1-a bash examples/launch/tpu_pod.sh: a process on every host of a Cloud TPU slice.
#
# RUNS is a folder that all hosts share, a Filestore share or a bucket mounted by gcsfuse. Called again, as after a
# preemption, the run goes on from its last checkpoint.
set -euo pipefail
: "${TPU:?the name of the TPU}" "${ZONE:?its zone}" "${RUNS:=/mnt/runs}"

everywhere() {
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

git archive --prefix=shardlib/ --output=/tmp/shardlib.tar HEAD
gcloud compute tpus tpu-vm scp /tmp/shardlib.tar "$TPU:" --zone="$ZONE" --worker=all
everywhere "tar -xf shardlib.tar && cd shardlib && python3 -m pip install -q uv \
    && python3 -m uv venv -q --clear --python 3.12 && python3 -m uv pip install -q -e '.[train]' 'jax[tpu]'"
everywhere "cd shardlib && .venv/bin/python examples/train_lm.py gpt2_124m --folder $RUNS/gpt2_124m --strategy.mesh data=-1"
