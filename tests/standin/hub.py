"""A hub on this machine: the part of the Hugging Face hub's HTTP API that huggingface_hub, transformers and datasets use.

Two servers run on two ports. The first is the hub. The second is the CDN, another host to which large files are redirected, and
which must never see a login. Repositories are kept in memory:

    with Hub() as hub:
        hub.put("me/model", {"config.json": b"{}"}, private=True)
        subprocess.run(command, env=os.environ | hub.environment(folder, token=OWNER))

Every request is recorded, and a file's download can be cut (`hub.faults`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

OWNER, STRANGER = "hf_" + "o" * 34, "hf_" + "x" * 34  # logins: the first may read and write all, the second only what is public
LARGE = (".safetensors", ".bin", ".pt", ".parquet", ".arrow", ".gz", ".gguf")  # endings of files that are kept as LFS objects
LARGE_SIZE = 10 * 2**20  # bytes; other files are LFS objects from this size on
PAGE = 3  # entries on a page of a file list; the real hub's 1,000 would leave paging untested
PLURALS = {"model": "models", "dataset": "datasets"}
MISSING_REPOSITORY = (401, "RepoNotFound", "Invalid username or password.")  # also the answer about private ones

API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)(/(?P<verb>[\w-]+)(/(?P<rest>.*))?)?")
RESOLVE = re.compile(r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
CACHED = re.compile(r"/api/resolve-cache/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)/(?P<revision>[^/]+)/(?P<file>.+)")
LFS_BATCH = re.compile(r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch")


@dataclass
class Fault:
    """Cut the next downloads of the files whose names match."""

    files: str  # pattern of names
    after: int  # bytes of the answer that are sent
    times: int  # number of downloads that are cut
    reset: bool = False  # reset the connection instead of closing it
    stall: float = 0.0  # seconds of silence instead; the connection stays open


@dataclass
class Repository:
    """A model or a data set with its commits, the last one last."""

    kind: str  # model | dataset
    name: str
    private: bool = False
    gated: bool = False
    readers: set[str] = field(default_factory=lambda: {OWNER})  # logins that may read it if it is private or gated
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # sha -> files
    names: dict[str, str] = field(default_factory=dict)  # branch or tag -> sha
    messages: list[str] = field(default_factory=list)

    def commit(self, files: Mapping[str, bytes], message: str = "a commit", branch: str = "main") -> str:
        """Replace the files of a branch. Returns the commit's sha."""
        text = json.dumps([len(self.commits), *((name, digest(content)) for name, content in sorted(files.items()))])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha], self.names[branch] = dict(files), sha
        self.messages.append(message)
        return sha

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the branch `main`."""
        return self.commits[self.names["main"]]

    def sha(self, revision: str) -> str | None:
        """The commit of a branch, a tag or a sha."""
        return self.names.get(revision, revision if revision in self.commits else None)


@dataclass(frozen=True)
class Request:
    """A request that arrived. server: hub | cdn."""

    server: str
    method: str
    path: str
    login: str | None
    range: str | None
    status: int
    sent: int  # bytes of the body


class Hub:
    """The two servers. `requests` has every request in the order of their ends; `faults` cut downloads."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.blobs: dict[str, bytes] = {}  # LFS objects by sha256
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.address, self.cdn = "", ""
        self._servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> Hub:
        for kind in (_HubHandler, _CdnHandler):
            handler = type(kind.__name__, (kind,), {"hub": self})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._servers.append(server)
        self.address, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def put(self, name: str, files: Mapping[str, bytes | str | Path], kind: str = "model", **settings: Any) -> Repository:
        """Make a repository with one commit."""
        made = Repository(kind, name, **settings)
        made.commit({path: bytes_of(content) for path, content in files.items()})
        self.blobs |= {digest(content): content for content in made.files.values()}
        self.repositories[kind, name] = made
        return made

    def change(self, kind: str, name: str, files: Mapping[str, bytes]) -> str:
        """Add a commit with these files to the branch `main`, next to those that it has. Returns its sha."""
        self.blobs |= {digest(content): content for content in files.values()}
        made = self.repositories[kind, name]
        return made.commit(made.files | dict(files))

    def put_folder(self, name: str, folder: Path, kind: str = "model", **settings: Any) -> Repository:
        """Make a repository of a directory's files."""
        found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        return self.put(name, found, kind, **settings)

    def environment(self, home: Path, token: str | None = None, **more: str) -> dict[str, str]:
        """Variables for a subprocess that uses this hub, with its caches in `home`."""
        plain = {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(home / "hf"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",  # Xet is a protocol of its own between hf_xet and a storage server
            "NO_PROXY": "127.0.0.1",
        }
        return plain | ({} if token is None else {"HF_TOKEN": token}) | more

    def downloads(self, pattern: str = "*") -> list[Request]:
        """The downloads of files whose last part of the path matches."""
        return [r for r in self.requests if r.method == "GET" and r.status in (200, 206) and fnmatch(_last(r.path), pattern)]

    def sent(self, pattern: str = "*") -> int:
        """Bytes sent of these files."""
        return sum(request.sent for request in self.downloads(pattern))

    def fault(self, name: str) -> Fault | None:
        """The fault that applies to the next download of this file."""
        with self.lock:
            for found in self.faults:
                if found.times and fnmatch(name, found.files):
                    found.times -= 1
                    return found
        return None


def bytes_of(content: bytes | str | Path) -> bytes:
    """A file's content."""
    if isinstance(content, Path):
        return content.read_bytes()
    return content.encode() if isinstance(content, str) else content


def digest(content: bytes) -> str:
    """sha256 of a content."""
    return hashlib.sha256(content).hexdigest()


def blob_id(content: bytes) -> str:
    """git's name of a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(name: str, size: int) -> bool:
    """Whether a file is kept as an LFS object."""
    return name.endswith(LARGE) or size >= LARGE_SIZE


def _last(path: str) -> str:
    return unquote(urlsplit(path).path.rpartition("/")[2])


class _Handler(BaseHTTPRequestHandler):
    """What both servers share: answers, ranges, and cut connections."""

    protocol_version = "HTTP/1.1"
    hub: Hub
    server_name = ""

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def login(self) -> str | None:
        """The token of the request."""
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def body(self) -> bytes:
        """The request's body, whole or in chunks."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, content: Any = b"", headers: Mapping[str, str] | None = None) -> None:
        """Send bytes, or a value as JSON."""
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        given = dict(headers or {})
        if not isinstance(content, bytes):
            given["Content-Type"] = "application/json; charset=utf-8"
        self._start(status, len(raw), given)
        if self.command != "HEAD":
            self.wfile.write(raw)
        self._record(status, 0 if self.command == "HEAD" else len(raw))

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """The hub's form of an error: its code and message in headers, and the message in the body."""
        given = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | dict(headers or {})
        self.answer(status, {"error": message}, given)

    def send_file(self, name: str, content: bytes, headers: Mapping[str, str]) -> None:
        """Send a file or the range that was asked for; cut off if a fault applies."""
        start, stop, status = 0, len(content), 200
        given = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"} | dict(headers)
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked and (asked[1] or asked[2]):
            start = int(asked[1]) if asked[1] else max(0, len(content) - int(asked[2]))
            stop = min(len(content), int(asked[2]) + 1) if asked[1] and asked[2] else len(content)
            if start >= len(content):
                self.answer(416, b"", given | {"Content-Range": f"bytes */{len(content)}"})
                return
            status, given["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{len(content)}"
        self._start(status, stop - start, given)
        if self.command == "HEAD":
            self._record(status, 0)
            return
        fault = self.hub.fault(name)
        part = content[start:stop] if fault is None else content[start : min(stop, start + fault.after)]
        self.wfile.write(part)
        self.wfile.flush()
        self._record(status, len(part))
        if fault is not None:
            self._cut(fault)

    def _cut(self, fault: Fault) -> None:
        if fault.stall:
            threading.Event().wait(fault.stall)
        if fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _start(self, status: int, size: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.send_header("X-Request-Id", f"Root=1-{len(self.hub.requests):08x}")
        self.end_headers()

    def _record(self, status: int, sent: int) -> None:
        with self.hub.lock:
            found = Request(self.server_name, self.command, self.path, self.login, self.headers.get("Range"), status, sent)
            self.hub.requests.append(found)


class _CdnHandler(_Handler):
    """Serves LFS objects at signed addresses, and takes them: /SHA256?name=FILE&signature=..."""

    server_name = "cdn"

    def do_GET(self) -> None:
        at = urlsplit(self.path)
        oid, query = at.path.partition("/blobs/")[2].partition("/")[0], parse_qs(at.query)
        if query.get("signature") != [signature(oid)] or oid not in self.hub.blobs:
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>", {"Content-Type": "application/xml"})
            return
        self.send_file(_last(self.path), self.hub.blobs[oid], {"ETag": f'"{oid}"'})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        at, content = urlsplit(self.path), self.body()
        oid = at.path.rpartition("/")[2]
        if parse_qs(at.query).get("signature") != [signature(oid)] or digest(content) != oid:
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>", {"Content-Type": "application/xml"})
            return
        self.hub.blobs[oid] = content
        self.answer(200, b"", {"ETag": f'"{oid}"'})


def signature(oid: str) -> str:
    """The part of a signed address that lets its holder read or write the object."""
    return digest(f"signed {oid}".encode())[:16]


class _HubHandler(_Handler):
    """The hub's API."""

    server_name = "hub"

    def do_GET(self) -> None:
        at = urlsplit(self.path)
        if self.login is not None and self.login not in (OWNER, STRANGER):
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif at.path == "/api/whoami-v2":
            self._whoami()
        elif found := RESOLVE.fullmatch(at.path):
            self._resolve(found)
        elif found := CACHED.fullmatch(at.path):
            self._cached(found)
        elif found := API.fullmatch(at.path):
            self._api(found, parse_qs(at.query))
        else:
            self.refuse(404, "", f"Cannot {self.command} {at.path}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        at, body = urlsplit(self.path), self.body()
        if self.login is not None and self.login not in (OWNER, STRANGER):
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif at.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif at.path == "/api/repos/create":
            self._create(json.loads(body))
        elif at.path == "/api/lfs/verify":
            wanted = json.loads(body)
            self.answer(200 if wanted["oid"] in self.hub.blobs else 404, {})
        elif found := LFS_BATCH.fullmatch(at.path):
            self._batch(found, json.loads(body))
        elif found := API.fullmatch(at.path):
            self._post_api(found, body)
        else:
            self.refuse(404, "", f"Cannot {self.command} {at.path}")

    def _whoami(self) -> None:
        if self.login is None:
            self.refuse(401, "", "Invalid username or password.")
        else:
            self.answer(200, {"type": "user", "name": "me" if self.login == OWNER else "stranger", "orgs": []})

    def _found(self, kind: str, name: str) -> Repository | None:
        """The repository, if this login may know of it. Otherwise the error is sent."""
        kind = "dataset" if kind.startswith("dataset") else "model"
        found = self.hub.repositories.get((kind, name))
        if found is None or (found.private and self.login not in found.readers):
            self.refuse(*MISSING_REPOSITORY)
            return None
        return found

    def _revision(self, repository: Repository, revision: str) -> str | None:
        sha = repository.sha(unquote(revision))
        if sha is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {unquote(revision)}")
        return sha

    def _may_read(self, repository: Repository, name: str) -> bool:
        """Whether a gated file may be read. Its card may always be read."""
        if not repository.gated or self.login in repository.readers or name == "README.md":
            return True
        place = f"{'dataset' if repository.kind == 'dataset' else 'model'} {repository.name}"
        if self.login is None:
            text = (
                f"Access to {place} is restricted. You must have access to it and be authenticated to access it. Please log in."
            )
            self.refuse(401, "GatedRepo", text)
        else:
            prefix = "datasets/" if repository.kind == "dataset" else ""
            text = f"Access to {place} is restricted and you are not in the authorized list."
            self.refuse(403, "GatedRepo", f"{text} Visit https://huggingface.co/{prefix}{repository.name} to ask for access.")
        return False

    def _resolve(self, at: re.Match[str]) -> None:
        repository = self._found(at["kind"] or "model", at["name"])
        sha = None if repository is None else self._revision(repository, at["revision"])
        if repository is None or sha is None:
            return
        name, commit = unquote(at["file"]), {"X-Repo-Commit": sha}
        if not self._may_read(repository, name):
            return
        content = repository.commits[sha].get(name)
        if content is None:
            self.refuse(404, "EntryNotFound", "Entry not found", commit)
        elif is_large(name, len(content)):
            oid = digest(content)
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{oid}"', "ETag": f'"{oid}"'}
            place = f"{self.hub.cdn}/blobs/{oid}/{Path(name).name}?signature={signature(oid)}"
            self.answer(302, b"", commit | linked | {"Location": place})
        else:
            place = f"/api/resolve-cache/{PLURALS[repository.kind]}/{repository.name}/{sha}/{at['file']}"
            self.answer(307, b"", commit | {"Location": place, "X-Linked-Size": str(len(content))})

    def _cached(self, at: re.Match[str]) -> None:
        repository = self._found(at["kind"], at["name"])
        if repository is None or not self._may_read(repository, unquote(at["file"])):
            return
        content = repository.commits[at["revision"]][unquote(at["file"])]
        headers = {"X-Repo-Commit": at["revision"], "ETag": f'"{blob_id(content)}"'}
        self.send_file(Path(unquote(at["file"])).name, content, headers)

    def _api(self, at: re.Match[str], query: dict[str, list[str]]) -> None:
        repository = self._found(at["kind"], at["name"])
        if repository is None:
            return
        verb, rest = at["verb"], unquote(at["rest"] or "")
        revision, _, folder = rest.partition("/")
        if verb not in (None, "revision", "tree", "refs", "auth-check"):
            self.refuse(404, "", f"Cannot GET {at[0]}")
        elif verb == "auth-check":
            if self._may_read(repository, ""):
                self.answer(200, {})
        elif verb == "refs":
            named = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha} for n, sha in repository.names.items()]
            self.answer(200, {"branches": named, "tags": [], "converts": []})
        elif (sha := self._revision(repository, revision if verb else "main")) is None:
            pass
        elif verb == "tree":
            self._tree(repository, sha, folder, query)
        else:
            files = repository.commits[sha]
            about = {"id": repository.name, "sha": sha, "private": repository.private, "tags": [], "downloads": 0, "likes": 0}
            gated = {
                "gated": "manual" if repository.gated else False,
                "disabled": False,
                "author": repository.name.split("/")[0],
            }
            self.answer(200, about | gated | {"siblings": [{"rfilename": name} for name in sorted(files)]})

    def _tree(self, repository: Repository, sha: str, folder: str, query: dict[str, list[str]]) -> None:
        files, prefix = repository.commits[sha], f"{folder}/" if folder else ""
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = [_entry(name, content) for name, content in sorted(files.items()) if name.startswith(prefix)]
        names = [str(entry["path"]) for entry in entries]
        folders = {parent.as_posix() for name in names for parent in Path(name).parents if parent.as_posix().startswith(prefix)}
        entries += [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders - {".", folder}]
        if not recursive:
            entries = [entry for entry in entries if "/" not in str(entry["path"])[len(prefix) :]]
        if folder and not entries:
            self.refuse(404, "EntryNotFound", f"{folder} does not exist on this revision")
            return
        entries.sort(key=lambda entry: str(entry["path"]))
        first = int(query.get("cursor", ["0"])[0])
        more = {}
        if first + PAGE < len(entries):
            at = urlsplit(self.path)
            kept = "&".join(f"{key}={values[0]}" for key, values in query.items() if key != "cursor")
            more["Link"] = f'<{self.hub.address}{at.path}?{kept}&cursor={first + PAGE}>; rel="next"'
        self.answer(200, entries[first : first + PAGE], more)

    def _post_api(self, at: re.Match[str], body: bytes) -> None:
        repository = self._found(at["kind"], at["name"])
        sha = None if repository is None else self._revision(repository, at["rest"] or "main")
        if repository is None or sha is None:
            return
        if at["verb"] == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            self.answer(200, list(_entries(repository.commits[sha], asked)))
        elif self.login != OWNER:
            self.refuse(403, "", "you must use a write token to upload to a repository")
        elif at["verb"] == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "lfs" if is_large(f["path"], f["size"]) else "regular"} for f in asked]
            self.answer(200, {"files": [mode | {"shouldIgnore": False, "oid": None} for mode in modes]})
        elif at["verb"] == "commit":
            self._commit(repository, unquote(at["rest"] or "main"), [json.loads(line) for line in body.splitlines()])
        else:
            self.refuse(404, "", f"Cannot POST {at[0]}")

    def _commit(self, repository: Repository, branch: str, operations: list[dict[str, Any]]) -> None:
        files, message = dict(repository.commits[repository.names[branch]]), ""
        for operation in operations:
            key, value = operation["key"], operation["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.blobs:
                    self.refuse(400, "", f"LFS object {value['oid']} was not uploaded")
                    return
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif key == "deletedFile":
                files.pop(value["path"], None)
        sha = repository.commit(files, message, branch)
        self.hub.blobs |= {digest(content): content for content in files.values()}
        place = f"{self.hub.address}/{'datasets/' if repository.kind == 'dataset' else ''}{repository.name}/commit/{sha}"
        self.answer(200, {"success": True, "commitUrl": place, "commitOid": sha, "hookOutput": ""})

    def _create(self, wanted: dict[str, Any]) -> None:
        name, kind = f"{wanted.get('organization') or 'me'}/{wanted['name']}", wanted.get("type") or "model"
        place = f"{self.hub.address}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if self.login is None:
            self.refuse(401, "", "Invalid username or password.")
        elif self.login != OWNER or not name.startswith("me/"):
            self.refuse(403, "", f'You don\'t have the rights to create a {kind} under the namespace "{name.split("/")[0]}"')
        elif (kind, name) in self.hub.repositories:
            self.answer(409, {"error": "You already created this model repo", "url": place})
        else:
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            self.hub.put(name, {".gitattributes": b""}, kind, private=private)
            self.answer(200, {"url": place, "name": name})

    def _batch(self, at: re.Match[str], wanted: dict[str, Any]) -> None:
        if self._found(at["kind"] or "model", at["name"]) is None:
            return
        if self.login != OWNER:
            self.refuse(403, "", "you must use a write token to upload to a repository")
            return
        objects = []
        for asked in wanted["objects"]:
            upload = {"href": f"{self.hub.cdn}/uploads/{asked['oid']}?signature={signature(asked['oid'])}"}
            verify = {"href": f"{self.hub.address}/api/lfs/verify"}
            there = asked["oid"] in self.hub.blobs
            objects.append(asked if there else asked | {"actions": {"upload": upload, "verify": verify}})
        self.answer(200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"})


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """A file in a list of files."""
    entry: dict[str, Any] = {"type": "file", "path": name, "oid": blob_id(content), "size": len(content)}
    if is_large(name, len(content)):
        entry["lfs"] = {"oid": digest(content), "size": len(content), "pointerSize": 134}
    return entry


def _entries(files: Mapping[str, bytes], names: Iterable[str]) -> Iterable[dict[str, Any]]:
    for name in names:
        if name in files:
            yield _entry(name, files[name])
        elif any(path.startswith(f"{name}/") for path in files):
            yield {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
