"""`train_lm.py` as a user starts it: its command line, several processes, and resuming after a kill
on another number of them.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import shardlib as sl
from examples import train_lm
from examples.configs import gpt2_124m, llama3_8b, llama3_8b_3d, tiny, tiny_onebit
from examples.fields import override, show_help
from examples.find_run import from_command_line
from examples.run import AdamW, Muon
from models import moe

pytest.importorskip("grain")
ROOT = Path(__file__).parent.parent
SMALL = [
    *(
        "--model.layers",
        "1",
        "--model.width",
        "32",
        "--model.hidden",
        "64",
        "--model.context",
        "32",
        "--batch",
        "8",
    ),
    *(
        "--loop.log_every",
        "1",
        "--loop.evaluate_every",
        "6",
        "--loop.save_every",
        "3",
        "--evaluation_batches",
        "2",
    ),
    *(
        "--data.tokenizer",
        "bytes",
        "--model.vocab",
        "257",
        "--loop.steps",
        "12",
        "--optimizer.warmup",
        "2",
    ),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A corpus of a few files, and the cache of its tokens."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(24):
        (folder / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    return [
        *SMALL,
        "--data.files",
        str(folder),
        "--data.held_out",
        "0.2",
        "--cache",
        str(folder / "cache"),
    ]


@pytest.fixture(scope="module")
def slow_trainer(tmp_path_factory):
    """The trainer, whose steps take a second each: a signal arrives long before the last one."""
    script = tmp_path_factory.mktemp("slow") / "slow.py"
    script.write_text(
        "import runpy, sys, time\n"
        "from shardlib.step._step import Step\n"
        "take = Step.__call__\n"
        "Step.__call__ = lambda *arguments: (time.sleep(1), take(*arguments))[1]\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"runpy.run_path({str(ROOT / 'examples/train_lm.py')!r}, run_name='__main__')\n"
    )
    return script


def command(texts, folder, *more, script=ROOT / "examples/train_lm.py"):
    return [
        sys.executable,
        str(script),
        "tiny",
        *texts,
        "--folder",
        str(folder),
        *more,
    ]


def run(command, *, processes=None, devices=8, **options):
    """The command in a process of its own, or in several by the launcher, on so many devices in
    all.
    """
    # The flags that make compiling quick are kept; of two counts of devices the last one holds.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "HOME": "/nonexistent",
        "PYTHONPATH": str(ROOT),
    }
    if processes:
        each = ["-n", str(processes), "--devices", str(devices // processes)]
        command = [sys.executable, "-m", "shardlib.launch", *each, "--", *command]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def finished(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def metrics(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    told = (
        {n: v for n, v in line.items() if not n.endswith(("_per_second", "_left", "crc32"))}
        for line in lines
    )
    return [line for line in told if "note" not in line]


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory):
    """A run of two processes that nothing stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    output = finished(run(command(texts, folder), processes=2, devices=4))
    return folder, output


def last_digests(folder):
    content = json.loads((folder / "checkpoints" / "12" / "about" / "metadata").read_text())
    return {
        path: leaf["digest"]
        for path, leaf in json.loads(json.loads(json.dumps(content))["content"])["leaves"].items()
    }


@pytest.mark.long
def test_train_lm_in_two_processes_logs_metrics_and_prints_a_sample(undisturbed):
    folder, output = undisturbed
    assert (
        "data=4 on 4 cpu devices" in output
        and "model.width = 32" in output
        and "documents" in output
    )
    assert re.search(r"\[0\] step 12/12 .*loss \d", output) and "[1] step" not in output, (
        "the first process speaks"
    )
    assert "A sample, after 12 steps" in output
    assert {"run.json", "metrics.jsonl", "checkpoints"} <= {path.name for path in folder.iterdir()}
    assert [line["step"] for line in metrics(folder) if "loss" in line] == list(range(1, 13))
    assert metrics(folder)[-1].keys() == {"step", "evaluation/loss", "evaluation/bits_per_byte"}


