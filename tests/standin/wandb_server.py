"""A W&B server on this machine: the part of W&B's HTTP API that the library wandb, `wandb sync` and `wandb.Api` use for runs.

    with WandbServer() as server:
        subprocess.run(command, env=os.environ | server.environment(home))
    server.run().history

Runs, their files and artifacts are kept in memory. A login that is not KEY gets 401. An operation or a path that is not known
is answered with an error and kept in `unknown`. Every request's body is recorded, and `fault` makes the server fail.

As W&B's server does it:
- lines go where their offset says and end there: what was there before is replaced (`replaced` counts lines of history). So a
  run that is begun again under the same id, online or by `wandb sync`, replaces its history;
- an artifact with the digest of an earlier version is that version;
- a mutation for a run that exists changes it, and one for a new run makes it.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

KEY, USER = "k" * 40, "me"  # the login that is accepted, and its name
STREAM = re.compile(r"/files/(?P<entity>[^/]+)/(?P<project>[^/]+)/(?P<name>[^/]+)/file_stream")
NAME = re.compile(r"[\w.-]{1,128}")  # of projects, runs and artifacts
TIME = "2026-01-01T00:00:00Z"
JSON = Mapping[str, Any]


@dataclass
class Run:
    """A run as the server has it."""

    entity: str
    project: str
    name: str  # its id in addresses
    given: dict[str, Any] = field(default_factory=dict)  # the last values of UpsertBucket's variables
    history: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    state: str = "running"
    replaced: int = 0  # lines of history that were written again

    @property
    def key(self) -> str:
        return base64.b64encode(f"Run:v1:{self.name}:{self.project}:{self.entity}".encode()).decode()

    @property
    def config(self) -> dict[str, Any]:
        """The values that the user gave."""
        found = json.loads(self.given.get("config") or "{}")
        return {name: item["value"] for name, item in found.items() if name != "_wandb"}

    def steps(self) -> list[int]:
        """The step of each line of history."""
        return [line["_step"] for line in self.history]

    def values(self, step: int) -> dict[str, Any]:
        """The figures of a step, without W&B's own."""
        (line,) = (line for line in self.history if line["_step"] == step)
        return {key: value for key, value in line.items() if not key.startswith("_")}


@dataclass
class Artifact:
    """A version of an artifact."""

    given: dict[str, Any]  # CreateArtifact's input
    version: int
    run: str | None
    state: str = "PENDING"
    manifest: str | None = None  # key of its manifest in the storage
    aliases: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return str(self.given["artifactCollectionName"])

    @property
    def kind(self) -> str:
        return str(self.given["artifactTypeName"])

    @property
    def key(self) -> str:
        return base64.b64encode(f"Artifact:{self.name}:{self.version}".encode()).decode()


@dataclass(frozen=True)
class Request:
    """A request that arrived."""

    method: str
    path: str
    operation: str | None  # of GraphQL
    login: str | None
    body: bytes
    status: int


