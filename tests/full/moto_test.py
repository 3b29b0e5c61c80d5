#!/usr/bin/env python3
# time limit: 400
"""Object storage against a server that is not ours: moto, from PyPI, in an environment of its own. Skipped with the reason
where it cannot be installed. It checks signatures by botocore's own code, and has Amazon's rules for parts; a faulty way to
it is s3server.py's, which passes on what it does not refuse."""
import os, re, shutil, subprocess, sys, urllib.parse, urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, Skip, run, wait_until
from jobs import attempts, job_of, wait_event, wait_rank_step
import s3server

os.environ["no_proxy"] = "127.0.0.1"
BASE = Path(os.environ.get("BOOST_TEST_DIR") or "/tmp")
PART = 5 << 20  # the least that Amazon takes
ALL = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
_moto = {}


def call(path, method="POST", data=None, **headers):
    request = urllib.request.Request(_moto["url"] + path, method=method, data=data, headers=headers)
    return urllib.request.urlopen(request).read().decode()


def iam(**query):
    scope = "AWS4-HMAC-SHA256 Credential=x/20200101/us-east-1/iam/aws4_request, SignedHeaders=host, Signature=0"
    return call("/", data=urllib.parse.urlencode({**query, "Version": "2010-05-08"}).encode(), Authorization=scope)


def install():
    venv = BASE / "venv"
    made = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
    if made.returncode == 0:
        made = subprocess.run([venv / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "moto[server,s3]==5.*"],
                              capture_output=True, text=True, timeout=300)
    if made.returncode != 0:
        _moto["skip"] = "moto cannot be installed: " + (made.stderr.strip() or made.stdout.strip()).splitlines()[-1][:200]
    return venv / "bin" / "python"


