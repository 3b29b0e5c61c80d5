#!/usr/bin/env python3
"""Token files by URL: fetched into a bounded cache before ranks start, gone on with where they were cut, checked, and what is
wrong said at submit. The server is s3server.py: plain files, and objects behind signatures."""
import atexit, hashlib, os, shutil, socket, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import run, wait_until, words
from jobs import Shared, at, losses, wait_event
import s3server
from s3server import keys_file

os.environ["no_proxy"] = "127.0.0.1"
store = s3server.Store()
base = Path(os.environ.get("BOOST_TEST_DIR") or "/tmp") / f"keys-{os.getpid()}"
base.mkdir()
atexit.register(shutil.rmtree, base, ignore_errors=True)
shared = Shared(cpu_slots=2, agent_set={"s3_endpoint": store.url, "s3_path_style": "true", "s3_stall_ms": 3000,
                                        "s3_credentials": keys_file(base)})
impatient = Shared(cpu_slots=2, boostd_set={"fetch_tries": 3}, agent_set={"s3_stall_ms": 1000})
TEXT = words(200_000).encode()
SUM = hashlib.sha256(TEXT).hexdigest()


def put(name, data=TEXT):
    store.objects["-", name] = data
    return f"{store.url}/-/plain/{name}"


def spec(c, path, name="web", steps=10, cache=None, extra=""):
    return f"""spec_version: 1
name: "{name}"
model {{ factorization: COLA hidden: 32 layers: 2 heads: 4 intermediate: 64 rank: 8 vocab: 256 }}
parallel {{ strategy: BTP micro_batch: 2 global_batch: 2 }}
data {{ train {{ path: "{path}" }} eval {{ path: "{path}" }} seq_len: 32 cache_dir: "{cache or c.dir / 'cache'}" {extra} }}
optimizer {{ lr: 3e-3 warmup_steps: 5 }}
run {{ steps: {steps} eval_tokens: 64 }}
checkpoint {{ dir: "{c.dir}/ckpt" every_steps: 5 keep: 3 }}
"""


def gets(name):
    return [r for r in store.requests if r.startswith("GET") and name in r]


def refused(c, text):
    path = c.dir / "refused.pbtxt"
    path.write_text(text)
    r = c.ctl("submit", path)
    assert r.rc != 0, r
    return r.err


@shared
def test_a_file_of_the_web_trains_as_one_of_the_disk(c):
    with store.lock:  # the way is bad: cut twice, refused twice
        store.faults[:] = [{"method": "GET", "match": "a.txt", "cut": 50_000, "times": 2},
                           {"method": "GET", "match": "a.txt", "status": 503, "times": 2}]
    job = c.submit(spec(c, put("a.txt")))
    c.wait_state(job, "COMPLETED")
    assert "MiB of its files fetched" in wait_event(c, job, "data-fetched")["text"]
    file, = (c.dir / "cache").glob("*-a.txt")
    assert file.read_bytes() == TEXT and not list((c.dir / "cache").glob("*.part"))
    disk = c.dir / "a.txt"
    disk.write_bytes(TEXT)
    twin = c.submit(spec(c, disk, name="disk"))
    c.wait_state(twin, "COMPLETED")
    assert losses(c, job).keys() == losses(c, twin).keys()
    assert [list(x.values()) for x in losses(c, job).values()] == [list(x.values()) for x in losses(c, twin).values()]
    before = len(gets("a.txt"))
    again = c.submit(spec(c, put("a.txt"), name="again"))
    c.wait_state(again, "COMPLETED")
    assert len(gets("a.txt")) == before, "it was in the cache"


@shared
def test_an_object_with_its_checksum(c):
    store.objects["models", "data/b.txt"] = TEXT
    job = c.submit(spec(c, f"s3://models/data/b.txt#sha256={SUM}", name="object"))
    c.wait_state(job, "COMPLETED")
    wrong = c.submit(spec(c, f"s3://models/data/b.txt#sha256={'0' * 64}", name="wrong"))
    c.wait_state(wrong, "HELD")
    text = c.ok("show", wrong)
    assert SUM in text and "correct the checksum" in text, text
    assert len(list((c.dir / "cache").glob("*-b.txt"))) == 1, "what is wrong does not stay"
    c.ok("cancel", "-y", wrong)


@shared
def test_agent_killed_in_the_middle_goes_on(c):
    with store.lock:
        store.faults[:] = [{"method": "GET", "match": "c.txt", "cut": 100_000, "times": 1},
                           {"method": "GET", "match": "c.txt", "delay": 60, "times": 1}]
    job = c.submit(spec(c, put("c.txt"), name="killed"))
    wait_until(lambda: len(gets("c.txt")) >= 2, 20, "the second part is asked for")
    part, = (c.dir / "cache").glob("*-c.txt.part")
    assert 0 < part.stat().st_size <= 100_000
    had = part.stat().st_size
    c.agents["n1"].kill9()
    store.faults[:] = []
    c.start_agent("n1")
    c.wait_state(job, "COMPLETED")
    moved = float(wait_event(c, job, "data-fetched")["text"].split()[0])
    assert moved <= (len(TEXT) - had) / 2**20 + 0.1, (moved, had)
    assert next((c.dir / "cache").glob("*-c.txt")).read_bytes() == TEXT


