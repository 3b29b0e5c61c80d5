#!/usr/bin/env python3
# time limit: 120 s
"""Bad input: each says what is wrong and how to mend it, with the exit code of the contract, and harms nothing."""
import json, os, socket, struct, subprocess, threading

from harness import BIN, Cluster, run, tiny_job, wait_until, words
from jobs import NobodyCluster, Shared

shared = Shared(cpu_slots=2)
USAGE, UNREACHABLE, NOT_FOUND, REFUSED, INVALID = 2, 3, 4, 5, 6


def file_of(c, text, name="bad.pbtxt"):
    path = c.dir / name
    path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
    return path


def refused(c, rc, says, *args):
    """boostctl ends with rc and its message (with the mend) holds all of `says`."""
    r = c.ctl(*args)
    assert r.rc == rc, f"{args}: status {r.rc} instead of {rc}\n{r.out}{r.err}"
    for text in says:
        assert text in r.err, f"{args}: '{text}' is not in\n{r.err}"
    assert "hint: " in r.err or "expected" in r.err, f"{args}: no mend in\n{r.err}"
    assert r.out == "", f"{args}: data on stdout: {r.out}"


def submit_is_refused(c, rc, says, text, *options, name="bad.pbtxt"):
    before = len(c.json("status", "-a")["jobs"])
    refused(c, rc, says, "submit", file_of(c, text, name), *options)
    assert len(c.json("status", "-a")["jobs"]) == before, "a refused job is in the list"


def as_json(c, text):
    return c.ok("decode", "--to", "json", file_of(c, text, "good.pbtxt"))


def as_binary(c, text):
    p = c.dir / "good.pb"
    c.ok("encode", file_of(c, text, "good.pbtxt"), "-O", p)
    return p.read_bytes()


# ---- the job file ------------------------------------------------------------------


@shared
def test_an_unknown_field(c):
    good = tiny_job(c)
    submit_is_refused(c, INVALID, ["bad.pbtxt:3:29", "unknown field 'hiden'", "did you mean 'hidden'?"],
                      good.replace("hidden:", "hiden:"))
    submit_is_refused(c, INVALID, ["bad.json", "unknown field 'hiden'", "did you mean 'hidden'?"],
                      as_json(c, good).replace('"hidden"', '"hiden"'), name="bad.json")
    submit_is_refused(c, INVALID, ["bad.pb", "999", "--allow-unknown"], as_binary(c, good) + b"\xba\x3e\x01x",
                      name="bad.pb")
    assert c.submit(file_of(c, as_binary(c, good) + b"\xba\x3e\x01x", "bad.pb"), "--allow-unknown", "--hold")


@shared
def test_values_out_of_range_and_shapes_that_do_not_fit(c):
    good = tiny_job(c)
    submit_is_refused(c, INVALID, ["model.rank = -8", "1 to 1048576"], good.replace("rank: 8", "rank: -8"))
    submit_is_refused(c, INVALID, ["model.heads = 4", "not divisible by parallel.tp = 3", "1, 2, 4"],
                      good.replace("tp: 1", "tp: 3"))
    submit_is_refused(c, INVALID, ["devices_per_node = 2 * 1 is not parallel.tp"], good, "--set", "resources.nodes=2", "--set", "resources.devices_per_node=1")
    submit_is_refused(c, INVALID, ["'gpu=' is not a constraint", "no value"], good, "--set", "resources.constraint=gpu=")
    submit_is_refused(c, INVALID, ["run.steps", "is required"], good.replace("steps: 20", ""))
    submit_is_refused(c, INVALID, ["run.precision = FP32", "CUDA trains in BF16"], good, "--set", "resources.device=CUDA",
                      "--set", "run.precision=FP32")
    submit_is_refused(c, INVALID, ["attention = CUDNN applies to CUDA only"], good, "--set", "resources.device=CPU", "--set",
                      "parallel.attention=CUDNN")
    submit_is_refused(c, INVALID, ["CUDA_VISIBLE_DEVICES", "set by the node"], good, "--set",
                      "env+={key: 'CUDA_VISIBLE_DEVICES' value: '0'}")


@shared
def test_names(c):
    good = tiny_job(c)
    for name in ("a" * 65, "a/b", "two words", "caf\u00e9", "a;b", ".." + "/x"):
        submit_is_refused(c, INVALID, ["name", "A-Z a-z 0-9 . _ -"], good.replace('"tiny"', json.dumps(name, ensure_ascii=False)))
    submit_is_refused(c, INVALID, ["name"], good.replace('"tiny"', '""'))
    assert c.submit(good.replace('"tiny"', '"' + "a" * 64 + '"'), "--hold")


