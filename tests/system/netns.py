"""Several nodes on one machine, each in a network namespace of its own: a veth pair leads to a bridge in boostd's
namespace. Namespaces have no names: each lives as long as a process in it, and the one that holds it ends with the
test, however that ends. What a test can do to a link needs nothing but iproute2."""
import atexit, os, shutil, signal, subprocess, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import Cluster, Skip, alive, tiny_job, wait_until
from jobs import at, ended, losses, same_losses  # noqa: F401, for the tests beside

NET, HUB = "10.77.0.", "10.77.0.1"
NOWHERE = "02:00:00:00:00:ee"  # a hardware address that nobody has


def processes_in(inode, but):
    """Pids of what runs in the network namespace, one apart."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and int(entry) != but and os.stat(f"/proc/{entry}/ns/net").st_ino == inode and \
                    alive(int(entry)):
                found.append(int(entry))
        except OSError:
            pass  # gone
    return found


def kill_in(inode, but):
    """SIGKILL, until nothing is left there."""
    while pids := processes_in(inode, but):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def hold():
    """The process that holds a namespace, until its input (the test) ends. Takes all there with it."""
    print("here", flush=True)
    sys.stdin.read()
    kill_in(os.stat("/proc/self/ns/net").st_ino, os.getpid())


class Namespace:
    def __init__(self):
        self.holder = subprocess.Popen(["unshare", "--net", sys.executable, __file__, "hold"], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, start_new_session=True)
        assert self.holder.stdout.readline() == b"here\n", "a network namespace"
        self.number = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino
        self.ip("link set lo up")

    @property
    def enter(self):
        return ["nsenter", "-t", str(self.holder.pid), "-n"]

    def ip(self, *lines):
        subprocess.run([*self.enter, "ip", "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True,
                       capture_output=True)

    def close(self):
        if not self.holder.stdin.closed:
            self.holder.stdin.close()
            self.holder.stdout.close()
            self.holder.wait()


def can_run():
    if os.geteuid() != 0:
        raise Skip("needs root, for network namespaces")
    for program in ("unshare", "nsenter", "ip"):
        if not shutil.which(program):
            raise Skip(f"needs {program} (packages util-linux and iproute2)")
    probe = ["unshare", "--net", "sh", "-c", "ip link add b0 type bridge && ip link add v0 type veth peer name v1"]
    p = subprocess.run(probe, capture_output=True, text=True)
    if p.returncode:
        raise Skip(f"no network namespaces, bridges or veth here: {p.stderr.strip()}")


class NetCluster(Cluster):
    """boostd at 10.77.0.1, the agents n1, n2, ... at 10.77.0.11, .12, ..., with the defaults of the configuration: its
    limits are what is tested. boostctl comes by the Unix socket, from outside."""

    def __init__(self, nodes):
        can_run()
        self.hub, self.nodes = None, {}
        atexit.register(self._close_net)
        super().__init__(start=False, cpu_slots=2, tls=True)
        self.boostd_set = {}
        try:
            self.hub = Namespace()
            self.hub.ip("link add hub type bridge", f"addr add {HUB}/24 dev hub", "link set hub up")
            self.certs("controller", "hub", "--san", HUB)
            self.start_boostd()
            for i in range(1, nodes + 1):
                self._make_node(f"n{i}")
                self.start_agent(f"n{i}")
            self.wait_nodes(nodes, deadline=60)
        except BaseException:
            self._kill_all()
            raise

    @staticmethod
    def address_of(name):
        return NET + str(10 + int(name[1:]))

    def _make_node(self, name):
        ns = self.nodes[name] = Namespace()
        self.hub.ip(f"link add {name} type veth peer name eth0 netns {ns.holder.pid}", f"link set {name} master hub up")
        ns.ip(f"addr add {self.address_of(name)}/24 dev eth0", "link set eth0 up")

    def start_boostd(self, **sets):
        self.address = HUB + ":7443"
        super().start_boostd(wrap=self.hub.enter, **{**self.tls_set("controller", "hub"), **sets})
        self.env.pop("BOOST_HOST")
        return self.boostd

    def start_agent(self, name, **sets):
        sets = {"data_address": self.address_of(name), **sets}
        return super().start_agent(name, wrap=self.nodes[name].enter, **sets)

    # ---- what can happen to a node -------------------------------------------------

    def kill_node(self, name):
        """kill -9 of every process there."""
        kill_in(self.nodes[name].number, self.nodes[name].holder.pid)
        self.agents[name].child.wait()
        self.agents[name].child.stdout.close()

    def cut(self, name):
        self.hub.ip(f"link set {name} down")

    def mend(self, name):
        self.hub.ip(f"link set {name} up")

    def others(self, name):
        nodes = {self.address_of(n): (ns, "eth0") for n, ns in self.nodes.items() if n != name}
        return {HUB: (self.hub, "hub"), **nodes}

    def mute(self, name):
        """Nothing that it sends arrives; what is sent to it does."""
        lines = [f"neigh replace {to} lladdr {NOWHERE} dev eth0 nud permanent" for to in self.others(name)]
        self.nodes[name].ip(*lines)

    def unmute(self, name):
        self.nodes[name].ip(*(f"neigh del {to} dev eth0" for to in self.others(name)))

    def deafen(self, name):
        """Nothing that is sent to it arrives; what it sends does."""
        for ns, dev in self.others(name).values():
            ns.ip(f"neigh replace {self.address_of(name)} lladdr {NOWHERE} dev {dev} nud permanent")

    def undeafen(self, name):
        for ns, dev in self.others(name).values():
            ns.ip(f"neigh del {self.address_of(name)} dev {dev}")

    def node_state(self, name):
        return next(x["state"] for x in self.json("node", "ls")["nodes"] if x["name"] == name)

    # ---- the end -------------------------------------------------------------------

    def close(self):
        super().close()
        self._close_net()

    def _kill_all(self):
        super()._kill_all()
        self._close_net()

    def _close_net(self):
        for ns in [*self.nodes.values(), *([self.hub] if self.hub else [])]:
            ns.close()


# ---- the job ---------------------------------------------------------------------------


def job_of(c, steps, name="job", nodes=4, every=20, extra=""):
    """dp x tp over whole nodes of two ranks."""
    text = tiny_job(c, steps=steps, tp=2, every=every, name=name,
                    extra=f"resources {{ device: CPU nodes: {nodes} devices_per_node: 2 }} {extra}")
    return text.replace("micro_batch: 2 global_batch: 2", f"dp: {nodes} micro_batch: 1 global_batch: {nodes}")


def ranks_of(c, job, attempt):
    """Their pids, all nodes together."""
    return [pid for name in c.nodes for pid in c.rank_pids(job, attempt, name).values()]


def event(c, job, kind, attempt=None, deadline=60.0, last=False):
    """Its time, seconds since the epoch, and its text."""
    def there():
        found = [e for e in c.events(job) if e["kind"] == kind and attempt in (None, e.get("attempt"))]
        return found[-1 if last else 0] if found else None
    e = wait_until(there, deadline, f"an event {kind} of job {job}")
    return at(e), e["text"]


if __name__ == "__main__":
    hold()
