#!/usr/bin/env python3
"""T31 (pytorch #46849, #53843): a gradient becomes NaN or infinite at step k; clipping passes it, the run trains NaN for
hours, checkpoints it, and retention deletes the last good checkpoints.

Here the update is skipped on every rank alike, Adam's t stays, the skips are counted, the job ends after
optimizer.max_skipped in a row with the steps and samples named, and no state that is not finite is ever committed.
"""
import json, math, os, re, struct

from standalone import SEQ, Job, fields, run
from jobs import Shared, job_of

shared = Shared(cpu_slots=2)
MAX_SKIPPED, STEPS = 3, 400


def contents(path):
    """Metadata and entries of a shard, its bytes, and where in them the data begins."""
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    entries = json.loads(data[8:8 + size])
    return entries.pop("__metadata__"), entries, data, 8 + size


def shard(path):
    """Metadata of a shard, and whether every number in it is finite."""
    meta, entries, data, at = contents(path)
    assert entries and all(t["dtype"] == "F32" for t in entries.values()), entries
    return meta, all(x & 0x7f800000 != 0x7f800000 for x, in struct.iter_unpack("<I", data[at:]))


def ranks_done(run_dir, world=2):
    """The DoneRecords: {field: value}, 5 the step, 7 the error."""
    return [dict(fields((run_dir / f"rank-{r}.done").read_bytes())) for r in range(world)]


# With lr * weight_decay far above 2 each update makes the weights many times larger: finite at first, until products
# of them overflow.
EXPLODES = ["optimizer.lr=10", "optimizer.weight_decay=10", "optimizer.decay_embeddings=true",
            "optimizer.warmup_steps=400", "optimizer.schedule=CONSTANT", f"optimizer.max_skipped={MAX_SKIPPED}"]


SAID = re.compile(r"(\d+) updates in a row were skipped because loss or gradient was not finite: steps (\d+) to (\d+), "
                  r"samples (\d+) to (\d+)")


def explodes(c, parallel):
    """One checkpoint is kept, so that a single one of a broken state would be enough to lose all."""
    batch = 8
    job = c.submit(job_of(c, steps=STEPS, every=1, name="explodes", tp=1, batch=batch, hidden=32, seq_len=32,
                          extra="restart { max_restarts: 0 }"),
                   *[x for s in [*EXPLODES, *parallel, "checkpoint.keep=1"] for x in ("--set", s)])
    row = c.wait_state(job, "FAILED", deadline=60)
    said = SAID.search(row["info"])
    assert said, row
    count, first, last, first_sample, last_sample = map(int, said.groups())
    assert (count, last - first + 1) == (MAX_SKIPPED, MAX_SKIPPED) and 5 < first < STEPS - MAX_SKIPPED, row
    assert (first_sample, last_sample) == ((first - 1) * batch, last * batch - 1), row

    metrics = {}
    for r in c.json("metrics", job)["metrics"]:  # a checkpoint has a row of its own
        metrics.setdefault(r["step"], {}).update(r)
    for step in range(1, last + 1):  # counted; a number that is none is left out
        assert metrics[step]["skipped"] == max(0, step - first + 1), metrics[step]
        assert ("loss" in metrics[step]) == ("grad_norm" in metrics[step]) == (step < first), metrics[step]

    rows = c.json("ckpt", "ls", job, "-a")["checkpoints"]
    assert max(k["step"] for k in rows) < first, "nothing was written of a skipped step"
    kept = [k for k in rows if k["state"] == "COMMITTED"]
    assert len(kept) == 1 and any(k["state"] in ("DELETING", "DELETED") for k in rows), rows  # retention was at work
    shards = sorted(f for f in os.listdir(kept[0]["path"]) if f.endswith(".safetensors"))
    assert len(shards) == 2, shards
    for name in shards:
        meta, finite = shard(c.dir / kept[0]["path"] / name)
        assert finite and int(meta["step"]) == float(meta["adam_t"]) == kept[0]["step"], meta


@shared
def test_t31_two_slices_of_a_model(c):
    explodes(c, ["parallel.tp=2"])


@shared
def test_t31_two_replicas(c):
    explodes(c, ["parallel.dp=2", "parallel.micro_batch=4"])


test_nothing_is_left = shared.last


