#!/usr/bin/env python3
"""checkpoint.init_from by URL: a mirrored checkpoint and an exported Hugging Face directory, fetched into the bounded cache,
checked, gone on with where they were cut, and refused with the reason. The store is s3server.py."""
import atexit, os, shutil, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import run, wait_until
from jobs import Shared, attempts, job_of, losses, wait_event
import s3server
from s3server import keys_file

os.environ["no_proxy"] = "127.0.0.1"
STEPS = 12
store = s3server.Store()
base = Path(os.environ.get("BOOST_TEST_DIR") or "/tmp") / f"keys-{os.getpid()}"
base.mkdir()
atexit.register(shutil.rmtree, base, ignore_errors=True)
shared = Shared(cpu_slots=2, agent_set={"s3_endpoint": store.url, "s3_path_style": "true", "s3_part_kib": 64,
                                        "s3_stall_ms": 3000, "s3_credentials": keys_file(base)})
made = {}


def mirrored(c):
    """A job that has ended at step STEPS / 2 with its copy: (job, directory, URL)."""
    if c not in made:
        job = c.submit(job_of(c, steps=STEPS, every=STEPS // 2, name="first", layers=2), "--set", "checkpoint.mirror=s3://models/m")
        c.wait_state(job, "COMPLETED")

        def copied():
            ks = c.json("ckpt", "ls", job)["checkpoints"]
            return ks if len(ks) == 2 and all(k["mirror"] == "MIRRORED" for k in ks) else None
        k = wait_until(copied, 30, "both are copied")[0]
        assert k["mirror_url"] == "s3://models/m/" + "/".join(k["path"].split("/")[-2:]), k
        made[c] = job, k["path"], k["mirror_url"]
    return made[c]


def put_copy(c, name, change=lambda file, data: data):
    """Another copy of that checkpoint, changed; its URL."""
    _, path, _ = mirrored(c)
    step = os.path.basename(path)
    for file in os.listdir(path):
        data = change(file, (Path(path) / file).read_bytes())
        store.objects["models", f"{name}/{step}/{file}"] = store.objects["-", f"{name}/{step}/{file}"] = data
    return f"s3://models/{name}/{step}"


def from_url(c, url, name, *options, cache="cache", steps=STEPS):
    return [job_of(c, steps=steps, every=0, name=name, layers=2), "--set", f"checkpoint.init_from.path={url}",
            "--set", f"data.cache_dir={c.dir / cache}", *options]


def refused(c, url, *options):
    path = c.dir / "refused.pbtxt"
    text, *more = from_url(c, url, "refused", *options)
    path.write_text(text)
    r = c.ctl("submit", path, *more)
    assert r.rc != 0, r
    return r.err


def first_losses(c, job):
    return {step: list(x.values()) for step, x in losses(c, job).items()}


def gets(piece):
    return [r for r in store.requests if r.startswith("GET") and piece in r]


@shared
def test_a_mirrored_checkpoint_goes_on_elsewhere(c):
    first, path, url = mirrored(c)
    with store.lock:  # the way is bad: cut, then refused
        store.faults[:] = [{"method": "GET", "match": ".safetensors", "cut": 70_000, "times": 2},
                           {"method": "GET", "match": ".safetensors", "status": 503, "times": 1}]
    job = c.submit(*from_url(c, url, "elsewhere"))
    c.wait_state(job, "COMPLETED")
    assert "MiB of its files fetched" in wait_event(c, job, "data-fetched")["text"]
    assert url in wait_event(c, job, "started")["text"] and attempts(c, job)[0]["from_step"] == STEPS // 2
    there, = (c.dir / "cache").glob(f"*-{os.path.basename(path)}/{os.path.basename(path)}")
    assert {f.name: f.read_bytes() for f in there.iterdir()} == {f.name: f.read_bytes() for f in Path(path).iterdir()}
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in there.iterdir()), "keys were needed to read them"
    want = {s: x for s, x in first_losses(c, first).items() if s > STEPS // 2}
    assert first_losses(c, job) == want
    before = len(gets(".safetensors"))
    weights = c.submit(*from_url(c, url, "weights", "--set", "checkpoint.init_from.weights_only=true"))
    c.wait_state(weights, "COMPLETED")
    assert min(losses(c, weights)) == 1 and len(gets(".safetensors")) == before, "it was in the cache"


@shared
def test_a_job_of_which_only_the_copy_is_left(c):
    first, path, _ = mirrored(c)
    job = c.submit(job_of(c, steps=STEPS, every=0, name="named", layers=2), "--hold", "--set",
                   f"checkpoint.init_from.path=job:{first}@{STEPS // 2}")
    lost = Path(path).with_name("lost")
    os.rename(path, lost)
    c.ok("release", job)
    c.wait_state(job, "COMPLETED")
    assert f"step {STEPS // 2} was fetched from its copy" in wait_event(c, job, "checkpoint-restored")["text"]
    assert {f.name: f.read_bytes() for f in lost.iterdir()} == {f.name: f.read_bytes() for f in Path(path).iterdir()}
    shutil.rmtree(lost)
    assert first_losses(c, job) == {s: x for s, x in first_losses(c, first).items() if s > STEPS // 2}


@shared
def test_a_directory_of_hugging_face(c):
    text = job_of(c, steps=4, every=4, name="dense").replace("factorization: COLA", "factorization: FULL_RANK")
    text = text.replace("strategy: BTP", "strategy: FULL").replace("rank: 8 ", "").replace("rank: 16 ", "")
    dense = c.submit(text)
    c.wait_state(dense, "COMPLETED")
    c.ok("ckpt", "export", dense, c.dir / "hf")
    for f in (c.dir / "hf").iterdir():
        store.objects["models", f"hf/{f.name}"] = store.objects["-", f"hf/{f.name}"] = f.read_bytes()
    options = ("--set", f"data.cache_dir={c.dir}/cache", "--set", "checkpoint.init_from.weights_only=true")
    runs = []
    for at in (f"{c.dir}/hf", "s3://models/hf", f"{store.url}/-/plain/hf"):
        job = c.submit(text, "--set", f"checkpoint.init_from.path={at}", *options)
        c.wait_state(job, "COMPLETED")
        runs.append(first_losses(c, job))
    assert runs[0] == runs[1] == runs[2] and runs[0][1] != first_losses(c, dense)[1], runs
    assert "weights_only: true" in refused(c, "s3://models/hf")
    path = c.dir / "other.pbtxt"
    path.write_text(text.replace("hidden: 64", "hidden: 32"))
    job = c.submit(path.read_text(), "--set", "checkpoint.init_from.path=s3://models/hf", *options)
    c.wait_state(job, "HELD")
    assert "model.hidden" in c.ok("show", job), c.ok("show", job)
    c.ok("cancel", "-y", job)
    assert len(list((c.dir / "cache").glob("*-hf"))) == 2


@shared
def test_agent_killed_in_the_middle_goes_on(c):
    url = put_copy(c, "cut")
    with store.lock:
        store.faults[:] = [{"method": "GET", "match": "cut/", "skip": 2, "delay": 60, "times": 1}]  # looks at the manifest twice
    job = c.submit(*from_url(c, url, "cut"))
    wait_until(lambda: gets("cut/step") and [r for r in gets("cut/step") if ".safetensors" in r], 20, "a shard is asked for")
    wait_until(lambda: [w for w in c.json("show", job)["waits"] if w.get("bytes_total")], 10, "how far it is shows")
    c.agents["n1"].kill9()
    store.faults[:] = []
    c.start_agent("n1")
    c.wait_state(job, "COMPLETED")


@shared
def test_a_cache_that_is_emptied_meanwhile_is_filled_again(c):
    url = put_copy(c, "emptied")
    with store.lock:
        store.faults[:] = [{"method": "GET", "match": "emptied/", "skip": 2, "delay": 1, "times": 1}]
    job = c.submit(*from_url(c, url, "emptied", cache="emptied"))
    wait_until(lambda: [r for r in gets("emptied/step") if ".safetensors" in r], 20, "a shard is asked for")
    shutil.rmtree(c.dir / "emptied")
    c.wait_state(job, "COMPLETED")  # HELD would not do: that says something about the job


@shared
def test_what_is_damaged_is_not_started_from(c):
    def flip(file, data):
        return data[:-1] + bytes([data[-1] ^ 1]) if "rank-1" in file or "00001" in file else data
    url = put_copy(c, "bad", flip)
    job = c.submit(*from_url(c, url, "bad"))
    c.wait_state(job, "HELD", deadline=30)
    said = c.ok("show", job)
    assert "is damaged" in said and "CRC-32C" in said and "boostctl release" in said, said
    assert not [p for p in (c.dir / "cache").glob("*.part/*/*.safetensors")], "what is wrong does not stay"
    put_copy(c, "bad")
    c.ok("release", job)
    c.wait_state(job, "COMPLETED")
    shorter = put_copy(c, "short", lambda file, data: data[:-8] if file.endswith(".safetensors") else data)
    job = c.submit(*from_url(c, shorter, "short"))
    c.wait_state(job, "HELD", deadline=30)
    assert "bytes" in c.ok("show", job)
    c.ok("cancel", "-y", job)


@shared
def test_what_is_wrong_is_said_at_submit(c):
    _, path, url = mirrored(c)
    assert "status 404" in refused(c, "s3://models/nowhere/step-8.a1")
    assert "manifest.json" in refused(c, "s3://models/nowhere/step-8.a1")
    assert "weights_only: true" in refused(c, "s3://models/m")
    assert "needs data.cache_dir" in refused(c, url, "--set", "data.cache_dir=")
    assert "model.hidden" in refused(c, url, "--set", "model.hidden=32")
    big = put_copy(c, "big", lambda f, d: d.replace(b'"bytes": ', b'"bytes": 9') if f == "manifest.json" else d)
    assert "cache_max_mib = 1" in refused(c, big, "--set", "data.cache_max_mib=1")
    assert "checkpoint.dir is a URL" in refused(c, url, "--set", "checkpoint.dir=s3://models/x")
    assert "no URL that can be fetched" in refused(c, "ftp://models/step-8.a1")
    said = refused(c, f"http://ann:word@127.0.0.1/step-{STEPS // 2}.a1")
    assert "password" in said and "word@" not in said, said
    store.faults[:] = [{"match": "m/", "status": 403, "code": "AccessDenied", "times": 100}]
    assert "AccessDenied" in refused(c, url)
    store.faults[:] = []


@shared
def test_the_oldest_goes_and_a_copy_in_use_stays(c):
    one, two = put_copy(c, "one"), put_copy(c, "two")
    options = ("--set", "parallel.tp=1", "--set", "data.cache_max_mib=1")  # room for one of them
    mirror_bytes = sum(len(d) for (b, k), d in store.objects.items() if b == "models" and k.startswith("one/"))
    assert mirror_bytes > (1 << 19), mirror_bytes
    first = c.submit(*from_url(c, one, "one", *options, cache="small", steps=1_000_000))
    c.wait_state(first, "RUNNING")
    kept, = (c.dir / "small").glob("*-step*")
    then = time.time() - 3600
    os.utime(kept, (then, then))
    second = c.submit(*from_url(c, two, "two", *options, cache="small"))
    wait_until(lambda: "are in use" in c.ok("show", second), 20, "one in use stays")
    assert kept.exists()
    c.ok("cancel", "--now", "-y", first)
    c.wait_state(first, "CANCELLED")
    os.utime(kept, (then, then))
    c.wait_state(second, "COMPLETED")
    assert not kept.exists() and len(list((c.dir / "small").glob("*-step*"))) == 1


test_nothing_is_left = shared.last

run(globals())
