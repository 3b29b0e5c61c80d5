#!/usr/bin/env python3
"""Copies of checkpoints in an object store: made, cut and gone on with, refused, deleted with their checkpoints, and fetched
back by a node that has nothing. The store is s3server.py, which checks every signature."""
import atexit, os, shutil, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Cluster, run, wait_until
from jobs import Shared, attempts, job_of, same_losses, twin_of, wait_event, wait_rank_step
import s3server
from s3server import keys_file

os.environ["no_proxy"] = "127.0.0.1"
STEPS = 40
MIRROR = "s3://models/a b/runs"
PART = 64 << 10

store = s3server.Store()


# Where every test of this program finds the keys: the agents have to know the file when they start.
base = Path(os.environ.get("BOOST_TEST_DIR") or "/tmp") / f"keys-{os.getpid()}"
base.mkdir()
atexit.register(shutil.rmtree, base, ignore_errors=True)
shared = Shared(cpu_slots=2, agent_set={
    "s3_endpoint": store.url, "s3_path_style": "true", "s3_part_kib": PART >> 10, "s3_stall_ms": 2000,
    "s3_credentials": keys_file(base)})


def rows(c, job, state="COMMITTED"):
    return [k for k in c.json("ckpt", "ls", job, "-a")["checkpoints"] if k["state"] == state]


def files(directory):
    return {f: (Path(directory) / f).read_bytes() for f in os.listdir(directory)}


def copy_of(path):
    """{file: bytes} of the copy of a checkpoint directory."""
    prefix = "a b/runs/" + "/".join(path.split("/")[-2:]) + "/"
    with store.lock:
        return {k[len(prefix):]: v for (b, k), v in store.objects.items() if b == "models" and k.startswith(prefix)}


def mirrored(c, job, deadline=30):
    def there():
        ks = rows(c, job)
        return ks if ks and all(k["mirror"] == "MIRRORED" for k in ks) else None
    return wait_until(there, deadline, f"all checkpoints of job {job} are copied: {rows(c, job)}")


def submit(c, name, *options, every=8, mirror=MIRROR):
    return c.submit(job_of(c, steps=STEPS, every=every, name=name), "--set", f"checkpoint.mirror={mirror}", *options)


@shared
def test_copies_follow_the_registry(c):
    job = submit(c, "copied", "--set", "checkpoint.keep=2")
    c.wait_state(job, "COMPLETED")
    ks = mirrored(c, job)
    assert [k["step"] for k in ks] == [STEPS - 8, STEPS], ks
    assert all(copy_of(k["path"]) == files(k["path"]) for k in ks)
    assert all("manifest.json" in copy_of(k["path"]) for k in ks)
    wait_until(lambda: not rows(c, job, "DELETING"), 20, "deletions are over")
    assert not any(copy_of(k["path"]) for k in rows(c, job, "DELETED")), store.keys()
    assert "MIRRORED" in c.ok("ckpt", "ls", job) and "copied to s3://models/" in c.ok("events", job)
    assert not store.uploads, store.uploads
    assert any(r.startswith("POST") and "uploadId=" in r for r in store.requests), "no shard was larger than a part"
    # a copy goes while its files are on a file system that is not mounted, and they when it is back
    base = Path(ks[0]["path"]).parent
    os.rename(base, away := Path(f"{base}.away"))
    c.ok("ckpt", "rm", f"{job}@{ks[0]['step']}")
    wait_until(lambda: any("is not there" in k.get("note", "") for k in rows(c, job, "DELETING")), 20, "the note")
    assert not copy_of(ks[0]["path"]) and (away / Path(ks[0]["path"]).name).exists()
    os.rename(away, base)
    wait_until(lambda: not rows(c, job, "DELETING"), 20, "the deletion")
    assert sorted(os.listdir(base)) == [Path(ks[1]["path"]).name] and copy_of(ks[1]["path"])
    assert not any("mirror" in k or "mirror_url" in k for k in rows(c, job, "DELETED")), rows(c, job, "DELETED")
    # an ended job's files are not fetched, but it is said where they are
    os.rename(base, away)
    r = c.ctl("restart", job, "--set", f"run.steps={2 * STEPS}")
    copy = next(k["mirror_url"] for k in rows(c, job))
    assert r.rc == 6 and "manifest.json" in r.err and f"submit FILE --set checkpoint.init_from.path={copy} " in r.err, r