class WandbServer:
    """The server. fault: None, a status to answer with, or "hang": take requests and answer none until it ends."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str, str], Run] = {}
        self.artifacts: list[Artifact] = []
        self.used: list[tuple[str, str]] = []  # run and artifact
        self.storage: dict[str, bytes] = {}  # by key: files of runs and artifacts
        self.projects: list[str] = []
        self.reports: list[dict[str, Any]] = []
        self.requests: list[Request] = []
        self.unknown: list[str] = []
        self.fault: int | str | None = None
        self.lock = threading.RLock()
        self.released = threading.Event()
        self.address = ""

    def __enter__(self) -> WandbServer:
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Answer nothing from now on: connections are refused."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path, key: str = KEY) -> dict[str, str]:
        """Variables for a subprocess that uses this server, with its settings and caches in `home`."""
        return {
            "WANDB_BASE_URL": self.address,
            "WANDB_API_KEY": key,
            "WANDB_CONFIG_DIR": str(home / "config"),
            "WANDB_CACHE_DIR": str(home / "cache"),
            "WANDB_DATA_DIR": str(home / "data"),
            "WANDB_ARTIFACT_DIR": str(home / "artifacts"),
            "WANDB_ERROR_REPORTING": "false",
            "HOME": str(home),
            "NO_PROXY": "127.0.0.1",
        }

    def run(self, job: str = "fit") -> Run:
        """The only run of this kind."""
        (found,) = (run for run in self.runs.values() if run.given.get("jobType") == job)
        return found

    def artifact(self, kind: str) -> Artifact:
        """The only artifact of this type."""
        (found,) = (artifact for artifact in self.artifacts if artifact.kind == kind)
        return found

    def entries(self, artifact: Artifact) -> dict[str, dict[str, Any]]:
        """The files of an artifact, from its manifest."""
        assert artifact.manifest is not None
        found: dict[str, dict[str, Any]] = json.loads(self.storage[artifact.manifest])["contents"]
        return found

    def operations(self, name: str) -> list[Request]:
        """The requests of a GraphQL operation."""
        return [request for request in self.requests if request.operation == name]

    def bodies(self) -> bytes:
        """All that was sent: paths and bodies."""
        return b"\n".join(request.path.encode() + b"\n" + request.body for request in self.requests)


class RefusedError(Exception):
    """An error in GraphQL's form."""


def _upsert_bucket(server: WandbServer, given: JSON) -> JSON:
    if given.get("id") and not given.get("name"):
        run = next(run for run in server.runs.values() if run.key == given["id"])
        inserted = False
    else:
        entity, project, name = given.get("entity") or USER, given["project"], given["name"]
        if not NAME.fullmatch(project) or not NAME.fullmatch(name):
            raise RefusedError(f"invalid name {project!r} or {name!r}")
        if entity != USER:
            raise RefusedError(f"permission denied: entity {entity}")
        inserted = (entity, project, name) not in server.runs
        run = server.runs.setdefault((entity, project, name), Run(entity, project, name))
        if project not in server.projects:
            server.projects.append(project)
    if len(given.get("groupName") or "") > 128:
        raise RefusedError("the group's name is too long")
    run.given |= {key: value for key, value in given.items() if value is not None}
    run.state, run.exit_code = "running", None
    # the count of lines is an answer about a run that goes on from a step of another; others begin at the first line
    return {"upsertBucket": {"bucket": _bucket(run) | {"historyLineCount": None}, "inserted": inserted}}


def _bucket(run: Run) -> dict[str, Any]:
    project = {
        "id": f"project {run.project}",
        "name": run.project,
        "entity": {"id": f"entity {run.entity}", "name": run.entity},
    }
    last = run.history[-1] if run.history else None
    return {
        "id": run.key,
        "name": run.name,
        "projectId": "1",
        "displayName": run.given.get("displayName") or run.name,
        "description": "",
        "config": run.given.get("config") or "{}",
        "sweepName": None,
        "project": project,
        "summaryMetrics": json.dumps(run.summary),
        "logLineCount": len(run.output),
        "historyLineCount": len(run.history),
        "eventsLineCount": len(run.events),
        "historyTail": json.dumps([json.dumps(last)] if last else []),
        "eventsTail": json.dumps([json.dumps(run.events[-1])] if run.events else []),
        "tags": list(run.given.get("tags") or []),
        "notes": None,
        "wandbConfig": json.dumps(
            {"t": json.loads(run.given.get("config") or "{}").get("_wandb", {}).get("value", {}).get("t")}
        ),
        "state": run.state,
        "group": run.given.get("groupName"),
        "jobType": run.given.get("jobType"),
        "commit": run.given.get("commit"),
        "readOnly": False,
        "createdAt": TIME,
        "heartbeatAt": TIME,
        "systemMetrics": "{}",
        "user": {"name": USER, "username": USER},
        "historyKeys": {"lastStep": run.steps()[-1] if run.history else -1, "keys": {}, "sets": []},
    }


