#!/usr/bin/env python3
"""A small S3-compatible store in memory, on 127.0.0.1, that checks signatures and misbehaves when it is told to.

    s3server.py [DIR]   prints its port, and serves the bucket "models" until its standard input is closed; keys KEY / SECRET
                        below. With DIR by TLS, its certificate is then DIR/own.crt, and DIR/other.crt is somebody else's

In a test: `with Store() as s:` gives s.url, s.objects {(bucket, key): bytes}, s.uploads, s.requests, s.faults.
A fault is a dict: `method` and `match` (a piece of path and query) say which requests, `times` how often (1), `skip` how
many go through first; then `status` (with `code` or all of the `body`; `retry_after`, or `retry_after_date`, seconds from now
as a date; `location`), `cut` (the connection is closed after so many bytes of the body, of the request or of the answer),
`delay` (seconds before the answer), `drip` (so many bytes of an object every tenth of a second), `etag`, `no_range` (of an
object), `longer` (an object is said to have so many bytes more), `clock` (seconds that its Date is off). Unsigned, for programs: PUT /-/faults with a JSON list, PUT /-/region with the one that signatures
have to name, GET /-/requests, PUT /-/plain/NAME, and GET of the same, which knows ranges.
"""
import hashlib, hmac, http.client, json, re, ssl, subprocess, sys, threading, time, urllib.parse
from datetime import datetime, timezone
from pathlib import Path
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

KEY, SECRET, REGION = "AKIDTEST", "secret/of+tests", "us-east-1"


def quote(text, safe=""):
    return urllib.parse.quote(text, safe=safe + "-._~")


def canonical_query(query):
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    return "&".join(f"{a}={b}" for a, b in sorted((quote(a), quote(b)) for a, b in pairs))


