#!/usr/bin/env bash
# Builds, checks and times the GPU path in one run of under ten minutes; results go to
# gpu_results.json beside this file. $PYTHON (python3 by default) must find torch, triton,
# transformers, peft, numba, numpy, pytest and hypothesis; of the repository only the files are
# needed. --dry-run executes all stages on a CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="services:pipelines:tests"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE
python="${PYTHON:-python3}"
if [[ " $* " != *" --dry-run "* ]] && ! "$python" -c \
  'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu.sh: $python sees no CUDA GPU through torch; nothing was built or timed" >&2
  exit 3
fi
exec "$python" benchmarks/gpu/gpu.py "$@"
