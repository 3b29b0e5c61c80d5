#!/bin/sh
# Tests this build on a machine with an NVIDIA GPU: every step in turn, each under a time limit, going on after a
# failure. Lies in the archive that make gpu-bundle packs; runs from a build tree too (BUILD names it).
#
#   deploy/gpu-check.sh                 all steps
#   deploy/gpu-check.sh STEP...         these
#   deploy/gpu-check.sh --list          what there is
#
# Writes report.txt, report.jsonl and a log of each step to $OUT (default: gpu-report here). Exit status: 0 when no step
# failed and one passed.
set -u

self=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
root=$(cd "$(dirname "$0")/.." && pwd)
build=${BUILD:-$root/build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
out=${OUT:-gpu-report}
case $out in /*) ;; *) out=$PWD/$out ;; esac

# name, seconds, what. A step is the function step_NAME: 0 passed, 77 skipped for the reason in its last line. One whose
# text begins with "on request" runs only when it is named.
steps='
machine          60  GPU, driver, libraries
library          60  boost-cuda.so loads and is of this build
kernels         900  every kernel against its reference, on the device and beside it
programs       1800  tests/gpu: engines, collectives and whole jobs on the device
sanitizer       120  whether compute-sanitizer serves this device
memcheck       1200  kernel tests under compute-sanitizer: out of bounds, misaligned
racecheck      1200  the same: hazards in shared memory
initcheck      1200  the same: device memory read before it was written
bench          1500  on request: speed of training steps, of ranks and a profile; BOOST_BENCH names others, BOOST_PEERS peers
'

# ---- steps ----------------------------------------------------------------------------

step_machine() {
    uname -srm
    python3 "$root/deploy/gpu-versions.py"
    nvidia-smi --query-gpu=index,name,driver_version,memory.total,compute_cap,clocks.max.sm,power.limit --format=csv
}

step_library() {
    worker=$("$build/bin/boost-worker" --version) && echo "$worker" &&
        python3 - "$BOOST_CUDA_LIBRARY" "$worker" <<'EOF'
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.boost_build_id.restype = ctypes.c_char_p
build = library.boost_build_id().decode()
print("boost-cuda.so", build)
assert f"({build})" in sys.argv[2], "another build than the worker"
assert library.kernels_cuda and library.boost_cuda_library
EOF
}

run_tests() { python3 "$root/tests/run.py" --build "$build" "$1"; }

step_kernels() { run_tests tests/kernels; }

step_programs() { python3 "$root/tests/run.py" --build "$build" --gpu --verbose; }

sanitizer() {
    command -v compute-sanitizer 2>/dev/null || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null
}

# Under some sandboxes the tool cannot attach: then it says so instead of a summary.
step_sanitizer() {
    tool=$(sanitizer)
    [ -n "$tool" ] || { echo "compute-sanitizer is not installed"; return 77; }
    BOOST_TEST_BACKEND=cuda "$tool" --tool memcheck "$build/tests/kernels/update_test" >"$out/sanitizer.out" 2>&1
    tail -n 30 "$out/sanitizer.out"
    grep -q 'ERROR SUMMARY: 0 errors' "$out/sanitizer.out" && ! grep -q 'FAILED' "$out/sanitizer.out" && return 0
    grep -q 'ERROR SUMMARY: [1-9]' "$out/sanitizer.out" && return 1
    echo "compute-sanitizer refuses this device: $(grep -m 1 -iE 'error|not supported|unable|fail' "$out/sanitizer.out")"
    return 77
}

# Kernel tests with the CUDA variants alone: sanitized TOOL "TEST..." OPTION...
sanitized() {
    tool=$1 tests=$2
    shift 2
    step_sanitizer >/dev/null || { echo "compute-sanitizer does not serve this device (step sanitizer)"; return 77; }
    failed=0
    for test in $tests; do
        echo "== $(basename "$test")"
        BOOST_TEST_BACKEND=cuda BOOST_TEST_SANITIZED=1 timeout -k 10 300 "$(sanitizer)" --tool "$tool" \
            --report-api-errors no "$@" "$test" 2>&1 | tail -n 60
        # A pipe's status is its last command's: the summary is what counts.
    done >"$out/$tool.out"
    cat "$out/$tool.out"
    ran=$(grep -c '^== ' "$out/$tool.out")
    clean=$(grep -cE 'SUMMARY: 0 (errors|hazards)' "$out/$tool.out")
    grep -q 'FAILED' "$out/$tool.out" && failed=1
    echo "$clean of $ran programs are clean"
    [ "$clean" -eq "$ran" ] && [ $failed -eq 0 ]
}
step_memcheck() { sanitized memcheck "$(ls "$build"/tests/kernels/*_test)"; }
# In the asynchronous copies of NVIDIA's own kernels the tool sees hazards that are none, so cuDNN's are left out. cuBLASLt's
# cannot be: left out, they fail with an internal error of the tool. The two programs that launch hardly anything else
# are not run.
step_racecheck() {
    sanitized racecheck "$(ls "$build"/tests/kernels/*_test | grep -vE '/(gemm|device)_test$')" \
        --kernel-name-exclude kernel_substring=cudnn
}
# cuDNN reads what it padded and never wrote.
step_initcheck() {
    sanitized initcheck "$(ls "$build"/tests/kernels/*_test)" --kernel-name-exclude kernel_substring=cudnn
}

# ---- the run --------------------------------------------------------------------------------

# Newer cuDNN and NCCL than the system's come with PyTorch, in the site-packages folder nvidia/; cuBLAS if it is newer.
library_path() {
    python3 "$root/deploy/gpu-versions.py" --path
}

if [ "${1:-}" = --step ]; then
    "step_$2"
    exit $?
fi
if [ "${1:-}" = --list ]; then
    printf '%s' "$steps" | sed '/^$/d'
    exit 0
fi
[ -x "$build/bin/boost-worker" ] || { echo "gpu-check: no programs in $build" >&2; exit 2; }
for want in "$@"; do
    printf '%s' "$steps" | grep -q "^$want " || { echo "gpu-check: no step $want (--list shows all)" >&2; exit 2; }
done

mkdir -p "$out"
newer=$(library_path)
export LD_LIBRARY_PATH="$newer${newer:+:}/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export BOOST_CUDA_LIBRARY="$build/lib/boost-cuda.so"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export BUILD="$build" OUT="$out"

say() { printf '%s\n' "$*" | tee -a "$out/report.txt"; }
: >"$out/report.txt"
python3 "$root/deploy/gpu-versions.py" --json "$root" >"$out/report.jsonl"
say "gpu-check $(date -u +%Y-%m-%dT%H:%M:%SZ)"
say "$(cat "$out/report.jsonl")"

passed=0 failed=0 skipped=0
while read -r name limit what; do
    [ -n "$name" ] || continue
    if [ $# -gt 0 ]; then
        case " $* " in *" $name "*) ;; *) continue ;; esac
    else
        case $what in "on request"*) continue ;; esac
    fi
    start=$(date +%s)
    timeout -k 20 "$limit" sh "$self" --step "$name" >"$out/$name.log" 2>&1 </dev/null
    status=$?
    took=$(($(date +%s) - start))
    note=
    case $status in
    0) verdict=passed passed=$((passed + 1)) ;;
    77) verdict=skipped skipped=$((skipped + 1)) note=$(tail -n 1 "$out/$name.log") ;;
    124|137) verdict=failed failed=$((failed + 1)) note="ran past $limit s" ;;
    *) verdict=failed failed=$((failed + 1)) note="status $status" ;;
    esac
    say "$verdict  $name  $took s  $what${note:+ ($note)}"
    [ $verdict != failed ] || tail -n 60 "$out/$name.log" | sed 's/^/  | /' | tee -a "$out/report.txt"
    python3 -c 'import json, sys
print(json.dumps(dict(zip(("step", "verdict", "seconds", "note"), (sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])))))' \
        "$name" "$verdict" "$took" "$note" >>"$out/report.jsonl"
done <<EOF
$steps
EOF
say "$passed passed, $failed failed, $skipped skipped; logs in $out"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