@pytest.mark.long
def test_train_lm_resumes_bit_for_bit_after_a_kill(undisturbed, texts, slow_trainer, tmp_path):
    killed = run(command(texts, tmp_path, script=slow_trainer), processes=2, devices=4)
    for _ in killed.stdout:
        if any(path.name.isdecimal() for path in (tmp_path / "checkpoints").glob("*")):
            killed.kill()  # and the kernel its processes
            break
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    output = finished(run(command(texts, tmp_path), processes=2, devices=4))
    assert re.search(r"resumed from the checkpoint of step [369]", output)
    assert last_digests(tmp_path) == last_digests(undisturbed[0])
    assert metrics(tmp_path) == metrics(undisturbed[0])


@pytest.mark.long
def test_train_lm_resumes_on_another_mesh_after_sigterm(undisturbed, texts, slow_trainer, tmp_path):
    options = ("--loop.save_every", "12")
    told = run(command(texts, tmp_path, *options, script=slow_trainer), processes=2, devices=4)
    seen = ""
    for line in told.stdout:
        seen += line
        if re.search(r"step 2/12", line):
            told.send_signal(signal.SIGTERM)
            break
    seen += finished(told)  # which it ends with 0
    stopped = int(
        re.search(r"asked to end: stopped after step (\d+) of 12; the state is saved", seen)[1]
    )
    more = (
        "--strategy.mesh",
        "data=4,model=2",
        "--strategy.rules",
        "data|tensor",
        "--strategy.zero",
        "3",
    )
    output = finished(run(command(texts, tmp_path, *more)))
    assert f"resumed from the checkpoint of step {stopped}" in output
    mine, theirs = (
        {r["step"]: r["loss"] for r in metrics(at) if "loss" in r}
        for at in (tmp_path, undisturbed[0])
    )
    assert list(mine) == list(range(1, 13)) and mine == pytest.approx(theirs, rel=1e-4)
    # What is held out is measured at the steps it would be, but for the one at which the run was
    # told to end.
    assert {r["step"] for r in metrics(tmp_path) if "loss" not in r} == {6, 12} - {stopped}


@pytest.mark.long
def test_train_lm_names_a_process_with_another_configuration(texts, tmp_path):
    odd = tmp_path / "odd.py"
    odd.write_text(
        f"import os, sys, runpy\nsys.path.insert(0, {str(ROOT)!r})\nodd = "
        "os.environ['SHARDLIB_PROCESS'] == '1'\nsys.argv += ['--folder', sys.argv.pop(1) + ('1' if "
        "odd else '0'), '--seed', '1' if odd else '0']\n"
        f"runpy.run_path({str(ROOT / 'examples/train_lm.py')!r}, run_name='__main__')\n"
    )
    started = run(
        [sys.executable, str(odd), str(tmp_path / "run"), "tiny", *texts], processes=2, devices=2
    )
    output, _ = started.communicate(timeout=300)
    assert started.returncode != 0
    assert re.search(r"Process 1 differs from process 0 in `configuration`", output), output
    assert "-seed: 0" in output and "+seed: 1" in output
    assert "step 1/12" not in output


@pytest.mark.long
def test_checkpoint_folder_not_shared_by_all_processes_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nimport shardlib as sl\nsl.initialize_distributed()\n"
        "try:\n    sl.Checkpoints(os.path.join(sys.argv[1], os.environ['SHARDLIB_PROCESS']))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    output = finished(
        run([sys.executable, str(script), str(tmp_path / "local")], processes=2, devices=2)
    )
    for process in range(2):
        assert re.search(
            rf"\[{process}\] Process 1 of 2 does not see in .*local/{process} what process 0 wrote",
            output,
        ), output


@pytest.mark.long
def test_run_json_repeats_a_run_bit_for_bit(undisturbed, texts, tmp_path):
    """No field is given but the folder."""
    again = [sys.executable, str(ROOT / "examples/train_lm.py"), str(undisturbed[0] / "run.json")]
    finished(run([*again, "--folder", str(tmp_path)], processes=2, devices=4))
    assert last_digests(tmp_path) == last_digests(undisturbed[0])
    assert metrics(tmp_path) == metrics(undisturbed[0])
    before, now = (json.loads((at / "run.json").read_text()) for at in (undisturbed[0], tmp_path))
    assert {name for name in {**before, **now} if before.get(name) != now.get(name)} == {"folder"}


