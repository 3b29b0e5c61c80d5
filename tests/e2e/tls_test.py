#!/usr/bin/env python3
"""TCP with TLS between boostctl, agents and boostd: what works, and what each side says when a certificate is not good."""
import os, resource, shutil, signal, socket, ssl, subprocess, tempfile, time
from pathlib import Path

from harness import BIN, ROOT, Cluster, Skip, run, tiny_job, wait_until
from wire import HELLO, Wire, agent_hello, frame, num, parse, register, sub

def said(process, text, deadline=10.0):
    wait_until(lambda: text in process.log_text(), deadline, f"{process.name} says {text!r}")


def fails(c, rc, text, *args, **kw):
    r = c.ctl(*args, **kw)
    assert r.rc == rc and text in r.err, f"{args}: {r}"


def context(c, role=None, name=None):
    """Python's own TLS, an implementation that shares no code with ours but the library."""
    x = ssl.create_default_context(cafile=str(c.dir / "certs" / "ca.crt"))
    if role:
        x.load_cert_chain(str(c.cert_dir(role, name) / "tls.crt"), str(c.cert_dir(role, name) / "tls.key"))
    return x


class TlsWire(Wire):
    """Frames to boostd inside TLS."""

    def __init__(self, c, role, name, hello=True):
        host, port = c.address.rsplit(":", 1)
        raw = socket.create_connection((host, int(port)), timeout=20)
        self.s = context(c, role, name).wrap_socket(raw, server_hostname=host)
        if hello:
            self.s.sendall(HELLO if hello is True else hello)
            self.greeting = self.reply()


def test_a_job_through_agent_and_boostctl_by_tls():
    with Cluster(tls=True) as c:
        c.env["BOOST_SOCKET"] = "/nonexistent"  # everything goes by BOOST_HOST
        job = c.submit(tiny_job(c, steps=200, every=20))
        follow = c.popen_ctl("logs", job, "-f")
        waiting = c.popen_ctl("wait", job, "--follow")
        c.wait_state(job, "RUNNING")
        c.restart_boostd()  # both follows go on through it, and so does the rank
        c.wait_state(job, "COMPLETED")
        assert follow.wait(30) == 0 and waiting.wait(30) == 0, (follow.stdout.read(), waiting.stdout.read())
        assert c.status(job)["attempt"] == 1, "a restart of the controller has touched the ranks"
        c.ok("metrics", job, "-o", "csv")
        c.ok("--host", c.address.replace("127.0.0.1", "localhost"), "show", job)
        said(c.boostd, "node n1")
        # The second connection is there and carries the beats.
        wait_until(lambda: len(established(c)) >= 2, 10, "agent's two connections")


def established(c):
    port = int(c.address.rsplit(":", 1)[1])
    lines = open("/proc/net/tcp").read().splitlines()[1:]
    return [x for x in lines if x.split()[1].endswith(f":{port:04X}") and x.split()[3] == "01"]


def test_heartbeats_have_a_connection_of_their_own():
    with Cluster(tls=True, boostd_set={"heartbeat_ms": 50, "suspect_ms": 1000, "node_timeout_ms": 3000}) as c:
        wait_until(lambda: len(established(c)) == 2, 10, "agent's two connections")
        # Its token: a connection without it, or of another node's certificate, is refused.
        c.certs("node", "n2")
        for node, why in (("n1", b"not the one registered"), ("n2", b"not the one registered")):
            with TlsWire(c, "node", node, agent_hello(node)) as w:
                assert 7 not in w.greeting
                w.send(frame(sub(40, sub(1, "x") + b"\x11" + b"\1" * 8)))
                assert why in w.reply()[10][0]
                assert w.ended()
        # One that registers, then again with nonsense, is refused and gone; the node's next agent is as welcome as any.
        c.certs("node", "n3")
        for _ in range(3):
            with TlsWire(c, "node", "n3", agent_hello("n3")) as w:
                w.send(register("n3", instance="a"))
                token = parse(w.reply()[1][0])[4][0]
                with TlsWire(c, "node", "n3", agent_hello("n3")) as heart:
                    heart.send(frame(sub(40, sub(1, "a") + b"\x11" + token)))
                    assert 9 in heart.reply()
                    heart.send(frame(sub(2, num(1, 5))))
                    assert parse(heart.reply()[9][0])[1] == [5]
                    w.send(register("n3", instance="b", boot=""))
                    assert 10 in w.reply() and w.ended()
                    heart.send(frame(sub(2, num(1, 6))))
                    assert parse(heart.reply()[9][0])[1] == [6]
                    heart.send(register("n3", instance="c"))  # not what this connection is for
                    assert heart.ended()
        c.ok("ping")
        before = len(established(c))
        assert before == 2, before
        assert {x["name"]: x["state"] for x in c.json("node", "ls")["nodes"]}["n1"] == "UP"


