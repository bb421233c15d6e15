"""A local server with the part of the Hub's interface that fetching needs, and with failures on request."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """One repository of files.

    `failures[path]` lists the failures of the first requests for a path: an HTTP status, ("drop", number of bytes sent
    before the connection closes), "corrupt", or "hang". `always[path]` is a failure of every request.
    `requests` lists pairs (path, range).
    """

    def __init__(self, repository, files):
        self.repository, self.files = repository, files
        self.failures, self.always, self.requests = {}, {}, []
        self.listed = dict(files)  # the files of the listing, which may differ from the files that are served
        self.release = threading.Event()

    def next_failure(self, path):
        if path in self.always:
            return self.always[path]
        failures = self.failures.get(path)
        return failures.pop(0) if failures else None

    def listing(self):
        siblings = []
        for path, data in self.listed.items():
            lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
            siblings.append({"rfilename": path, "size": len(data), "blobId": "0" * 40, "lfs": lfs})
        siblings.append({"rfilename": "README.md", "size": 3, "blobId": "1" * 40})
        return json.dumps({"id": self.repository, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()

    def ranges(self, path):
        """Return the requested ranges of one file, in order."""
        return [byte_range for requested, byte_range in self.requests if requested == path]


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def answer(self, status, body=b"", headers=(), send=None):
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if send is None else body[:send])

        def do_HEAD(self):
            path = urlsplit(self.path).path.removeprefix(f"/datasets/{hub.repository}/resolve/{COMMIT}/")
            if hub.always.get(path) == 404 or path not in hub.files:
                return self.answer(404)
            headers = [("X-Repo-Commit", COMMIT), ("ETag", f'"{hashlib.sha256(hub.files[path]).hexdigest()}"')]
            headers.append(("X-Linked-Size", str(len(hub.files[path]))))
            return self.answer(200, headers=headers)

        def do_GET(self):
            parts = urlsplit(self.path)
            api, resolve = f"/api/datasets/{hub.repository}/revision/", f"/datasets/{hub.repository}/resolve/{COMMIT}/"
            if parts.path.startswith(api):
                failure = hub.next_failure("api")
                hub.requests.append(("api", None))
                if isinstance(failure, int):
                    return self.answer(failure, b"{}")
                return self.answer(200, hub.listing(), [("Content-Type", "application/json")])
            if parts.path.startswith(resolve) and parts.path[len(resolve) :] in hub.files:
                return self.send_file(parts.path[len(resolve) :])
            hub.requests.append((parts.path, None))
            return self.answer(404, b"{}")

        def send_file(self, path):
            data, byte_range = hub.files[path], self.headers.get("Range")
            hub.requests.append((path, byte_range))
            failure = hub.next_failure(path)
            if isinstance(failure, int):
                return self.answer(failure)
            start = 0 if byte_range is None else int(byte_range.removeprefix("bytes=").partition("-")[0])
            body, headers = data[start:], [("ETag", '"etag"'), ("Accept-Ranges", "bytes")]
            if failure == "corrupt":
                body = bytes([body[0] ^ 255]) + body[1:]
            if start:
                headers.append(("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"))
            status = 206 if start else 200
            if failure == "hang":
                self.answer(status, body, headers, send=len(body) // 2)
                self.wfile.flush()
                return hub.release.wait(30)
            return self.answer(status, body, headers, send=failure[1] if isinstance(failure, tuple) else None)

    return Handler


@contextmanager
def serving(repository, files):
    """Serve a repository with these files at `hub.endpoint`."""
    hub = Hub(repository, files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