@shared
def test_a_bucket_that_is_not_there_has_lost_no_copy(c):
    """Nor is one there that is to be fetched: the job waits, and does not take its checkpoint for damaged."""
    job = submit(c, "bucket", "--set", "checkpoint.keep=3")
    wait_rank_step(c, job, 1, 26)
    c.ok("hold", job)
    c.wait_state(job, "HELD", deadline=40)
    old, *_, newest = mirrored(c, job)
    store.buckets.remove("models")
    c.ok("ckpt", "rm", f"{job}@{old['step']}")
    waiting = wait_until(lambda: [k for k in rows(c, job, "DELETING") if k.get("mirror_note")], 20, "why it stays")
    note = waiting[0]["mirror_note"]
    assert "NoSuchBucket" in note and "not deleted yet" in note and "make the bucket models" in note, note
    assert copy_of(old["path"]) and not os.path.exists(old["path"])
    shutil.rmtree(newest["path"])
    c.ok("release", job)
    wait_until(lambda: "NoSuchBucket" in c.status(job)["info"], 20, "what the job waits for")
    store.buckets.add("models")
    store.faults[:] = [{"status": 404, "body": "<html>nothing here</html>", "times": 10_000}]  # another server
    info = lambda: c.status(job)["info"]
    wait_until(lambda: "status 404" in info() and "NoSuchBucket" not in info(), 20, "that it waits for the store")
    store.faults[:] = [{"status": 200, "body": "<html>welcome</html>", "times": 10_000}]
    wait_until(lambda: "is a page" in c.status(job)["info"], 20, "what answers")
    assert copy_of(old["path"]) and all(not k.get("note") for k in rows(c, job, "COMMITTED"))
    store.faults[:] = []
    wait_until(lambda: not rows(c, job, "DELETING") and not copy_of(old["path"]), 30, "the deletion")
    c.wait_state(job, "COMPLETED")
    assert attempts(c, job)[-1]["from_step"] == newest["step"], attempts(c, job)


@shared
def test_a_node_that_has_nothing_fetches_it(c):
    job = submit(c, "restored")
    wait_rank_step(c, job, 1, 18)
    c.ok("hold", job)
    c.wait_state(job, "HELD", deadline=40)
    newest = mirrored(c, job)[-1]
    shutil.rmtree(os.path.dirname(newest["path"]))
    with store.lock:  # and the way there is bad
        store.faults[:] = [{"method": "GET", "match": ".safetensors", "cut": 70000, "times": 2},
                           {"method": "GET", "match": ".safetensors", "status": 503, "times": 2}]
    c.ok("release", job)
    c.wait_state(job, "COMPLETED")
    assert attempts(c, job)[-1]["from_step"] == newest["step"], attempts(c, job)
    assert "was fetched from its copy" in wait_event(c, job, "checkpoint-restored")["text"]
    same_losses(c, job, twin_of(c, steps=STEPS, every=8), STEPS)


@shared
def test_a_damaged_shard_is_mended_from_the_copy(c):
    job = submit(c, "mended")
    wait_rank_step(c, job, 1, 18)
    c.ok("hold", job)
    c.wait_state(job, "HELD", deadline=40)
    newest = mirrored(c, job)[-1]
    shard = next(Path(newest["path"]).glob("*.safetensors"))
    good = shard.read_bytes()
    shard.write_bytes(good[:1000] + bytes([good[1000] ^ 1]) + good[1001:])
    c.ok("release", job)
    c.wait_state(job, "COMPLETED")
    assert attempts(c, job)[-1]["from_step"] == newest["step"], attempts(c, job)
    same_losses(c, job, twin_of(c, steps=STEPS, every=8), STEPS)


@shared
def test_a_damaged_copy_is_not_believed(c):
    job = submit(c, "twice")
    wait_rank_step(c, job, 1, 26)
    c.ok("hold", job)
    c.wait_state(job, "HELD", deadline=40)
    *_, before, newest = mirrored(c, job)
    shutil.rmtree(newest["path"])
    name = next(n for n in store.objects if newest["path"].split("/")[-1] + "/rank" in n[1]
                and newest["path"].split("/")[-2] in n[1])
    store.objects[name] = store.objects[name][:-1] + bytes([store.objects[name][-1] ^ 1])
    c.ok("release", job)
    c.wait_state(job, "COMPLETED")
    assert attempts(c, job)[-1]["from_step"] == before["step"], attempts(c, job)
    assert "is damaged" in wait_event(c, job, "checkpoint-damaged")["text"]


