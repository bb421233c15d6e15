"""A Hub on this machine, as far as fetching needs one, that misbehaves when told to."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """One repository of files.

    `trouble[path]` is a list of what goes wrong with each request for that path in turn, before all goes well:
    a status, ("drop", bytes sent before the connection closes), "corrupt", "whole" (ranges are ignored), or "hang".
    `always[path]` goes wrong every time.
    """

    def __init__(self, repository, files):
        self.repository, self.files = repository, files
        self.trouble, self.always, self.asked = {}, {}, []
        self.told = dict(files)  # what the listing says, where that is not what is served
        self.release = threading.Event()

    def problem(self, path):
        if path in self.always:
            return self.always[path]
        waiting = self.trouble.get(path)
        return waiting.pop(0) if waiting else None

    def listing(self):
        siblings = []
        for path, data in self.told.items():
            lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
            siblings.append({"rfilename": path, "size": len(data), "blobId": "0" * 40, "lfs": lfs})
        siblings.append({"rfilename": "README.md", "size": 3, "blobId": "1" * 40})
        return json.dumps({"id": self.repository, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()

    def ranges(self, path):
        """The ranges asked for, in order, of one file's bytes."""
        return [asked for where, asked in self.asked if where == path]


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

        def do_GET(self):
            parts = urlsplit(self.path)
            api, resolve = f"/api/datasets/{hub.repository}/revision/", f"/datasets/{hub.repository}/resolve/{COMMIT}/"
            if parts.path.startswith(api):
                problem = hub.problem("api")
                hub.asked.append(("api", None))
                if isinstance(problem, int):
                    return self.answer(problem, b"{}")
                return self.answer(200, hub.listing(), [("Content-Type", "application/json")])
            if parts.path.startswith(resolve) and parts.path[len(resolve) :] in hub.files:
                path = parts.path[len(resolve) :]
                return self.answer(302, headers=[("Location", f"/cdn/{path}?signed"), ("X-Repo-Commit", COMMIT)])
            if parts.path.startswith("/cdn/"):
                return self.give(parts.path[len("/cdn/") :])
            hub.asked.append((parts.path, None))
            return self.answer(404, b"{}")

        def give(self, path):
            data, asked = hub.files[path], self.headers.get("Range")
            hub.asked.append((path, asked))
            problem = hub.problem(path)
            if isinstance(problem, int):
                return self.answer(problem)
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and problem != "whole" else 0
            body, headers = data[start:], [("ETag", '"etag"'), ("Accept-Ranges", "bytes")]
            if problem == "corrupt":
                body = bytes([body[0] ^ 255]) + body[1:]
            if start:
                headers.append(("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"))
            status = 206 if start else 200
            if problem == "hang":
                self.answer(status, body, headers, send=len(body) // 2)
                self.wfile.flush()
                return hub.release.wait(30)
            return self.answer(status, body, headers, send=problem[1] if isinstance(problem, tuple) else None)

    return Handler


@contextmanager
def serving(repository, files):
    """A Hub with these files, at hub.endpoint."""
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
