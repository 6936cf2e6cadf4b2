"""A hub of datasets on this machine: what the datasets library asks of the real one, from files in memory."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

Revisions = Mapping[str, Mapping[str, bytes]]
"""Branch or tag -> file -> content."""


@contextmanager
def serving(name: str, revisions: Revisions) -> Iterator[str]:
    """Serve one dataset; yields the endpoint."""
    commits = {revision: sha1(revision.encode()).hexdigest() for revision in revisions}
    by_commit = {commits[revision]: files for revision, files in revisions.items()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].replace("%2F", "/")
            api = re.fullmatch(rf"/api/datasets/{name}(?:/(revision|tree)/([^/]+)(/.*)?)?", path)
            file = re.fullmatch(rf"/datasets/{name}/resolve/([^/]+)/(.+)", path)
            revision = (api and (api[2] or "main")) or (file and file[1])
            commit = commits.get(str(revision), str(revision))
            files = by_commit.get(commit)
            if files is None or (file and file[2] not in files):
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound" if files is None else "EntryNotFound"})
            elif file:
                self.send_file(files[file[2]], commit)
            elif api and api[1] == "tree":
                entries = [
                    {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}
                    for path, content in files.items()
                ]
                self.reply(200, json.dumps(entries).encode())
            else:
                siblings = [{"rfilename": path} for path in files]
                info = {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
                self.reply(200, json.dumps(info).encode())

        def send_file(self, content: bytes, commit: str) -> None:
            headers = {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if not part:
                self.reply(200, content, headers)
                return
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            self.reply(
                206, content[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"}
            )

        def reply(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
