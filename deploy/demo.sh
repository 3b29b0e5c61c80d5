#!/bin/sh
# The whole product in two minutes: a private controller and agent, a real training
# job, a worker killed half-way, recovery by itself, the result checked.
# Exit 0 only if the job COMPLETED, recovered exactly once and learnt.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
build=${BUILD:-build}
case $build in /*) ;; *) build=$root/$build ;; esac
bin=$build/bin
dir=$build/demo/$$
job_file=$root/deploy/examples/demo.pbtxt
bound=2.0 # nats a byte on held-out text

say() { printf '\n== %s\n' "$*"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

mkdir -p "$dir"
# A socket path is at most 107 bytes; a deep build folder needs a short home for it.
sockets=$dir
if [ ${#dir} -gt 80 ]; then
    sockets=$(mktemp -d "${TMPDIR:-/tmp}/boost-demo.XXXXXX")
fi
export BOOST_SOCKET="$sockets/boostd.sock"
unset XDG_RUNTIME_DIR
boostd_pid= agent_pid= killer_pid=

# Ranks outlive their agent by design: stopping the demo means ending the job first.
clean_up() {
    status=$?
    trap - EXIT INT TERM
    [ -z "$killer_pid" ] || kill "$killer_pid" 2>/dev/null || true
    if [ -n "$job" ]; then
        "$bin/boostctl" -q cancel --now "$job" >/dev/null 2>&1 || true
        "$bin/boostctl" -q wait "$job" --timeout 20s >/dev/null 2>&1 || true
    fi
    for pid in $agent_pid $boostd_pid; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    [ "$sockets" = "$dir" ] || rm -rf "$sockets"
    exit "$status"
}
job=
trap clean_up EXIT
trap 'exit 130' INT TERM

# Starts a daemon and waits for the line it prints once it is ready.
start_daemon() {
    name=$1
    shift
    fifo=$dir/$name.ready
    mkfifo "$fifo"
    "$bin/$name" "$@" >"$fifo" 2>"$dir/$name.log" &
    started=$!
    if ! read -r line <"$fifo"; then
        cat "$dir/$name.log" >&2
        die "$name did not start (above)"
    fi
    rm -f "$fifo"
    echo "   $line"
}

field() { # one scalar of the job's JSON status
    "$bin/boostctl" -o jsonl status -a "$job" | sed -n 's/.*"'"$1"'":"\{0,1\}\([^",}]*\).*/\1/p'
}

say "training text: the King James Bible, from Debian's bible-kjv-text"
# Verse labels ("Ge1:1 ") are not prose: cut them.
bible -f 'gen1:1-rev22:21' | sed 's/^[^ ]* //' >"$dir/all.txt"
size=$(wc -c <"$dir/all.txt")
[ "$size" -ge 4000000 ] || die "the text has only $size bytes; is bible-kjv-text installed?"
held=$((size / 20))
head -c $((size - held)) "$dir/all.txt" >"$dir/train.txt"
tail -c "$held" "$dir/all.txt" >"$dir/val.txt"
rm "$dir/all.txt"
echo "   $((size - held)) bytes to train on, $held held out"

say "a private controller and one agent, all state in $dir"
start_daemon boostd --state-dir "$dir/boostd" --socket "$BOOST_SOCKET"
boostd_pid=$started
start_daemon boost-agent --state-dir "$dir/agent" --controller-socket "$BOOST_SOCKET" --node demo-node --cpu-slots 2
agent_pid=$started

say "submit $job_file"
"$bin/boostctl" submit "$job_file" --parsable --set data.train[0].path="$dir/train.txt" \
    --set data.eval[0].path="$dir/val.txt" --set checkpoint.dir="$dir/ckpt" >"$dir/job" || die "submit failed"
job=$(cat "$dir/job")
steps=$("$bin/boostctl" -o jsonl status "$job" | sed -n 's/.*"steps":\([0-9]*\).*/\1/p')
"$bin/boostctl" status

say "follow it; half-way, at step $((steps / 2)), one worker is killed with SIGKILL"
(
    "$bin/boostctl" -q wait "$job" --for="step>=$((steps / 2))" --timeout 10m >/dev/null || exit 1
    # a rank's identity: boot id, pid, start time
    read -r _ pid _ <"$(echo "$dir"/agent/attempts/*-"$job".1/rank-1.pid)" || exit 1
    printf '\n== SIGKILL to rank 1 (pid %s)\n' "$pid"
    kill -9 "$pid"
) &
killer_pid=$!
"$bin/boostctl" wait "$job" --follow || true # how it ended is judged below
wait "$killer_pid" || die "the worker could not be killed half-way"
killer_pid=

say "final table"
"$bin/boostctl" status -a
say "loss over the steps"
"$bin/boostctl" metrics "$job" --plot
say "checkpoints"
"$bin/boostctl" ckpt ls "$job"

state=$(field state)
attempts=$(field attempt)
eval_loss=$(field eval_loss)
say "result: $state after $attempts attempts, evaluation loss $eval_loss nats a byte (bound $bound)"
[ "$state" = COMPLETED ] || die "the job ended $state"
[ "$attempts" = 2 ] || die "expected exactly one recovery, the job has $attempts attempts"
awk -v loss="$eval_loss" -v bound="$bound" 'BEGIN { exit !(loss != "" && loss + 0 < bound) }' ||
    die "evaluation loss $eval_loss is not below $bound"
echo "   it learnt, lost a worker, went on by itself; checkpoints: $dir/ckpt"