def test_t31_every_rank_ends_alike():
    """Without an agent nobody ends a rank but itself: each tells the same step and the same reason."""
    for parallel in (["parallel.tp=2"], ["parallel.tp=1", "parallel.dp=2"]):
        job = Job(STEPS)
        code, out = job.finish(sets=[*EXPLODES, *parallel, "checkpoint.every_steps=1"])
        assert code == 70, (code, out)
        one, other = ranks_done(job.run_dir)
        said = SAID.search(one[7].decode())
        assert said and one[5] == other[5] == int(said.group(3)) and one[7] == other[7], (one, other)
        whole = job.checkpoints()
        assert whole and all(int(d.name[5:].split(".")[0]) < int(said.group(2)) for d in whole), whole
        for meta, finite in (shard(p) for d in whole for p in d.glob("*.safetensors")):
            assert finite and int(meta["step"]) == float(meta["adam_t"]) and meta["skipped"] == "0", meta


def test_t31_a_skipped_update_leaves_adam_alone():
    """Every third window has no target that counts: wherever the order puts them, a step of nothing else is skipped on
    both ranks, and training goes on."""
    for parallel in (["parallel.tp=2"], ["parallel.tp=1", "parallel.dp=2"]):
        job = Job(40)
        text = bytearray((job.dir / "train.txt").read_bytes()[:40 * SEQ + 1])
        for w in range(0, 40, 3):
            text[w * SEQ + 1:(w + 1) * SEQ + 1] = b"#" * SEQ
        (job.dir / "train.txt").write_bytes(text)
        batch = 1 if "parallel.tp=2" in parallel else 2
        code, out = job.finish(sets=[*parallel, "parallel.micro_batch=1", f"parallel.global_batch={batch}", "data.pad_id=35",
                                     f"run.steps={40 // batch}", "checkpoint.every_steps=0", "optimizer.max_skipped=40"])
        assert code == 0, out
        skipped = job.metric("skipped")[40 // batch]
        assert skipped == 14 if batch == 1 else skipped > 0, skipped
        assert out.count("update skipped, no token had a loss") == skipped, out
        for path in sorted(job.checkpoints()[-1].glob("*.safetensors")):
            meta, finite = shard(path)
            assert finite and int(meta["skipped"]) == skipped, meta
            assert float(meta["adam_t"]) == int(meta["step"]) - skipped, meta
            count, *numbers = map(float, meta["spike"].split())  # a loss that is none is not among those it compares with
            assert count == int(meta["step"]) - skipped and all(map(math.isfinite, numbers)), meta


def stopped_job(sets=()):
    """A job that was stopped after some steps, the checkpoints it left, and the step of the last."""
    job = Job(40)
    code, out = job.finish(sets=["run.steps=100000", *sets], stop_after=10)
    assert code == 0 and "stopped at step" in out, out
    before = job.checkpoints()
    return job, before, int(re.fullmatch(r"step-(\d+)\.a1", before[-1].name).group(1))


# Steps enough (half a second) for the first of their checkpoints to fail while there are more to come.
MORE = 600


def writes_nothing(job, before, end, sets):
    code, out = job.finish(resume=before[-1], sets=["checkpoint.every_steps=1", f"run.steps={end}", *sets])
    assert code == 70 and "update skipped" not in out, (code, out)
    assert "the last checkpoint failed: the state is not finite: embedding holds an infinity or a NaN" in out, out
    for record in ranks_done(job.run_dir):
        assert record[5] == end and b"final checkpoint: the state is not finite" in record[7], record
    assert job.checkpoints() == before, (job.checkpoints(), before)


def test_t31_a_state_that_is_not_finite_is_never_written():
    """An eps that is 0 in fp32 makes 0/0 of the rows of bytes that the text does not have, while losses and gradients
    stay finite: nothing but its checkpoints could tell, and each would be the newest."""
    job, before, at = stopped_job()
    assert all(shard(p)[1] for d in before for p in d.glob("*.safetensors"))
    writes_nothing(job, before, at + MORE, ["optimizer.eps=1e-60"])
    code, out = job.finish(resume=before[-1], sets=[f"run.steps={at + MORE}"])
    assert code == 0 and f"completed at step {at + MORE}" in out, out


def test_t31_nor_one_of_fp64():
    """The row of byte 0, which the text does not have, is infinite from the start."""
    job, before, at = stopped_job(["run.precision=FP64"])
    for path in before[-1].glob("*.safetensors"):
        _, entries, data, begin = contents(path)
        assert entries["embedding"]["dtype"] == "F64"
        begin += entries["embedding"]["data_offsets"][0]
        path.write_bytes(data[:begin] + struct.pack("<d", -math.inf) + data[begin + 8:])
    writes_nothing(job, before, at + MORE, ["run.precision=FP64"])


run(globals())
