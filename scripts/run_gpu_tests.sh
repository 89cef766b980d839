#!/usr/bin/env bash
# Every test that needs a GPU, none of them skipped, and the fault's scenario under
# compute-sanitizer. Arguments go to pytest. PYTHON chooses the interpreter.
# MULTI_GPU=1 runs the tests that need two devices too (they are left out otherwise).
# JOBS=N runs the tests in N processes that share the GPU, and the sanitizer beside them; their
# output is printed at the end, and stays in LOGS where that names a directory.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
jobs="${JOBS:-1}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${LOGS:-}" ]; then
    logs="$LOGS"
    mkdir -p "$logs"
else
    logs="$(mktemp -d)"
    trap 'rm -rf "$logs"' EXIT
fi

"$python" -c 'import mla_ops; print(mla_ops.backend_report(device="cuda"))'
marks="gpu and not multi_gpu"
[ "${MULTI_GPU:-0}" = 1 ] && marks="gpu"

tests() {
    if [ "$jobs" = 1 ]; then
        "$python" -m pytest tests --require-gpu -m "$marks" -q --durations=15 "$@"
        return
    fi
    "$python" -m pytest tests --require-gpu -m "$marks" -q --collect-only "$@" |
        grep '::' >"$logs/tests"
    rm -f "$logs"/lane.*
    split -n "r/$jobs" "$logs/tests" "$logs/lane."
    local lane pids=() status=0
    for lane in "$logs"/lane.*; do
        xargs -d '\n' -a "$lane" "$python" -m pytest --require-gpu -q --durations=5 \
            -p no:cacheprovider >"$lane.log" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    cat "$logs"/lane.*.log
    echo "run_gpu_tests: $(wc -l <"$logs/tests") tests in $jobs processes, status $status"
    return "$status"
}

sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)"
check() {
    "$sanitizer" --tool "$1" --error-exitcode 99 "$python" scripts/sanitize.py "${@:2}"
}

sanitize() {
    if [ ! -x "$sanitizer" ]; then
        echo "run_gpu_tests: compute-sanitizer must be installed, found none" \
            "(install the CUDA toolkit)" >&2
        return 1
    fi
    check memcheck || return 1
    # Hazards in shared memory; it knows neither TMA nor its barriers, so the other kernels are
    # left out.
    check racecheck --no-graph --backend triton || return 1
    # Without the caching allocator each tensor is an allocation of its own: reads past it are
    # seen.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    check memcheck --no-graph || return 1
    # The checker must be able to fail: a planted read past the end of a table has to be reported.
    if check memcheck --plant >"$logs/planted" 2>&1; then
        echo "run_gpu_tests: the planted out-of-bounds read must be reported," \
            "memcheck said nothing" >&2
        return 1
    fi
    if ! grep -q "Invalid __global__ read" "$logs/planted"; then
        cat "$logs/planted" >&2
        echo "run_gpu_tests: the planted read failed for another reason than memcheck's" >&2
        return 1
    fi
    echo "run_gpu_tests: compute-sanitizer found the planted read and nothing else"
}

if [ "$jobs" = 1 ]; then
    tests "$@"
    (sanitize)
else
    (sanitize) >"$logs/sanitizer" 2>&1 &
    beside=$!
    status=0
    tests "$@" || status=1
    wait "$beside" || status=1
    cat "$logs/sanitizer"
    [ "$status" = 0 ] || exit 1
fi
echo "run_gpu_tests: all passed"
