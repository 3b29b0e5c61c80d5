#!/usr/bin/env python3
"""boostctl ckpt: what verify finds and names, pins, deletion in two phases, retention."""
import contextlib, json, os, shutil, signal, sqlite3, subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import BIN, run, wait_until
from jobs import Shared, attempts, job_of, wait_rank_step

shared = Shared(cpu_slots=2)


def held(c, name, steps=60, every=8, at=26, **sets):
    job = c.submit(job_of(c, steps=steps, every=every, name=name),
                   *[x for k, v in sets.items() for x in ("--set", f"checkpoint.{k}={v}")])
    wait_rank_step(c, job, 1, at)
    c.ok("hold", job)
    c.wait_state(job, "HELD", deadline=40)
    return job, committed(c, job)


def committed(c, job):
    return [k for k in c.json("ckpt", "ls", job)["checkpoints"] if k["state"] == "COMMITTED"]


def shards(k):
    return sorted(os.path.join(k["path"], f) for f in os.listdir(k["path"]) if f.endswith(".safetensors"))


def verify(c, job, step):
    r = c.ctl("-o", "json", "ckpt", "verify", f"{job}@{step}")
    answer = json.loads(r.out)
    assert r.rc == (0 if answer["sound"] else 1), r
    return answer["faults"]


class Spoiled:
    """A checkpoint that is put right again at the end."""

    def __init__(self, k):
        self.path, self.copy = k["path"], k["path"] + ".copy"

    def __enter__(self):
        shutil.copytree(self.path, self.copy)

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)
        os.rename(self.copy, self.path)


def flip(path, at):
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


def reseal(directory):
    """The manifest says of each shard what it is now."""
    path = os.path.join(directory, "manifest.json")
    manifest = json.load(open(path))
    for s in manifest["shards"]:
        data = open(os.path.join(directory, s["file"]), "rb").read()
        s["bytes"], s["crc32c"] = len(data), crc32c(data)
    json.dump(manifest, open(path, "w"))


TABLE = []
for i in range(256):
    for _ in range(8):
        i = i >> 1 ^ (0x82F63B78 if i & 1 else 0)
    TABLE.append(i)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@shared
def test_verify_names_what_is_wrong(c):
    job, ks = held(c, "spoiled")
    k, other = ks[-1], ks[-2]
    assert crc32c(b"123456789") == 0xE3069283
    assert "is sound" in c.ok("ckpt", "verify", job)
    r = c.ctl("ckpt", "verify", k["path"])
    assert r.rc == 2 and f"boost-worker ckpt verify {k['path']}" in r.err, r
    one, two = shards(k)
    name = os.path.basename(two)
    with Spoiled(k):
        flip(two, os.path.getsize(two) - 5)
        faults = verify(c, job, k["step"])
        assert any(name in f and "CRC" in f for f in faults), faults
    # what was found stays said until it is found sound, and the one before is what the job would go on from
    rows = {x["step"]: x for x in c.json("ckpt", "ls", job)["checkpoints"]}
    assert "damaged" in rows[k["step"]]["note"], rows
    with Spoiled(k):
        os.truncate(two, os.path.getsize(two) - 1)
        faults = verify(c, job, k["step"])
        assert any(name in f and "bytes" in f for f in faults), faults
        os.unlink(one)
        faults = verify(c, job, k["step"])
        assert all(any(os.path.basename(x) in f for f in faults) for x in (one, two)), faults
    with Spoiled(k):
        os.unlink(os.path.join(k["path"], "manifest.json"))
        assert any("manifest.json" in f for f in verify(c, job, k["step"]))
    with Spoiled(k):
        shutil.copy(shards(other)[1], two)
        faults = verify(c, job, k["step"])
        assert any(name in f and f"step {other['step']}" in f for f in faults), faults
    said = c.ok("events", job)
    assert f"checkpoint of step {k['step']} does not verify" in said and "is tried" not in said, said
    assert f"; a resume would take the one of step {other['step']}" in said, said
    assert c.status(job)["last_checkpoint_step"] == other["step"]
    assert verify(c, job, k["step"]) == []
    assert f"checkpoint of step {k['step']} verifies after all" in c.ok("events", job)
    rows = {x["step"]: x for x in c.json("ckpt", "ls", job)["checkpoints"]}
    assert not rows[k["step"]].get("note") and c.status(job)["last_checkpoint_step"] == k["step"], rows
    with Spoiled(k):
        flip(one, os.path.getsize(one) // 2)
        c.ok("release", job)
        c.wait_state(job, "COMPLETED")
    assert attempts(c, job)[-1]["from_step"] == other["step"], attempts(c, job)


@shared
def test_coverage_and_foreign_shards_that_a_checksum_does_not_show(c):
    """The worker's own look: of files whose manifest has been made to fit."""
    job, ks = held(c, "foreign")
    k = ks[-1]
    one, two = shards(k)

    def look():
        r = subprocess.run([BIN / "boost-worker", "ckpt", "verify", k["path"]], capture_output=True, text=True)
        assert r.returncode == 0, r
        return [x[7:] for x in r.stdout.splitlines() if x.startswith("fault: ")]
    assert look() == []

    def edit(path, change):
        data = open(path, "rb").read()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + size])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= size
        open(path, "wb").write(data[:8] + text.ljust(size) + data[8 + size:])
        reseal(k["path"])

    def foreign(header):
        header["__metadata__"]["attempt"] = "7"

    def shift(header):
        """The second rank's rows of one tensor are said to be the first's."""
        for key, value in header["__metadata__"].items():
            if key.startswith("shard:") and ".B" in key:
                parts = value.split(",")
                parts[2] = "0"
                header["__metadata__"][key] = ",".join(parts)
                return
    with Spoiled(k):
        edit(two, foreign)
        faults = look()
        assert any(os.path.basename(two) in f and "attempt 7" in f for f in faults), faults
    with Spoiled(k):
        edit(two, shift)
        faults = look()
        assert any("twice" in f or "lack" in f for f in faults) and any(".B" in f for f in faults), faults
    with Spoiled(k):
        shutil.copy(two, os.path.join(k["path"], "rank-00002-of-00003.safetensors"))
        faults = look()
        assert any("rank-00002-of-00003" in f and "does not belong" in f for f in faults), faults
    c.ok("cancel", job)


