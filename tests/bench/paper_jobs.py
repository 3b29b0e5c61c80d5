"""Jobs of paper_table.py that run to an end of their own: a small model whose rank is killed, and its curves by tp.
`table` is that of paper_table.py, which has put the end-to-end tests' folder on the path."""
import os, signal, statistics, time

from harness import wait_until
from jobs import wait_committed
from paper_lines import learnable_tokens


def small_job(table, name, tp, steps, every):
    """A model that learns in seconds. Few tokens and a low rate: with 4096 and 3e-3 it learns nothing for 30 steps and
    then all at once, and when that is hangs on the last bit."""
    data, vocab = table.cluster.dir / "learn.u16", 256
    if not data.exists():
        data.write_bytes(learnable_tokens(vocab, 1 << (15 if table.args.cpu else 20)))
    length = 256 if table.args.share > 1 else 1024  # shared GPUs sum over sockets
    shape = ("hidden: 64 layers: 2 heads: 8 intermediate: 128 rank: 16", 32) if table.args.cpu else \
        ("hidden: 512 layers: 8 heads: 8 intermediate: 1344 rank: 128", length)
    return f"""spec_version: 1
name: "{name}"
model {{ factorization: COLA {shape[0]} vocab: {vocab} }}
parallel {{ strategy: BTP tp: {tp} micro_batch: 8 global_batch: 8 }}
data {{ train {{ path: "{data}" }} seq_len: {shape[1]} }}
optimizer {{ lr: 1e-3 warmup_steps: 30 schedule: CONSTANT }}
run {{ steps: {steps} precision: BF16 }}
checkpoint {{ dir: "{table.cluster.dir}/ckpt" every_steps: {every} }}
resources {{ device: {table.device} }}
"""


def kill_a_rank(table):
    """SIGKILL for the last rank of a small model, behind its first checkpoint."""
    tp = 4 if 4 in table.args.tp else max(table.args.tp)
    every = 10 if table.args.cpu else 50
    if tp < 2:
        return
    table.need(40)
    c = table.cluster
    job = c.submit(small_job(table, "killed", tp, 1_000_000, every))
    try:
        wait_committed(c, job, every, deadline=min(120, table.left()))
        pids = c.rank_pids(job, 1)
        begin = time.monotonic()
        os.kill(pids[tp - 1], signal.SIGKILL)
        wait_until(lambda: c.status(job)["attempt"] == 2, 60, "the second attempt")
        starts = time.monotonic() - begin
        second = lambda: next((r for r in c.json("metrics", job)["metrics"] if r["attempt"] == 2), None)
        row = wait_until(second, 90, "a step of it")
        took = time.monotonic() - begin
    finally:
        c.ctl("cancel", "--now", "-y", job)
        c.ctl("wait", job, "--timeout", "30s")
    rows = c.json("metrics", job)["metrics"]
    first = {r["step"]: r["loss"] for r in rows if r["attempt"] == 1 and "loss" in r}
    twice = [(first[r["step"]], r["loss"]) for r in rows
             if r["attempt"] == 2 and r["step"] in first and "loss" in r]
    table.lines.put(f"recover_s_kill_tp{tp}", took, "s", attempt_2_s=starts, from_step=row["step"] - 1,
                    steps_again=len(twice), equal_to_the_bit=all(a == b for a, b in twice), backoff_min_ms=100,
                    model="BTP, hidden 512, 8 layers", tp=tp)


def overlay(table):
    """The same steps at tp 1 and every other; how far these are off."""
    steps = 20 if table.args.cpu else 200
    curves = {}
    for tp in sorted({1, *table.args.tp}):
        table.need(25)
        job = table.cluster.submit(small_job(table, f"loss-tp{tp}", tp, steps, 0))
        table.cluster.wait_state(job, "COMPLETED", deadline=min(180, table.left()))
        rows = [r for r in table.cluster.json("metrics", job, "--name", "loss")["metrics"] if "loss" in r]
        curves[tp] = [r["loss"] for r in sorted(rows, key=lambda r: r["step"])]
    for tp in sorted(curves)[1:]:
        off = [abs(a / b - 1) for a, b in zip(curves[tp], curves[1])]
        table.lines.put(f"overlay_max_pct_tp{tp}", 100 * max(off), "%", steps=len(off), beside="tp 1",
                        mean_pct=100 * statistics.mean(off), first=curves[tp][0], last=curves[tp][-1],
                        last_beside=curves[1][-1], curve=[round(x, 5) for x in curves[tp]],
                        curve_beside=[round(x, 5) for x in curves[1]])
