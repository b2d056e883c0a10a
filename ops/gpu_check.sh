#!/usr/bin/env bash
# Measures the promises of the real engines on this machine, in one table. ops/bench/gpu has the
# parts.
#
#   ops/gpu_check.sh [--only PART] [--json FILE]
#
# Takes the first environment that is there: $PYTHON, .venv-vllm (make vllm: vLLM's CPU build),
# .venv. The last holds vLLM on a GPU machine after pip install 'headrace[vllm]'. Without a GPU it
# runs its CPU form, on tiny models; without vLLM, on the local engine.
set -euo pipefail
cd "$(dirname "$0")/.."
for python in "${PYTHON:-}" .venv-vllm/bin/python .venv/bin/python; do
  if [ -n "$python" ] && command -v "$python" >/dev/null; then
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    exec "$python" -m ops.bench.gpu "$@"
  fi
done
echo "no environment: run make test, make vllm, or set PYTHON" >&2
exit 2