def test_run_json_of_changed_texts_is_refused(tmp_path):
    run = from_command_line(["tiny"])
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**run.lines(), "train": "aa", "held out": "bb"}))
    same = {**run.lines(), "train": "aa", "held out": "bb"}
    train_lm.check_texts(str(path), run, same)
    train_lm.check_texts("tiny", run, {**same, "train": "cc"})
    train_lm.check_texts(
        str(path), override(run, ["--data.files", "other"]), {**same, "train": "cc"}
    )
    with pytest.raises(SystemExit, match="The texts of .*data.files='python'.* have changed"):
        train_lm.check_texts(str(path), run, {**same, "train": "cc"})


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        *((config, []) for config in (tiny, tiny_onebit, gpt2_124m, llama3_8b, llama3_8b_3d)),
        (tiny, ["--optimizer", "adamw", "--optimizer.freeze", "auto", "--loop.profile", "20,3", "--data.files", "['a', 'b']"]),
        (tiny, ["--strategy.precision", "bf16", "--model.dtype", "bfloat16", "--strategy.manual", "('data',)"]),
        (gpt2_124m, ["--strategy.zero", "FULL_SHARD", "--strategy.rules", "data|batch=pod,data|embed=none",
                     "--strategy.mesh", "pod=2,data=4", "--prompt", r"é\n'\""]),
        (llama3_8b_3d, ["--strategy.pipeline", "zb-v:4:16", "--strategy.remat", "stage"]),
        (gpt2_124m, ["--strategy.remat", "context|offload:mlp_up"]),
    ],
)  # fmt: skip
def test_run_json_restores_the_same_run(config, changes, tmp_path):
    run = override(config.run(), changes)
    values = {
        "rules": run.strategy.rules.indivisible("replicate", embed="drop"),
        "frozen": ("a.*", "b"),
        "precision": sl.Precision("bf16", keep=(".*norm.*",)),
    }
    # What blocks keep is made of values of their own; a pipeline takes none of these.
    budget = sl.Remat.budget("14GiB", offload=("block_in",))
    kept = [sl.Remat.slots(3), sl.Remat.layers((1, "none"), rest="full"), budget]
    strategies = [run.strategy, dataclasses.replace(run.strategy, **values)]
    if run.strategy.pipeline is None:
        strategies += [dataclasses.replace(run.strategy, remat=one) for one in kept]
    around = sl.rules.data | sl.rules.context("ring")
    strategies.append(sl.Strategy(mesh="data=4,context=2", rules=around))
    for one in [dataclasses.replace(run, strategy=strategy) for strategy in strategies]:
        path = tmp_path / "run.json"
        path.write_text(json.dumps({**one.lines(), "train": "aa", "held out": "bb"}))
        again = from_command_line([str(path), "--loop.steps", "7"])
        assert again == dataclasses.replace(one, loop=dataclasses.replace(one.loop, steps=7))


def test_a_recorded_run_in_a_folder_gets_another_name_with_another_folder(tmp_path):
    run = dataclasses.replace(tiny.run(), folder=str(tmp_path))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**run.lines(), "train": "aa", "held out": "bb"}))
    with pytest.raises(SystemExit, match=f"`--name again`: .*`{tmp_path}`, and would go on there"):
        from_command_line([str(path), "--name", "again"])
    elsewhere = from_command_line([str(path), "--name", "again", "--folder", "other"])
    assert (elsewhere.name, elsewhere.folder) == ("again", "other")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def run(): pass", "gives NoneType, where a `Run` was expected"),
        ("def run(): return tiny.run().model", "gives GPTConfig, where a `Run` was expected"),
        ("def run(steps): return tiny.run()", "is called without arguments, and takes some"),
        ("run = 3", "gives int, where a `Run` was expected"),
    ],
)
def test_a_file_that_gives_no_run_is_refused(text, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"from examples.configs import tiny\n{text}\n")
    with pytest.raises(SystemExit, match=message):
        from_command_line([str(path)])