@shared
def test_what_is_there_waits_for_no_other_download(c):
    put("d.txt")
    first = c.submit(spec(c, f"{store.url}/-/plain/d.txt", name="first"))
    c.wait_state(first, "COMPLETED")
    with store.lock:
        store.faults[:] = [{"method": "GET", "match": "slow.txt", "drip": 4000, "times": 1000}]  # for five seconds
    slow = c.submit(spec(c, put("slow.txt"), name="slow"))
    wait_until(lambda: gets("slow.txt"), 20, "it is being fetched")
    quick = c.submit(spec(c, f"{store.url}/-/plain/d.txt", name="quick"))
    c.wait_state(quick, "COMPLETED")
    assert c.status(slow)["state"] == "QUEUED", c.status(slow)
    wait, = wait_until(lambda: [w for w in c.json("show", slow)["waits"] if w.get("bytes_done")], 10, "how far it is shows")
    assert 0 < wait["bytes_done"] < wait["bytes_total"] == len(TEXT), wait
    c.ok("cancel", "-y", slow)
    store.faults[:] = []
    part, = (c.dir / "cache").glob("*-slow.txt.part")  # nobody wants it any more: the lock is free for the next one
    next_one = c.submit(spec(c, put("e.txt"), name="next"))
    c.wait_state(next_one, "COMPLETED")
    assert part.stat().st_size < len(TEXT), "it went on for a job that was cancelled"


@shared
def test_what_is_wrong_is_said_at_submit(c):
    put("there.txt")
    assert "status 404" in refused(c, spec(c, f"{store.url}/-/plain/nowhere.txt"))
    store.faults[:] = [{"match": "there.txt", "status": 403, "times": 100}]
    assert "status 403" in refused(c, spec(c, f"{store.url}/-/plain/there.txt"))
    store.faults[:] = []
    assert "status 404" in refused(c, spec(c, "s3://models/nothing.txt"))
    big = put("big.txt", TEXT * 12)
    said = refused(c, spec(c, big, extra="cache_max_mib: 1"))
    assert "cache_max_mib = 1" in said and "raise data.cache_max_mib" in said, said
    assert "#sha256=" in refused(c, spec(c, big + "#md5=00"))
    assert "needs data.cache_dir" in refused(c, spec(c, big).replace(f'cache_dir: "{c.dir}/cache"', ""))


@shared
def test_a_file_that_is_said_to_be_longer(c):
    store.faults[:] = [{"match": "short.txt", "longer": 1000, "times": 100}]
    job = c.submit(spec(c, put("short.txt"), name="short"))
    said = c.wait_state(job, "HELD")["info"]
    store.faults[:] = []
    assert f"ends at byte {len(TEXT)}" in said and "mend the Content-Length" in said, said
    c.ok("cancel", "-y", job)


def held_for_its_files(c, job, why):
    c.wait_state(job, "HELD")
    first = [e for e in c.events(job) if e["kind"] == "fetch-failed"]
    assert len(first) == 1 and "(try 1)" in first[0]["text"] and why in first[0]["text"], first
    text = c.ok("show", job)
    assert "cannot fetch its files in 3 tries" in text and why in text and f"boostctl release {job}" in text, text
    assert not [e for e in c.events(job) if e["kind"] == "started"]


@impatient
def test_a_server_that_always_fails(c):
    store.faults[:] = [{"match": "e500.txt", "status": 500, "times": 10**6}]
    (c.dir / "here.txt").write_bytes(TEXT)
    both = "--hold", "--set", "parallel.tp=2"  # either takes all the devices
    job = c.submit(spec(c, put("e500.txt"), name="e500"), *both)
    behind = c.submit(spec(c, c.dir / "here.txt", name="behind"), *both)
    c.ok("release", job, behind)
    held_for_its_files(c, job, "status 500")
    c.wait_state(behind, "COMPLETED")
    assert at(wait_event(c, behind, "started")) < at(wait_event(c, job, "held")), "it waited for a job that waited"
    assert len([r for r in store.requests if "e500.txt" in r]) == 3 + 1 + 1, "of the first try's request, and of the others'"
    store.faults[:] = []
    c.ok("release", job)
    c.wait_state(job, "COMPLETED")


@impatient
def test_a_server_that_takes_calls_and_says_nothing(c):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as mute:
        job = c.submit(spec(c, f"http://127.0.0.1:{mute.getsockname()[1]}/m.txt", name="mute"))
        last = "last: data.train[0] http://127.0.0.1"
        wait_until(lambda: f"fetches its files on n1, try 2 of 3; {last}" in c.status(job)["info"], 30, "the last error shows")
        wait, = [w["name"] for w in c.json("show", job)["waits"]]
        assert last in wait and "no byte moved for 1000 ms" in wait, wait
        held_for_its_files(c, job, "no byte moved for 1000 ms")
        c.ok("cancel", "-y", job)


test_nothing_is_left_of_the_impatient = impatient.last


@shared
def test_the_oldest_goes_and_nothing_that_is_in_use(c):
    cache = c.dir / "small"
    two = (TEXT * 4)[:700_000]
    options = {"cache": cache, "extra": "cache_max_mib: 1"}
    old = c.submit(spec(c, put("old.txt", two), name="old", **options))
    c.wait_state(old, "COMPLETED")
    job = c.submit(spec(c, put("new.txt", two), name="new", steps=1_000_000, **options), "--set", "checkpoint.every_steps=0")
    wait_until(lambda: "no room" in c.ok("show", job), 20, "a young file is not thrown out")
    file, = cache.glob("*-old.txt")
    wait_until(lambda: not c.run_dir(old, 1).exists(), 20, "nothing is left of the old job")
    then = time.time() - 3600
    os.utime(file, (then, then))
    c.wait_state(job, "RUNNING")
    assert not file.exists() and len(list(cache.glob("*-new.txt"))) == 1
    new, = cache.glob("*-new.txt")
    os.utime(new, (then, then))
    third = c.submit(spec(c, put("third.txt", two), name="third", **options))
    wait_until(lambda: "are in use" in c.ok("show", third), 20, "one in use stays")
    assert new.exists()
    c.ok("cancel", "--now", "-y", job, third)


test_nothing_is_left = shared.last

run(globals())
