#!/usr/bin/env bash
# Every test that needs a GPU, none of them skipped, and the fault's scenario under
# compute-sanitizer. Arguments go to pytest. PYTHON chooses the interpreter.
# MULTI_GPU=1 runs the tests that need two devices too (they are left out otherwise).
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -c 'import mla_ops; print(mla_ops.backend_report(device="cuda"))'
marks="gpu and not multi_gpu"
[ "${MULTI_GPU:-0}" = 1 ] && marks="gpu"
"$python" -m pytest tests --require-gpu -m "$marks" -q --durations=15 "$@"

sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)"
if [ ! -x "$sanitizer" ]; then
    echo "run_gpu_tests: compute-sanitizer must be installed, found none (install the CUDA toolkit)" >&2
    exit 1
fi
tool=memcheck
check() { "$sanitizer" --tool "$tool" --error-exitcode 99 "$python" scripts/sanitize.py "$@"; }
check
# Hazards in shared memory; it knows neither TMA nor its barriers, so the other kernels are left out.
tool=racecheck
check --no-graph --backend triton
tool=memcheck
# Without the caching allocator each tensor is an allocation of its own: reads past it are seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
check --no-graph
# The checker must be able to fail: a planted read past the end of a table has to be reported.
planted="$(mktemp)"
if check --plant >"$planted" 2>&1; then
    echo "run_gpu_tests: the planted out-of-bounds read must be reported, memcheck said nothing" >&2
    exit 1
fi
if ! grep -q "Invalid __global__ read" "$planted"; then
    cat "$planted" >&2
    echo "run_gpu_tests: the planted read failed for another reason than memcheck's" >&2
    exit 1
fi
echo "run_gpu_tests: all passed"
