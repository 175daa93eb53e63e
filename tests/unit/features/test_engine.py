"""States from servers: what is asked, checked, repeated and cleaned up. The server is a stand-in with vLLM's protocol."""

from __future__ import annotations

import errno
import fcntl
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.files import HOST
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import collate
from drafttrain.engines.states_server import free_ports
from drafttrain.features import FeatureOptions, MooncakeOptions, servers, vllm_source
from drafttrain.features.engine import EngineStates, StateLayers
from drafttrain.features.online import Online
from drafttrain.features.servers import ReferenceStates, Servers, ServerSettings
from drafttrain.features.source import AbsentError, Description, Received, RequestNames, WrongError
from drafttrain.features.vllm_source import StateFiles, VllmSource
from drafttrain.model.batch import TrainBatch
from drafttrain.model.images import spans, with_placeholders
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.images import ImageReader
from drafttrain.targets.vision import VisionTarget
from drafttrain.train import TrainOptions
from drafttrain.train.caching import check_features
from tests.helpers import certificates, fast_target, prompts, tiny_model
from tests.images import encoded, picture, sequence, vision_target
from tests.standin.states_server import Asked, StandIn, serving

TAPS = Taps((0, 2))
LAYERS = StateLayers(TAPS, 4)
THREADS = 6
NO_PROCESS = 2**22 + 1  # above every process number


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return fast_target()


@pytest.fixture(scope="module")
def another() -> HFTarget:
    """Of the same shape, with other weights."""
    return FastTarget(tiny_model(seed=1))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(ssl, "create_default_context", certificates)
    monkeypatch.setattr(servers, "LONGEST_WAIT", 0.05)


def batch(rows: list[np.ndarray]) -> TrainBatch:
    return collate([Encoded(ids, np.ones(len(ids), np.bool_)) for ids in rows], 0)


def texts(count: int) -> list[np.ndarray]:
    return [np.array(p, np.int32) for p in prompts(count, longest=20)]


def computed(target: HFTarget, layers: tuple[int, ...] = LAYERS.ids) -> Callable[[list[int]], Tensor]:
    """The states [T, L, H] that a server with this target gives."""
    taps, one = Taps(tuple(i - 1 for i in layers)), threading.Lock()

    def compute(ids: list[int]) -> Tensor:
        with one:
            hidden = Online(target, taps).fill(batch([np.array(ids, np.int64)])).hidden
        return torch.stack([hidden[i - 1][0] for i in layers], 1)

    return compute


@contextmanager
def source(
    target: HFTarget,
    *urls: str,
    said: list[str] | None = None,
    ahead: int = 2,
    folder: Path | None = None,
    timeout: float = 5.0,
    direct: bool = False,
    images: ImageReader | None = None,
) -> Iterator[EngineStates]:
    ids = texts(1)[0].tolist()
    own = dict(zip(range(4), computed(target, (1, 2, 3, 4))(ids).unbind(1), strict=True))
    reference = ReferenceStates(ids, LAYERS.keys, own, torch.float32)
    settings = ServerSettings(tuple(f"{url}/v1" for url in urls), None, timeout, 2.0, 4, direct)
    vllm = VllmSource(LAYERS.keys, 64, StateFiles(folder), "start it well", images)
    states = EngineStates(Servers(settings, vllm, reference, (said if said is not None else []).append), LAYERS, target, 2)
    try:
        yield states
    finally:
        states.close()


def test_engine_states_equal_target_states(target: HFTarget, tmp_path: Path) -> None:
    standin = StandIn(computed(target), tmp_path)
    with serving(standin) as url, source(target, url) as states:
        states.servers.check()
        for rows in (texts(5), texts(1)):
            some = batch(rows)
            expected, found = Online(target, TAPS).fill(some), states.fill(some)
            real_BT = some.document_BT >= 0
            assert sorted(found.hidden) == sorted(expected.hidden) == [FINAL, 0, 2]
            for key, state_BTH in expected.hidden.items():
                # rows are computed one by one: sums are in another order than in a padded batch, which depends on the processor
                torch.testing.assert_close(found.hidden[key][real_BT], state_BTH[real_BT], atol=1e-5, rtol=1e-5)
        for key, state_BTH in expected.hidden.items():
            assert torch.equal(found.hidden[key], state_BTH), "one row without padding is the same product"
        assert not list(tmp_path.iterdir()), "files are removed as soon as they are read"
        figures = states.figures(2.0)
        assert figures["states_tokens_per_s"] > 0 and figures["states_queue"] == 0 and figures["states_repeated"] == 0
    request = standin.requests[-1]
    assert request["prompt"] == texts(1)[0].tolist() and request["max_tokens"] == 1 and request["model"] == "target"