def test_a_file_may_have_a_run_or_a_function_that_returns_it(tmp_path):
    for number, text in enumerate(("run = tiny.run()", "def run(): return tiny.run()")):
        path = tmp_path / f"mine{number}.py"
        path.write_text(f"from examples.configs import tiny\n{text}\n")
        assert from_command_line([str(path)]) == tiny.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"strategy.clip": "GradientTransformation(init=<function f at 0x7f>)"},
            "`strategy.clip = .* made again",
        ),
        ({"strategy.rules": "open('/etc/passwd')"}, "`strategy.rules = .* made again"),
        ({"strategy.rules": "AxisRules(batch='data').names()"}, "`strategy.rules = .* made again"),
        ({"prompt": "().__class__"}, "`prompt = .* made again"),
        ({"batch": "0"}, r"Run\(batch=0\)"),
        ({"loop.pause": "3"}, "`loop` has the fields .*`pause`.* does not know"),
        ({"other": "3"}, "has other fields, or reads them otherwise: `other`"),
        ({"seed": None}, "it has no `seed`"),
        ({"seed": 3}, "is not the `run.json` of a run"),
    ],
)
def test_run_json_that_is_malformed_is_refused(change, message, tmp_path):
    path = tmp_path / "run.json"
    lines = {**tiny.run().lines(), **change}
    path.write_text(json.dumps({name: value for name, value in lines.items() if value is not None}))
    with pytest.raises(SystemExit, match=f"(?s){message}"):
        from_command_line([str(path)])
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(SystemExit, match="cannot be read|is not the `run.json`"):
            from_command_line([str(path)])
    with pytest.raises(SystemExit, match="There is no file"):
        from_command_line([str(tmp_path / "other.json")])


@pytest.mark.long
def test_run_folder_of_another_run_is_refused_naming_the_field(undisturbed, texts):
    output = finished(run(command(texts, undisturbed[0], "--model.width", "64")), code=1)
    assert (
        "holds another run:\n  model.width: 32 there, 64 now" in output
        and "Traceback" not in output
    )


# The command line.


