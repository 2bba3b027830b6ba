"""What the README tells a newcomer to run, in few steps."""

import re

from examples import quickstart


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