def _resume_status(server: WandbServer, given: JSON) -> JSON:
    entity = given.get("entity") or USER
    if given["project"] not in server.projects:
        return {"model": None}
    run = server.runs.get((entity, given["project"], given["name"]))
    found = {"id": f"project {given['project']}", "name": given["project"], "entity": {"id": entity, "name": entity}}
    return {"model": found | {"bucket": _bucket(run) if run else None}}


def _run(server: WandbServer, given: JSON) -> JSON:
    run = server.runs.get((given["entity"], given["project"], str(given.get("name") or given.get("run"))))
    return {"project": {"run": _bucket(run)} if run else None}


def _run_files(server: WandbServer, given: JSON) -> JSON:
    run = server.runs[given["entity"], given["project"], given["run"]]
    places = [{"name": name, "uploadUrl": _place(server, f"run/{run.name}/{name}")} for name in given["files"]]
    return {"createRunFiles": {"runID": run.key, "uploadHeaders": [], "files": places}}


def _place(server: WandbServer, key: str) -> str:
    return f"{server.address}/storage/{quote(key)}?signature=1"


def _create_artifact(server: WandbServer, given: JSON) -> JSON:
    wanted = dict(given["input"])
    if not NAME.fullmatch(wanted["artifactCollectionName"]):
        raise RefusedError(f"invalid name {wanted['artifactCollectionName']!r}")
    if any(old.name == wanted["artifactCollectionName"] and old.kind != wanted["artifactTypeName"] for old in server.artifacts):
        raise RefusedError("the artifact has another type")
    versions = [old for old in server.artifacts if old.name == wanted["artifactCollectionName"]]
    made = next((old for old in versions if old.given["digest"] == wanted["digest"]), None)
    if made is None:
        made = Artifact(wanted, len(versions), wanted.get("runName"))
        server.artifacts.append(made)
    for old in versions:
        old.aliases -= {"latest", *(item["alias"] for item in wanted.get("aliases") or [])}
    made.aliases |= {item["alias"] for item in wanted.get("aliases") or []} | {"latest"}
    latest = [old for old in versions if old.state == "COMMITTED"]
    sequence = {"latestArtifact": {"id": latest[-1].key} if latest else None}
    return {"createArtifact": {"artifact": {"id": made.key, "state": made.state, "artifactSequence": sequence}}}


def _artifact_by(server: WandbServer, key: str) -> Artifact:
    return next(artifact for artifact in server.artifacts if artifact.key == key)


def _create_manifest(server: WandbServer, given: JSON) -> JSON:
    artifact = _artifact_by(server, given["artifactID"])
    artifact.manifest = f"manifest/{artifact.name}/{artifact.version}"
    return {"createArtifactManifest": {"artifactManifest": _manifest(server, artifact)}}


def _update_manifest(server: WandbServer, given: JSON) -> JSON:
    artifact = next(a for a in server.artifacts if f"of {a.key}" == given["artifactManifestID"])
    return {"updateArtifactManifest": {"artifactManifest": _manifest(server, artifact)}}


def _manifest(server: WandbServer, artifact: Artifact) -> JSON:
    file: JSON = {"id": artifact.manifest, "uploadUrl": _place(server, str(artifact.manifest)), "uploadHeaders": []}
    return {"id": f"of {artifact.key}", "file": file}


def _artifact_files(server: WandbServer, given: JSON) -> JSON:
    edges = []
    for spec in given["input"]["artifactFiles"]:
        artifact = _artifact_by(server, spec["artifactID"])
        key = f"artifact/{artifact.name}/{artifact.version}/{spec['name']}"
        node: dict[str, Any] = {
            "storagePath": key,
            "uploadUrl": _place(server, key),
            "uploadHeaders": [],
            "uploadMultipartUrls": None,
        }
        edges.append({"node": node | {"artifact": {"id": artifact.key}}})
    return {"createArtifactFiles": {"files": {"edges": edges}}}