class PictureServer(StandIn):
    """As vLLM, replaces each placeholder by the rows of its image. `more`: beyond those of the target's processor."""

    def __init__(self, target: VisionTarget, folder: Path, more: int = 0) -> None:
        super().__init__(computed(target), folder)
        assert target.reader is not None
        self.reader, self.more = target.reader, more

    def _asked(self, body: dict[str, Any], fault: str) -> Asked:
        if "prompt" in body:
            return super()._asked(body, fault)
        read, images = list[int](), iter(body["content_parts"])
        for token in body["token_ids"]:
            if token == self.reader.token_id:
                image = self.reader.read(next(images)["url"], "image")
                read += [*range(image.base, image.base + image.rows), *[image.base] * self.more]
            else:
                read.append(token)
        assert next(images, None) is None, "every image has its placeholder"
        return Asked(read, with_placeholders(read, self.reader.token_id), {}, {})


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_engine_states_of_images_equal_target_states(name: str, tmp_path: Path) -> None:
    seeing = vision_target(name, tmp_path / "target")
    pictures = [picture(tmp_path / "a.png"), picture(tmp_path / "b.png", seed=1, size=(16, 16))]
    ids = sequence(seeing, [*pictures])
    standin = PictureServer(seeing, tmp_path / "states")
    with serving(standin) as url, source(seeing, url, images=seeing.reader) as states:
        some = collate([encoded(ids)], 0)
        expected, found = Online(seeing, TAPS).fill(some), states.fill(some)
        for key, state_BTH in expected.hidden.items():
            torch.testing.assert_close(found.hidden[key], state_BTH, atol=1e-5, rtol=1e-5)
        asked = standin.requests[-1]
        assert seeing.reader is not None and asked["token_ids"].count(seeing.reader.token_id) == 2
        start, stop = spans(ids)[-1]
        some = collate([encoded(ids[: stop - 1])], 0)
        expected, found = Online(seeing, TAPS).fill(some), states.fill(some)
        torch.testing.assert_close(found.hidden[FINAL][:, :start], expected.hidden[FINAL][:, :start], atol=1e-5, rtol=1e-5)
        assert len(standin.requests[-1]["content_parts"]) == 1 and not found.hidden[0][:, start:].any()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3_vl", "its image processor has other settings; start it well"),
        ("gemma3", "takes images of targets such as Qwen's"),
    ],
)
def test_engine_states_of_images_that_vllm_reads_otherwise_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    seeing = vision_target(name, tmp_path / "target")
    ids = sequence(seeing, [picture(tmp_path / "a.png")])
    with (
        serving(PictureServer(seeing, tmp_path / "states", more=1)) as url,
        source(seeing, url, images=seeing.reader) as states,
        pytest.raises(UserError, match=reason),
    ):
        states.fill(collate([encoded(ids)], 0))


def test_engine_states_packed_conversations_equal_separate_requests(target: HFTarget, tmp_path: Path) -> None:
    a, b = texts(2)
    packed = TrainBatch(
        torch.from_numpy(np.concatenate([a, b]).astype(np.int64))[None],
        torch.cat([torch.arange(len(t)) for t in (a, b)])[None],
        torch.cat([torch.full((len(t),), i) for i, t in enumerate((a, b))])[None],
        torch.ones(1, len(a) + len(b), dtype=torch.bool),
    )
    with serving(StandIn(computed(target), tmp_path)) as url, source(target, url) as states:
        found, alone = states.fill(packed).hidden, states.fill(batch([b])).hidden
    for key, state_BTH in alone.items():
        assert torch.equal(found[key][:, len(a) :], state_BTH)


