#!/bin/sh
# make gpu-bundle: packs what a machine with a GPU needs to test this build, into one archive: programs, boost-cuda.so,
# tests, the demo's text, and every library that they are linked with but for glibc's, the C and C++ run time of the
# compiler, and NVIDIA's, which that machine has. There: tar xf, then deploy/gpu-check.sh.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
build=${BUILD:-build}
case $build in /*) ;; *) build=$root/$build ;; esac
limit=$((25 * 1024 * 1024))
name=boost-gpu-${COMMIT:-$(git -C "$root" rev-parse --short=12 HEAD)}

die() { printf 'gpu-bundle: %s\n' "$*" >&2; exit 1; }
[ -f "$build/lib/boost-cuda.so" ] || die "there is no $build/lib/boost-cuda.so: the CUDA toolkit is needed here (make cuda says what is missing)"

work=$(mktemp -d "${TMPDIR:-/tmp}/boost-gpu-bundle.XXXXXX")
trap 'rm -rf "$work"' EXIT
top=$work/$name
mkdir -p "$top/build/lib" "$top/build/tests" "$top/data"

# The tree as the tests expect it: programs below build/, their sources' time limits and data beside it.
cp -R "$build/bin" "$top/build/"
cp "$build/lib/boost-cuda.so" "$top/build/lib/"
for room in kernels worker; do
    mkdir -p "$top/build/tests/$room"
    cp "$build/tests/$room"/*_test "$top/build/tests/$room/"
done
for folder in gpu bench; do
    [ ! -d "$build/$folder" ] || cp -R "$build/$folder" "$top/build/"
done
(cd "$root" && git ls-files tests deploy proto README.md | tar cf - -T -) | (cd "$top" && tar xf -)
find "$top/build" -type f -exec strip --strip-debug {} + 2>/dev/null || true

# The demo's text, cut as deploy/demo.sh cuts it.
bible -f 'gen1:1-rev22:21' | sed 's/^[^ ]* //' >"$work/all.txt"
size=$(wc -c <"$work/all.txt")
[ "$size" -ge 4000000 ] || die "the text has only $size bytes; is bible-kjv-text installed?"
head -c $((size - size / 20)) "$work/all.txt" >"$top/data/train.txt"
tail -c $((size / 20)) "$work/all.txt" >"$top/data/val.txt"

# Libraries, by what the loader would take here.
find "$top/build" -type f \( -perm -100 -o -name '*.so' \) -exec ldd {} + 2>/dev/null |
    sed -n 's/^[[:space:]]*\([^ ]*\) => \(\/[^ ]*\) .*/\1 \2/p; s/^[[:space:]]*\([^ ]*\) => not found.*/\1 missing/p' |
    sort -u >"$work/needed"
while read -r soname path; do
    case $soname in
    libc.so.*|libm.so.*|libmvec.so.*|libpthread.so.*|libdl.so.*|librt.so.*|libresolv.so.*|libutil.so.*|ld-linux*) ;;
    libgcc_s.so.*|libstdc++.so.*) ;; # older ones would stand before those that NVIDIA's libraries want
    libcuda.so.*|libcudart*|libcublas*|libnccl*|libcudnn*|libnvrtc*|libnvidia*|libnvJitLink*) ;;
    boost-cuda.so) ;;
    *)
        [ "$path" != missing ] || die "$soname is needed and not found here"
        cp -L "$path" "$top/build/lib/$soname"
        ;;
    esac
done <"$work/needed"

{
    echo "commit ${name#boost-gpu-}"
    echo "built $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "nvcc $(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
} >"$top/BUILD"

out=$build/$name.tar.xz
tar cf - -C "$work" --owner=0 --group=0 "$name" | xz -6 >"$out.part"
packed=$(wc -c <"$out.part")
if [ "$packed" -gt $limit ]; then
    (cd "$top" && find . -type f -size +1000k -exec ls -l {} + | sort -k5 -n) >&2
    rm "$out.part"
    die "$packed bytes are more than the $limit that a bundle may have (its largest files above)"
fi
mv "$out.part" "$out"
echo "$out: $((packed / 1024)) KiB, $(find "$top/build/lib" -name '*.so*' | wc -l) libraries"
