#!/usr/bin/env python3
# time limit: 120 s
"""A submit that was acknowledged is never lost: kill -9 of boostd while several clients submit, 50 times."""
import json, random, socket, struct, subprocess, threading, time

from harness import BIN, Cluster, run, tiny_job, wait_until

TRIALS, CLIENTS = 50, 4


def varint(n):
    return bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80]) + varint(n >> 7)


def sub(field, data):
    return varint(field << 3 | 2) + varint(len(data)) + data


class Acknowledged:
    """{job: name} of what was acknowledged; `enough` is set at the given count."""

    def __init__(self, enough):
        self.jobs, self.lock, self.count = {}, threading.Lock(), enough
        self.enough = threading.Event()

    def add(self, job, name):
        with self.lock:
            assert job not in self.jobs, f"job {job} was given twice"
            self.jobs[job] = name
            if len(self.jobs) >= self.count:
                self.enough.set()


def submit_in_frames(c, spec, prefix, acknowledged):
    """Submits until boostd is gone; speaks the wire by hand, so that many submits are under way at once."""
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(20)
            s.connect(str(c.socket))

            def call(body):
                s.sendall(struct.pack(">I", len(body)) + body)
                head = s.recv(4, socket.MSG_WAITALL)
                if len(head) < 4:
                    raise EOFError
                n = struct.unpack(">I", head)[0]
                answer = s.recv(n, socket.MSG_WAITALL)
                if len(answer) < n:
                    raise EOFError
                return answer
            call(b"\x08\x01\x10\x01\x18\x00")
            for k in range(100_000):
                name = f"{prefix}-{k}"
                # the last of several `name` fields counts
                answer = call(b"\x08\x01" + sub(2, sub(1, spec + sub(2, name.encode()))))
                assert answer[:2] == b"\x08\x01" and answer[2] == 4 << 3 | 2, f"not a SubmitReply: {answer}"
                at, job, shift = 4 if answer[3] < 0x80 else 5, 0, 0
                assert answer[at] == 8, answer
                while True:
                    at += 1
                    job |= (answer[at] & 0x7F) << shift
                    shift += 7
                    if answer[at] < 0x80:
                        break
                acknowledged.add(job, name)
    except (EOFError, ConnectionError):
        pass


def submit_with_boostctl(c, path, prefix, acknowledged):
    for k in range(100_000):
        name = f"{prefix}-{k}"
        r = c.ctl("submit", path, "--parsable", "--set", f"name={name}")
        if r.rc != 0:
            assert r.rc == 3 and r.out == "", r
            return
        acknowledged.add(int(r.out), name)


def test_kill_9_of_boostd_while_clients_submit():
    rng = random.Random(7)
    with Cluster(agents=0) as c:
        path = c.dir / "job.pbtxt"
        path.write_text(tiny_job(c))
        spec = subprocess.run([BIN / "boostctl", "encode", path], check=True, capture_output=True).stdout
        kept, slowest, begin = {}, 0.0, time.monotonic()
        for trial in range(TRIALS):
            acknowledged = Acknowledged(rng.randint(1, 24))
            by_boostctl = trial % 5 == 0
            work, what = (submit_with_boostctl, path) if by_boostctl else (submit_in_frames, spec)
            threads = [threading.Thread(target=work, args=(c, what, f"t{trial}-{i}", acknowledged))
                       for i in range(CLIENTS)]
            for t in threads:
                t.start()
            assert acknowledged.enough.wait(20), "no client got through"
            c.boostd.kill9()
            for t in threads:
                t.join(20)
                assert not t.is_alive()
            kept.update(acknowledged.jobs)
            start = time.monotonic()
            c.start_boostd()
            there = {j["id"]: j for j in c.json("status", "-a")["jobs"]}
            slowest = max(slowest, time.monotonic() - start)
            lost = {i: n for i, n in kept.items() if i not in there or there[i]["name"] != n}
            assert not lost, f"trial {trial}: acknowledged and lost: {lost}"
            # What was under way without an acknowledgement may be there or not, but only whole.
            assert all(j["state"] == "QUEUED" and j["name"].startswith("t") for j in there.values())
        print(f"# {len(kept)} acknowledged submits over {TRIALS} kills in {time.monotonic() - begin:.1f} s, none lost; "
              f"slowest restart to answer {slowest:.3f} s")


run(globals())