@pytest.mark.parametrize("fault", ["status", "drop", "half", "missing", "late", "nan", "ids", "another"])
def test_engine_states_failed_requests_are_repeated(fault: str, target: HFTarget, tmp_path: Path) -> None:
    with (
        serving(StandIn(computed(target), tmp_path, {2: fault, 3: fault})) as url,
        source(target, url, timeout=0.3 if fault == "late" else 5.0) as states,
    ):
        object.__setattr__(states.servers.settings, "patience", 60.0)  # the waits after two faults, on a busy machine too
        states.servers.check()  # requests 0 and 1
        some = batch(texts(4))
        expected, found = Online(target, TAPS).fill(some), states.fill(some)
        torch.testing.assert_close(found.hidden[2], expected.hidden[2].where(some.document_BT[..., None] >= 0, 0.0))
        assert states.servers.counts.repeated == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given", ["{}\0.safetensors", "\0/{}.safetensors", "\ud800{}.safetensors", f"{'y' * 300}/{{}}.safetensors"]
)
def test_state_files_impossible_file_name_raises_wrong_error(given: str, tmp_path: Path) -> None:
    files = StateFiles()
    path = f"{tmp_path}/{given.format(name := files.names.next())}"
    with pytest.raises(WrongError, match="a file name that cannot be"):
        files.receive(name, {"hidden_states_path": path}, 3, time.monotonic() + 5, threading.Event())
    files.sweep()


@pytest.mark.parametrize(
    ("fault", "patience", "line"),
    [
        ("status", 0.2, r"/v1: status 500, for 0.2 s; start the server again and repeat the command with resume=auto"),
        ("half", 0.2, r"is damaged .*, for 0.2 s; start the server again"),
        ("nan", 60.0, r"states that are not finite, 5 times; start it well"),
        ("ids", 60.0, r"states of \d+ token ids that are not the \d+ of the request, 5 times; start it well"),
    ],
)
def test_engine_states_persistent_fault_raises_user_error(
    fault: str, patience: float, line: str, target: HFTarget, tmp_path: Path
) -> None:
    faults = dict.fromkeys(range(2, 200), fault)
    with serving(StandIn(computed(target), tmp_path, faults)) as url, source(target, url) as states:
        object.__setattr__(states.servers.settings, "patience", patience)
        states.servers.check()
        with pytest.raises(UserError, match=line):
            states.fill(batch(texts(2)))
    assert not list(tmp_path.iterdir())


def test_engine_states_not_finite_of_one_conversation_alone_become_nan(target: HFTarget, tmp_path: Path) -> None:
    some, faulty, right = texts(3), texts(3)[1].tolist(), computed(target)

    def compute(ids: list[int]) -> Tensor:
        return right(ids).index_fill(0, torch.tensor(len(ids) - 1), torch.inf) if ids == faulty else right(ids)

    with serving(StandIn(compute, tmp_path)) as url, source(target, url) as states:
        found, expected = states.fill(batch(some)), Online(target, TAPS).fill(batch(some))
        assert found.nonfinite().tolist() == [False, True, False]
        real_T = some[0] >= 0
        torch.testing.assert_close(found.hidden[2][0, : len(real_T)], expected.hidden[2][0, : len(real_T)])
        assert states.servers.counts.repeated == servers.SURE, "the same states again and again are the target's own"
        states.begin(batch(some))
        padding = batch(some).without([0, 1, 2], 3)
        assert not states.fill(padding).hidden[0].any() and not states.fill(padding).mask_BT.any()
    assert not list(tmp_path.iterdir())


def test_engine_states_dead_server_is_replaced_and_rejoins(target: HFTarget, tmp_path: Path) -> None:
    said: list[str] = []
    first, second, again = (StandIn(computed(target), tmp_path) for _ in range(3))
    with serving(first) as one, serving(second) as two:
        port = int(one.rpartition(":")[2])
        with source(target, one, two, said=said) as states:
            states.servers.check()
            assert first.requests and second.requests, "every server is compared"
    with serving(second) as two, source(target, one, two, said=said) as states:  # the first is gone
        until = time.monotonic() + 10
        while not said and time.monotonic() < until:
            states.fill(batch(texts(4)))
        assert one in said[0] and "no answer (ConnectError); trying again" in said[0]
        with serving(again, port):
            while not again.requests and time.monotonic() < until:
                states.fill(batch(texts(4)))
        assert again.requests and again.requests[0]["prompt"] == states.servers.reference.ids, (
            "it is compared before it is used"
        )


