#!/bin/bash
# Trains on a Cloud TPU slice with one process on each of its VMs. The workdir is on a file system that all VMs mount.
#
#     NAME=tformer ZONE=us-east5-b TYPE=v6e-16 VERSION=v2-alpha-tpuv6e launch/tpu_vm.sh --config=FILE --workdir=DIR ...
#
# If no slice has the name, it is created (SPOT=1: a preemptible one); DELETE=1 deletes it at the end. The same command
# resumes an interrupted training, on a new slice too.

set -euo pipefail
: "${NAME:?of the slice}" "${ZONE:?}" "${TYPE:?of the accelerators}" "${VERSION:?of the software}"
root=$(cd "$(dirname "$0")/.." && pwd)
archive=$(mktemp -d)/tformer.tar.gz

tpu() {
  gcloud compute tpus tpu-vm "$@" --zone="$ZONE"
}
everywhere() {
  tpu ssh "$NAME" --worker=all --command="$1"
}

tpu describe "$NAME" > /dev/null 2>&1 ||
  tpu create "$NAME" --accelerator-type="$TYPE" --version="$VERSION" ${SPOT:+--spot}
tar -czf "$archive" -C "$root" pyproject.toml README.md LICENSE tformer configs
tpu scp "$archive" "$NAME:tformer.tar.gz" --worker=all
everywhere 'set -e; mkdir -p tformer; tar -xzf tformer.tar.gz -C tformer; cd tformer
  command -v python3.11 > /dev/null || (sudo apt-get -qq update && sudo apt-get -qq install -y python3.11-venv)
  test -d .venv || python3.11 -m venv .venv
  .venv/bin/pip install --quiet -e ".[tpu]"'
code=0
everywhere "cd tformer; exec .venv/bin/tformer train --coordinator=auto $(printf '%q ' "$@")" || code=$?
if [ -n "${DELETE:-}" ]; then
  tpu delete "$NAME" --quiet
fi
exit "$code"
