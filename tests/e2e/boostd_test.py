#!/usr/bin/env python3
# time limit: 180 s
"""boostd alone, without an agent: start and stop, what peers may send, what survives kill -9."""
import json, os, shutil, socket, sqlite3, struct, subprocess, threading, time

from harness import BIN, Cluster, Skip, run, tiny_job, wait_until
from wire import (BROKEN, EVENTS, FAILURE, HEARTBEAT_ACK, LIST, PING, REFUSED, REGISTERED, SUBMIT, UNKNOWN, Wire, agent_hello,
                  frame, num, parse, register, sub)


def job_text(c, name="j"):
    return tiny_job(c, name=name)


def rss_mib(pid):
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---- what ping says of the disk, and what -o json says of several jobs ---------------


def test_ping_says_what_keeps_the_store_from_writing():
    with Cluster(agents=0) as c:
        assert "state_health" not in c.json("ping") and "metrics_health" not in c.json("ping")
        other = sqlite3.connect(c.state_dir / "state.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        (c.dir / "job.pbtxt").write_text(job_text(c))
        client = c.popen_ctl("submit", "--hold", c.dir / "job.pbtxt")
        wait_until(lambda: "state_health" in c.json("ping"), 30, "the trouble is told")
        answer = c.json("ping")
        assert answer["state_health"].startswith("state.db: ") and "lock" in answer["state_health"], answer
        assert "metrics_health" not in answer, answer
        assert c.ok("ping").splitlines()[1].startswith("no job is taken: state.db: "), c.ok("ping")
        other.rollback()
        client.wait(30)
        wait_until(lambda: "state_health" not in c.json("ping"), 30, "it is over")
        assert len(c.ok("ping").splitlines()) == 1


def test_json_of_several_jobs_names_the_failed_ones():
    with Cluster(agents=0) as c:
        job = c.submit(job_text(c), "--hold")
        p = c.ctl("-o", "json", "cancel", "-y", "nosuch", job)
        assert p.rc == 4, p
        bad, good = json.loads(p.out)["results"]
        assert bad["ref"] == "nosuch" and "nosuch" in bad["error"] and bad["hint"] and "id" not in bad, bad
        assert good["id"] == job and good["text"] and "error" not in good, good
        p = c.ctl("-o", "json", "logs", job)
        assert p.rc == 2 and "-o" in p.err and not p.out, p
        p = c.ctl("show", f"{job}.1")
        assert p.rc == 4 and f"job {job} has no attempt 1" in p.err, p


# ---- start and stop ----------------------------------------------------------------


def test_starts_says_so_and_stops_cleanly():
    with Cluster(agents=0) as c:
        assert f"socket={c.socket}" in c.boostd.ready_line, c.boostd.ready_line
        store = c.boostd.ready_line.split("store=")[1]
        assert len(store) == 8 and int(store, 16) >= 0
        assert oct(os.stat(c.socket).st_mode)[-4:] == "0666"
        assert oct(os.stat(c.state_dir).st_mode)[-3:] == "700"
        assert c.ok("ping")
        assert c.boostd.terminate() == 0
        assert not os.path.exists(c.socket), "the socket file is left"
        assert c.ctl("ping").rc == 3
        c.start_boostd()
        assert c.boostd.ready_line.endswith(store), "the store changed its id"


def test_ready_fd_gets_a_byte_once_it_listens():
    with Cluster(agents=0, start=False) as c:
        r, w = os.pipe()
        child = subprocess.Popen([BIN / "boostd", "--config", "/dev/null", "--state-dir", c.state_dir, "--socket",
                                  c.socket, "--ready-fd", str(w)], pass_fds=[w], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(w)
        assert os.read(r, 1) == b"\n"
        Wire(c).close()
        assert os.read(r, 1) == b"", "the descriptor stays open"
        os.close(r)
        child.terminate()
        assert child.wait(10) == 0


def test_second_boostd_on_the_same_state_directory():
    with Cluster(agents=0) as c:
        p = subprocess.run([BIN / "boostd", "--config", "/dev/null", "--state-dir", c.state_dir, "--socket",
                            f"{c.socket}2"], capture_output=True, text=True, timeout=20)
        assert p.returncode == 5, p
        assert str(c.state_dir) in p.stderr and str(c.boostd.pid) in p.stderr, p.stderr
        assert not os.path.exists(f"{c.socket}2"), "the socket was touched before the lock"
        assert c.ok("ping")


def test_second_boostd_on_the_same_socket():
    with Cluster(agents=0) as c:
        p = subprocess.run([BIN / "boostd", "--config", "/dev/null", "--state-dir", c.dir / "other", "--socket",
                            c.socket], capture_output=True, text=True, timeout=20)
        assert p.returncode == 5 and str(c.socket) in p.stderr, p
        assert c.ok("ping"), "the first one was disturbed"


def test_options_that_are_wrong_say_what_and_how():
    with Cluster(agents=0, start=False) as c:
        def fails(*args):
            p = subprocess.run([BIN / "boostd", *args], capture_output=True, text=True, timeout=20)
            assert p.returncode == 2, p
            return p.stderr
        assert "heartbeat_ms" in fails("--state-dir", c.state_dir, "--set", "heartbeet_ms=5")
        assert "10 to 60000" in fails("--state-dir", c.state_dir, "--set", "heartbeat_ms=5")
        assert "loud" in fails("--state-dir", c.state_dir, "--log-level", "loud")
        assert "--nonsense" in fails("--nonsense")
        assert "107" in fails("--state-dir", c.state_dir, "--socket", "/tmp/" + "x" * 110)
        assert "extra" in fails("extra")
        conf = c.dir / "bad.conf"
        conf.write_text("state_dir: \"x\"\nsocket 5\n")
        assert f"{conf}:2" in fails("--config", conf)
        assert str(c.dir / "none.conf") in fails("--config", c.dir / "none.conf")
        assert not c.state_dir.exists(), "made before the options were known to be right"
        p = subprocess.run([BIN / "boost-agent", "--config", "/dev/null", "--state-dir", conf / "agent"], env=c.env,
                           capture_output=True, text=True, timeout=20)
        assert p.returncode == 1 and "cannot create directory" in p.stderr and "--state-dir" in p.stderr, p


def test_what_a_daemon_is_told_beats_its_environment():
    with Cluster(agents=0) as c:
        wanted, around = c.dir / "wanted.sock", c.dir / "around.sock"
        env = {**c.env, "BOOST_SOCKET": str(around)}
        (c.dir / "boostd.conf").write_text(f'socket: "{wanted}"\n')
        for how in (["--config", c.dir / "boostd.conf"], ["--config", "/dev/null", "--set", f"socket={wanted}"]):
            p = subprocess.Popen([BIN / "boostd", *how, "--state-dir", c.dir / "told"], env=env, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            try:
                assert f"socket={wanted} " in p.stdout.readline(), how
            finally:
                p.terminate()
                p.communicate(timeout=20)
        assert not around.exists()
        agent = subprocess.Popen([BIN / "boost-agent", "--config", "/dev/null", "--state-dir", c.dir / "agent", "--node",
                                  "told", "--set", f"controller_socket={c.socket}"], env=env, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: [n for n in c.json("node", "ls")["nodes"] if n["name"] == "told"], 10, "it registers")
        finally:
            agent.terminate()
            agent.wait(20)


def test_a_regular_file_at_the_socket_path_is_left_alone():
    with Cluster(agents=0, start=False) as c:
        c.socket.write_text("precious")
        p = subprocess.run([BIN / "boostd", "--config", "/dev/null", "--state-dir", c.state_dir, "--socket", c.socket],
                           capture_output=True, text=True, timeout=20)
        assert p.returncode == 2 and str(c.socket) in p.stderr, p
        assert c.socket.read_text() == "precious"


def test_sighup_changes_nothing():
    with Cluster(agents=0) as c:
        c.boostd.child.send_signal(1)
        wait_until(lambda: "SIGHUP" in c.boostd.log_text(), 5, "a line about SIGHUP")
        assert c.ok("ping")


# ---- peers --------------------------------------------------------------------------


def test_garbage_does_not_disturb_others():
    with Cluster(agents=0) as c, Wire(c) as good:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4\xff\xff\xff\xff", os.urandom(300), b"\0\0\0\0"):
            with Wire(c, hello=False) as bad:
                bad.send(data)
                bad.s.shutdown(socket.SHUT_WR)
                try:
                    refused = parse(bad.reply()[7][0])
                    assert refused[1] == [BROKEN], refused
                except (EOFError, ConnectionResetError):
                    pass
                assert bad.ended()
            good.ping()


def test_a_malformed_request_is_answered_and_ends_only_its_connection():
    with Cluster(agents=0) as c, Wire(c) as good:
        bodies = [b"\xff\xff\xff", num(1, 7) + b"\x12\x05ab", sub(2, sub(1, b"\x0d\0"))]
        for body in bodies:
            with Wire(c) as bad:
                bad.send(frame(body))
                r = bad.reply()
                failure = parse(r[FAILURE][0])
                assert failure[1] == [BROKEN] and failure[2][0], failure
                assert bad.ended()
            good.ping()


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    with Cluster(agents=0) as c:
        with Wire(c) as bad:
            before = rss_mib(c.boostd.pid)
            bad.send(struct.pack(">I", 0xFFFFFFFF))
            failure = parse(bad.reply()[FAILURE][0])
            assert failure[1] == [BROKEN] and b"limit" in failure[2][0], failure
            assert bad.ended()
            assert rss_mib(c.boostd.pid) < before + 16
        with Wire(c) as largest:  # 4 MiB exactly is fine: an unknown field of this size
            body = num(1, 5) + sub(PING, b"")
            pad = (4 << 20) - len(body) - 6
            body += sub(1000, b"\0" * pad)
            body = body[:4 << 20] if len(body) > 4 << 20 else body
            largest.send(frame(body))
            assert largest.reply()[1] == [5]


def test_frames_in_pieces_and_many_at_once():
    with Cluster(agents=0) as c, Wire(c) as w:
        one = frame(num(1, 9) + sub(PING, b""))
        for i in range(len(one)):
            w.send(one[i:i + 1])
        assert w.reply()[1] == [9]
        w.send(b"".join(frame(num(1, i) + sub(PING, b"")) for i in range(1, 2001)))
        assert [w.reply()[1][0] for _ in range(2000)] == list(range(1, 2001))


def test_an_unknown_request_is_refused_and_the_connection_goes_on():
    with Cluster(agents=0) as c, Wire(c) as w:
        w.request(3, 999, b"new")
        r = w.reply()
        assert r[1] == [3] and parse(r[FAILURE][0])[1] == [UNKNOWN], r
        w.ping(4)


def test_other_protocol_versions():
    with Cluster(agents=0) as c:
        with Wire(c, hello=False) as w:
            w.send(frame(num(1, 99) + num(2, 98) + num(3, 0)))
            refused = parse(w.reply()[7][0])
            assert refused[1] == [BROKEN] and b"98" in refused[2][0], refused
            assert w.ended()
        with Wire(c, hello=False) as w:
            w.send(frame(num(1, 99) + num(2, 1) + num(3, 0)))
            assert 7 not in w.reply()
            w.ping()


def test_200_connections():
    with Cluster(agents=0) as c:
        wires = [Wire(c) for _ in range(200)]
        for i, w in enumerate(wires):
            w.request(i + 1, PING)
        for i, w in enumerate(wires):
            assert w.reply()[1] == [i + 1]
        fds = len(os.listdir(f"/proc/{c.boostd.pid}/fd"))
        assert fds >= 200
        for w in wires:
            w.close()
        wait_until(lambda: len(os.listdir(f"/proc/{c.boostd.pid}/fd")) <= fds - 200, 5, "descriptors closed")
        assert c.ok("ping")


def test_a_slow_reader_is_held_back_and_loses_nothing():
    with Cluster(agents=0) as c:
        for i in range(30):
            c.submit(job_text(c, f"job-{i:02}-" + "n" * 50), "--hold")
        with Wire(c, timeout=60) as slow, Wire(c) as good:
            asked = 3000  # answers of some 5 KB each: 15 MB
            def ask():
                for i in range(asked):
                    slow.request(i + 1, LIST, num(2, 1))
            writer = threading.Thread(target=ask, daemon=True)
            writer.start()
            writer.join(2.0)  # it blocks once boostd reads no more: nothing to wait for but that it still does
            assert writer.is_alive(), "boostd took every request of a client that reads nothing"
            assert rss_mib(c.boostd.pid) < 200, "boostd grows with a slow reader"
            good.ping()
            got = [slow.reply() for _ in range(asked)]
            writer.join(10)
            assert [r[1][0] for r in got] == list(range(1, asked + 1))
            assert all(5 in r for r in got), "an answer that is no list"


def test_parked_requests_go_with_their_client():
    with Cluster(agents=0) as c:
        job = c.submit(job_text(c), "--hold")
        wires = [Wire(c) for _ in range(20)]
        newest = c.events(job)[-1]["id"]
        for w in wires:
            w.request(1, EVENTS, sub(1, sub(1, str(job))) + num(2, newest) + num(4, 60000))
        for w in wires:
            w.close()
        with Wire(c) as w:
            w.request(1, EVENTS, sub(1, sub(1, str(job))) + num(2, newest) + num(4, 30000))
            w.ping(2)  # one that waits does not hold up the next
            c.ok("cancel", "-y", job)
            r = w.reply()
            assert r[1] == [1] and parse(r[7][0])[1], "woken without an event"
            w.request(3, EVENTS, sub(1, sub(1, str(job))) + num(2, 10**6) + num(4, 30000))
            assert parse(w.reply()[7][0]).get(2) == [1], "an ended job: at once, and it says so"


def test_a_wait_ends_in_time_without_news():
    with Cluster(agents=0) as c, Wire(c) as w:
        job = c.submit(job_text(c), "--hold")
        newest = c.events(job)[-1]["id"]
        start = time.monotonic()
        w.request(1, EVENTS, sub(1, sub(1, str(job))) + num(2, newest) + num(4, 300))
        r = parse(w.reply()[7][0])
        assert 0.29 < time.monotonic() - start < 5 and 1 not in r and r.get(2, [0]) == [0], r


# ---- agents and other users ------------------------------------------------------


def nodes(c):
    return {n["name"]: n for n in c.json("node", "ls")["nodes"]}


def test_an_agent_registers_and_its_silence_is_seen():
    limits = {"heartbeat_ms": 50, "suspect_ms": 400, "node_timeout_ms": 1000, "restart_grace_ms": 0}
    with Cluster(agents=0, boostd_set=limits) as c:
        with Wire(c, agent_hello("n1")) as agent:
            agent.send(register("n1"))
            answer = parse(agent.reply()[REGISTERED][0])
            assert answer[1][0].decode() in c.boostd.ready_line, "the store id"
            assert nodes(c)["n1"]["state"] == "UP" and nodes(c)["n1"]["devices"] == 2
            agent.send(frame(sub(2, num(1, 5))))  # a heartbeat and its answer
            assert parse(agent.reply()[HEARTBEAT_ACK][0])[1] == [5]
        start = time.monotonic()
        wait_until(lambda: nodes(c)["n1"]["state"] == "DOWN", 10, "n1 DOWN")
        assert time.monotonic() - start > 0.5, "down before its time"
        with Wire(c, agent_hello("n1")) as agent:
            agent.send(register("n1", instance="i2"))
            assert REGISTERED in agent.reply()
            assert nodes(c)["n1"]["state"] == "UP"


def test_nodes_come_in_pages():
    """What the agents tell of 60 nodes is more than a frame holds."""
    env = b"".join(sub(22, sub(1, f"KEY{i}") + sub(2, "x" * 2500)) for i in range(32))
    with Cluster(agents=0) as c:
        for i in range(60):
            with Wire(c, agent_hello(f"n{i:02}")) as agent:
                agent.send(register(f"n{i:02}", more=env))
                assert REGISTERED in agent.reply()
        listed = c.json("node", "ls")["nodes"]
        assert [n["name"] for n in listed] == [f"n{i:02}" for i in range(60)]
        assert all(len(n["env"]) == 32 for n in listed)
        assert c.json("node", "show", "n59")["node"]["name"] == "n59"
        with Wire(c) as w:
            w.request(1, 10)
            pages = []
            while not pages or 2 in pages[-1][0]:
                pages.append(w.reply_and_size())
            assert len(pages) >= 4 and all(size <= 4 << 20 for _, size in pages), [size for _, size in pages]


def test_agents_that_are_not_taken():
    with Cluster(agents=0) as c, Wire(c, agent_hello("n1")) as good:
        good.send(register("n1"))
        assert REGISTERED in good.reply()

        def refused(hello, *frames):
            with Wire(c, hello) as w:
                for f in frames:
                    w.send(f)
                r = w.reply()
                assert REFUSED in r, r
                assert w.ended()
                return parse(r[REFUSED][0])[2][0].decode()
        assert "n2" in refused(agent_hello("n2"), register("n3"))
        assert "uid" in refused(agent_hello("n2"), register("n2", uid=4242))
        assert "n1" in refused(agent_hello("n1"), register("n1", instance="another"))
        with Wire(c, agent_hello("n2")) as early:
            early.send(frame(sub(2, num(1, 1))))
            assert early.ended(), "it may speak before it has registered"
        with Wire(c, hello=False) as bad:
            bad.send(agent_hello("no good/name"))
            assert b"no good/name" in parse(bad.reply()[7][0])[2][0]
        assert list(nodes(c)) == ["n1"]
        good.send(frame(sub(2, num(1, 9))))
        assert parse(good.reply()[HEARTBEAT_ACK][0])[1] == [9], "the good one was disturbed"


def test_another_user_may_look_and_not_touch():
    if os.geteuid() != 0:
        raise Skip("needs root to become another user")
    nobody = 65534
    with Cluster(agents=0) as c:
        job = c.submit(job_text(c), "--hold")
        for d in {c.dir, c.dir.parent, c.socket.parent}:
            os.chmod(d, 0o711)

        def as_nobody(*args):
            p = subprocess.run([BIN / "boostctl", *map(str, args)], env=c.env, cwd="/", user=nobody, group=nobody,
                               extra_groups=[], capture_output=True, text=True, timeout=30)
            return p
        try:
            look = as_nobody("-o", "json", "status")
        except PermissionError:
            raise Skip("another user cannot run the programs under test")
        assert look.returncode == 0 and f'"id": {job}' in look.stdout.replace('"id":', '"id": ').replace("  ", " "), look
        touch = as_nobody("cancel", "-y", job)
        assert touch.returncode == 5, touch
        assert c.status(job)["state"] == "HELD"
        spec = c.dir / "theirs.pbtxt"
        spec.write_text(job_text(c, "theirs"))
        os.chmod(spec, 0o644)
        own = as_nobody("submit", spec, "--hold", "--parsable")
        assert own.returncode == 0, own
        assert as_nobody("cancel", "-y", own.stdout.split()[0]).returncode == 0
        rogue = "import sys; sys.path[:0] = [%r]\n" % os.path.dirname(os.path.abspath(__file__)) + (
            "from wire import *\n"
            "class C: socket = %r\n"
            "w = Wire(C, hello=False); w.send(agent_hello('rogue')); r = parse(w.reply()[7][0]); print(r[1][0])"
            % str(c.socket))
        p = subprocess.run(["python3", "-c", rogue], user=nobody, group=nobody, extra_groups=[], capture_output=True,
                           text=True, timeout=30, cwd="/", env={"PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]})
        assert p.stdout.strip() == "5", p  # ERR_REFUSED
        assert "rogue" not in nodes(c)


# ---- what survives ----------------------------------------------------------------


def test_kill_9_and_restart_keeps_what_was_acknowledged():
    with Cluster(agents=0) as c:
        jobs = {}
        for i in range(5):
            jobs[c.submit(job_text(c, f"job{i}"), *(["--hold"] if i % 2 else []))] = f"job{i}"
        before = {j["id"]: j for j in c.json("status", "-a")["jobs"]}
        c.restart_boostd()
        after = {j["id"]: j for j in c.json("status", "-a")["jobs"]}
        assert {i: j["name"] for i, j in after.items()} == jobs
        assert {i: j["state"] for i, j in after.items()} == {i: j["state"] for i, j in before.items()}
        assert c.submit(job_text(c, "next")) == max(jobs) + 1


def test_a_long_list_comes_in_pages():
    """Pages of about 1 MiB, every job once and in order, totals on the last one only."""
    with Cluster(agents=0) as c, Wire(c, timeout=120) as w:
        path, count = c.dir / "spec.pbtxt", 8000
        path.write_text(job_text(c, "n" * 64))
        spec = subprocess.run([BIN / "boostctl", "encode", path], env=c.env, capture_output=True, check=True).stdout
        for first in range(1, count + 1, 100):  # 100 at once
            w.send(b"".join(frame(num(1, i) + sub(SUBMIT, sub(1, spec) + num(2, 1))) for i in range(first, first + 100)))
            for i in range(100):
                answer = w.reply()
                assert 4 in answer, parse(answer[FAILURE][0])
        w.request(1, LIST, num(2, 1))
        ids, pages, more = [], 0, True
        while more:
            r, size = w.reply_and_size()
            assert r[1] == [1] and size < (1 << 20) + (64 << 10), size
            page = parse(r[5][0])
            ids += [parse(j)[1][0] for j in page[1]]
            more = r.get(2, [0]) == [1]
            assert (2 in page) == (not more), "totals"
            pages += 1
        assert ids == list(range(1, count + 1)) and pages > 1, (len(ids), pages)
        assert parse(page[2][0])[4] == [count], "held"
        w.request(2, LIST, num(6, 3))
        r = w.reply()
        assert [parse(j)[1][0] for j in parse(r[5][0])[1]] == [count - 2, count - 1, count]


def test_sigterm_with_open_followers():
    with Cluster(agents=0) as c:
        job = c.submit(job_text(c), "--hold")
        newest = c.events(job)[-1]["id"]
        with Wire(c) as w:
            w.request(1, EVENTS, sub(1, sub(1, str(job))) + num(2, newest) + num(4, 60000))
            w.ping(2)
            start = time.monotonic()
            assert c.boostd.terminate() == 0
            assert time.monotonic() - start < 5 and w.ended()
        c.start_boostd()


def test_sigterm_while_a_directory_service_hangs():
    """The look-up of a user's name is a thread that nothing can end: boostd ends without it."""
    cc = shutil.which("cc")
    if not cc:
        raise Skip("no compiler for the library that hangs")
    with Cluster(agents=0, start=False) as c:
        (c.dir / "hang.c").write_text("#include <fcntl.h>\n#include <unistd.h>\n"
                                      "int getpwuid_r(void) { close(open(HERE, O_CREAT | O_WRONLY, 0600)); for (;;) pause(); }\n")
        here = c.dir / "asked"
        subprocess.run([cc, "-shared", "-fPIC", f'-DHERE="{here}"', "-o", c.dir / "hang.so", c.dir / "hang.c"], check=True)
        c.env["LD_PRELOAD"] = str(c.dir / "hang.so")
        c.start_boostd()
        del c.env["LD_PRELOAD"]
        client = c.popen_ctl("ping")
        wait_until(here.exists, what="the look-up begins")
        start = time.monotonic()
        assert c.boostd.terminate() == 0
        assert 1 < time.monotonic() - start < 15
        client.kill()
        client.wait()
        c.start_boostd()
        assert c.ok("ping")


def test_list_in_pages_with_filters():
    with Cluster(agents=0) as c:
        for i in range(40):
            c.submit(job_text(c, f"job-{i:02}"), *(["--hold"] if i % 2 else []))
        assert len(c.json("status")["jobs"]) == 40
        assert [j["name"] for j in c.json("status", "-N", "3")["jobs"]] == ["job-37", "job-38", "job-39"]
        assert all(j["state"] == "HELD" for j in c.json("status", "-s", "HELD")["jobs"])
        assert len(c.json("status", "-s", "HELD")["jobs"]) == 20
        me = c.json("status", "--me")["jobs"]
        assert len(me) == 40
        assert c.json("status", "-u", "no-such-user")["jobs"] == []
        c.ok("cancel", "-y", 1)
        wait_until(lambda: c.status(1)["state"] == "CANCELLED", 5, "job 1 cancelled")
        assert len(c.json("status")["jobs"]) == 39 and len(c.json("status", "-a")["jobs"]) == 40
        assert len(c.json("status", "--since", "1h")["jobs"]) == 40


run(globals())