@pytest.mark.parametrize(
    ("layers", "seed", "line"),
    [
        (
            (2, 4),
            0,
            r"gives states of shape \[\d+, 2, 32\] for \d+ tokens and the state of layer id 1, .* 3, .* 4; start it well",
        ),
        ((1, 2, 4), 0, r"the state of layer id 3 differs .*; it is the state of layer id 2: it serves other layer ids"),
        ((1, 4, 4), 0, r"the state of layer id 3 differs .*; it is the state of layer id 4: it serves other layer ids"),
        ((1, 3, 4), 1, r"the state of layer id 1 differs from the target's by .* another model or another revision"),
    ],
)
def test_engine_server_with_wrong_layers_or_model_is_refused(
    layers: tuple[int, ...], seed: int, line: str, target: HFTarget, another: HFTarget, tmp_path: Path
) -> None:
    with (
        serving(StandIn(computed(another if seed else target, layers), tmp_path)) as url,
        source(target, url) as states,
        pytest.raises(UserError, match=line),
    ):
        states.servers.check()
    assert not list(tmp_path.iterdir())


def test_reference_bfloat16_states_are_matched_to_nearest_block() -> None:
    """Rounding of 1 % of the norm, and blocks whose outputs differ by 2 %."""
    generator = torch.Generator().manual_seed(0)

    def noise(share: float) -> Tensor:
        return share * torch.randn(30, 32, generator=generator)

    first_TH = noise(1.0)
    own = {0: first_TH, 1: first_TH + noise(0.02), 2: first_TH + noise(1.0)}
    reference = ReferenceStates([0] * 30, (1, 2), own, torch.bfloat16)
    right_TKH, early_TKH = (torch.stack([own[i] + noise(0.01), own[2] + noise(0.01)], 1).bfloat16() for i in (1, 0))
    assert reference.fault(right_TKH, "block {}".format) is None
    assert "it is block 0" in str(reference.fault(early_TKH, "block {}".format))


def test_engine_server_restarted_with_other_model_is_refused(target: HFTarget, another: HFTarget, tmp_path: Path) -> None:
    with serving(StandIn(computed(target), tmp_path)) as url, source(target, url) as states:
        port = int(url.rpartition(":")[2])
        states.fill(batch(texts(2)))
    other = StandIn(computed(another), tmp_path, {0: "status"})
    with serving(other, port) as url, source(target, url) as states:
        states.servers.servers[0].heard_at = time.monotonic()  # as if its requests had just been answered
        states.servers.servers[0].description = Description("vllm", "0.32.0", "target")
        with pytest.raises(UserError, match="another model or another revision"):
            states.fill(batch(texts(1)))


def test_engine_states_each_conversation_is_requested_once(target: HFTarget, tmp_path: Path) -> None:
    standin = StandIn(computed(target), tmp_path)
    some = [batch(texts(3)) for _ in range(3)]
    with serving(standin) as url, source(target, url) as states:
        for one in (some[0], some[1], some[0]):
            states.begin(one)
        states.fill(some[0]), states.fill(some[1])
        assert len(standin.requests) == 6 + 1, "each conversation once, and the comparison"
        assert standin.most_at_once <= 4, "features.concurrency"
        states.begin(some[2])  # never filled
    assert not list(tmp_path.iterdir())


def test_state_files_of_dead_processes_are_removed_and_others_kept(target: HFTarget, tmp_path: Path) -> None:
    dead = tmp_path / f"cmpl-drafttrain-{HOST}-{NO_PROCESS}-1f-3--0-ab.safetensors"
    earlier = tmp_path / f"cmpl-drafttrain-{HOST}-{os.getpid()}-1f-3--0-ab.safetensors.lock"  # this number, before a restart
    alive = tmp_path / f"cmpl-drafttrain-{HOST}-{os.getppid()}-1f-3--0-ab.safetensors"
    elsewhere = tmp_path / "cmpl-drafttrain-other-machine-1-1f-3--0-ab.safetensors"
    foreign = tmp_path / "cmpl-123.safetensors"
    for file in (dead, earlier, alive, elsewhere, foreign):
        file.touch()
    with serving(StandIn(computed(target), tmp_path)) as url, source(target, url) as states:
        states.servers.check()
        assert sorted(tmp_path.iterdir()) == sorted([alive, elsewhere, foreign])


