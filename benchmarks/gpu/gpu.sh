#!/usr/bin/env bash
# Checks and times the engine on a machine with a GPU, part by part; `gpu.sh --help` lists the parts.
# $PYTHON (python3 by default) must find torch, triton, transformers, numba, numpy, msgspec,
# llguidance, pytest and hypothesis; with bitsandbytes and vllm it measures more. Ray, Redis and the
# packages of the command line are not needed. --dry-run runs all parts at toy size on a CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="services:pipelines:tests${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE
python="${PYTHON:-python3}"
if [[ " $* " != *" --dry-run "* && " $* " != *" --help "* ]] && ! "$python" -c \
  'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu.sh: $python sees no CUDA GPU through torch; nothing was timed" >&2
  exit 3
fi
exec "$python" benchmarks/gpu/gpu.py "$@"
