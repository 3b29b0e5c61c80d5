#!/bin/sh
# Installs what building, testing and the demo need and this machine lacks: Debian 12
# or Ubuntu 24.04 packages by name, as root or through sudo. Does nothing, and needs
# no network, when all are there. The CUDA toolkit is not installed by this script:
# the build finds it if it is there.
set -eu

# package                  why
wanted="
gcc                        C compiler
g++                        the Gloo shim is C++ (so are CUDA files)
make                       the build
pkg-config                 where OpenSSL lies
git                        the build id
ca-certificates            git and apt over https
libprotobuf-c-dev          wire format and job files
protobuf-c-compiler        C code from the .proto files
protobuf-compiler          protoc: include path of the compiler above, judge in tests
libuv1-dev                 event loop of boostd and boost-agent
libsqlite3-dev             the controller's store
libssl-dev                 OpenSSL: TLS between machines
openssl                    deploy/make-certs.sh
libcurl4-openssl-dev       copies of checkpoints in object storage, data files by URL
libjansson-dev             JSON job files and JSON output
libdnnl-dev                oneDNN: matrix products on the CPU
liblapacke-dev             LAPACK: checkpoints of dense models cut to low rank
libgloo-dev                Gloo: collectives between processes on the CPU
libcmocka-dev              unit tests
python3                    test runner and end-to-end tests (standard library only)
bible-kjv                  prints the demo's training text
bible-kjv-text             the demo's training text
"

names=$(printf '%s\n' "$wanted" | while read -r name _; do printf '%s ' "$name"; done)
missing=
for name in $names; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $name"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: apt-get not found; install by hand:$missing" >&2
    exit 1
fi
if [ "$(id -u)" -eq 0 ]; then
    as_root=
elif command -v sudo >/dev/null 2>&1; then
    as_root=sudo
else
    echo "setup: these packages are missing and this is neither root nor a user with sudo:$missing" >&2
    echo "  hint: as root: apt-get install$missing" >&2
    exit 1
fi
echo "setup: installing$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Another apt on the machine holds the lock for a while: wait for it, not for ever.
run_apt() {
    if ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -q -y "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "setup: apt-get $1 failed (above); nothing was built" >&2
        exit 1
    fi
}
run_apt update
# shellcheck disable=SC2086
run_apt install --no-install-recommends $missing
