"""Features on disk: what is kept of a state, where it lies, and how damage is found."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import collate
from drafttrain.features import store as stores
from drafttrain.features.cached import Cached, documents
from drafttrain.features.online import Online
from drafttrain.features.store import ABSENT, FeatureFormat, FeatureStore, ShardLayout, key_of
from drafttrain.model.batch import Prediction, Top, TrainBatch
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.teacher import TopKDistribution
from drafttrain.ops.divergence import LOSSES, divergence
from drafttrain.targets.hf import HFTarget
from drafttrain.train.caching import ShardWriter
from tests.damage import harmed
from tests.helpers import prompts, tiny_target

KEYS = (1, FINAL)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MIN_SHARD_TOKENS", 24)
    monkeypatch.setattr(stores, "MIN_SHARDS", 4)


def texts(count: int = 12) -> list[np.ndarray]:
    return [np.array(p, np.int32) for p in prompts(count, longest=20)]


def batch(rows: list[np.ndarray]) -> TrainBatch:
    return collate([Encoded(ids, np.ones(len(ids), np.bool_)) for ids in rows], 0)


def written(folder: Path, target: HFTarget, format: str = "float32", top: int = 0) -> FeatureStore:
    form = FeatureFormat(KEYS[:1] if top else KEYS, format, target.shape.hidden_size, top)
    store = FeatureStore(folder, ShardLayout.of(texts(), form.bytes), form, {"target": target.fingerprint})
    store.folder.mkdir(parents=True)
    ShardWriter(store, Online(target, Taps((1,))), batch, 60).write(list(store.numbers), 0, 1, lambda tokens: None)
    return store


@pytest.mark.parametrize(("format", "error"), [("float32", 0.0), ("bfloat16", 2**-8), ("float8", 2**-4)])
def test_feature_format_rounding_error_stays_within_bound(format: str, error: float) -> None:
    state_NH = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None]
    state_NH[7] = 0.0
    state_NH[8, 0] = 1e4  # one outlier must not cost the others their digits
    form = FeatureFormat((2,), format, 32)
    columns = form.encode({2: state_NH}, tiny_target())
    assert {name: (c.dtype, tuple(c.shape[1:])) for name, c in columns.items()} == {
        name: (c.dtype, c.shape) for name, c in form.columns.items()
    }
    found_NH = form.states(columns, torch.float32)[2]
    largest_N1 = state_NH.abs().amax(-1, keepdim=True)
    assert ((found_NH - state_NH).abs() <= error * state_NH.abs() + largest_N1 * (2**-18 if error else 0.0)).all()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), seed=st.integers(0, 99), bytes=st.sampled_from([1, 2**24])
)
def test_feature_layout_holds_each_text_once_in_any_order(lengths: list[int], seed: int, bytes: int) -> None:
    generator = np.random.default_rng(seed)
    some = [generator.integers(0, 5, n).astype(np.int32) for n in lengths]
    layout, other = ShardLayout.of(some, bytes), ShardLayout.of(some[::-1] + some[:1], bytes)
    assert layout.shards == other.shards and layout.digest == other.digest and layout.places == other.places
    assert sorted(layout.places) == sorted({key_of(ids) for ids in some})
    rows = {number: [False] * layout.tokens(number) for number in range(len(layout.shards))}
    for ids in some:
        place = layout.places[key_of(ids)]
        assert place.stop - place.start == len(ids)
    for place in layout.places.values():
        assert not any(rows[place.shard][place.start : place.stop])
        rows[place.shard][place.start : place.stop] = [True] * (place.stop - place.start)
    assert all(all(shard) for shard in rows.values())
    for number in range(len(layout.shards)):
        passes = layout.passes(number, 40)
        assert [key_of(t) for p in passes for t in p] == [key_of(layout.sequences[i]) for i in layout.shards[number]]
        assert all(len(p) * max(map(len, p)) <= 40 for p in passes)


def test_feature_store_folder_depends_on_texts_format_and_target(tmp_path: Path) -> None:
    form, some = FeatureFormat(KEYS, "float32", 32), texts()
    layout = ShardLayout.of(some, form.bytes)
    folders = {
        FeatureStore(tmp_path, layout, form, {"target": "a"}).folder,
        FeatureStore(tmp_path, layout, form, {"target": "b"}).folder,
        FeatureStore(tmp_path, layout, FeatureFormat(KEYS, "bfloat16", 32), {"target": "a"}).folder,
        FeatureStore(tmp_path, layout, FeatureFormat((2, FINAL), "float32", 32), {"target": "a"}).folder,
        FeatureStore(tmp_path, ShardLayout.of(some[1:], form.bytes), form, {"target": "a"}).folder,
    }
    assert len(folders) == 5
    assert FeatureStore(tmp_path, ShardLayout.of(some[::-1], form.bytes), form, {"target": "a"}).folder in folders


@pytest.mark.parametrize("processes", [1, 3])
def test_cached_states_written_by_processes_equal_online_states(processes: int, target: HFTarget, tmp_path: Path) -> None:
    form = FeatureFormat(KEYS, "float32", target.shape.hidden_size)
    store = FeatureStore(tmp_path, ShardLayout.of(texts(), form.bytes), form, {})
    store.folder.mkdir()
    passes, done = [], []
    for rank in range(processes):
        online = Online(target, Taps((1,)))
        calls = [0]

        def counted(rows: list[np.ndarray], calls: list[int] = calls) -> TrainBatch:
            calls[0] += 1
            return batch(rows)

        ShardWriter(store, online, counted, 60).write(list(store.numbers), rank, processes, done.append)
        passes.append(calls[0])
    assert len(store.numbers) > 3 and len(set(passes)) == 1, "a sharded target computes in all processes or in none"
    assert sum(done) == sum(map(len, texts()))
    some = batch(texts()[:5])
    expected, found = Online(target, Taps((1,))).fill(some), Cached(store, target.device, target.dtype).fill(some)
    for key in KEYS:
        real_BT = some.document_BT >= 0
        torch.testing.assert_close(found.hidden[key][real_BT], expected.hidden[key][real_BT], atol=2e-6, rtol=1e-5)
        assert not found.hidden[key][~real_BT].any()


def test_cached_states_of_packed_row_equal_single_documents(target: HFTarget, tmp_path: Path) -> None:
    store, (a, b, c) = written(tmp_path, target), texts()[:3]
    packed = TrainBatch(
        torch.from_numpy(np.concatenate([a, b, c]).astype(np.int64))[None],
        torch.cat([torch.arange(len(t)) for t in (a, b, c)])[None],
        torch.cat([torch.full((len(t),), i) for i, t in enumerate((a, b, c))])[None],
        torch.ones(1, len(a) + len(b) + len(c), dtype=torch.bool),
    )
    assert [(d.start, d.stop) for d in documents(packed)] == [
        (0, len(a)),
        (len(a), len(a) + len(b)),
        (len(a) + len(b), len(a) + len(b) + len(c)),
    ]
    found = Cached(store, target.device, target.dtype).fill(packed).hidden[1][0]
    alone = Cached(store, target.device, target.dtype).fill(batch([c])).hidden[1][0]
    assert torch.equal(found[-len(c) :], alone)


def test_feature_store_fault_detects_damaged_or_missing_shard(target: HFTarget, tmp_path: Path) -> None:
    store = written(tmp_path, target)
    assert [store.fault(n, verify=True) for n in store.numbers] == [None] * len(store.numbers)
    whole = store.file(1).read_bytes()
    store.file(1).write_bytes(whole[:-7])
    assert f"{len(whole) - 7:,} bytes instead of {len(whole):,}" == store.fault(1, verify=False)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    store.file(1).write_bytes(flipped)
    assert store.fault(1, verify=False) is None
    assert "sha256" in str(store.fault(1, verify=True))
    store.file(1).write_bytes(whole)
    assert store.fault(1, verify=True) is None
    store.file(1).with_suffix(".json").unlink()  # killed between the two
    assert store.fault(1, verify=True) == "no record of it"
    store.file(2).unlink()
    assert store.fault(2, verify=True) == ABSENT
    store.file(3).with_suffix(".json").write_text("{")
    assert store.fault(3, verify=True) == "no record of it"


def test_feature_writer_disk_full_keeps_complete_shards(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FeatureFormat(KEYS, "float32", target.shape.hidden_size)
    store = FeatureStore(tmp_path, ShardLayout.of(texts(), form.bytes), form, {})
    store.folder.mkdir()
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "shard-00002.safetensors" in path.name:
            write(path, content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"disk full while writing .*shard-00002.*complete shards are.*set features.dir"):
        ShardWriter(store, Online(target, Taps((1,))), batch, 60).write(list(store.numbers), 0, 1, lambda tokens: None)
    assert [store.fault(n, verify=True) for n in (0, 1)] == [None, None] and store.fault(2, verify=True) == ABSENT
    assert not [p for p in store.folder.iterdir() if "tmp" in p.name]


def test_feature_store_second_writer_is_refused(target: HFTarget, tmp_path: Path) -> None:
    store = written(tmp_path, target)
    leftover = store.folder / "shard-00009.safetensors.tmp-1"
    leftover.touch()
    with store.writing():
        assert not leftover.exists()
        with pytest.raises(UserError, match="another run is writing"), store.writing():
            pass
    with store.writing():
        pass


def coarse(name: str, logits: torch.Tensor, p: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The divergence between both laws with all tokens but the kept ones as one outcome."""
    q = logits.softmax(-1)
    both = [torch.cat([x.gather(1, kept), 1 - x.gather(1, kept).sum(-1, keepdim=True)], 1).log() for x in (q, p)]
    return divergence(name, *both, torch.zeros(len(q), dtype=torch.long))


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "ce"])
def test_top_k_distribution_divergence_equals_merged_tail_token(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    law = torch.randn(6, 20, generator=generator) * 2
    draft = torch.randn(6, 20, generator=generator).requires_grad_()
    columns = FeatureFormat((), "float32", 8, top=5)._top(law)
    top = Top(*(columns[f"law.{part}"][None] for part in ("id", "log_p", "log_rest")))
    top = Top(top.id_BTk.long(), top.log_p_BTk, top.log_rest_BT)
    prediction = Prediction(0, torch.arange(6), torch.arange(6), draft, lambda x: x)
    with torch.no_grad():
        found = TopKDistribution(top, 20).logits(torch.arange(6), prediction, draft)
    p = law.softmax(-1)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(6))
    torch.testing.assert_close(found.gather(1, top.id_BTk[0]).exp(), p.topk(5).values)
    ours = divergence(name, draft.log_softmax(-1), found.log_softmax(-1), torch.zeros(6, dtype=torch.long))
    theirs = coarse(name, draft, p, top.id_BTk[0])
    torch.testing.assert_close(ours, theirs)
    whole = divergence(name, draft.log_softmax(-1), p.log(), torch.zeros(6, dtype=torch.long))
    assert (ours <= whole + 1e-6).all() and (ours < whole).any()
    (a,), (b,) = (torch.autograd.grad(x.sum(), draft) for x in (ours, theirs))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_top_k_distribution_without_other_draft_tokens_spreads_tail_evenly() -> None:
    top = Top(torch.tensor([[[3, 1]]]), torch.tensor([[[0.5, 0.3]]]).log(), torch.tensor([[0.2]]).log())
    prediction = Prediction(0, torch.zeros(1), torch.zeros(1), torch.zeros(1, 2), lambda x: x, vocab_D=torch.tensor([1, 3]))
    found = TopKDistribution(top, 6).logits(torch.zeros(1, dtype=torch.long), prediction, torch.zeros(1, 2)).exp()
    torch.testing.assert_close(found, torch.tensor([[0.05, 0.3, 0.05, 0.5, 0.05, 0.05]]))


