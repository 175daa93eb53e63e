"""A target that reads images, from drawn prompts to replies, a trained drafter, its measurement and its export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import drafttrain
from benchmarks import image_prompts, image_target
from drafttrain.core.errors import UserError
from drafttrain.data.prompts import load_prompts
from drafttrain.engines.states_server import IMAGES
from drafttrain.features import FeatureOptions
from drafttrain.model.target import Taps
from drafttrain.runs import states_servers
from drafttrain.runs.options import RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import EMBEDDED, load_target
from drafttrain.train.engine_features import EngineFeatures
from tests.images import picture, write_conversations, write_target

SMALL = ("train.steps=3", "train.checkpoint_every=3", "train.global_batch=4", "train.micro_batch=2", "data.held_out=4")
FEW = (
    "measure.minutes=0.1",
    "measure.tune=off",
    "measure.repeats=1",
    "decode.max_new_tokens=12",
    "decode.tree_nodes=6",
    "logger=none",
)


def prompts_in(folder: Path) -> Path:
    """Two prompts with an image, one of them of two turns, and one without."""
    image = {"type": "image", "image": "0.png"}
    asked = [[[image, {"type": "text", "text": "what"}], "how"], [[image, {"type": "text", "text": "count"}]], ["how many"]]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in asked))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe", "more"),
    [
        pytest.param("qwen2_5_vl", "medusa", (), marks=pytest.mark.grid),  # unit/export has the refusal of its export
        ("qwen3_vl", "eagle3", ("features=cached", "drafter.target_layer_ids=[0,1,2]")),
        ("gemma3", "eagle3", ("data.pack=true", "data.max_length=64", "drafter.target_layer_ids=[0,1,2]")),
        ("qwen3_vl", "dflash", ("drafter.layers=1", "drafter.block_size=4", "target.image_inputs=placeholder")),
        ("qwen3_5", "eagle3", ("features=cached", "drafter.target_layer_ids=[0,1,2]")),
        ("gemma4_whole", "eagle3", ("data.pack=true", "data.max_length=64", "drafter.target_layer_ids=[0,1,2]")),
    ],
)
def test_image_target_drafter_is_trained_measured_and_exported(
    name: str, recipe: str, more: tuple[str, ...], command: Callable[..., int], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    target = f"target.path={write_target(name, tmp_path / 'target')}"
    data, asked = write_conversations(tmp_path, 16), prompts_in(tmp_path)
    chosen = (f"recipe={recipe}", target, f"data.path={data}", f"data.cache={tmp_path / 'cache'}", f"prompts={asked}")
    assert command("fit", *chosen, *SMALL, *FEW, *more, f"output={tmp_path / 'out'}") == 0
    (report,) = (tmp_path / "out").rglob("report.json")
    (entry,) = json.loads(report.read_text())["checkpoints"]
    assert entry["exact_matches"] == entry["transformers_exact_matches"] == 4
    capsys.readouterr()
    (checkpoint,) = (tmp_path / "out").rglob("step-00003")
    recorded = json.loads((checkpoint / "drafter.json").read_text())["target"]["image_inputs"]
    assert recorded == ("placeholder" if "target.image_inputs=placeholder" in more else "fused")
    stack = "vllm" if recipe == "medusa" else "sglang"
    exported = command("export", f"checkpoint={checkpoint}", target, f"format={stack}", f"out={tmp_path / 'export'}")
    if recipe == "medusa":
        refused = capsys.readouterr().err
        assert exported == 2 and "not known to draft with this family for Qwen2_5_VLForConditionalGeneration" in refused
    else:
        assert exported == 0 and (tmp_path / "export" / "config.json").is_file()


@pytest.mark.slow
def test_prepare_image_target_answers_drawn_prompts(command: Callable[..., int], tmp_path: Path) -> None:
    drawn, target = tmp_path / "drawn", write_target("qwen3_vl", tmp_path / "target")
    image_prompts.main(["--out", str(drawn), "--count", "6", "--prompts", "2"])
    chosen = (f"target.path={target}", f"data.path={drawn / 'data.jsonl'}", f"out={tmp_path / 'replies'}")
    short = ("prepare.max_new_tokens=8", "prepare.max_length=400", "prepare.drop=[]")
    assert command("prepare", *chosen, *short) == 0
    records = [json.loads(line) for line in (tmp_path / "replies" / "part-00000.jsonl").read_text().splitlines()]
    assert len(records) == 6 and all(Path(record["messages"][0]["content"][0]["image"]).is_file() for record in records)
    page = tmp_path / "page.html"
    words = (f"target.path={target}", f"data.path={tmp_path / 'replies'}", f"prompts={drawn / 'prompts.jsonl'}", f"out={page}")
    assert command("inspect", *words) == 0 and page.is_file()


@pytest.mark.slow
def test_image_target_of_benchmarks_answers_drawn_prompt(tmp_path: Path) -> None:
    image_target.main(["--out", str(tmp_path / "target"), "--steps", "2", "--rows", "4"])
    image_prompts.main(["--out", str(tmp_path / "drawn"), "--count", "0", "--prompts", "1"])
    target, (prompt,) = drafttrain.load_target(tmp_path / "target"), load_prompts(str(tmp_path / "drawn" / "prompts.jsonl"))
    (found,) = drafttrain.generate(target, None, [[{"role": "user", "content": prompt.turns[0]}]], max_new_tokens=4)
    assert found.tokens


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("qwen2_5_vl", ("recipe=hydra",), "this drafter reads text alone"),
        (
            "qwen2_5_vl",
            ("recipe=medusa", "features=engine", "features.engine=sglang", "features.servers=[http://x]"),
            "features.engine=sglang takes text alone, but the data",
        ),
        (
            "gemma3",
            ("recipe=medusa", "features=engine", "features.servers=[http://x]"),
            "features=engine takes images of targets such as Qwen's",
        ),
        (
            "qwen2_5_vl",
            ("recipe=medusa", "features=engine", "features.answers=true", "features.servers=[http://x]"),
            "features.answers continues text alone, but the data",
        ),
        (
            "qwen2_5_vl",
            ("recipe=medusa", "features=engine", "features.target=ends", "features.servers=[http://x]"),
            "data.jsonl:1: it has an image, but features.target=ends",
        ),
    ],
)
def test_fit_images_that_cannot_be_trained_on_are_refused(
    name: str,
    options: tuple[str, ...],
    reason: str,
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before a server is started."""
    target, data = write_target(name, tmp_path / "target"), write_conversations(tmp_path, 8)
    chosen = (f"target.path={target}", f"data.path={data}", f"prompts={prompts_in(tmp_path)}")
    assert command("fit", *options, *chosen, *SMALL, *FEW, f"output={tmp_path / 'out'}") == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("images", [True, False])
