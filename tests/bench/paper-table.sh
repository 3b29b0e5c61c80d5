#!/bin/sh
# The paper's table on this machine's GPUs, through boostd, boost-agent and real jobs; `paper-table.sh --help` has the
# options. Runs from a build tree and from the archive of make gpu-bundle; BUILD names the build folder, BOOST_PEERS the
# folder of the PyTorch programs that are measured beside ours.
#
#   tests/bench/paper-table.sh                                       everything the machine has room for
#   tests/bench/paper-table.sh --tp 2 --sizes 3b --budget-s 500      the rows of one size, within so many seconds
#   tests/bench/paper-table.sh --table results.jsonl                 tables and checks of what was measured
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$root/build}
case $build in /*) ;; *) build=$PWD/$build ;; esac

# As deploy/gpu-check.sh has them: the newer cuDNN and NCCL of Python packages, and no NVLink multicast.
newer=$(python3 "$root/deploy/gpu-versions.py" --path)
export LD_LIBRARY_PATH="$newer${newer:+:}/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export BOOST_CUDA_LIBRARY="${BOOST_CUDA_LIBRARY:-$build/lib/boost-cuda.so}"
export NCCL_NVLS_ENABLE=0
exec python3 "$root/tests/bench/paper_table.py" --build "$build" "$@"
