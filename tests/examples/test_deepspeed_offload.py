"""The guide's DeepSpeed example: its tour, what it learns, and how it goes on, offloaded."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.examples.guides import script
from tests.patience import patience
from tests.readme import run
from tests.road import EXAMPLES, Project, project

HERE = EXAMPLES / "deepspeed_offload"
# The first run on a machine compiles DeepSpeed's optimizer, for some minutes.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
TWO = ("--cluster", "local", "--nproc-per-node", "2", "--device", "cpu")
DEBUG = ("train_captions.py", "--max-steps", "10", "--save-every", "5", "--log-every", "1")
SMALL = ("--width", "32", "--layers", "1", "--batch-size", "4", "--held-out", "9")


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Project:
    copied = project(tmp_path / "examples", tmp_path / "state")
    return replace(copied, path=copied.path / HERE.name)


@pytest.fixture(name="parts")
def _parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the example's modules; others have some of the same names."""
    names = ("pairs", "captioner", "options", "image_folder", "train_captions")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(HERE))
    import captioner
    import pairs
    import train_captions

    yield pairs, captioner, train_captions
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(name="pairs")
def _pairs(parts: Any) -> Any:
    return parts[0]


def train(here: Project, *argv: str) -> str:
    """Run to the end on this machine and return all that was printed."""
    here.ok("submit", "--wait", *TWO, *argv, timeout_s=500)
    return here.logs(here.json("status")["job_id"])


def losses(text: str) -> dict[int, float]:
    return {int(n): float(loss) for n, loss in re.findall(r"step (\d+)/\d+ loss (\S+)", text)}


def words_right(text: str) -> int:
    """Return the percentage, of which 29 is by chance."""
    found = re.search(r"held-out \d+ images: (\d+)% of the words right \(by chance 29%\)", text)
    assert found, text
    return int(found[1])


@pytest.mark.long
def test_the_tour_debugs_goes_on_and_captions_images_that_it_never_saw(tmp_path: Path) -> None:
    out = run(script(HERE, "local"), tmp_path)
    assert "strategy deepspeed zero-2, optimizer in host memory, precision no" in out
    assert set(re.findall(r"rank (\d)/2 on local0 device cpu", out)) == {"0", "1"}
    assert len(re.findall(r"saved .*/tmp/captions/step-00000005$", out, re.MULTILINE)) == 1
    assert re.search(r"resumed from .*/step-00000010 at step 10$", out, re.MULTILINE)
    debugged, trained, folder = out.split("resumed from")
    assert words_right(trained) > 75 > words_right(debugged)
    assert "batch 1 x 16 accumulation x 2 ranks = 32 pairs a step" not in folder
    assert folder.startswith(f" {tmp_path}/tmp/folder/step-00000010 at step 10\n")
    assert sorted(losses(folder)) == [5, 15]
    assert "the projector is frozen" in folder
    params = yaml.safe_load((HERE / "clusterrun.yaml").read_text())["training"]["params"]
    assert f"model {params} parameters" in out


@pytest.mark.long
def test_images_are_taken_in_the_precision_of_the_weights(here: Project) -> None:
    words = ("--strategy", "zero2-offload", "--mixed-precision", "bf16")
    text = train(here, *words, *DEBUG, *SMALL)
    assert "precision bf16" in text
    assert losses(text)[10] < losses(text)[1]


@pytest.mark.long
def test_the_batch_may_be_divided_anew_on_a_resume(here: Project, tmp_path: Path) -> None:
    """The conservative and the aggressive setting are the same training."""
    own = ("--deepspeed-config", "zero2_offload.json", "train_captions.py")
    words = ("--save_steps", "2", "--log-every", "1", *SMALL[:4], "--held-out", "9")
    conservative = (
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "128"),
        *("--dataloader_num_workers", "1", "--gradient_checkpointing", "True"),
        *("--model_max_length", "1024", "--lazy_preprocess", "True"),
    )
    aggressive = (
        *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "32"),
        *("--dataloader_num_workers", "4", "--model_max_length", "1024"),
    )
    kept = ("--output", str(tmp_path / "kept"))
    whole = train(here, *own, *words, *conservative, "--max_steps", "4")
    assert "batch 1 x 128 accumulation x 2 ranks = 256 pairs a step" in whole
    assert "strategy deepspeed zero-2, optimizer in host memory, precision no" in whole
    train(here, *own, *words, *conservative, *kept, "--max_steps", "2")
    resumed = train(here, *own, *words, *aggressive, *kept, "--max_steps", "4")
    assert "batch 4 x 32 accumulation x 2 ranks = 256 pairs a step" in resumed
    assert re.search(r"resumed from .*/step-00000002 at step 2\n", resumed)
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 2}