def test_command_line_overrides_fields_by_dotted_names():
    changes = {
        "loop.steps": "7", "loop.keep_every": "5", "model.bias": "true",
        "optimizer.learning-rate": "1",
        "strategy.rules": "data|tensor", "strategy.zero": "FULL_SHARD",
        "strategy.precision": "bf16",
        "strategy.remat": "none", "loop.profile": "20,3", "strategy.clip": "none",
    }  # fmt: skip
    given = [part for name, text in changes.items() for part in (f"--{name}", text)]
    run = from_command_line(["tiny", *given, "--strategy.mesh=data=2,model=4"])
    assert (run.loop.steps, run.loop.keep_every, run.model.bias) == (7, 5, True)
    assert (
        run.strategy.mesh == "data=2,model=4"
        and run.strategy.rules == sl.rules.data | sl.rules.tensor
    )
    assert run.strategy.sharding.stage == 3 and run.strategy.dtypes.compute == "bfloat16"
    assert isinstance(run.optimizer.learning_rate, float)
    for text, remat in (
        ("none", "none"),
        ("dots", "dots"),
        ("selective", "selective"),
        ("context | mlp_up", sl.Remat.save("context", "mlp_up")),
        ("compress:int8:mlp_up, context", sl.Remat.compress("int8", "context", "mlp_up")),
        (
            "query|compress:int4:mlp_up",
            sl.Remat.save("query") | sl.Remat.compress("int4", "mlp_up"),
        ),
        ("sublinear", "sublinear"),
        ("every:4", sl.Remat.every(4)),
        ("budget:14GiB", sl.Remat.budget("14GiB")),
        ("budget:14GiB,block_in", sl.Remat.budget("14GiB", offload=("block_in",))),
        ("slots:3", sl.Remat.slots(3)),
        ("offload:block_in", sl.Remat.offload("block_in")),
        ("context | offload:block_in", sl.Remat.save("context") | sl.Remat.offload("block_in")),
    ):
        run = from_command_line(["tiny", "--strategy.remat", text])
        assert run.strategy.remat == remat
    onebit = [
        "--strategy.exchange",
        "onebit:data",
        "--strategy.zero",
        "0",
        "--optimizer.freeze",
        "auto",
    ]
    run = from_command_line(["gpt2_124m", *onebit])
    assert run.strategy.exchange == sl.collectives.OneBit("data") and run.optimizer.freeze == "auto"
    for text, exchange in (
        ("int4:data", sl.collectives.Quantised("data", bits=4)),
        ("powersgd:data:2", sl.collectives.PowerSGD("data", rank=2)),
        ("diloco:data:500", sl.collectives.DiLoCo("data", every=500)),
        ("local:data:8", sl.collectives.LocalSGD("data", every=8)),
        ("server:data", sl.collectives.ParameterServer("data")),
        ("elastic:data:8", sl.collectives.ElasticAveraging("data", every=8)),
    ):
        run = from_command_line(["tiny", "--strategy.exchange", text, "--strategy.zero", "0"])
        assert run.strategy.exchange == exchange
    pods = ["--strategy.mesh", "pod=2,data=4", "--strategy.rules", "data|batch=pod,data|embed=none"]
    run = from_command_line(
        ["tiny_onebit", *pods, "--strategy.exchange", "onebit:pod", "--optimizer.freeze", "4"]
    )
    assert run.strategy.rules == sl.rules.data | sl.AxisRules(batch=("pod", "data"), embed=None)
    assert repr(run.optimizer.freeze) == "4"  # a step, not a part of the run
    run = from_command_line(["tiny_onebit", *pods, "--strategy.exchange", "onebit:pod, data"])
    assert run.strategy.exchange == sl.collectives.OneBit(("pod", "data"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny"], "There is no run `tinny`; did you mean `tiny`?"),
        (["tyni"], "There is no run `tyni`; did you mean `tiny`?"),
        (["other"], "There is no run `other`. There are"),
        (["mine.py:run"], "There is no file `mine.py`"),
        (["tiny", "--loop.step", "7"], "There is no field `loop.step`; did you mean `loop.steps`?"),
        (["tiny", "--steps", "7"], "There is no field `steps`; did you mean `loop.steps`?"),
        (
            ["tiny", "--learning_rate", "1"],
            "There is no field `learning_rate`; did you mean `optimizer.learning_rate`?",
        ),
        (
            ["tiny", "--optimizer.lr", "1"],
            "There is no field `optimizer.lr`: `optimizer` has `optimizer.learning_rate`, ",
        ),
        (["tiny", "--optimizer.warm-up", "1"], "did you mean `optimizer.warmup`?"),
        (["tiny", "--optimiser.warmup", "1"], "did you mean `optimizer.warmup`?"),
        (
            ["tiny", "--optimizer", "adam"],
            "`optimizer` is `adamw` or `muon`, with its own fields; got `adam`",
        ),
        (
            ["tiny", "--optimizer", "adamw", "--optimizer.reach", "1"],
            "There is no field `optimizer.reach`",
        ),
        (
            ["tiny", "--model", "gpt2"],
            "There is no field `model`: it is a group of fields, `model.layers`, ",
        ),
        (["tiny", "--bogus", "1"], "There is no field `bogus`.\n"),
        (
            ["tiny", "--strategy.pipeline", "1f1b:4:" + "9" * 5000],
            "A pipeline is a schedule, its stages",
        ),
        (["tiny", "--strategy.pipeline", "1f1b:4:" + "9" * 18], "Got `1f1b:4:999999999999999999`"),
        (["tiny", "--model.width", "wide"], "`width` is a number, 128 now; got 'wide'"),
        (["tiny", "--model.bias", "maybe"], "`bias` is true or false; got 'maybe'"),
        (["tiny", "--strategy.rules", "data|tensr"], "Rules are presets, of vocabulary, "),
        (["tiny", "--strategy.rules", "batch=pod,"], "joined by `|`; got `batch=pod,`"),
        (["tiny", "--strategy.exchange", "onebit:pod,"], "`onebit:pod`; or one of"),
        (["tiny", "--strategy.exchange", "local:pod,,data:4"], "got `local:pod,,data:4`"),
        (["tiny", "--loop.steps", "1e3"], "`steps` is a whole number"),
        (["tiny", "--batch", "true"], "`batch` is neither true nor false"),
        (["tiny", "--seed", "none"], "`seed` cannot be none"),
        (["tiny", "--seed", "4294967296"], "a whole number, 0 to 4,294,967,295"),
        (
            ["tiny", "--evaluation_batches", "0"],
            "`Run(evaluation_batches=0)`: a whole number, 1 to",
        ),
        (["tiny", "--loop.profile", "20"], "takes the first step and how many"),
        (["tiny", "--loop.steps"], "`--loop.steps` has no value"),
        (
            ["tiny", "--strategy.exchange", "onebit"],
            "`exact`; one of onebit, int8, int4, server and the axes",
        ),
        (["tiny", "--strategy.exchange", "diloco:data"], "one of powersgd, local, diloco, elastic"),
        (["tiny", "--strategy.exchange", "local:data:0"], "`LocalSGD(every=0)` takes"),
        (["tiny", "7"], "Fields are given as `--FIELD VALUE`; got `7`"),
        (["tiny", "--model.width", "30"], "must be a multiple of `heads=4`"),
    ],
)
def test_command_line_mistakes_are_explained_in_a_sentence(arguments, message):
    with pytest.raises(SystemExit) as end:
        from_command_line(arguments)
    assert message in str(end.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--loop.steps", "40"],
            "`optimizer.warmup=50` would take all `loop.steps=40`: `--optimizer.warmup 4`",
        ),
        (
            ["--data.tokenizer", "bpe:3000"],
            "`data.tokenizer=bpe:3000` has more tokens than `model.vocab=2048`",
        ),
        (["--strategy.mesh", "data=16"], "^`strategy.mesh=data=16`: .* takes 16 and there are 8"),
        (["--batch", "12"], "^`batch=12`: "),
    ],
)
def test_train_lm_checks_the_configuration_before_reading_data(arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train_lm.check(from_command_line(["tiny", "--folder", str(tmp_path), *arguments]))


def test_command_line_selects_an_optimizer_with_its_own_fields():
    changed = from_command_line(
        ["tiny", "--optimizer.learning_rate", "1", "--optimizer", "AdamW", "--optimizer.b2=0.9"]
    )
    assert changed.optimizer == AdamW(learning_rate=1.0, b2=0.9)
    assert from_command_line(["gpt2_124m", "--optimizer", "muon"]).optimizer == Muon()


@pytest.mark.parametrize("config", [tiny, tiny_onebit, gpt2_124m, llama3_8b, llama3_8b_3d])
def test_recipes_can_be_planned_for_another_machine(config):
    """Its step is made for a machine that is not there, of the mesh of the recipe or another;
    nothing is allocated.
    """
    run, target = config.run(), sl.Target("cpu:8")
    mesh = "stage=4,data=2,model=1" if run.strategy.pipeline else "data=4,other=2"
    step, state, batch = run.planned(target, mesh)
    assert (
        ",".join(f"{axis}={size}" for axis, size in step.strategy.device_mesh.shape.items()) == mesh
    )
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((state.params, batch))
    )
    assert {leaf.shape[0] for leaf in jax.tree.leaves(batch)} == {run.batch}
    if not run.strategy.pipeline:
        assert dict(run.planned(target)[0].strategy.device_mesh.shape) == {"data": 8}


