"""`generate.py` as a user starts it, after a run of `train_lm.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from examples import generate

pytest.importorskip("orbax.checkpoint")
ROOT = Path(__file__).parent.parent
SMALL = (
    "--model.layers 1 --model.width 32 --model.hidden 64 --model.context 32 --batch 8 "
    "--loop.steps 4 --loop.save_every 2 --loop.evaluate_every 2 --evaluation_batches 1 --optimizer.warmup 1"
)
ON_MODEL = ("--mesh", "data=2,model=4", "--rules", "data|tensor_sequence")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A corpus of a few files."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(24):
        (folder / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    return folder


@pytest.fixture(scope="module", params=["bytes", "bpe:300"])
def trained(request, texts, tmp_path_factory):
    """The folder of a short run, on eight devices, with tokens that are bytes or learned."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    data = ["--data.tokenizer", request.param, "--model.vocab", "300", "--data.files", str(texts)]
    where = ["--folder", str(folder), "--cache", str(folder.parent / "cache")]
    command = [sys.executable, str(ROOT / "examples/train_lm.py"), "tiny", *SMALL.split()]
    subprocess.run([*command, *data, *where], check=True, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture
def written(trained, capsys):
    """What the example prints, on the standard output and on the standard error."""
    before = jax.config.jax_compilation_cache_dir

    def written(*arguments):
        capsys.readouterr()
        generate.main([str(trained), *arguments])
        return capsys.readouterr()

    yield written
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()  # it stays open otherwise, for all tests that follow


@pytest.mark.representative("bpe:300")
@pytest.mark.long
def test_generate_goes_on_with_prompts_the_same_on_every_mesh(written):
    prompts = ("--prompt", "def f", "--prompt", "    return x", "--tokens", "12")
    shown = written(*prompts)
    first, second = shown.out.removesuffix("\n").split(generate.SEPARATOR)
    assert first.startswith("def f") and second.startswith("    return x")
    said = r"\d+ tokens of step 4 in \d+\.\d\d s, \d+ tokens/s, on data=8"
    assert re.search(said, shown.err)
    elsewhere = written(*prompts, *ON_MODEL, "--chunk", "4")
    assert elsewhere.out == shown.out and "on data=2,model=4" in elsewhere.err
    assert "tokens of step 2 in" in written("--step", "2", "--tokens", "3").err


@pytest.mark.representative("bytes")
@pytest.mark.long
def test_generate_takes_how_tokens_are_chosen(written):
    cold = written("--prompt", "def", "--tokens", "8", "--temperature", "0").out
    for option in (("--top-k", "1"), ("--top-p", "0.0001")):
        assert written("--prompt", "def", "--tokens", "8", *option).out == cold
    hot = ("--prompt", "def", "--tokens", "8", "--temperature", "3")
    assert written(*hot).out == written(*hot).out != written(*hot, "--seed", "1").out


@pytest.mark.long
@pytest.mark.sentinel("bytes")
def test_generate_refuses_what_it_cannot_do(trained, written):
    for arguments, message in (
        (
            ["--prompt", "", "--tokens", "32"],
            "The longest prompt has 1 tokens, and the context is 32",
        ),
        (["--prompt", "x" * 40], "has room for 0 more. A shorter `--prompt`"),
        (["--tokens", "0"], "`generate(tokens=0)`"),
        (["--top-k", "0"], "`Sampling(top_k=0)`"),
        (["--step", "3"], "There is no checkpoint of step 3"),
        (["--rules", "data|tensr"], "Rules are presets"),
        (["--mesh", "data=3"], "`data=3` is 3 of 8"),
        (["--rules", "data|tensor"], "the mesh has `data=-1`"),
    ):
        with pytest.raises(SystemExit) as caught:
            written(*arguments)
        assert message in str(caught.value)
    for folder, message in (
        (trained.parent / "tinny", f"did you mean `{trained}`?"),
        (Path("nowhere"), "`nowhere` is no folder of a run of `train_lm.py`"),
    ):
        with pytest.raises(SystemExit) as caught:
            generate.main([str(folder)])
        assert message in str(caught.value)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_have_as_many_bits_as_keys_are_made_of(seed, capsys):
    with pytest.raises(SystemExit):
        generate.main(["runs/tiny", f"--seed={seed}"])
    assert "a whole number of 32 bits, 0 to 4,294,967,295" in capsys.readouterr().err


@pytest.mark.long
def test_generate_refuses_a_tokenizer_whose_texts_have_changed(trained, texts, written):
    if "bpe:300" not in (trained / "run.json").read_text():
        pytest.skip("bytes are the same for all texts")
    file = texts / "0.txt"
    before, times = file.read_text(), file.stat()
    try:
        file.write_text("class g:\n" * 50)
        with pytest.raises(SystemExit, match="that have changed since"):
            written("--tokens", "3")
    finally:
        file.write_text(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