def moto():
    """One server for all tests here: its URL. It has a user whose keys are in _moto, and takes no others."""
    if "url" not in _moto and "skip" not in _moto:
        python = Path(os.environ.get("BOOST_MOTO_PYTHON") or install())
    if "skip" in _moto:
        raise Skip(_moto["skip"])
    if "url" in _moto:
        return _moto["url"]
    log = open(BASE / "moto.log", "w+")
    child = subprocess.Popen([python, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=log, stderr=log)
    _moto["child"] = child
    found = wait_until(lambda: re.search(r"Running on (http://127.0.0.1:\d+)", (BASE / "moto.log").read_text()), 60,
                       "moto listens")
    _moto["url"] = found.group(1)
    call("/models", "PUT")
    iam(Action="CreateUser", UserName="boost")
    iam(Action="PutUserPolicy", UserName="boost", PolicyName="all", PolicyDocument=ALL)
    made = iam(Action="CreateAccessKey", UserName="boost")
    _moto["key"] = re.search("<AccessKeyId>(.*?)<", made).group(1)
    _moto["secret"] = re.search("<SecretAccessKey>(.*?)<", made).group(1)
    call("/moto-api/reset-auth", data=b"0", **{"Content-Type": "text/plain"})
    return _moto["url"]


def keys(name, secret=None):
    path = BASE / name
    path.touch(0o600)
    path.write_text(f"aws_access_key_id = {_moto['key']}\naws_secret_access_key = {secret or _moto['secret']}\n")
    return path


def bucket(query):
    """What the store lists, seen by moto's own door."""
    call("/moto-api/reset-auth", data=b"inf", **{"Content-Type": "text/plain"})
    try:
        return call(f"/models?{query}", "GET")
    finally:
        call("/moto-api/reset-auth", data=b"0", **{"Content-Type": "text/plain"})


def cluster(endpoint, credentials):
    return Cluster(cpu_slots=2, agent_set={"s3_endpoint": endpoint, "s3_path_style": "true", "s3_part_kib": PART >> 10,
                                           "s3_stall_ms": 4000, "s3_credentials": credentials})


def large(c, name, *options):
    """A job of one rank whose one checkpoint goes in four parts."""
    return c.submit(job_of(c, steps=2, every=0, name=name, tp=1, hidden=2048, batch=2, seq_len=32), "--set",
                    "checkpoint.mirror=s3://models/a b", *options)


def copied(c, job):
    ks = [k for k in c.json("ckpt", "ls", job)["checkpoints"] if k["state"] == "COMMITTED"]
    return ks if ks and all(k["mirror"] == "MIRRORED" for k in ks) else None


def bench(key, secret):
    file = BASE / "large"
    file.write_bytes(os.urandom(20 << 20))
    env = {**os.environ, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    return subprocess.run([BIN.parent / "bench" / "mirror_bench", moto(), "models", file], env=env, capture_output=True,
                          text=True)


def test_a_large_object_in_parts_under_a_signature_that_botocore_checks():
    moto()
    p = bench(_moto["key"], _moto["secret"])
    assert p.returncode == 0, p.stderr
    p = bench(_moto["key"], "wrong")
    assert p.returncode == 1 and "SignatureDoesNotMatch" in p.stderr, p.stderr
    p = bench("AKIDWRONG", _moto["secret"])
    assert p.returncode == 1 and "InvalidAccessKeyId" in p.stderr, p.stderr


def test_mirrored_deleted_restored():
    with cluster(moto(), keys("keys")) as c:
        job = c.submit(job_of(c, steps=40, every=8, name="moto"), "--set",
                       "checkpoint.mirror=s3://models/a b", "--set", "checkpoint.keep=2")
        wait_rank_step(c, job, 1, 26)
        c.ok("hold", job)
        c.wait_state(job, "HELD", deadline=60)
        newest = wait_until(lambda: copied(c, job), 60, "all are copied")[-1]
        shutil.rmtree(newest["path"])
        c.ok("release", job)
        c.wait_state(job, "COMPLETED", deadline=120)
        assert attempts(c, job)[-1]["from_step"] == newest["step"], attempts(c, job)
        wait_event(c, job, "checkpoint-restored")
        last = wait_until(lambda: copied(c, job), 60, "all are copied")[-1]

        def left():
            text = bucket("list-type=2&prefix=a%20b/")
            return len({m.rsplit("/", 2)[-2] for m in re.findall(r"<Key>(.*?)</Key>", text)})
        wait_until(lambda: left() == 2, 60, "copies go with their checkpoints")
        elsewhere = c.submit(job_of(c, steps=50, every=0, name="elsewhere"), "--set",
                             f"checkpoint.init_from.path={last['mirror_url']}", "--set", f"data.cache_dir={c.dir}/cache")
        c.wait_state(elsewhere, "COMPLETED", deadline=60)
        assert attempts(c, elsewhere)[0]["from_step"] == 40


def test_interrupted_refused_and_slow():
    moto()
    with s3server.Store(forward=_moto["url"].split("//")[1]) as way, cluster(way.url, keys("keys")) as c:
        with way.lock:  # 503s, a server that says nothing, a connection that breaks; then the agent is killed
            way.faults[:] = [{"method": "PUT", "match": "partNumber=1", "status": 503, "retry_after": 1, "times": 2},
                             {"method": "PUT", "match": "partNumber=2", "delay": 8},
                             {"method": "PUT", "match": "partNumber=2", "cut": 100_000},
                             {"method": "PUT", "match": "partNumber=3", "delay": 60}]
        job = large(c, "cut")
        c.wait_state(job, "COMPLETED", deadline=60)
        wait_until(lambda: any("partNumber=3" in r for r in way.requests), 60, "the third part is on its way")
        c.agents["n1"].kill9()
        ones = sum("partNumber=1&" in r for r in way.requests)
        assert "<Upload>" in bucket("uploads")
        with way.lock:
            way.faults[:] = []
        c.start_agent("n1")
        k, = wait_until(lambda: copied(c, job), 60, "it is copied")
        assert ones == 3 and sum("partNumber=1&" in r for r in way.requests) == ones, "parts that were there are not sent again"
        assert "<Upload>" not in bucket("uploads")
        shard = next(Path(k["path"]).glob("*.safetensors"))
        good = shard.read_bytes()
        shard.unlink()
        with way.lock:  # and back, on a way as bad
            way.faults[:] = [{"method": "GET", "match": ".safetensors", "cut": 6_000_000, "times": 2},
                             {"method": "GET", "match": ".safetensors", "status": 503}]
        again = large(c, "again", "--set", f"checkpoint.init_from.path=job:{job}", "--set", "run.steps=3")
        c.wait_state(again, "COMPLETED", deadline=60)
        wait_event(c, again, "checkpoint-restored")
        assert shard.read_bytes() == good


def test_wrong_credentials():
    moto()
    with cluster(_moto["url"], keys("wrong", "wrong+secret")) as c:
        job = c.submit(job_of(c, steps=5, every=0, name="wrong"), "--set", "checkpoint.mirror=s3://models/w")
        c.wait_state(job, "COMPLETED", deadline=60)
        wait_until(lambda: "SignatureDoesNotMatch" in c.ok("ckpt", "ls", job), 30, "the reason")
        assert "check the keys" in c.ok("ckpt", "ls", job)
        assert "wrong+secret" not in c.explain(job) and _moto["key"] not in c.explain(job)
        keys("wrong")
        c.ok("ckpt", "mirror", job)
        wait_until(lambda: copied(c, job), 30, "it is copied with the right ones")


def test_nothing_is_left():
    if "child" in _moto:
        _moto["child"].terminate()
        _moto["child"].wait()


run(globals())