@pytest.mark.parametrize(("host", "direct"), [("127.0.0.1", False), ("127.0.0.2", True)])
def test_engine_servers_local_or_started_by_run_bypass_http_proxy(
    host: str, direct: bool, target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(StandIn(computed(target), tmp_path), host=host) as url:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
        with source(target, url, direct=direct) as states:
            states.servers.check()
        if direct:  # of servers that the user named elsewhere, the environment says how they are reached
            with source(target, url) as states, pytest.raises(UserError, match=r"no answer \(ConnectError\)"):
                object.__setattr__(states.servers.settings, "patience", 0.1)
                states.servers.check()


def test_engine_server_failed_comparison_is_shared_by_waiting_threads() -> None:
    """A server that hangs must not keep them for a `timeout` each, one after the other."""

    class Counting:
        """A lock that knows how many threads want it."""

        def __init__(self) -> None:
            self.lock, self.wanted = threading.Lock(), 0

        def __enter__(self) -> None:
            with counting:
                self.wanted += 1
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()

        def locked(self) -> bool:
            return self.lock.locked()

    class Hanging:
        """A source whose first comparison ends when all threads wait for it."""

        keys, way_out, comparisons = (FINAL,), "start it well", 0

        def describe(self, url: str, ask: object) -> Description:
            self.comparisons += 1
            while checking.wanted < THREADS:
                time.sleep(0.001)
            raise AbsentError("no answer in features.timeout=120 s")

        def sweep(self, late: bool = False) -> None: ...

        def close(self) -> None: ...

    counting, checking, hanging, faults = threading.Lock(), Counting(), Hanging(), list[str]()
    reference = ReferenceStates([1, 2], (FINAL,), {FINAL: torch.zeros(2, 4)}, torch.float32)
    settings = ServerSettings(("http://127.0.0.1:1/v1",), patience=1e-9)
    asked = Servers(settings, hanging, reference, lambda line: None)  # type: ignore[arg-type]
    asked.servers[0].checking = checking  # type: ignore[assignment]

    def ask() -> None:
        with pytest.raises(UserError) as fault:
            asked.states([1, 2])
        faults.append(str(fault.value))

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked.close()
    assert hanging.comparisons == 1
    assert len(faults) == THREADS and all("no answer in features.timeout=120 s, for" in fault for fault in faults)


def test_engine_servers_hanging_server_does_not_delay_requests() -> None:
    """It is compared in a thread of its own, and used again when it answers."""
    ids, released, compared, served = [1, 2], threading.Event(), list[bool](), list[str]()

    class Two:
        """A source of two servers: `hangs` drops the first comparison and hangs in the second; `works` works."""

        keys, way_out, names = (FINAL,), "start it well", RequestNames()

        def describe(self, url: str, ask: object) -> Description:
            if "hangs" in url:
                compared.append(threading.current_thread() is threading.main_thread())
                if len(compared) == 1:
                    raise AbsentError("dropped")
                released.wait(30)
            return Description("vllm", "0.32.0")

        def states(self, url: str, *given: object) -> Received:
            served.append(url)
            return Received(torch.ones(2, 1, 4), ids)

        def label(self, key: int) -> str:
            return ""

        def remove(self, names: object) -> None: ...

        def sweep(self, late: bool = False) -> None: ...

        def close(self) -> None: ...

    reference = ReferenceStates(ids, (FINAL,), {FINAL: torch.ones(2, 4)}, torch.float32)
    settings = ServerSettings(("http://hangs/v1", "http://works/v1"))
    asked = Servers(settings, Two(), reference, lambda line: None)  # type: ignore[arg-type]
    until = time.monotonic() + 60
    while len(compared) < 2 and time.monotonic() < until:
        asked.states(ids)
    for _ in range(10):
        asked.states(ids)
    assert compared == [True, False] and set(served) == {"http://works/v1"}
    released.set()
    asked.servers[1].running += 1  # so that the other one is chosen once it can be
    while served.count("http://hangs/v1") < 2 and time.monotonic() < until:
        asked.states(ids)
    assert served.count("http://hangs/v1") == 2 and len(compared) == 2, "the comparison, and a request"
    asked.close()


def test_state_file_written_while_run_ends_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_source, "ENDING", 60.0, raising=False)
    path, closed, looks, ended = tmp_path / "cmpl-1.safetensors", threading.Event(), list[int](), list[int]()
    closed.set()

    def flock(file: int, how: int) -> None:
        looks.append(file)
        fcntl.flock(file, how)

    def read() -> None:
        with suppress(AbsentError):
            vllm_source.read(path, time.monotonic() + 60, closed)
        ended.append(1)

    monkeypatch.setattr(vllm_source, "fcntl", SimpleNamespace(LOCK_SH=fcntl.LOCK_SH, LOCK_NB=fcntl.LOCK_NB, flock=flock))
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=read)
        thread.start()
        while len(looks) < 3 and not ended:
            time.sleep(0.001)
        path.touch()
    thread.join()
    assert not list(tmp_path.iterdir())