def test_command_line_reads_escapes_in_separator_and_prompt():
    run = from_command_line(
        ["tiny", "--data.separator", r"\n", "--prompt", r"é\tdef", "--folder", r"C:\new"]
    )
    assert (run.data.separator, run.prompt, run.folder) == ("\n", "é\tdef", r"C:\new")


def test_run_folder_with_changed_data_is_refused(tmp_path):
    run = from_command_line(["tiny", "--folder", str(tmp_path)])
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps({**run.lines(), "train": "aa", "held out": "bb"}))
    train_lm.check(run)
    with pytest.raises(SystemExit, match="(?s)train: aa there, cc now.*files have other text"):
        train_lm.check_folder(run, {**run.lines(), "train": "cc", "held out": "bb"})


def test_command_line_help_lists_runs_and_explains_fields(capsys):
    with pytest.raises(SystemExit):
        from_command_line(["--help"])
    assert "gpt2_124m, llama3_8b, llama3_8b_3d, tiny, tiny_onebit" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        from_command_line(["tiny", "--help"])
    told = capsys.readouterr().out
    assert re.search(r"--loop.keep 3\n +the newest checkpoints", told)
    assert re.search(r"--strategy.accumulate 1\n +microbatches per step", told)
    assert re.search(r"--model.width 128\n +the size of the residual stream", told)
    assert not re.findall(r"^  --.*\n(?=  --|\Z)", told, re.MULTILINE), "options without a word"


