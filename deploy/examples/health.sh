#!/bin/sh
# A health_script for boost-agent: status 0 when the node is fit for work, else the last line says why not.
# Run before each attempt ($BOOST_JOB is set then) and every health_interval_ms.
fail() {
    echo "$*"
    exit 1
}
for dir in /shared /scratch; do
    [ ! -d "$dir" ] || timeout 5 stat -f "$dir" >/dev/null 2>&1 || fail "$dir does not answer"
done
used=$(df --output=pcent /tmp | tail -1 | tr -dc 0-9)
[ "${used:-0}" -lt 98 ] || fail "/tmp is $used % full"
if command -v nvidia-smi >/dev/null; then
    timeout 20 nvidia-smi -L >/dev/null || fail "nvidia-smi -L failed or took more than 20 s"
fi
exit 0
