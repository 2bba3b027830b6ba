"""What the README tells a newcomer to run, in few steps."""

import re

from examples import experts, quickstart, translate


def test_quickstart_shows_mesh_parameters_falling_loss_another_mesh_and_a_sample(capsys):
    quickstart.main(steps=30)
    shown = capsys.readouterr().out
    assert "data=2,model=4 on 8 cpu devices" in shown
    assert re.search(r"blocks/mlp/up/kernel +2x256x64 +float32 +layers, mlp, embed +-, model, - +32.0 KiB", shown)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+) ", shown)]
    assert losses[0] > losses[2] + 1, "the loss falls"
    (here, there) = re.findall(r"    loss   (.*)   on ", shown)
    assert here == there
    assert re.search(r"A sample, after 30 steps:\s+def __init__\(self", shown)


def test_experts_beside_a_dense_model_and_the_picture_of_their_load(capsys, tmp_path):
    experts.main(["--steps", "10", "--picture", str(tmp_path / "load.svg")])
    assert re.search(r"The experts' loss is \d\.\d+ of the dense model's; \d+\.\d% of choices", capsys.readouterr().out)
    assert (tmp_path / "load.svg").read_text().count("<polyline") == 8


def test_a_small_gshard_begins_to_translate(capsys):
    right = translate.main(["--steps", "10"])
    shown = capsys.readouterr().out
    assert 0 <= right <= 1 and "of 128 sentences it has never seen are right" in shown and shown.count(" -> ") == 5