def signature(secret, method, path, query, headers, signed, payload_hash, date, region, service):
    """Hex; `headers` by lower-case name, `path` as it came, `signed` in order."""
    lines = "".join(f"{h}:{' '.join(headers.get(h, '').split())}\n" for h in signed)
    request = "\n".join([method, path, canonical_query(query), lines, ";".join(signed), payload_hash])
    scope = f"{date[:8]}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = ("AWS4" + secret).encode()
    for part in (date[:8], region, service, "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()


class Refused(Exception):
    def __init__(self, status, code, text="", region=""):
        self.status, self.code, self.text, self.region = status, code, text, region


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    clock = 0

    def log_message(self, *args):
        pass

    def date_time_string(self, timestamp=None):
        return super().date_time_string((timestamp or time.time()) + self.clock)

    def answer(self, status, body=b"", headers=()):
        body = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(n.lower() == "content-length" for n, _ in headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_one(self):
        store = self.server.store
        path, _, query = self.path.partition("?")
        length = int(self.headers.get("Content-Length") or 0)
        if path.startswith("/-/") and not path.startswith("/-/plain/"):
            self.control(path, self.rfile.read(length))
            return
        fault = store.fault(self.command, self.path)
        self.clock = fault.get("clock", 0) if fault else 0
        with store.lock:
            store.requests.append(f"{self.command} {self.path}")
        if fault and "cut" in fault and self.command in ("PUT", "POST"):
            self.rfile.read(min(fault["cut"], length))
            self.close_connection = True
            self.connection.shutdown(2)
            return
        body = self.rfile.read(length)
        if fault and "delay" in fault:
            time.sleep(fault["delay"])
        if fault and "status" in fault:
            after = [("Retry-After", str(fault["retry_after"]))] if "retry_after" in fault else []
            if "retry_after_date" in fault:
                after = [("Retry-After", super().date_time_string(time.time() + fault["retry_after_date"]))]
            if "location" in fault:
                after = [("Location", fault["location"])]
            text = error_xml(fault.get("code", "SlowDown"), "please reduce your request rate")
            self.answer(fault["status"], fault.get("body", text), after)
            return
        if path.startswith("/-/plain/"):
            self.plain(path, body, fault)
            return
        if store.forward:
            self.pass_on(body, fault)
            return
        try:
            self.check(path, query, body)
            _, bucket, *rest = urllib.parse.unquote(path).split("/", 2)
            self.s3(bucket, rest[0] if rest else "", dict(urllib.parse.parse_qsl(query, keep_blank_values=True)), body, fault)
        except Refused as e:
            more = [("x-amz-bucket-region", e.region)] if e.region else []
            self.answer(e.status, error_xml(e.code, e.text, e.region), more)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

    def control(self, path, body):
        store = self.server.store
        if path == "/-/faults":
            with store.lock:
                store.faults[:] = json.loads(body)
            self.answer(200)
        elif path == "/-/region":
            store.region = body.decode()
            self.answer(200)
        else:
            with store.lock:
                self.answer(200, "\n".join(store.requests) + "\n")

    def plain(self, path, body, fault):
        store, name = self.server.store, ("-", path[len("/-/plain/"):])
        if self.command == "PUT":
            store.objects[name] = body
            self.answer(200)
        elif name not in store.objects:
            self.answer(404, "no such file")
        else:
            self.send_object(store.objects[name], [("ETag", etag(store.objects[name]))], fault)

    def pass_on(self, body, fault):
        """As it came, host and signature too, to the store that is behind this one."""
        c = http.client.HTTPConnection(self.server.store.forward, timeout=60)
        c.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            c.putheader(name, value)
        c.endheaders(body)
        r = c.getresponse()
        data = r.read()
        headers = [(k, v) for k, v in r.getheaders() if k.lower() not in ("server", "date", "connection", "transfer-encoding")]
        if fault and "cut" in fault:
            self.send_response(r.status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[:fault["cut"]])
            self.close_connection = True
            self.connection.shutdown(2)
        else:
            self.answer(r.status, data, headers)
        c.close()

    def check(self, path, query, body):
        h = {k.lower(): v for k, v in self.headers.items()}
        m = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, "
                         r"SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})", h.get("authorization", ""))
        if not m:
            raise Refused(403, "AccessDenied", "no signature")
        key, day, region, signed, found = m.groups()
        if key != KEY:
            raise Refused(403, "InvalidAccessKeyId", "The key is not known.")
        date, payload = h.get("x-amz-date", ""), h.get("x-amz-content-sha256", "")
        if self.server.store.region and region != self.server.store.region:
            raise Refused(400, "AuthorizationHeaderMalformed", f"the region '{region}' is wrong", self.server.store.region)
        signed = signed.split(";")
        want = signature(SECRET, self.command, path, query, h, signed, payload, date, region, "s3")
        left = [x for x in h if (x == "host" or x.startswith("x-amz-")) and x not in signed]
        if not hmac.compare_digest(want, found) or left or signed != sorted(signed) or date[:8] != day:
            raise Refused(403, "SignatureDoesNotMatch", "The signature does not match.")
        if payload != hashlib.sha256(body).hexdigest():
            raise Refused(400, "XAmzContentSHA256Mismatch", "The body is another one.")
        then = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        if abs((datetime.now(timezone.utc) - then).total_seconds()) > 900:
            raise Refused(403, "RequestTimeTooSkewed")

    def send_object(self, data, headers, fault):
        status, first = 200, 0
        m = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if m and int(m.group(1)) >= len(data):
            self.answer(416, "")
            return
        fault = fault or {}
        if "etag" in fault:
            headers = [(n, fault["etag"] if n == "ETag" else v) for n, v in headers]
        if m and not self.server.store.no_ranges and not fault.get("no_range"):
            status, first = 206, int(m.group(1))
            headers = [*headers, ("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")]
        part = data[first:]
        if "cut" in fault or "drip" in fault or "longer" in fault:
            self.send_response(status)
            for name, value in [*headers, ("Content-Length", str(len(part) + fault.get("longer", 0)))]:
                self.send_header(name, value)
            self.end_headers()
            for at in range(0, len(part) if "drip" in fault else 0, fault.get("drip", 1)):
                try:
                    self.wfile.write(part[at:at + fault["drip"]])
                except OSError:
                    break  # it has given up
                time.sleep(0.1)
            if self.command != "HEAD":
                self.wfile.write(part[:fault.get("cut", len(part) if "longer" in fault else 0)])
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.answer(status, part, [*headers, ("Content-Length", str(len(part)))])

    def s3(self, bucket, key, q, body, fault):
        store = self.server.store
        with store.lock:
            if bucket not in store.buckets:
                raise Refused(404, "NoSuchBucket", "The bucket does not exist.")
            do = (self.parts if "uploadId" in q else self.bucket if not key else self.object)
            reply = do(bucket, key, q, body)
        if reply[0] == "object":
            self.send_object(reply[1], reply[2], fault)
        else:
            self.answer(*reply)

    def bucket(self, bucket, key, q, body):
        store, prefix = self.server.store, q.get("prefix", "")
        if self.command != "GET":
            raise Refused(405, "MethodNotAllowed")
        if "uploads" in q:
            after = (q.get("key-marker", ""), q.get("upload-id-marker", ""))
            left = [(k, i) for k, i in sorted((u["name"][1], i) for i, u in store.uploads.items() if u["name"][0] == bucket)
                    if k.startswith(prefix) and (k, i) > after]
            page, more = left[:store.page], len(left) > store.page
            rows = "".join(f"<Upload><Key>{escape(k)}</Key><UploadId>{i}</UploadId></Upload>" for k, i in page)
            if more:
                rows += f"<NextKeyMarker>{escape(page[-1][0])}</NextKeyMarker>"
                rows += f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
            return 200, (f"<ListMultipartUploadsResult>{rows}<IsTruncated>{str(more).lower()}</IsTruncated>"
                         "</ListMultipartUploadsResult>")
        keys = sorted(k for b, k in store.objects if b == bucket and k.startswith(prefix))
        start = int(q.get("continuation-token") or 0)
        page = keys[start:start + store.page]
        more = start + store.page < len(keys)
        rows = "".join(f"<Contents><Key>{escape(k)}</Key><Size>{len(store.objects[bucket, k])}</Size></Contents>"
                       for k in page)
        token = f"<NextContinuationToken>{start + store.page}</NextContinuationToken>" if more else ""
        return 200, f"<ListBucketResult>{rows}<IsTruncated>{str(more).lower()}</IsTruncated>{token}</ListBucketResult>"

    def object(self, bucket, key, q, body):
        store, name = self.server.store, (bucket, key)
        meta = [(k, v) for k, v in self.headers.items() if k.lower().startswith("x-amz-meta-")]
        if self.command == "PUT":
            store.objects[name], store.meta[name] = body, meta
            return 200, "", [("ETag", etag(body))]
        if self.command == "POST" and "uploads" in q:
            store.next_upload += 1
            upload = f"upload-{store.next_upload:04d}"
            store.uploads[upload] = {"name": name, "meta": meta, "parts": {}}
            return 200, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        if self.command == "DELETE":
            store.objects.pop(name, None)
            return 204, ""
        if name not in store.objects:
            raise Refused(404, "NoSuchKey", "The key does not exist.")
        data = store.objects[name]
        headers = [*store.meta.get(name, []), ("ETag", etag(data))]
        if self.command == "HEAD":
            return 200, b"", [*headers, ("Content-Length", str(len(data)))]
        return "object", data, headers

    def parts(self, bucket, key, q, body):
        store, upload = self.server.store, self.server.store.uploads.get(q["uploadId"])
        if not upload or upload["name"] != (bucket, key):
            raise Refused(404, "NoSuchUpload", "The upload does not exist.")
        parts = upload["parts"]
        if self.command == "PUT":
            parts[int(q["partNumber"])] = body
            return 200, "", [("ETag", etag(body))]
        if self.command == "DELETE":
            del store.uploads[q["uploadId"]]
            return 204, ""
        if self.command == "GET":
            after = int(q.get("part-number-marker") or 0)
            numbers = [n for n in sorted(parts) if n > after]
            page = numbers[:store.page]
            more = len(page) < len(numbers)
            rows = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(etag(parts[n]), {chr(34): '&quot;'})}</ETag>"
                           f"<Size>{len(parts[n])}</Size></Part>" for n in page)
            marker = f"<NextPartNumberMarker>{page[-1]}</NextPartNumberMarker>" if more else ""
            return 200, f"<ListPartsResult>{rows}<IsTruncated>{str(more).lower()}</IsTruncated>{marker}</ListPartsResult>"
        listed = re.findall(r"<PartNumber>(\d+)</PartNumber><ETag>(.*?)</ETag>", body.decode())
        if [int(n) for n, _ in listed] != sorted(parts) or any(etag(parts[int(n)]) != e for n, e in listed):
            raise Refused(400, "InvalidPart", "a part is missing or another one")
        store.objects[bucket, key] = b"".join(parts[n] for n in sorted(parts))
        store.meta[bucket, key] = upload["meta"]
        del store.uploads[q["uploadId"]]
        return 200, "<CompleteMultipartUploadResult/>"