def _commit_artifact(server: WandbServer, given: JSON) -> JSON:
    artifact = _artifact_by(server, given["artifactID"])
    if artifact.manifest not in server.storage:
        raise RefusedError("the artifact has no manifest")
    artifact.state = "COMMITTED"
    return {"commitArtifact": {"artifact": {"id": artifact.key, "digest": artifact.given["digest"]}}}


def _use_artifact(server: WandbServer, given: JSON) -> JSON:
    wanted = given["input"]
    server.used.append((wanted["runName"], _artifact_by(server, wanted["artifactID"]).name))
    return {"useArtifact": {"artifact": {"id": wanted["artifactID"]}}}


def _collection(artifact: Artifact) -> dict[str, Any]:
    entity, project = artifact.given["entityName"], artifact.given["projectName"]
    found = {"id": f"project {project}", "internalId": "1", "name": project, "entity": {"name": entity}}
    return {"__typename": "ArtifactSequence", "id": artifact.name, "name": artifact.name, "project": found}


def _shown(artifact: Artifact) -> dict[str, Any]:
    aliases = [{"__typename": "ArtifactAlias", "id": a, "alias": a} for a in sorted(artifact.aliases)]
    return {
        "__typename": "Artifact",
        "id": artifact.key,
        "artifactSequence": _collection(artifact),
        "versionIndex": artifact.version,
        "artifactType": {"name": artifact.kind},
        "description": None,
        "metadata": artifact.given.get("metadata"),
        "ttlDurationSeconds": -2,
        "ttlIsInherited": True,
        "tags": [],
        "historyStep": None,
        "state": artifact.state,
        "size": 1,
        "digest": artifact.given["digest"],
        "digestAlgorithm": "MANIFEST_MD5",
        "commitHash": "0",
        "fileCount": 1,
        "createdAt": TIME,
        "updatedAt": TIME,
        "aliases": [alias | {"artifactCollection": _collection(artifact)} for alias in aliases],
    }


def _logged_artifacts(server: WandbServer, given: JSON) -> JSON:
    found = [artifact for artifact in server.artifacts if artifact.run == given["run"] and artifact.state == "COMMITTED"]
    page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
    edges = [{"node": _shown(artifact)} for artifact in found]
    return {"project": {"run": {"artifacts": {"totalCount": len(found), "pageInfo": page, "edges": edges}}}}


def _membership(server: WandbServer, given: JSON) -> JSON:
    if given["project"] not in server.projects or given["entity"] != USER:
        return {"project": None}
    artifact = _named(server, *given["name"].split(":"))
    if artifact is None:
        return {"project": {"artifactCollectionMembership": None}}
    whole = _shown(artifact)
    kept = {key: whole[key] for key in ("versionIndex", "createdAt", "aliases")}
    kept |= {"__typename": "ArtifactCollectionMembership", "id": artifact.key, "artifact": whole}
    return {"project": {"artifactCollectionMembership": kept | {"artifactCollection": _collection(artifact)}}}


def _named(server: WandbServer, name: str, alias: str) -> Artifact | None:
    found = [a for a in server.artifacts if a.name == name and (alias in a.aliases or alias == f"v{a.version}")]
    return found[0] if found else None


def _artifact_type(server: WandbServer, given: JSON) -> JSON:
    artifact = _named(server, *given["name"].split(":"))
    return {"project": {"artifact": {"artifactType": {"name": artifact.kind}} if artifact else None}}


def _file_addresses(server: WandbServer, given: JSON) -> JSON:
    artifact = _named(server, given["collection"], given["alias"])
    assert artifact is not None
    edges = []
    for name, entry in server.entries(artifact).items():
        if "ref" not in entry:
            place = _place(server, f"artifact/{artifact.name}/{artifact.version}/{name}")
            edges.append({"node": {"__typename": "File", "name": name, "directUrl": place}})
    page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
    return {
        "project": {
            "artifactCollection": {
                "__typename": "ArtifactSequence",
                "artifactMembership": {"files": {"pageInfo": page, "edges": edges}},
            }
        }
    }