def test_certificates_that_do_not_do():
    with Cluster(agents=0, tls=True) as c:
        c.certs("node", "n1")
        c.certs("node", "n2")
        c.certs("user", "nobody-of-this-name")
        tls = lambda role, name: ("--tls-dir", c.cert_dir(role, name))
        fails(c, 5, "of node n1, not of a user", *tls("node", "n1"), "ping")
        said(c.boostd, "of node n1, not of a user")
        fails(c, 5, "does not know", *tls("user", "nobody-of-this-name"), "ping")
        fails(c, 5, "--tls-dir", "--tls-dir", c.dir / "none", "ping")
        fails(c, 3, "Connection refused", "--host", "127.0.0.1:1", "ping")
        fails(c, 2, "is no address", "--host", "a:b:c]", "ping")
        fails(c, 2, "two ways", "--host", "h:1", "--socket", "/x", "ping")
        # A key that others may read.
        loose = c.dir / "loose"
        shutil.copytree(c.cert_dir("user", os.path.basename(c.env["BOOST_TLS_DIR"])[5:]), loose)
        os.chmod(loose / "tls.key", 0o644)
        fails(c, 5, "chmod 600", "--tls-dir", loose, "ping")
        # Another CA: each side says so of the other.
        other = Other(c)
        fails(c, 5, "controller's certificate is not accepted", "--tls-dir", other.dir("user"), "ping")
        said(c.boostd, "is of another CA")
        mixed = c.dir / "mixed"
        shutil.copytree(other.dir("user"), mixed)
        shutil.copy(c.dir / "certs" / "ca.crt", mixed)
        fails(c, 5, "is not good under the CA", "--tls-dir", mixed, "ping")
        # An agent under another name, and one with a user's certificate.
        for name, cert, text in (("n1", ("node", "n2"), "is of node n2, this is node n1"),
                                 ("n1", ("user", "nobody-of-this-name"), "is of user nobody-of-this-name")):
            argv = [BIN / "boost-agent", "--config", "/dev/null", "--state-dir", c.dir / "x", "--node", name,
                    "--controller", c.address]
            for key, value in c.tls_set(*cert).items():
                argv += ["--set", f"{key}={value}"]
            p = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=20)
            assert p.returncode == 1 and text in p.stderr, p
        # A controller that shows a certificate for another host, or of another role.
        c.certs("controller", "d", "--san", "elsewhere.example")
        c.boostd.terminate()
        c.start_boostd(**c.tls_set("controller", "d"))
        fails(c, 5, "controller's certificate is not for 127.0.0.1", "ping")
        said(c.boostd, "does not accept this side's certificate")
        agent = [BIN / "boost-agent", "--config", "/dev/null", "--state-dir", c.dir / "x", "--node", "n1", "--controller",
                 c.address] + [x for k, v in c.tls_set("node", "n1").items() for x in ("--set", f"{k}={v}")]
        p = subprocess.Popen([str(a) for a in agent], stderr=subprocess.PIPE, text=True)
        line = next(x for x in p.stderr if "not taken by the controller" in x)
        assert "is not for 127.0.0.1" in line, line
        p.terminate()
        p.stderr.read()
        assert p.wait(20) == 0
        p.stderr.close()
        c.boostd.terminate()
        argv = [BIN / "boostd", "--config", "/dev/null", "--state-dir", c.state_dir, "--socket", c.socket, "--listen",
                "127.0.0.1:0"] + [x for k, v in c.tls_set("node", "n1").items() for x in ("--set", f"{k}={v}")]
        p = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=20)
        assert p.returncode == 1 and "unsuitable certificate purpose" in p.stderr, p