@shared
def test_agent_killed_in_the_middle_of_an_upload(c):
    """The third part hangs: the agent is killed there. The next one sends the parts that are missing."""
    with store.lock:
        store.faults[:] = [{"method": "PUT", "match": "partNumber=3", "delay": 60, "times": 100}]
        before = len(store.requests)
    job = submit(c, "cut", every=0)
    c.wait_state(job, "COMPLETED")

    def parts(n):
        return [r for r in store.requests[before:] if f"partNumber={n}&" in r]
    wait_until(lambda: parts(3), 20, "the third part is on its way")
    k, = wait_until(lambda: [k for k in rows(c, job) if k.get("mirror_bytes_done")], 20, "how far it is shows")
    assert 2 * PART <= k["mirror_bytes_done"] < k["mirror_bytes_total"] == k["bytes"], k
    wait, = [x for x in c.json("show", job)["waits"] if x["name"].startswith("copy of the checkpoint")]
    assert 2 * PART <= wait["bytes_done"] < wait["bytes_total"] == k["bytes"], wait
    assert "PENDING" in c.ok("ckpt", "ls", job) and "% " in c.ok("ckpt", "ls", job)
    first = parts(1)[0]
    c.agents["n1"].kill9()
    with store.lock:
        store.faults[:] = []
    c.start_agent("n1")
    k, = mirrored(c, job)
    assert copy_of(k["path"]) == files(k["path"]) and not store.uploads
    assert parts(1).count(first) == 1, parts(1)


@shared
def test_wrong_keys_stop_no_job_and_are_said(c):
    with store.lock:
        store.faults[:] = [{"match": "wrong", "status": 403, "code": "InvalidAccessKeyId", "times": 10000}]
    job = submit(c, "keys", mirror="s3://models/wrong", every=0)
    c.wait_state(job, "COMPLETED")
    k = wait_until(lambda: [k for k in rows(c, job) if k.get("mirror_note")], 20, "a reason")[0]
    assert "InvalidAccessKeyId" in k["mirror_note"] and "s3_credentials" in k["mirror_note"], k
    assert k["mirror"] in ("PENDING", "FAILED"), k
    text = c.explain(job) + c.ok("ckpt", "ls", job)
    for pid in c.processes():
        text += Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    assert s3server.SECRET not in text and s3server.KEY not in text
    k = wait_until(lambda: next((k for k in rows(c, job) if k.get("mirror_retry_s")), None), 20, "it waits for the next try")
    assert "next try in" in c.ok("ckpt", "ls", job)
    store.faults[:] = []  # the keys are mended
    assert "1 checkpoint of job" in c.ok("ckpt", "mirror", job)
    mirrored(c, job)
    assert "is being copied" in c.ok("ckpt", "mirror", f"{job}@{k['step']}")
    mirrored(c, job)
    plain = c.submit(job_of(c, steps=3, every=0, name="plain"))
    c.wait_state(plain, "COMPLETED")
    r = c.ctl("ckpt", "mirror", plain)
    assert r.rc == 5 and "has no checkpoint.mirror" in r.err, r


def test_keys_of_the_environment_stay_with_the_agent():
    with Cluster(cpu_slots=2, agents=0, agent_set={
            "s3_endpoint": store.url, "s3_path_style": "true", "s3_credentials": base / "none.keys"}) as c:
        c.env.update(AWS_ACCESS_KEY_ID=s3server.KEY, AWS_SECRET_ACCESS_KEY=s3server.SECRET)
        c.start_agent("n1")
        del c.env["AWS_ACCESS_KEY_ID"], c.env["AWS_SECRET_ACCESS_KEY"]
        job = submit(c, "environment", "--set", "run.steps=1000000", every=0)  # it is not to end meanwhile
        wait_rank_step(c, job, 1, 6)
        c.ok("checkpoint", job)
        mirrored(c, job)
        others = [pid for pid in c.processes() if pid != c.agents["n1"].pid]
        assert len(others) >= 4, others  # boostd, keeper, two ranks
        for pid in others:
            assert s3server.SECRET not in Path(f"/proc/{pid}/environ").read_text(errors="replace"), pid


@shared
def test_no_keys_are_told_at_submit(c):
    keys = base / "s3.keys"
    keys.chmod(0o644)
    try:
        path = c.dir / "open.pbtxt"
        path.write_text(job_of(c, steps=5, every=0, name="open"))
        r = c.ctl("submit", path, "--set", f"checkpoint.mirror={MIRROR}")
        assert r.rc != 0 and "chmod 600" in r.err, r
        r = c.ctl("submit", path, "--set", "checkpoint.mirror=s3://B/x")
        assert r.rc != 0 and "s3://bucket/prefix" in r.err, r
    finally:
        keys.chmod(0o600)


test_nothing_is_left = shared.last

run(globals())