@pytest.mark.long
def test_a_launch_as_llavas_trains_on_a_folder_with_a_frozen_adapter(
    here: Project, tmp_path: Path
) -> None:
    data, adapter = tmp_path / "shapes", tmp_path / "projector.pt"
    write = [sys.executable, "image_folder.py", str(data), "--count", "40"]
    subprocess.run(write, cwd=here.path, check=True, timeout=60 * patience())
    debug = (
        *("--deepspeed", "zero2_offload.json", "--data_path", str(data / "captions.json")),
        *("--image_folder", str(data / "images"), "--bf16", "True"),
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "16"),
        *("--max_steps", "10", "--save_steps", "5", "--dataloader_num_workers", "1"),
        *("--model_max_length", "1024", "--log-every", "1", *SMALL[:4], "--held-out", "9"),
    )
    own = ("train_captions.py", *debug)  # clusterrun takes the JSON from the script's argument
    text = train(here, *own, "--save-adapter", str(adapter))
    assert "precision bf16" in text
    assert sorted(losses(text)) == list(range(1, 11))
    assert len(re.findall(r"saved .*/step-000000(?:05|10)$", text, re.MULTILINE)) == 2
    text = train(here, *own, "--pretrain_mm_mlp_adapter", str(adapter), "--save-adapter", "after")
    assert "the projector is frozen" in text
    before, after = (torch.load(path) for path in (adapter, here.path / "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_loss_and_its_gradient_do_not_depend_on_how_a_batch_is_divided(parts: Any) -> None:
    pairs, captioner, training = parts
    torch.manual_seed(0)
    model = captioner.Captioner(side=24, words=17, places=20, width=16, layers=1)
    batch = [pairs.Pairs(0, 8)[index] for index in range(8)]
    images = torch.stack([image for image, _ in batch])
    words = torch.stack([caption for _, caption in batch])
    words[0, 2:] = words[5, 3:] = pairs.IGNORED  # captions of several lengths

    def learned(passes: int, *, recompute: bool = False) -> tuple[float, Any]:
        model.zero_grad()
        if recompute:
            model.recompute()
        divided = zip(images.chunk(passes), words.chunk(passes), strict=True)
        every = [training.caption_loss(model, *part) / passes for part in divided]
        torch.stack(every).sum().backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        return float(sum(every).detach()), gradient

    loss, gradient = learned(1)
    for passes in (2, 8):
        other, its_gradient = learned(passes, recompute=True)
        assert other == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-3, atol=1e-6)


def test_the_flags_of_llavas_scripts_are_understood(parts: Any, tmp_path: Path) -> None:
    import options

    line = (
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 128 --max_steps=10 "
        "--gradient_checkpointing True --model_max_length 1024 --dataloader_num_workers 1 "
        f"--lazy_preprocess True --bf16 True --save_steps 5 --output {tmp_path}"
    )
    args = options.parse_arguments(line.split())
    assert (args.batch_size, args.accumulation, args.max_steps, args.workers) == (1, 128, 10, 1)
    assert (args.gradient_checkpointing, args.model_max_length, args.save_every) == (True, 1024, 5)
    assert parts[2].workers(options.parse_arguments(["--workers", "4000"])) < 4000


def test_an_adapter_that_is_none_is_refused(parts: Any, tmp_path: Path) -> None:
    import options

    path = tmp_path / "adapter.pt"
    path.touch()
    args = options.parse_arguments(["--pretrain_mm_mlp_adapter", str(path)])
    for content in ("hello\n", ["a", "list"], {"0.weight": 1}):
        if isinstance(content, str):
            path.write_text(content)
        else:
            torch.save(content, path)
        with pytest.raises(SystemExit, match="is not a projector of this model"):
            parts[2].build(args, parts[0].Pairs(0, 1))


def test_flags_that_contradict_are_refused(parts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import options

    for line, said in {
        "--model_max_length 16": "an image alone takes 16 places",
        "--data_path .": "--data-path and --image-folder need each other",
        "--data_path gone.json --image_folder .": "gone.json does not exist",
        "--lazy_preprocess False": "images are always read when they are needed",
        "--save-adapter /dev/null/projector.pt": "/dev/null: File exists",
        "--save-adapter .": ". is a directory",
        "--bf16 maybe": "maybe is neither True nor False",
    }.items():
        with pytest.raises(SystemExit):
            options.parse_arguments(line.split())
        assert said in capsys.readouterr().err


def test_a_folder_is_read_as_it_was_drawn_each_image_once_in_an_epoch(
    parts: Any, tmp_path: Path
) -> None:
    pairs = parts[0]
    import image_folder

    image_folder.write(tmp_path, 12, seed=3)
    folder, file = tmp_path / "images", tmp_path / "captions.json"
    read = image_folder.ImageFolder(folder, file, most_words=3, held_out=2, seed=0)
    drawn = [pairs.Pairs(3, 12)[index] for index in range(12)]
    epoch = [read[index] for index in range(10, 20)]
    texts = [[read.words[word] for word in words] for _, words in epoch]
    assert sorted(texts) == sorted([pairs.WORDS[w] for w in words[:3]] for _, words in drawn[:10])
    held = image_folder.ImageFolder(folder, file, most_words=3, held_out=2, seed=None)
    torch.testing.assert_close(held[1][0], drawn[11][0], atol=0.2, rtol=0)  # bytes, and clamped
    (folder / "000007.png").unlink()
    (folder / "000009.png").unlink()
    with pytest.raises(ValueError, match=r"2 of 12 images do not exist, .*7\.png"):
        image_folder.ImageFolder(folder, file, most_words=3, held_out=2, seed=0)


def test_captions_that_are_none_are_refused(parts: Any, tmp_path: Path) -> None:
    import image_folder

    file = tmp_path / "captions.json"
    for text, said in (
        ("[{}]", "is not a list of"),
        ('[{"image": "a.png", "conversations": [{"from": "gpt", "value": " "}]}]', "is not a list"),
        ('[{"image": "a.png", "conversations": [{"from": "gpt", "value": "a"}]}]', "not exist"),
        ("[]", "0 images, but 0 are held out"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            image_folder.ImageFolder(tmp_path, file, most_words=4, held_out=0, seed=0)