@shared
def test_pin_rm_and_retention(c):
    job, ks = held(c, "kept", steps=200, every=6, at=30, keep=2, keep_every=12)
    steps = [k["step"] for k in ks]
    assert all(s in steps for s in range(12, max(steps) + 1, 12)), steps  # every 12th stays beside the last two
    assert len([s for s in steps if s % 12]) <= 2, steps
    last = steps[-1]
    assert "pinned" in c.ok("ckpt", "pin", f"{job}@{last}")
    assert [k["step"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k.get("pinned")] == [last]
    r = c.ctl("ckpt", "rm", f"{job}@{last}")
    assert r.rc == 5 and "pinned" in r.err and "unpin" in r.err, r
    r = c.ctl("ckpt", "rm", job)
    assert r.rc == 2 and f"ckpt rm {job}@STEP" in r.err, r
    (c.dir / "taken").mkdir()
    (c.dir / "taken" / "x").touch()
    assert c.ctl("ckpt", "export", job, c.dir / "taken").rc == 5, "refused; there is no job file that could be invalid"
    assert c.ctl("ckpt", "rm", f"{job}@99999").rc == 4
    c.restart_boostd()
    assert [k["step"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k.get("pinned")] == [last]
    # what the registry does not know of is nobody's to delete, old as it looks
    base = Path(ks[-1]["path"]).parent
    strangers = [base / "step-1.a1", base / "step-3.a9", base / "notes.txt"]
    for path in strangers[:2]:
        shutil.copytree(ks[-1]["path"], path)
    strangers[2].write_text("mine")
    c.ok("release", job)
    wait_until(lambda: len([k for k in committed(c, job) if k["step"] > last]) >= 2, 30, "two later checkpoints")
    c.ok("cancel", job)
    c.wait_state(job, "CANCELLED", deadline=40)
    rows = {k["step"]: k for k in committed(c, job)}
    assert last in rows, rows
    c.ok("ckpt", "unpin", f"{job}@{last}")
    victim = max(rows)
    c.ok("ckpt", "rm", f"{job}@{victim}")
    wait_until(lambda: [k for k in c.json("ckpt", "ls", job, "-a")["checkpoints"]
                        if k["step"] == victim and k["state"] == "DELETED"], 10, "the deletion")
    assert not os.path.exists(rows[victim]["path"]) and not os.path.exists(rows[victim]["path"] + ".deleting")
    assert "checkpoint-removed" in c.ok("events", job)
    assert all(path.exists() for path in strangers) and len(os.listdir(strangers[0])) == 3, os.listdir(base)
    # one that is on a file system that is not mounted just now is not deleted yet
    k = committed(c, job)[-1]
    os.rename(base, away := Path(f"{base}.away"))
    c.ok("ckpt", "rm", f"{job}@{k['step']}")
    row = wait_until(lambda: [r for r in c.json("ckpt", "ls", job, "-a")["checkpoints"]
                              if r["step"] == k["step"] and "is not there" in r.get("note", "")], 10, "the note")[0]
    assert row["state"] == "DELETING" and "not deleted yet" in row["note"] and "empty directory" in row["note"], row
    assert not base.exists() and (away / Path(k["path"]).name).exists()
    os.rename(away, base)
    row = wait_until(lambda: [r for r in c.json("ckpt", "ls", job, "-a")["checkpoints"]
                              if r["step"] == k["step"] and r["state"] == "DELETED"], 20, "the deletion")[0]
    assert not os.path.exists(k["path"]) and "not deleted" not in row.get("note", ""), row


@shared
def test_the_only_one_of_a_job_that_goes_on_stays(c):
    job, ks = held(c, "single", every=0, at=10)
    assert len(ks) == 1, ks  # hold writes one
    r = c.ctl("ckpt", "rm", f"{job}@{ks[0]['step']}")
    assert r.rc == 5 and "only one" in r.err, r
    c.ok("cancel", job)
    c.wait_state(job, "CANCELLED", deadline=40)
    c.ok("ckpt", "rm", f"{job}@{ks[0]['step']}")


@shared
def test_a_file_system_that_goes_away_in_the_middle(c):
    """Nothing is written below its mount point, so nothing takes the place of what is on it."""
    job = c.submit(job_of(c, steps=1_000_000, every=8, name="away"))
    wait_until(lambda: len(committed(c, job)) >= 2, 20, "two checkpoints")
    base = os.path.dirname(committed(c, job)[-1]["path"])
    os.rename(base, base + ".away")
    wait_until(lambda: "is not there" in c.status(job)["info"], 20, "why there is no checkpoint")
    events = [e["text"] for e in c.json("events", job)["events"] if e["kind"] == "checkpoint-abandoned"]
    assert any(f"{base} is not there" in x for x in events), events
    step = c.status(job)["step"]
    wait_until(lambda: c.status(job)["step"] > step, 20, "training that goes on")
    assert not os.path.exists(base)
    for pid in c.rank_pids(job, 1).values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "mounted" in c.status(job)["info"] and c.status(job)["state"] != "RUNNING", 20, "the wait")
    newest = committed(c, job)[-1]["step"]
    os.rename(base + ".away", base)
    wait_until(lambda: len(attempts(c, job)) > 1 and attempts(c, job)[-1]["from_step"] == newest, 20, "the next attempt")
    wait_until(lambda: committed(c, job)[-1]["step"] > newest, 20, "the next checkpoint")
    assert "does not verify" not in c.ok("events", job)
    c.ok("cancel", "--now", job)


@shared
def test_the_newest_of_very_many_are_listed(c):
    """Rows of what was deleted stay: weeks of them are more than a page of an answer."""
    many = 10_000
    job = c.submit(job_of(c, steps=4, every=2, tp=1, name="many"))
    c.wait_state(job, "COMPLETED")
    c.boostd.terminate()
    with contextlib.closing(sqlite3.connect(c.state_dir / "state.db")) as db, db:
        names = [row[1] for row in db.execute("PRAGMA table_info(checkpoint)")]
        values = ", ".join({"step": "n", "state": "3"}.get(x, x) for x in names)  # DELETED
        db.execute(f"WITH RECURSIVE more(n) AS (VALUES (1000) UNION ALL SELECT n + 1 FROM more WHERE n < {many + 999}) "
                   f"INSERT INTO checkpoint ({', '.join(names)}) SELECT {values} FROM checkpoint, more WHERE job = ? AND step = 4",
                   (job,))
        db.execute("UPDATE checkpoint SET state = 1 WHERE job = ? AND step = ?", (job, many + 999))  # COMMITTED
    c.start_boostd()
    c.wait_nodes(1)
    assert [k["step"] for k in committed(c, job)][-1] == many + 999
    assert len(c.ok("-o", "name", "ckpt", "ls", "-a", job).splitlines()) == many + 2


@shared
def test_an_interval_that_is_left_to_us_is_shown(c):
    job = c.submit(job_of(c, steps=100_000, every=0, name="auto"), "--set", "checkpoint.interval=AUTO")
    wait_rank_step(c, job, 1, 5)
    assert "every" not in c.ok("show", job).split("attempts")[0]  # nothing is measured yet
    c.ok("checkpoint", job)
    show = wait_until(lambda: (s := c.json("show", job)) and s.get("checkpoint_every_s") and s, 20, "the interval")
    cost, failure = show["checkpoint_cost_s"], show["mean_failure_s"]
    assert 86000 < failure < 87000 and 0 < cost < 5, show
    young = max(1, (2 * cost * failure) ** 0.5)
    assert 0.8 * young < show["checkpoint_every_s"] < 1.2 * young, (show["checkpoint_every_s"], young)
    assert "a failure is expected every" in c.ok("show", job)
    c.ok("cancel", "--now", job)


test_nothing_is_left = shared.last

run(globals())
