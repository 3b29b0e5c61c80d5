"""boostd's socket by hand: a few bytes of protobuf, so that tests do not depend on boostctl's good manners."""
import os, socket, struct


def varint(n):
    out = b""
    while n > 0x7F:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])


def num(field, value):
    return varint(field << 3) + varint(value)


def sub(field, data):
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def frame(body):
    return struct.pack(">I", len(body)) + body


def parse(data):
    """{field: [values]}, ints and bytes."""
    at, out = 0, {}

    def take():
        nonlocal at
        shift = value = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
    while at < len(data):
        key = take()
        if key & 7 == 0:
            value = take()
        elif key & 7 == 1:
            value, at = data[at:at + 8], at + 8
        elif key & 7 == 2:
            n = take()
            value, at = data[at:at + n], at + n
        else:
            value, at = data[at:at + 4], at + 4
        out.setdefault(key >> 3, []).append(value)
    return out


HELLO = frame(num(1, 1) + num(2, 1) + num(3, 0))  # protocol, protocol_min, component CTL
PING, SUBMIT, LIST, EVENTS, FAILURE = 12, 2, 3, 5, 3
BROKEN, UNKNOWN = 11, 12  # ERR_PROTOCOL, ERR_UNSUPPORTED


def agent_hello(node):
    return frame(num(1, 1) + num(2, 1) + num(3, 1) + sub(6, node))


def register(node, instance="i1", boot="b1", uid=None, slots=2, more=b""):
    """An AgentMessage."""
    body = (sub(1, node) + sub(2, boot) + sub(3, instance) + num(4, slots) + num(5, slots) + num(6, 1024) +
            num(7, os.geteuid() if uid is None else uid) + sub(8, "127.0.0.1") + sub(9, "0") + more)
    return frame(sub(1, body))


REGISTERED, REFUSED, HEARTBEAT_ACK = 1, 10, 9  # of ControllerMessage


class Wire:
    """A connection to boostd, bytes in and out. `hello`: True as boostctl, False none, or a frame of one's own."""

    def __init__(self, cluster, hello=True, timeout=20):
        self.s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.s.settimeout(timeout)
        self.s.connect(str(cluster.socket))
        if hello:
            self.s.sendall(HELLO if hello is True else hello)
            assert 7 not in self.reply(), "hello refused"

    def send(self, data):
        self.s.sendall(data)

    def request(self, id, field, body=b""):
        self.send(frame(num(1, id) + sub(field, body)))

    def _exactly(self, n):
        data = b""
        while len(data) < n:
            more = self.s.recv(n - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def reply_and_size(self):
        size = struct.unpack(">I", self._exactly(4))[0]
        return parse(self._exactly(size)), size

    def reply(self):
        return self.reply_and_size()[0]

    def ended(self):
        try:
            return not self.s.recv(1)
        except ConnectionResetError:
            return True

    def ping(self, id=1):
        self.request(id, PING)
        r = self.reply()
        assert r[1] == [id] and 14 in r, r
        return parse(r[14][0])

    def close(self):
        self.s.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