def columns_of(store: FeatureStore) -> list[list[float]]:
    fresh = FeatureStore(store.folder.parent, store.layout, store.form, {"target": store.identity["target"]})
    assert fresh.folder == store.folder
    return [
        column.float().flatten().tolist() for place in store.layout.places.values() for column in fresh.read(place).values()
    ]


@pytest.mark.parametrize("verify", [True, False])
def test_feature_shard_changed_byte_is_fault_or_changes_nothing(verify: bool, target: HFTarget, tmp_path: Path) -> None:
    """Without verify so are those of its header and its record."""
    store = written(tmp_path, target, "bfloat16")
    file = store.file(1)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    wanted = columns_of(store)
    for path in (file, file.with_suffix(".json")):
        count = tried = 0
        for how in harmed(path, 400, None if verify else header):
            tried += 1
            fault = store.fault(1, verify)
            count += fault is not None
            assert fault is not None or columns_of(store) == wanted, how
            assert "\n" not in str(fault)
        assert count == tried if verify and path == file else count > 0.2 * tried
    assert store.fault(1, verify) is None


def test_feature_shard_damaged_after_check_raises_user_error_on_read(target: HFTarget, tmp_path: Path) -> None:
    store = written(tmp_path, target)
    file = store.file(1)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for content in (whole[:20], b"", whole.replace(b'"F32"', b'"I32"'), whole[:8] + b"{" * (header - 8) + whole[header:]):
        file.write_bytes(content)
        with pytest.raises(
            UserError, match=r"shard-00001.safetensors: damaged or gone \(.*\); start again, and it is computed"
        ):
            columns_of(store)
    file.unlink()
    with pytest.raises(UserError, match=r"shard-00001.safetensors: damaged or gone"):
        columns_of(store)


def test_feature_store_ignores_damaged_index_file(target: HFTarget, tmp_path: Path) -> None:
    store = written(tmp_path, target)
    wanted = columns_of(store)
    (store.folder / "index.json").write_text("[")
    assert columns_of(store) == wanted and store.fault(0, verify=True) is None
