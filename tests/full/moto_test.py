#!/usr/bin/env python3
# time limit: 400
"""Object storage against a server that is not ours: moto, from PyPI, in an environment of its own. Skipped with the reason
where it cannot be installed. It checks no signatures (s3server.py does) but has Amazon's rules for parts."""
import os, re, shutil, subprocess, sys, urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, Skip, run, wait_until
from jobs import attempts, job_of, wait_event, wait_rank_step
from s3server import KEY, SECRET, keys_file

os.environ["no_proxy"] = "127.0.0.1"
BASE = Path(os.environ.get("BOOST_TEST_DIR") or "/tmp")
PART = 5 << 20  # the least that Amazon takes
_moto = {}


def moto():
    """Its URL; one server for all tests here."""
    if "skip" in _moto:
        raise Skip(_moto["skip"])
    if "url" in _moto:
        return _moto["url"]
    venv = BASE / "venv"
    made = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
    if made.returncode == 0:
        made = subprocess.run([venv / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "moto[server,s3]==5.*"],
                              capture_output=True, text=True, timeout=300)
    if made.returncode != 0:
        _moto["skip"] = "moto cannot be installed: " + (made.stderr.strip() or made.stdout.strip()).splitlines()[-1][:200]
        raise Skip(_moto["skip"])
    log = open(BASE / "moto.log", "w+")
    child = subprocess.Popen([venv / "bin" / "python", "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
                             stdout=log, stderr=log)
    _moto["child"] = child
    found = wait_until(lambda: re.search(r"Running on (http://127.0.0.1:\d+)", (BASE / "moto.log").read_text()), 60,
                       "moto listens")
    _moto["url"] = found.group(1)
    urllib.request.urlopen(urllib.request.Request(_moto["url"] + "/models", method="PUT"))
    return _moto["url"]


def test_a_large_object_in_parts():
    url = moto()
    file = BASE / "large"
    file.write_bytes(os.urandom(20 << 20))
    env = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    p = subprocess.run([BIN.parent / "bench" / "mirror_bench", url, "models", file], env=env, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr


def test_mirrored_deleted_restored():
    url = moto()
    keys = BASE / "keys"
    keys.mkdir()
    with Cluster(cpu_slots=2, agent_set={"s3_endpoint": url, "s3_path_style": "true", "s3_part_kib": PART >> 10,
                                         "s3_credentials": keys_file(keys)}) as c:
        job = c.submit(job_of(c, steps=40, every=8, name="moto"), "--set",
                       "checkpoint.mirror=s3://models/a b", "--set", "checkpoint.keep=2")
        wait_rank_step(c, job, 1, 26)
        c.ok("hold", job)
        c.wait_state(job, "HELD", deadline=60)

        def copied():
            ks = [k for k in c.json("ckpt", "ls", job)["checkpoints"] if k["state"] == "COMMITTED"]
            return ks if ks and all(k["mirror"] == "MIRRORED" for k in ks) else None
        newest = wait_until(copied, 60, "all are copied")[-1]
        shutil.rmtree(os.path.dirname(newest["path"]))
        c.ok("release", job)
        c.wait_state(job, "COMPLETED", deadline=120)
        assert attempts(c, job)[-1]["from_step"] == newest["step"], attempts(c, job)
        wait_event(c, job, "checkpoint-restored")
        wait_until(copied, 60, "all are copied")

        def left():
            text = urllib.request.urlopen(url + "/models?list-type=2&prefix=a%20b/").read().decode()
            return len({m.rsplit("/", 2)[-2] for m in re.findall(r"<Key>(.*?)</Key>", text)})
        wait_until(lambda: left() == 2, 60, "copies go with their checkpoints")


def test_nothing_is_left():
    if "child" in _moto:
        _moto["child"].terminate()
        _moto["child"].wait()


run(globals())