def test_state_files_on_mount_without_locks_raise_user_error(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre without its option flock."""
    with serving(StandIn(computed(target), tmp_path)) as url, source(target, url) as states:
        states.servers.check()

        def unsupported(*given: object) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(vllm_source, "fcntl", SimpleNamespace(LOCK_SH=1, LOCK_NB=4, flock=unsupported))
        with pytest.raises(UserError, match=r"takes no locks \(Function not implemented\).*features.transport=mooncake"):
            states.fill(batch(texts(1)))


def test_state_files_that_cannot_be_removed_raise_user_error(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that runs as another user, in a folder where only that user may remove files."""
    (tmp_path / f"cmpl-drafttrain-{HOST}-{NO_PROCESS}-1f-3--0-ab.safetensors").touch()

    def refused(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    line = rf"{os.getpid()}-\w+-0-.*safetensors cannot be removed \(Permission denied\).*run server and trainer as one user"
    with serving(StandIn(computed(target), tmp_path)) as url, source(target, url) as states:
        monkeypatch.setattr(Path, "unlink", refused)
        with pytest.raises(UserError, match=line):
            states.servers.check()


def test_state_files_are_read_from_features_dir(target: HFTarget, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(tmp_path / "there")
    with serving(StandIn(computed(target), tmp_path / "there")) as url:
        with source(target, url, folder=tmp_path / "here") as states:
            states.servers.check()
        with source(target, url, folder=tmp_path / "nowhere") as states:
            object.__setattr__(states.servers.settings, "patience", 0.1)
            with pytest.raises(UserError, match=r"lock cannot be read .*features.dir names the folder"):
                states.servers.check()


def test_engine_server_with_short_max_model_len_is_refused(target: HFTarget, tmp_path: Path) -> None:
    with (
        serving(StandIn(computed(target), tmp_path, longest=64)) as url,
        source(target, url) as states,
        pytest.raises(UserError, match=r"takes 64 tokens, .* up to 64; start it with --max-model-len 65"),
    ):
        states.servers.check()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"engine": "sglang"}, "SGLang is not started here; start servers and name them in features.servers"),
        ({"final_servers": ["http://a:1"]}, "features.final_servers is for features.engine=sglang"),
        ({"servers": ["http://a:1"], "python": "p"}, "leave one of them out"),
    ],
)
def test_engine_feature_options_in_conflict_are_refused(options: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line):
        FeatureOptions("engine", **options).check(64)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [
    {"servers": ["http://a:1"]}, {"gpus": 2}, {"arguments": ["--x"]}, {"transport": "mooncake"}, {"engine": "sglang"},
    {"nodes": 1}, {"tensor_parallel": 2}, {"mooncake": MooncakeOptions(master="a:1")},
])  # fmt: skip
def test_engine_feature_options_are_refused_when_features_is_online(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"features.{next(iter(option))} is for features=engine, but features is online"):
        FeatureOptions(**option).check(64)


@pytest.mark.parametrize("url", ["http://[::1:8000", "http://user:secret@a:8000", "a:8000"])
def test_final_servers_malformed_url_is_refused_hiding_password(url: str) -> None:
    drafter: Any = SimpleNamespace(trained=True, adapts=None, taps=TAPS)
    with pytest.raises(UserError, match=r"^features\.final_servers ") as fault:
        check_features(
            FeatureOptions("engine", engine="sglang", servers=["http://a:1"], final_servers=[url]), drafter, TrainOptions(), 64
        )
    assert "secret" not in str(fault.value)