def test_engine_servers_are_started_to_take_images_where_the_target_reads_them(images: bool, tmp_path: Path) -> None:
    path = write_target("qwen3_vl", tmp_path / "target") if images else EMBEDDED
    options = RunOptions(target=TargetOptions(path=str(path)), features=FeatureOptions("engine", servers=["http://x"]))
    features = EngineFeatures(options.features, load_target(options.target), Taps((0,)), 64)
    assert (IMAGES in states_servers._served(features, options, tmp_path, None).arguments) is images
    assert (f" {IMAGES} (" in f"{states_servers._way_out(features, options.features, None)} (") is images


def test_image_prompts_with_same_seed_are_identical(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        image_prompts.main(["--out", str(tmp_path / folder), "--count", "4", "--prompts", "2", "--seed", "3"])
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 8
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


def test_python_api_generate_accepts_image_and_names_missing_file(tmp_path: Path) -> None:
    target = drafttrain.load_target(write_target("qwen3_vl", tmp_path / "target"))
    content = [{"type": "image", "image": str(picture(tmp_path / "a.png"))}, {"type": "text", "text": "what"}]
    (found,) = drafttrain.generate(target, None, [[{"role": "user", "content": content}]], max_new_tokens=4)
    assert found.tokens
    content[0]["image"] = str(tmp_path / "b.png")
    with pytest.raises(UserError, match=r"a prompt: expected an image file at .*b.png"):
        drafttrain.generate(target, None, [[{"role": "user", "content": content}]], max_new_tokens=4)
