"""A server that takes runs as W&B's does, as far as the client needs it: what it has got can be looked at."""

from __future__ import annotations

import gzip
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Runs by id, each with its ``lines`` of history by number and its last ``summary``."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.url = ""

    def history(self, run_id: str) -> list[dict[str, Any]]:
        """Return the rows of a run in the order in which they stand on the server."""
        lines = self.runs[run_id]["lines"]
        return [json.loads(lines[number]) for number in sorted(lines)]

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if match := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
            return self._take(self.runs[match[1]], body)
        query, variables = body.get("query", ""), body.get("variables", {})
        if "UpsertBucket" in query or "upsertBucket" in query:
            self.runs.setdefault(variables["name"], {"lines": {}, "summary": "{}"}).update(
                {key: variables.get(key) for key in ("displayName", "groupName", "project", "config")}
            )
            return {"data": {"upsertBucket": {"bucket": self._bucket(variables["name"]), "inserted": True}}}
        if "RunResumeStatus" in query:
            found = self._bucket(variables["name"]) if variables["name"] in self.runs else None
            return {"data": {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}, "bucket": found}}}
        if "viewer" in query:
            teams = {"edges": []}
            return {"data": {"viewer": {"id": "u", "entity": "e", "username": "u", "flags": "{}", "teams": teams}}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/storage/{name}"} for name in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}}
        return {"data": {"serverInfo": {"features": []}}}

    def _take(self, run: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        files = body.get("files") or {}
        history = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        for number, line in enumerate(history["content"], start=history["offset"]):
            run["lines"][number] = line
        if summary := files.get("wandb-summary.json"):
            run["summary"] = summary["content"][-1]
        return {}

    def _bucket(self, run_id: str) -> dict[str, Any]:
        run = self.runs[run_id]
        tail = [run["lines"][number] for number in sorted(run["lines"])][-1:]
        return {
            "id": run_id, "name": run_id, "displayName": run["displayName"], "summaryMetrics": run["summary"],
            "logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(run["lines"]),
            "historyTail": json.dumps(tail), "eventsTail": "[]", "config": "{}", "tags": [],
            "wandbConfig": '{"t": 1}',
            "project": {"id": "p", "name": run["project"] or "p", "entity": {"id": "e", "name": "e"}},
        }  # fmt: skip


@contextmanager
def wandb_server(refuses: bool = False):
    """Serve on a free port of this machine, or refuse every request; yields the ``WandbServer``."""
    server = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            try:
                reply = json.dumps(server.answer(self.path, json.loads(data))).encode()
            except ValueError:  # telemetry
                reply = b"{}"
            if refuses:
                reply = b'{"errors": [{"message": "user is not logged in"}]}'
            self.send_response(401 if refuses else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_PUT = do_GET = do_POST

        def log_message(self, *arguments: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that is killed

    with Quiet(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield server
        http.shutdown()