def etag(data):
    return f'"{hashlib.md5(data).hexdigest()}"'


def error_xml(code, text, region=""):
    region = f"<Region>{region}</Region>" if region else ""
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{escape(text)}</Message>{region}</Error>'


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], (ConnectionError, ssl.SSLError)):  # clients may give up
            super().handle_error(request, client_address)


class Store:
    def __init__(self, buckets=("models",), page=1000, port=0, tls=None, forward=None):
        """forward: "host:port" of a store that answers in its place, where no fault does."""
        self.forward = forward
        self.buckets, self.page = set(buckets), page
        self.objects, self.meta, self.uploads = {}, {}, {}
        self.requests, self.faults, self.lock = [], [], threading.RLock()
        self.next_upload, self.no_ranges, self.region = 0, False, ""
        self.server = Server(("127.0.0.1", port), Handler)
        self.server.store = self
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.server.shutdown()
        self.server.server_close()

    def fault(self, method, target):
        with self.lock:
            for f in self.faults:
                if f.get("method", method) != method or f.get("match", "") not in urllib.parse.unquote(target):
                    continue
                if f.get("skip", 0) > 0:
                    f["skip"] -= 1
                    continue
                if f.setdefault("times", 1) > 0:
                    f["times"] -= 1
                    return f
        return None

    def keys(self, prefix=""):
        with self.lock:
            return sorted(k for b, k in self.objects if k.startswith(prefix))


def keys_file(directory):
    """The file of keys that agents of tests use."""
    path = Path(directory) / "s3.keys"
    path.touch(0o600)
    path.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    return path


def certificates(directory):
    for name in ("other", "own"):
        made = [f"{directory}/{name}.crt", f"{directory}/{name}.key"]
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
                        "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1", "-out", made[0], "-keyout", made[1]],
                       check=True, capture_output=True)
    return made


if __name__ == "__main__":
    with Store(page=3, tls=certificates(sys.argv[1]) if len(sys.argv) > 1 else None) as s:
        print(s.port, flush=True)
        sys.stdin.read()