def _manifest_address(server: WandbServer, given: JSON) -> JSON:
    artifact = _artifact_by(server, given.get("id") or given["artifact_id"])
    return {"artifact": {"currentManifest": {"file": {"directUrl": _place(server, str(artifact.manifest))}}}}


def _projects(server: WandbServer, _: JSON) -> JSON:
    page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
    shown = [
        {"__typename": "Project", "id": p, "name": p, "entityName": USER, "createdAt": TIME, "isBenchmark": False, "user": None}
        for p in server.projects
    ]
    return {"models": {"pageInfo": page, "edges": [{"node": project} for project in shown]}}


def _upsert_view(server: WandbServer, given: JSON) -> JSON:
    server.reports.append(dict(given))
    view = {key: given.get(key) for key in ("type", "name", "displayName", "description", "spec")}
    project = {"id": "1", "name": given["projectName"], "entityName": given["entityName"]}
    return {"upsertView": {"view": view | {"id": "Vmlldzox", "project": project, "updatedAt": TIME}, "inserted": True}}


VIEWER = {"id": "VXNlcjox", "entity": USER, "username": USER, "email": "me@example.org", "flags": "{}", "teams": {"edges": []}}
OPERATIONS: dict[str, Callable[[WandbServer, JSON], JSON]] = {
    "Viewer": lambda *_: {"viewer": VIEWER},
    "GetDefaultEntity": lambda *_: {"viewer": VIEWER},
    "ServerFeaturesQuery": lambda *_: {"serverInfo": {"features": []}},
    "XXHashDigestsEnabled": lambda *_: {"entity": {"xxhashDigestsEnabled": False}},
    "OrganizationCoreWeaveOrganizationID": lambda *_: {"entity": {"organization": None}},
    "FetchArtifactDigestAlgorithm": lambda *_: {"project": None},
    "ClientIDMapping": lambda server, given: {
        "clientIDMapping": next(
            ({"serverID": a.key} for a in server.artifacts if a.given.get("clientID") == given["clientID"]), None
        )
    },
    "UpsertBucket": _upsert_bucket,
    "RunResumeStatus": _resume_status,
    "Run": _run,
    "RunState": _run,
    "CreateRunFiles": _run_files,
    "MarkRunFilesUploaded": lambda *_: {"markRunFilesUploaded": {"success": True}},
    "CreateArtifact": _create_artifact,
    "CreateArtifactManifest": _create_manifest,
    "UpdateArtifactManifest": _update_manifest,
    "CreateArtifactFiles": _artifact_files,
    "CommitArtifact": _commit_artifact,
    "UseArtifact": _use_artifact,
    "ArtifactByID": lambda server, given: {"artifact": _shown(_artifact_by(server, given["id"]))},
    "ArtifactType": _artifact_type,
    "RunOutputArtifacts": _logged_artifacts,
    "ArtifactMembershipByName": _membership,
    "GetArtifactMembershipFileUrls": _file_addresses,
    "FetchArtifactManifest": _manifest_address,
    "ArtifactManifest": _manifest_address,
    "GetProjects": _projects,
    "upsertView": _upsert_view,
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: WandbServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self._body()
        if self._failed(body):
            return
        if path == "/graphql":
            self._graphql(body)
        elif found := STREAM.fullmatch(path):
            self._stream(body, *(unquote(found[key]) for key in ("entity", "project", "name")))
        else:
            self._refuse(body)

    def do_PUT(self) -> None:
        body = self._body()
        if self._failed(body):
            return
        key = unquote(urlsplit(self.path).path).removeprefix("/storage/")
        with self.owner.lock:
            self.owner.storage[key] = body
            if key.startswith("run/"):
                _, name, file = key.split("/", 2)
                next(run for run in self.owner.runs.values() if run.name == name).files[file] = body
        self._answer(200, b"", body)

    def do_GET(self) -> None:
        if self._failed(b""):
            return
        path = unquote(urlsplit(self.path).path)
        content = self.owner.storage.get(path.removeprefix("/storage/"))
        if path.startswith("/storage/") and content is not None:
            self._answer(200, content, b"")
        else:
            self._refuse(b"")

    @property
    def _login(self) -> str | None:
        kind, _, value = (self.headers.get("Authorization") or "").partition(" ")
        if kind == "Basic":
            return base64.b64decode(value).decode().partition(":")[2]
        return value or None

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            raw = b"".join(parts)
        else:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

    def _failed(self, body: bytes) -> bool:
        """Whether the server's fault or a wrong login has been the answer."""
        fault = self.owner.fault
        if fault == "hang":
            self.owner.released.wait()
            self._record(0, body)
            self.close_connection = True
            return True
        if isinstance(fault, int):
            self._answer(fault, {"errors": [{"message": f"fault {fault}"}]}, body)
            return True
        if self._login != KEY and not urlsplit(self.path).path.startswith("/storage/"):
            self._answer(401, {"errors": [{"message": "user is not logged in"}]}, body)
            return True
        return False

    def _refuse(self, body: bytes) -> None:
        self.owner.unknown.append(f"{self.command} {self.path}")
        self._answer(404, {"error": "not found"}, body)

    def _graphql(self, body: bytes) -> None:
        asked = json.loads(body)
        operation = _operation(asked["query"])
        if operation not in OPERATIONS:
            self.owner.unknown.append(f"{operation}: {asked['query']}")
            self._answer(400, {"errors": [{"message": f"unknown operation {operation}"}]}, body, operation)
            return
        try:
            with self.owner.lock:
                data = OPERATIONS[operation](self.owner, asked.get("variables") or {})
        except RefusedError as error:
            self._answer(200, {"data": None, "errors": [{"message": str(error)}]}, body, operation)
        except (KeyError, StopIteration, AssertionError) as error:
            self.owner.unknown.append(f"{operation}: {error!r} for {asked.get('variables')}")
            self._answer(400, {"errors": [{"message": repr(error)}]}, body, operation)
        else:
            self._answer(200, {"data": data}, body, operation)

    def _stream(self, body: bytes, *run_name: str) -> None:
        """Lines of a run's history, events and console, its summary, and its end."""
        sent = json.loads(body)
        with self.owner.lock:
            run = self.owner.runs.get((run_name[0], run_name[1], run_name[2]))
            if run is None:
                self._answer(404, {"error": "no run"}, body)
                return
            for name, part in (sent.get("files") or {}).items():
                if name == "wandb-summary.json":
                    run.summary = json.loads(part["content"][-1])
                    continue
                lines: list[Any] = {"wandb-history.jsonl": run.history, "wandb-events.jsonl": run.events}.get(name, run.output)
                new = part["content"] if lines is run.output else [json.loads(line) for line in part["content"]]
                at = part["offset"]
                if at > len(lines):
                    self.owner.unknown.append(f"{name}: line {at} after {len(lines)}")
                if lines is run.history:
                    run.replaced += len(lines[at:])
                lines[at:] = new
            if sent.get("complete"):
                run.exit_code = sent["exitcode"]
                run.state = "failed" if sent["exitcode"] else "finished"
        self._answer(200, {"exitcode": None, "limits": {}}, body)

    def _answer(self, status: int, content: Any, body: bytes, operation: str | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self._record(status, body, operation)
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(content, bytes) else "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _record(self, status: int, body: bytes, operation: str | None = None) -> None:
        made = Request(self.command, self.path, operation, self._login, body, status)
        with self.owner.lock:
            self.owner.requests.append(made)


def _operation(query: str) -> str:
    found = re.search(r"\b(?:query|mutation)\s+(\w+)", query)
    return found[1] if found else ""