def test_help_on_experts_explains_the_fields_of_their_decoder_too(capsys):
    show_help(moe.tiny())
    told = capsys.readouterr().out
    for name in ("layers", "experts", "router"):
        assert re.search(rf"--{name} .*\n {{8}}\w", told)


def test_another_optimizer_and_its_fields_go_in_one_line_with_others():
    run = dataclasses.replace(from_command_line(["tiny"]), optimizer=AdamW(2e-4))
    assert override(run, ["--optimizer", "adamw"]).optimizer == AdamW(2e-4)
    changed = override(run, ["--optimizer", "adamw", "--optimizer.warmup", "7"])
    assert changed.optimizer == AdamW(2e-4, warmup=7)
    muon = override(run, ["--optimizer.momentum", "0.9", "--optimizer", "muon"])
    assert muon.optimizer == Muon(momentum=0.9)
    tuned = dataclasses.replace(run, lora=dataclasses.replace(run.lora, rank=16))
    with pytest.raises(ValueError, match="lora.rank=16"):
        override(tuned, ["--optimizer", "muon"])
    assert override(tuned, ["--lora.rank", "0", "--optimizer", "muon"]).optimizer == Muon()


def test_a_damaged_run_json_is_told(tmp_path):
    run = from_command_line(["tiny", "--folder", str(tmp_path)])
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    (tmp_path / "run.json").write_text("")
    with pytest.raises(SystemExit, match="run.json` cannot be read"):
        train_lm.check_folder(run, run.lines())


def test_a_file_of_a_run_may_have_dataclasses_of_its_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from examples.configs.tiny import run\n@dataclass\nclass Mine:\n    a: int = 1\n"
    )
    assert from_command_line([str(path)]) == tiny.run()


@pytest.mark.parametrize("config", [tiny, tiny_onebit, gpt2_124m, llama3_8b, llama3_8b_3d])
def test_recipes_compare_and_convert_to_json(config):
    assert config.run() == config.run()
    lines = config.run().lines()
    assert json.loads(json.dumps(lines)) == lines and all(
        "0x" not in text for text in lines.values()
    )
    assert override(config.run(), ["--loop.steps", "3"]) != config.run()


@pytest.mark.long
def test_tokenizer_larger_than_the_model_vocabulary_is_refused(texts, tmp_path):
    output = finished(run(command(texts, tmp_path, "--model.vocab", "100")), code=1)
    assert (
        "has 257 tokens, and `model.vocab` is 100: `--model.vocab 257`" in output
        and "Traceback" not in output
    )
    assert not (tmp_path / "run.json").exists(), "so that the run can be started with what it says"
