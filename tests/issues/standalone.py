"""Whole jobs in one boost-worker process, for rows of trainers. Standard library only."""
import os, signal, struct, subprocess, sys, tempfile
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
from harness import BIN, run, wait_until  # noqa: F401  (tests take them from here)

SEQ, BATCH = 16, 4
JOB = """
spec_version: 1
name: "row"
model {{ factorization: COLA hidden: 16 layers: 2 heads: 2 intermediate: 32 rank: 4 vocab: 128 }}
parallel {{ strategy: BTP tp: 2 micro_batch: 2 global_batch: {batch} }}
data {{ train {{ path: "{dir}/train.txt" }} format: TEXT seq_len: {seq} }}
optimizer {{ lr: 1e-2 warmup_steps: 10 }}
run {{ steps: {steps} }}
checkpoint {{ dir: "{dir}/ckpt" every_steps: 10 }}
resources {{ threads_per_rank: 1 }}
"""


def fields(data):
    """Numbers and values of one protobuf message: varints, doubles as bytes, and byte strings."""
    at, out = 0, []

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
    while at < len(data):
        key = varint()
        if key & 7 == 0:
            out.append((key >> 3, varint()))
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            out.append((key >> 3, data[at:at + size]))
            at += size
    return out


def records(path):
    """Payloads of a record log (proto/reclog.h)."""
    data, at = Path(path).read_bytes(), 0
    while at + 8 <= len(data):
        size = struct.unpack_from("<I", data, at)[0]
        if at + 8 + size > len(data):
            return
        yield data[at + 8:at + 8 + size]
        at += 8 + size


class Job:
    """A directory with data, job file and checkpoints; runs of it are numbered."""

    def __init__(self, steps):
        self.dir = Path(tempfile.mkdtemp(prefix="row-", dir=os.environ.get("BOOST_TEST_DIR")))
        text, x = [], 1
        for _ in range(4000):
            x = (x * 1664525 + 1013904223) % 2**32
            text.append(("the", "lord", "said", "unto", "moses", "and", "it", "was", "so")[(x >> 24) % 9])
        (self.dir / "train.txt").write_text(" ".join(text))
        (self.dir / "job.pbtxt").write_text(JOB.format(dir=self.dir, steps=steps, seq=SEQ, batch=BATCH))
        self.steps, self.runs = steps, 0

    def start(self, resume=None, sets=()):
        self.runs += 1
        self.run_dir = self.dir / f"run-{self.runs}"
        argv = [BIN / "boost-worker", "--standalone", self.dir / "job.pbtxt", "--run-dir", self.run_dir]
        argv += ["--resume", resume] if resume else []
        for s in sets:
            argv += ["--set", s]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, resume=None, sets=(), stop_after=None, how=signal.SIGTERM):
        """Runs to the end, or signals once the step was told; (exit code, output)."""
        child, lines = self.start(resume, sets), []
        for line in child.stdout:
            lines.append(line)
            if stop_after and line.startswith(f"step {stop_after}/"):
                child.send_signal(how)
                stop_after = None
        return child.wait(), "".join(lines)

    def metric(self, name, run_dir=None):
        """{step: value} of rank 0."""
        out = {}
        for record in records((run_dir or self.run_dir) / "rank-0.metrics"):
            message = fields(record)
            step = dict((k, v) for k, v in message if k != 4)[2]
            for values in (dict(fields(v)) for k, v in message if k == 4):
                if values[1].decode() == name:
                    out[step] = struct.unpack("<d", values[2])[0]
        return out

    def checkpoints(self):
        """Whole ones, oldest first."""
        found = [d for d in (self.dir / "ckpt").glob("step-*.a*") if len(list(d.glob("rank-*.safetensors"))) == 2]
        return sorted(found, key=lambda d: [int(x) for x in d.name[5:].split(".a")])