class Other:
    """A cluster's certificates that are not this one's."""

    def __init__(self, c):
        self.at = c.dir / "other"
        for args in (("ca",), ("user", "root"), ("controller", "c")):
            subprocess.run(["sh", str(ROOT / "deploy" / "make-certs.sh"), str(self.at), *args], check=True,
                           stdout=subprocess.DEVNULL)

    def dir(self, role):
        return self.at / f"{role}-{'root' if role == 'user' else 'c'}"


def refused_by_server(c, x):
    """What the handshake, or the first answer, says."""
    host, port = c.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        try:
            with x.wrap_socket(raw, server_hostname=host) as s:
                s.sendall(HELLO)
                return s.recv(100) and "answered" or "closed"
        except (ssl.SSLError, ConnectionResetError, BrokenPipeError) as e:
            return str(e)


def what_the_server_refuses_of_others(c):
    """Without our own client's checks in the way."""
    assert "certificate_required" in refused_by_server(c, context(c)).lower().replace(" ", "_")
    said(c.boostd, "shows no certificate")
    old = context(c, "user", os.path.basename(c.env["BOOST_TLS_DIR"])[5:])
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    refused_by_server(c, old)
    said(c.boostd, "another version of TLS")
    # Expired: of the right CA, over since yesterday.
    gone = c.dir / "gone"
    gone.mkdir()
    sign(c, gone, "user", "root", ["-days", "-1"])
    x = context(c)
    x.load_cert_chain(str(gone / "tls.crt"), str(gone / "tls.key"))
    assert "expired" in refused_by_server(c, x), refused_by_server(c, x)
    said(c.boostd, "certificate has expired")
    shutil.copy(c.dir / "certs" / "ca.crt", gone)
    fails(c, 5, "expired", "--tls-dir", gone, "ping")
    # A name of another node in the hello, and a user as an agent.
    c.certs("node", "n2")
    for role, name in (("node", "n2"), ("user", os.path.basename(c.env["BOOST_TLS_DIR"])[5:])):
        with TlsWire(c, role, name, agent_hello("n1")) as w:
            assert b"shows the certificate of" in parse(w.greeting[7][0])[2][0]
    # Frames without TLS, HTTP, and TLS on the Unix socket.
    host, port = c.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as s:
        s.sendall(HELLO)
        answer = s.recv(4096)
        assert b"speaks TLS only" in answer, answer
    with socket.create_connection((host, int(port)), timeout=20) as s:
        s.sendall(b"GET / HTTP/1.0\r\n\r\n")
        try:
            s.recv(4096)
        except ConnectionResetError:
            pass
    said(c.boostd, "does not speak TLS")
    with Wire(c, hello=False) as w:
        w.send(bytes.fromhex("1603010005") + b"\1\0\0\1\0")
        assert b"without" in parse(w.reply()[7][0])[2][0]
    c.ok("ping")


def sign(c, out, role, name, options):
    certs = c.dir / "certs"
    run_openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", out / "tls.key")
    os.chmod(out / "tls.key", 0o600)
    run_openssl("req", "-new", "-key", out / "tls.key", "-out", out / "csr", "-subj", f"/CN={name}")
    (out / "ext").write_text(f"subjectAltName=URI:boost://{role}/{name}\n")
    run_openssl("x509", "-req", "-in", out / "csr", "-CA", certs / "ca.crt", "-CAkey", certs / "ca.key", "-set_serial",
                "77", *options, "-extfile", out / "ext", "-out", out / "tls.crt")


def run_openssl(*args):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


def hung_up(s):
    try:
        return not s.recv(1)
    except ConnectionResetError:
        return True


