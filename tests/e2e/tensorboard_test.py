#!/usr/bin/env python3
"""TensorBoard files, of `metrics --tensorboard` and of run.tensorboard_dir, read by a reader of our own: framing,
checksums, messages; the values are those of `metrics`, and a restart says what is outdated."""
import os, signal, struct
from pathlib import Path

from harness import run, tiny_job
from jobs import Shared, endless, job_of, wait_committed, wait_rank_step

shared = Shared(cpu_slots=2)


# ---- a reader: TFRecord frames, CRC-32C bit by bit, protobuf by hand -----------------------------------------------


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    data = Path(path).read_bytes()
    at = 0
    while at < len(data):
        head = data[at:at + 8]
        (length,) = struct.unpack("<Q", head)
        assert struct.unpack_from("<I", data, at + 8)[0] == masked(head), f"length at {at}"
        body = data[at + 12:at + 12 + length]
        assert len(body) == length and struct.unpack_from("<I", data, at + 12 + length)[0] == masked(body), f"record at {at}"
        yield body
        at += 16 + length


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data):
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif kind == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            assert kind == 2, kind
            length, at = varint(data, at)
            value, at = data[at:at + length], at + length
        yield tag >> 3, value


def events(path):
    """(step, wall seconds, what): what is a version, {tag: value} or the status of a session."""
    for body in records(path):
        e = dict(fields(body))
        if 3 in e:
            yield e[2], e[1], e[3].decode()
        elif 7 in e:
            yield e[2], e[1], dict(fields(e[7]))[1]
        else:
            values = [dict(fields(v)) for number, v in fields(e[5]) if number == 1]
            yield e[2], e[1], {v[1].decode(): v[2] for v in values}


def only_file(folder):
    files = list(Path(folder).iterdir())
    assert len(files) == 1 and files[0].name.startswith("events.out.tfevents."), files
    return files[0]


def single(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def same_as_metrics(read, rows):
    keys = ("attempt", "step", "time", "wall_time", "row")
    assert len(read) == len(rows), (len(read), len(rows))
    for (step, wall, values), row in zip(read, rows):
        assert step == row["step"] and wall > 1.6e9, (step, row)
        expected = {k: single(v) for k, v in row.items() if k not in keys and not isinstance(v, str)}
        assert values == expected, (values, expected)


# ---- tests ---------------------------------------------------------------------------------------------------------


def test_the_reader_knows_published_checksums():
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(bytes(32)) == 0x8A9136AA


@shared
def test_exported_and_exported_again(c):
    job = c.submit(tiny_job(c, name="exported"))
    c.wait_state(job, "COMPLETED")
    for _ in range(2):
        assert c.ok("metrics", job, "--tensorboard", c.dir / "tb") == ""
        read = list(events(only_file(c.dir / "tb" / f"job-{job}")))
        assert read[0][2] == "brain.Event:2", read[0]
        same_as_metrics(read[1:], c.json("metrics", job)["metrics"])
    c.ok("metrics", job, "--tensorboard", c.dir / "few", "--name", "loss,lr")
    read = list(events(only_file(c.dir / "few" / f"job-{job}")))[1:]
    assert len(read) == 20 and all(set(v) == {"loss", "lr"} for _, _, v in read), read[:3]
    r = c.ctl("metrics", job, "--tensorboard", c.dir / "x", "--plot")
    assert r.rc == 2 and "takes no -o and no --plot" in r.err, r
    (c.dir / "file").write_text("")
    r = c.ctl("metrics", job, "--tensorboard", c.dir / "file")
    assert r.rc != 0 and "file" in r.err, r


@shared
def test_rank_0_writes_by_itself_through_a_restart(c):
    board = c.dir / "board"
    job = c.submit(job_of(c, steps=120, every=20, name="board"), "--set", f"run.tensorboard_dir={board}")
    wait_committed(c, job, 20)
    wait_rank_step(c, job, 1, 30)
    os.kill(c.rank_pids(job, 1)[1], signal.SIGKILL)
    assert c.wait_state(job, "COMPLETED", deadline=90)["attempt"] == 2
    first, second = sorted((board / f"job-{job}").iterdir(), key=lambda f: f.name[-1])
    rows = c.json("metrics", job)["metrics"]
    read = list(events(second))
    assert read[0][2] == "brain.Event:2" and read[1][2] == 1, "a version, then a session that starts"
    from_step = next(a["from_step"] for a in c.json("show", job)["attempts"] if a["attempt"] == 2)
    assert read[1][0] == from_step + 1, (read[1], from_step)
    same_as_metrics(read[2:], [r for r in rows if r["attempt"] == 2])
    of_first = list(events(first))[1:]
    wanted = [r for r in rows if r["attempt"] == 1]
    same_as_metrics(of_first[:len(wanted)], wanted)  # its last steps may not have reached the controller
    # The export tells the same in one file.
    c.ok("metrics", job, "--tensorboard", c.dir / "tb2")
    read = list(events(only_file(c.dir / "tb2" / f"job-{job}")))
    starts = [i for i, (_, _, what) in enumerate(read) if what == 1]
    assert len(starts) == 1 and read[starts[0]][0] == from_step + 1 == read[starts[0] + 1][0], starts


@shared
def test_a_folder_that_cannot_be_made(c):
    (c.dir / "plain").write_text("")
    r = c.ctl("submit", "-", "--set", f"run.tensorboard_dir={c.dir}/plain", input=tiny_job(c, name="nowhere"))
    assert r.rc == 6 and "run.tensorboard_dir" in r.err and "hint: " in r.err, r


test_nothing_is_left = shared.last

run(globals())
