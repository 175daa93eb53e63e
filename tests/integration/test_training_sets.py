"""The named data sets, with hand-made rows of their real columns, from the hub of `standin/hub.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafttrain.data.sources import TRAINING_SETS
from tests.hubs import card, read, run, table
from tests.standin.hub import OWNER, STRANGER, Hub

pytestmark = pytest.mark.slow
FOX = '<div class="markdown"><p>The quick <b>fox</b>&nbsp;jumps.</p></div>'


def turns(*said: tuple[str, str | None]) -> list[dict[str, Any]]:
    return [{"from": who, "value": text} for who, text in said]


def messages(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": who, "content": text} for who, text in said]


def judged(number: int) -> dict[str, Any]:
    """Columns of OpenCodeInstruct."""
    return {
        "id": f"{number:032x}",
        "input": f"Write a function that adds {number}.",
        "output": f"```python\ndef add(x):\n    return x + {number}\n```",
        "domain": "algorithmic",
        "generation_algorithm": "self-instruct",
        "llm_judgement": '{"logical_correctness": {"score": 5}}',
        "unit_tests": '["assert add(0) == 0"]',
        "tests_execution_status": '["pass"]',
        "average_test_score": "1",
    }


# name -> (rows, roles of each row's conversation; None: it is left out)
ROWS: dict[str, tuple[list[dict[str, Any]], list[str | None]]] = {
    "ultrachat": (
        [
            {"prompt": "Hi?", "prompt_id": "f0", "messages": messages(("user", "Hi?"), ("assistant", "Yes."))},
            {"prompt": "A", "prompt_id": "f1", "messages": messages(*[("user", "A"), ("assistant", "B")] * 3)},
        ],
        ["ua", "uauaua"],
    ),
    "perfectblend": (
        [
            {"conversations": turns(("human", "1 + 1?"), ("gpt", "2")), "source": "meta-math/MetaMathQA"},
            {"conversations": turns(("system", "Be brief."), ("human", "Why?"), ("gpt", "So.")), "source": "a"},
            {"conversations": turns(("human", "A question without a reply")), "source": "ultrafeedback"},
        ],
        ["ua", "sua", None],
    ),
    "sharegpt": (
        [
            {"id": "a_0", "conversations": turns(("human", "Tidy this."), ("gpt", FOX), ("human", "Again"), ("chatgpt", "Ok"))},
            {"id": "b_0", "conversations": turns(("user", "Who?"), ("bing", "Bing."), ("human", "And?"), ("bard", "Bard."))},
            {"id": "c_0", "conversations": turns(("system", "Be kind."), ("human", ""), ("gpt", "What?"))},
            {"id": "d_0", "conversations": []},
            {"id": "e_0", "conversations": turns(("human", "Only a question"))},
            {"id": "f_0", "conversations": turns(("alien", "Hello"), ("gpt", "Hello"))},
            {"id": "g_0", "conversations": turns(("gpt", "A reply first"), ("human", "Then?"), ("gpt", "Then."))},
            {"id": "h_0", "conversations": turns(("human", "a"), ("gpt", "b"))},
        ],
        ["uaua", "uaua", "sua", None, None, None, "aua", "ua"],
    ),
    "nemotron": (
        [
            {
                "uuid": "0",
                "license": "cc-by-4.0",
                "generator": "Qwen3",
                "version": "v2",
                "category": "chat",
                "reasoning": "off",
                "messages": messages(("system", ""), ("user", "Say yes."), ("assistant", "<think></think>Yes.")),
            },
            {
                "uuid": "1",
                "license": "cc-by-4.0",
                "generator": "DeepSeek-R1",
                "version": "v2",
                "category": "chat",
                "reasoning": "on",
                "messages": messages(("user", "Think."), ("assistant", "<think>Hm.</think>Done.")),
            },
        ],
        ["sua", "ua"],
    ),
    "magpie": (
        [
            {
                "uuid": "0",
                "model": "Llama-3.1-70B-Instruct",
                "gen_input_configs": {"temperature": 1.0, "top_p": 1.0, "input_generator": "L", "pre_query_template": "<|"},
                "conversations": turns(("human", "Plan a trip."), ("gpt", "Day 1 ...")),
                "instruction": "Plan a trip.",
                "response": "Day 1 ...",
                "task_category": "Planning",
                "other_task_category": ["Advice seeking"],
                "instruct_reward": -3.5,
            }
        ],
        ["ua"],
    ),
    "opencode": ([judged(i) for i in range(2)], ["ua", "ua"]),
}
FILES = {
    "ultrachat": {split: f"data/{split}-*" for split in ("train_sft", "test_sft", "train_gen", "test_gen")},
    "nemotron": {split: f"data/{split}-*" for split in ("chat", "code", "math", "stem", "multilingual_ja")},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    """All named sets, laid out as they are published."""
    with Hub() as made:
        for name, (rows, _) in ROWS.items():
            chosen = TRAINING_SETS[name]
            if name == "sharegpt":
                file = json.dumps(rows)
                other = {"HTML_cleaned_raw_dataset/sg_90k_part1.json": json.dumps([{"id": "x", "conversations": []}])}
                files: dict[str, Any] = {"README.md": "---\nlicense: apache-2.0\n---\n", str(chosen.files): file, **other}
            else:
                patterns = FILES.get(name, {"train": "data/train-*"})
                files = {f"{p[:-1]}00000-of-00001.parquet": table(rows) for p in patterns.values()}
                files["README.md"] = card(**patterns)
            made.put(chosen.hub, files, "dataset", gated=chosen.gated)
        yield made


def roles(found: list[Any]) -> list[str]:
    return ["".join(message["role"][0] for message in messages) for _, messages in found]


def test_training_sets_all_have_sample_rows() -> None:
    assert set(ROWS) == set(TRAINING_SETS)


def test_training_set_reads_conversations_and_skips_unusable_rows(hub: Hub, tmp_path: Path) -> None:
    names = sorted(ROWS)
    asked = [{"path": name} for name in names]
    whole = read(hub, tmp_path, *asked, token=OWNER)
    limited = read(hub, tmp_path, *(one | {"limit": 1} for one in asked), token=OWNER)
    for name, one, first in zip(names, whole, limited, strict=True):
        rows, wanted = ROWS[name]
        assert roles(one["found"]) == [r for r in wanted if r is not None], name
        assert len(one["faults"]) == wanted.count(None), one["faults"]
        assert first["found"][0][1] == one["found"][0][1] and len(first["found"]) == 1, name
        assert set(rows[0]) >= set(TRAINING_SETS[name].columns), name
    by = dict(zip(names, whole, strict=True))
    assert by["sharegpt"]["found"][0][1][1]["content"] == FOX  # text is kept as it is
    assert "expected a speaker among human" in str(by["sharegpt"]["faults"]) and "got no turn" in str(by["sharegpt"]["faults"])
    # no split but the asked one is fetched, and no file but the named one
    fetched = {request.path.rpartition("/")[2].partition("?")[0] for request in hub.downloads() if request.server == "cdn"}
    assert not [name for name in fetched if name.startswith(("test", "code", "math", "train_gen"))]
    assert not hub.downloads("sg_90k*")


def test_training_set_gated_error_names_page_to_accept_terms(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, ("inspect", "data=nemotron"), token=STRANGER)
    assert done.codes == [2]
    page = "https://huggingface.co/datasets/nvidia/Nemotron-Post-Training-Dataset-v2"
    assert f"accept its terms or ask for access at {page}" in done.lines[0]


def test_training_sets_work_in_mixture_prepare_and_inspect(hub: Hub, tmp_path: Path) -> None:
    short = (
        *("train.steps=2", "train.global_batch=2", "train.micro_batch=2", "train.checkpoint_every=2", "train.warmup=0"),
        *("data.held_out=2", "data.max_length=128", "measure.enabled=false"),
    )
    mix = "data.mix=[{path:ultrachat,weight:0.7},{path:opencode,weight:0.3,limit:2},{path:nemotron,split:code,weight:0.5}]"
    fit = ("fit", "recipe=medusa", mix, *short)
    prepare = ("prepare", "data=sharegpt", "out=answered", "prepare.max_new_tokens=8", "prepare.drop=[]")
    inspect = [("inspect", f"data={name}") for name in ("ultrachat", "sharegpt", "nemotron")]
    done = run(hub, tmp_path, fit, prepare, *inspect, token=OWNER)
    assert done.codes == [0] * 5, done.errors
    assert "ultrachat: 2 records" in done.out or "HuggingFaceH4/ultrachat_200k: 2 records" in done.out
    for name in ("ultrachat", "sharegpt", "nemotron"):
        chosen = TRAINING_SETS[name]
        assert chosen.hub in done.out and chosen.licence in done.out
    assert "207,865 rows" in done.out
    summary = json.loads((tmp_path / "answered" / "summary.json").read_text())
    assert summary["skipped"]["unusable"] == 1 and summary["kept"] >= 4


def test_training_set_with_limit_downloads_only_part(hub: Hub, tmp_path: Path) -> None:
    rows = [judged(i) | {"unit_tests": str(i) * 4000} for i in range(3000)]
    files = {f"data/train-{i:05}.parquet": table(rows[i * 1000 : (i + 1) * 1000], group=100) for i in range(3)}
    hub.put("nvidia/OpenCodeInstruct", {"README.md": card(train="data/train-*"), **files}, "dataset")
    total = sum(map(len, files.values()))
    asked = {"path": "opencode", "limit": 150}
    (found,) = read(hub, tmp_path, asked)
    assert len(found["found"]) == 150 and found["found"][149][0] == "nvidia/OpenCodeInstruct:row 150"
    sent = hub.sent("train-*.parquet")
    assert 0 < sent < total / 3, (sent, total)
    assert read(hub, tmp_path, asked) == [found] and hub.sent("train-*.parquet") == sent  # it is kept
    assert read(hub, tmp_path, asked, HF_HUB_OFFLINE="1") == [found]