def test_stalled_crafted_and_refused_input():
    with Cluster(agents=0, tls=True) as c:
        host, port = c.address.rsplit(":", 1)
        user = os.path.basename(c.env["BOOST_TLS_DIR"])[5:]
        # More than SESSION_MAX_HALF_OPEN beginnings of a handshake: the oldest have to go, others come in.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        stalled = []
        for _ in range(1024 + 50):
            stalled.append(socket.create_connection((host, int(port)), timeout=20))
            stalled[-1].sendall(bytes.fromhex("16030102000100"))
        c.ok("ping")
        said(c.boostd, "over 1024 connections without a hello")
        assert hung_up(stalled[0]) and hung_up(stalled[40])
        # Inside TLS: a frame that is too long, one that is no message, one cut in two.
        with TlsWire(c, "user", user) as w:
            w.send(b"\xff\xff\xff\xff")
            assert 3 in w.reply() and w.ended()
        with TlsWire(c, "user", user) as w:
            w.send(frame(b"\x0b\xff\xff\xff"))
            assert 3 in w.reply() and w.ended()
        with TlsWire(c, "user", user) as w:
            whole = frame(num(1, 9) + sub(12, b""))
            for byte in whole:
                w.send(bytes([byte]))
            assert w.reply()[1] == [9]
        # Ciphertext that is damaged on the way ends that connection alone.
        with TlsWire(c, "user", user) as w:
            raw = socket.socket(fileno=os.dup(w.s.fileno()))
            raw.sendall(bytes.fromhex("1703030020") + b"\0" * 32)
            try:
                assert w.s.recv(10) == b""
            except (ssl.SSLError, ConnectionResetError):
                pass
            raw.close()
        what_the_server_refuses_of_others(c)  # meanwhile
        # The ten seconds of a handshake end: not answered, but closed.
        begin = time.monotonic()
        for s in stalled:
            try:
                while s.recv(4096):
                    pass
            except ConnectionResetError:
                pass
            s.close()
        assert time.monotonic() - begin < 15
        said(c.boostd, "handshake did not end in time")
        c.ok("ping")


def test_new_certificates_without_a_restart():
    with Cluster(tls=True) as c:
        host, port = c.address.rsplit(":", 1)

        def serial():
            with socket.create_connection((host, int(port)), timeout=20) as raw:
                with context(c, "node", "n1").wrap_socket(raw, server_hostname=host) as s:
                    return s.getpeercert()["serialNumber"]
        before = serial()
        shutil.move(c.cert_dir("controller", "c"), c.dir / "old")
        c.certs("controller", "c", "--san", "127.0.0.1")
        assert serial() == before
        c.boostd.child.send_signal(signal.SIGHUP)
        said(c.boostd, "certificates are read again")
        assert serial() != before
        # What cannot be used is not taken.
        os.chmod(c.cert_dir("controller", "c") / "tls.key", 0o644)
        c.boostd.child.send_signal(signal.SIGHUP)
        said(c.boostd, "the certificates in use stay")
        c.ok("ping")
        os.chmod(c.cert_dir("controller", "c") / "tls.key", 0o600)
        # The agent takes its own at the next connect.
        shutil.move(c.cert_dir("node", "n1"), c.dir / "old-node")
        c.certs("node", "n1")
        c.restart_boostd()
        said(c.agents["n1"], "have changed and are read again")
        c.wait_nodes(1)


def test_a_revoked_certificate_and_one_that_ends_soon():
    with Cluster(agents=0, tls=True, start=False) as c:
        c.certs("node", "n1")
        c.certs("user", "other", "--days", "5")
        c.certs("revoke", "node", "n1")
        c.certs("node", "n1")  # a new one is good
        c.start_boostd(tls_ca=c.dir / "certs" / "trusted.crt")
        fails(c, 5, "does not know", "--tls-dir", c.cert_dir("user", "other"), "ping")
        said(c.boostd, "the certificate of user other ends in ")
        c.start_agent("n1")
        c.wait_nodes(1)
        x = context(c)
        gone = c.dir / "certs" / "node-n1.revoked1"
        x.load_cert_chain(str(gone / "tls.crt"), str(gone / "tls.key"))
        assert "revoked" in refused_by_server(c, x)
        said(c.boostd, "certificate revoked")
        # By SIGHUP, for who is revoked later.
        user = os.path.basename(c.env["BOOST_TLS_DIR"])[5:]
        c.ok("ping")
        shutil.copytree(c.env["BOOST_TLS_DIR"], c.dir / "kept")
        c.certs("revoke", "user", user)
        c.boostd.child.send_signal(signal.SIGHUP)
        said(c.boostd, "certificates are read again")
        fails(c, 5, "it was revoked", "--tls-dir", c.dir / "kept", "ping")
        c.env.pop("BOOST_HOST")  # the Unix socket, to end