@shared
def test_set_with_a_wrong_path_or_value(c):
    good = tiny_job(c)
    submit_is_refused(c, INVALID, ["--set model.hiden=3", "did you mean 'hidden'?"], good, "--set", "model.hiden=3")
    submit_is_refused(c, INVALID, ["model.hidden", "'many'"], good, "--set", "model.hidden=many")
    refused(c, INVALID, ["data.train[7]"], "submit", file_of(c, good), "--set", "data.train[7].path=/x")
    refused(c, USAGE, ["--set nothing"], "submit", file_of(c, good), "--set", "nothing")


@shared
def test_a_binary_file_cut_at_every_length(c):
    good = as_binary(c, tiny_job(c))
    for n in range(len(good)):
        r = c.ctl("validate", file_of(c, good[:n], "cut.pb"))
        assert r.rc == INVALID and "cut.pb" in r.err and "hint: " in r.err, (n, r)
    for n in (0, 1, 2, 17, len(good) // 2, len(good) - 1):
        submit_is_refused(c, INVALID, ["cut.pb"], good[:n], name="cut.pb")


@shared
def test_files_that_are_no_job_files(c):
    refused(c, INVALID, ["bad.pbtxt is empty"], "submit", file_of(c, ""))
    refused(c, INVALID, [str(c.dir), "directory"], "submit", c.dir)
    refused(c, NOT_FOUND, ["none.pb"], "submit", c.dir / "none.pb")
    refused(c, INVALID, ["noise.pb"], "submit", file_of(c, bytes(range(256)) * 4, "noise.pb"))
    r = c.ctl("submit", file_of(c, b"# " + b"x" * 5_000_000, "big.pbtxt"))
    assert r.rc == INVALID and "big.pbtxt" in r.err and "1048576" in r.err, r
    refused(c, INVALID, ["good.pbtxt"], "submit", file_of(c, tiny_job(c), "good.pbtxt"), "--format", "json")
    refused(c, USAGE, ["'xml'"], "submit", c.dir / "good.pbtxt", "--format", "xml")


# ---- what only the node can see -------------------------------------------------------


@shared
def test_data_files(c):
    good = tiny_job(c)
    data = str(c.dir / "train.txt")
    submit_is_refused(c, INVALID, ["/nowhere/at/all.txt", "No such file"], good.replace(data, "/nowhere/at/all.txt"))
    submit_is_refused(c, INVALID, [str(c.dir)], good.replace(f'"{data}"', f'"{c.dir}"'))
    short = c.dir / "short.txt"
    short.write_text("x" * 32)  # a window of seq_len 32 has 33 tokens
    submit_is_refused(c, INVALID, [str(short), "33"], good.replace(data, str(short)))
    short.write_text("x" * 33)
    assert c.submit(good.replace(data, str(short)).replace("eval_tokens: 64", "eval_tokens: 32"), "--hold")
    empty = c.dir / "empty.txt"
    empty.write_text("")
    submit_is_refused(c, INVALID, [str(empty)], good.replace(data, str(empty)))


@shared
def test_a_token_beyond_the_vocabulary(c):
    good = tiny_job(c, name="beyond")
    data = c.dir / "high.txt"
    data.write_bytes(words(4000).encode().replace(b" ", b"\xff"))
    job = c.submit(good.replace(str(c.dir / "train.txt"), str(data)).replace("vocab: 256", "vocab: 128"))
    row = c.wait_state(job, "FAILED", deadline=30)
    text = c.json("show", job)["reason_text"]
    assert row["reason"] == "DataError" and row["attempt"] == 1, row
    assert str(data) in text and "255" in text and "128" in text, text


@shared
def test_checkpoint_directories(c):
    good = tiny_job(c)
    plain = c.dir / "plain-file"
    plain.write_text("")
    submit_is_refused(c, INVALID, [f"{plain}/ckpt", "plain-file"], good.replace(f"{c.dir}/ckpt", f"{plain}/ckpt"))
    submit_is_refused(c, INVALID, [str(plain)], good.replace(f"{c.dir}/ckpt", str(plain)))


def test_directories_that_the_user_may_not_write():
    with NobodyCluster() as c:
        good = tiny_job(c)
        closed = c.dir / "closed"
        closed.mkdir(mode=0o555)
        unread = c.dir / "unread.txt"
        unread.write_text("secret " * 100)
        unread.chmod(0o000)
        (c.dir / "bad.pbtxt").write_text(good.replace(f"{c.dir}/ckpt", f"{closed}/ckpt"))
        r = c.as_nobody("submit", c.dir / "bad.pbtxt")
        assert r.rc == INVALID and str(closed) in r.err and "Permission denied" in r.err and "hint: " in r.err, r
        (c.dir / "bad.pbtxt").write_text(good.replace(f"{c.dir}/train.txt", str(unread)))
        r = c.as_nobody("submit", c.dir / "bad.pbtxt")
        assert r.rc == INVALID and str(unread) in r.err and "Permission denied" in r.err, r
        (c.dir / "good.pbtxt").write_text(good)
        r = c.as_nobody("submit", c.dir / "good.pbtxt", "--wait")
        assert r.rc == 0, (r, c.explain(1))
        if os.geteuid() == 0:  # an agent without root's rights takes only jobs of its own user
            job = c.submit(good, "--hold")
            c.ok("release", job)
            info = wait_until(lambda: c.status(job)["info"], 5, "a reason")
            assert "n1" in info and "uid 65534" in info, info
            r = c.as_nobody("cancel", "-y", job, uid=1)
            assert r.rc == REFUSED and "root (uid 0)" in r.err, r
            c.ok("cancel", "-y", job)


# ---- daemons -----------------------------------------------------------------------


def fails_to_start(c, rc, says, program, *argv):
    p = subprocess.run([str(BIN / program), "--config", "/dev/null", *map(str, argv)], env=c.env, capture_output=True,
                       text=True, timeout=20, stdin=subprocess.DEVNULL)
    assert p.returncode == rc, (p.returncode, p.stderr)
    for text in says:
        assert text in p.stderr, (text, p.stderr)


@shared
def test_a_second_daemon_on_the_same_state(c):
    fails_to_start(c, REFUSED, [str(c.state_dir), str(c.boostd.pid)], "boostd", "--state-dir", c.state_dir, "--socket",
                   c.dir / "other.sock")
    assert not (c.dir / "other.sock").exists(), "the lock is taken before the socket"
    fails_to_start(c, REFUSED, [str(c.dir / "agent-n1")], "boost-agent", "--state-dir", c.dir / "agent-n1",
                   "--controller-socket", c.socket, "--node", "n1")
    c.ok("ping")


@shared
def test_daemon_options(c):
    fails_to_start(c, USAGE, ["heartbeat_ms"], "boostd", "--state-dir", c.dir / "x", "--set", "heartbeat_ms=-1")
    fails_to_start(c, USAGE, ["hartbeat_ms", "heartbeat_ms"], "boostd", "--state-dir", c.dir / "x", "--set",
                   "hartbeat_ms=5")
    fails_to_start(c, USAGE, ["n/1"], "boost-agent", "--state-dir", c.dir / "x", "--controller-socket",
                   c.socket, "--node", "n/1")
    assert c.ok("-o", "name", "node", "ls").split() == ["n1"]


# ---- the server checks again ----------------------------------------------------------


@shared
def test_the_server_does_not_trust_the_client(c):
    """A spec that boostctl would never send, in frames by hand."""
    def varint(n):
        return bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80]) + varint(n >> 7)

    def sub(field, data):
        return varint(field << 3 | 2) + varint(len(data)) + data

    def send(s, body):
        s.sendall(struct.pack(">I", len(body)) + body)

    def receive(s):
        n = struct.unpack(">I", s.recv(4, socket.MSG_WAITALL))[0]
        return s.recv(n, socket.MSG_WAITALL)
    good = tiny_job(c)
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(20)
        s.connect(str(c.socket))
        send(s, b"\x08\x01\x10\x01\x18\x00")
        receive(s)
        for text, *says in ((good.replace("tp: 1", "tp: 3"), b"parallel.tp = 3"),
                           (good.replace("rank: 8", "rank: -8"), b"model.rank = -8"),
                           (good.replace('"tiny"', '"a/../b"'), b"a/../b"),
                           (good.replace(str(c.dir / "train.txt"), "relative.txt"), b"relative.txt", b"absolute")):
            send(s, b"\x08\x07" + sub(2, sub(1, as_binary(c, text))))
            answer = receive(s)
            assert all(x in answer for x in says), answer
        send(s, b"\x08\x08" + sub(2, sub(1, as_binary(c, good) + b"\xba\x3e\x01x")))
        assert b"999" in receive(s)


@shared
def test_many_bad_submits_at_once(c):
    bad = file_of(c, tiny_job(c).replace("/train.txt", "/missing.txt"), "missing.pbtxt")
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(c.ctl("submit", bad).rc)) for _ in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert codes == [INVALID] * 12, codes


@shared
def test_the_daemons_are_unharmed(c):
    pid = c.boostd.pid
    assert c.boostd.running() and c.agents["n1"].running()
    job = c.submit(tiny_job(c, tp=2, name="after-all"))
    row = c.wait_state(job, "COMPLETED")
    assert row["step"] == 20 and row["attempt"] == 1 and c.boostd.pid == pid, row
    held = [j["id"] for j in c.json("status", "-s", "HELD")["jobs"]]
    if held:
        c.ok("cancel", "-y", *held)


test_nothing_is_left = shared.last

run(globals())