def test_both_families():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        raise Skip("no IPv6 here")
    with Cluster(agents=0, tls=True, start=False) as c:
        shutil.move(c.cert_dir("controller", "c"), c.dir / "old")
        c.certs("controller", "c")  # its usual hosts: localhost in both families
        c.start_boostd(listen=["127.0.0.1:0", "[::1]:0"])
        four, six = c.boostd.ready_line.split("listen=")[1].split(",")
        assert six.startswith("[::1]:"), six
        for host in (four, six, four.replace("127.0.0.1", "localhost")):
            c.ok("--host", host, "ping")
        c.start_agent("n1", controller_address=["[::1]:1", six])  # and the first that does not answer is passed over
        c.wait_nodes(1)
        busy = [BIN / "boostd", "--config", "/dev/null", "--state-dir", c.dir / "other", "--socket", c.dir / "o", "--listen",
                six] + [x for k, v in c.tls_set("controller", "c").items() for x in ("--set", f"{k}={v}")]
        p = subprocess.run([str(a) for a in busy], capture_output=True, text=True, timeout=20)
        assert p.returncode == 5 and "another program has this port" in p.stderr, p


def test_make_certs():
    script = ROOT / "deploy" / "make-certs.sh"

    def make(*args):
        p = subprocess.run(["sh", str(script), str(at), *args], capture_output=True, text=True)
        return p.returncode, p.stdout + p.stderr
    at = Path(tempfile.mkdtemp(dir=os.environ.get("BOOST_TEST_DIR"))) / "c"
    assert make("node", "n1")[0] == 1, "without a CA"
    assert make("ca")[0] == 0 and make("controller", "c", "--san", "fd00::7", "--san", "c.example")[0] == 0
    assert make("node", "gpu-01.a_b")[0] == 0 and make("user", "alice", "--days", "3")[0] == 0
    files = {f: f.stat() for f in at.rglob("*") if f.is_file()}
    assert {f.name for f in files} == {"ca.crt", "ca.key", "tls.crt", "tls.key"}, "temporary files are left"
    assert all(s.st_mode & 0o777 == (0o600 if f.suffix == ".key" else 0o644) for f, s in files.items())
    assert all(d.stat().st_mode & 0o777 == 0o700 for d in at.iterdir() if d.is_dir())
    # Nothing is overwritten, and what is wrong leaves nothing.
    for args in (("ca",), ("node", "gpu-01.a_b")):
        rc, text = make(*args)
        assert rc == 1 and "is there already" in text, (args, rc, text)
    for args in (("node", "a/b"), ("node", "x" * 65), ("node", ""), ("king", "a"), ("node", "n2", "--san", "h"),
                 ("user", "u", "--days", "x"), ("controller",), ("controller", "d", "--san", "a b,URI:boost://node/x")):
        rc, text = make(*args)
        assert rc in (1, 2) and text, (args, rc, text)
    assert {f: f.stat().st_ino for f in at.rglob("*") if f.is_file()} == {f: s.st_ino for f, s in files.items()}
    # What they say, and that they are of this CA and for their use.
    for name, san, purpose in (("controller-c", "URI:boost://controller/c, IP Address:FD00:0:0:0:0:0:0:7, DNS:c.example",
                                "sslserver"), ("node-gpu-01.a_b", "URI:boost://node/gpu-01.a_b", "sslclient"),
                               ("user-alice", "URI:boost://user/alice", "sslclient")):
        cert = str(at / name / "tls.crt")
        p = subprocess.run(["openssl", "x509", "-in", cert, "-noout", "-ext", "subjectAltName"], capture_output=True,
                           text=True)
        assert san.lower() in p.stdout.lower(), p
        run_openssl("verify", "-x509_strict", "-purpose", purpose, "-CAfile", at / name / "ca.crt", cert)


def test_who_may_do_what():
    if os.geteuid() != 0:
        raise Skip("needs root, to be somebody else")
    with Cluster(tls=True) as c:
        c.certs("user", "daemon")
        c.certs("admin", "daemon")
        job = c.submit(tiny_job(c), "--hold")
        fails(c, 5, "belongs to root", "--tls-dir", c.cert_dir("user", "daemon"), "release", job)
        c.ok("--tls-dir", c.cert_dir("user", "daemon"), "status")
        theirs = c.ok("--tls-dir", c.cert_dir("user", "daemon"), "submit", "--hold", "--parsable",
                      next(c.dir.glob("job-*.pbtxt"))).split()[0]
        assert c.status(theirs)["user"] == "daemon", c.status(theirs)
        c.ok("--tls-dir", c.cert_dir("admin", "daemon"), "cancel", "-y", job)
        c.ok("cancel", "-y", theirs)


run(globals())
