"""The table of receivers: its rules in a search, in exports and in layouts read back; their own code where it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from receivers import own_code
from receivers.random_plans import random_plans

import gplan
from gplan.cli import main
from gplan.core import Constraints, Plan, Profile, RecomputeMode
from gplan.core.errors import NoPlanError, UsageError
from gplan.interop.export.exporters import FORMATS, export
from gplan.interop.layouts import read_layout, stage_letters
from gplan.interop.planning import ForReceiver, import_plan
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import constraints_for, setting_of, settings_problem
from gplan.schedules.registry import SCHEDULES
from gplan.schedules.request import PipelineSetting
from tests.decoders import decoder_profile
from tests.interop.planned import planned, profiled, shared, transformer, value
from tests.made import make_profile
from tests.searching import search

TAKE_CUTS = [name for name, x in RECEIVERS.items() if x.cuts != "own"]


def named_profile(plan: Plan) -> Profile:
    return profiled(plan.layer_names)


def divided(names: list[str], *modules: str) -> Profile:
    """A profile whose layers are parts of some modules."""
    profile = profiled(names)
    return replace(profile, granularity="auto", model=replace(profile.model, divided=modules))


def language_model(num_blocks: int = 10, *, head_s: float = 4.0, path: str = "layers") -> Profile:
    """Embedding, equal blocks, norm and a head that takes longer than a block."""
    names = transformer(num_blocks, path=path)
    made = make_profile([0.5, *[1.0] * num_blocks, 0.25, head_s], microbatch_sizes=(1,))
    return replace(made, layers=tuple(replace(x, name=name) for x, name in zip(made.layers, names, strict=True)))


# The table


def test_every_receiver_has_an_exporter() -> None:
    assert {*FORMATS} - {*RECEIVERS} == {"csv", "json"}
    for receiver in RECEIVERS.values():
        assert set(receiver.schedules or ()) <= set(SCHEDULES)
        assert {"never"} <= set(receiver.recompute or {"never"}) <= set(get_args(RecomputeMode))


@pytest.mark.parametrize("receiver", TAKE_CUTS)
def test_random_plans_are_exported_and_read_back(receiver: str) -> None:
    for plan in random_plans(receiver, 60, seed=1):
        text = export(plan, to=receiver).text
        found = read_layout(text, named_profile(plan), receiver=receiver)
        assert found.cuts == plan.cuts, text
        assert found.numbers.get("num_devices") in (None, plan.num_devices)


@pytest.mark.parametrize("receiver", own_code.READERS)
def test_the_receivers_own_code_has_the_stages_of_the_plan(receiver: str) -> None:
    if own_code.installed(receiver) is None:
        pytest.skip(f"{own_code.PACKAGES[receiver]} is not installed; pip install 'gplan[receivers]'")
    with own_code.quiet():
        for plan in random_plans(receiver, 200, seed=2):
            try:
                found = own_code.READERS[receiver](plan)
            except ModuleNotFoundError as error:
                pytest.skip(f"{own_code.PACKAGES[receiver]} cannot be imported: {error}")
            assert found == [list(x.layer_names) for x in plan.stages]


# Planning for a receiver


@pytest.mark.parametrize("receiver", TAKE_CUTS)
@pytest.mark.parametrize(("num_devices", "num_blocks", "head_s"), [(2, 4, 0.1), (3, 5, 8.0), (4, 7, 3.0)])
def test_what_is_planned_for_a_receiver_can_be_exported(
    receiver: str, num_devices: int, num_blocks: int, head_s: float
) -> None:
    path = "model.layers" if receiver == "automodel" else "layers"
    profile, rules = language_model(num_blocks, head_s=head_s, path=path), RECEIVERS[receiver]
    plan = gplan.balance(
        profile,
        num_devices=num_devices,
        num_microbatches=2 * num_devices,
        schedule=rules.default_schedule,
        constraints=constraints_for(receiver, profile),
    )
    assert read_layout(export(plan, to=receiver, profile=profile).text, profile, receiver=receiver).cuts == plan.cuts


def test_the_rules_cost_what_the_plan_says_beside_the_free_optimum() -> None:
    profile = language_model(6, head_s=6.0)
    plan = gplan.balance(
        profile, num_devices=4, num_microbatches=8, schedule="1f1b", constraints=constraints_for("megatron", profile)
    )
    free = gplan.balance(profile, num_devices=4, num_microbatches=8, schedule="1f1b")
    assert plan.rivals[0].step_s == free.prediction.step_s < plan.prediction.step_s
    assert plan.stages[-1].layer_names == ("norm", "output")


def test_an_order_of_branches_is_kept() -> None:
    names = ["embed", "a", "b", "head"]
    branches = (value(0, 1), value(0, 2), value(1, 3), value(2, 3))
    profile = replace(make_profile([1.0, 3.0, 1.0, 1.0], microbatch_sizes=(2,)), values=branches)
    profile = replace(profile, layers=tuple(replace(x, name=n) for x, n in zip(profile.layers, names, strict=True)))
    for solver in ("dp", "milp"):
        plan = gplan.balance(
            profile, num_devices=2, num_microbatches=4, solver=solver, constraints=Constraints(profile_order=True)
        )
        assert plan.layer_names == tuple(names)
    assert constraints_for("deepspeed", profile).profile_order
    assert not constraints_for("deepspeed", language_model()).profile_order


def test_a_search_chooses_what_the_receiver_can_run() -> None:
    profile = language_model(8)
    for receiver in ("megatron", "torchgpipe"):
        rules = ForReceiver.of(receiver, profile)
        plan = search(
            profile, num_devices=2, num_microbatches="auto", batch_size=8, allows=rules.allows, constraints=rules.constraints,
            time_limit_s=1.0,
        )  # fmt: skip
        assert not settings_problem(receiver, setting_of(plan))
        export(plan, to=receiver, profile=profile)
    with pytest.raises(UsageError, match="is allowed with schedule looped-bfs:2 and recompute auto"):
        search(profile, num_devices=2, schedule="looped-bfs:2", allows=ForReceiver.of("megatron", profile).allows)


@pytest.mark.parametrize(
    ("receiver", "settings", "told"),
    [
        ("megatron", PipelineSetting(schedule="gpipe", num_devices=2, num_microbatches=4), "schedule gpipe"),
        ("megatron", PipelineSetting(schedule="interleaved-1f1b:2", num_devices=4, num_microbatches=6), "in groups of 4"),
        ("deepspeed", PipelineSetting(schedule="interleaved-1f1b:2", num_devices=2, num_microbatches=4), "one stage per device"),
        ("torchtitan", PipelineSetting(schedule="zb-h1", num_devices=2, num_microbatches=4, recompute="always"), "splits the backward"),
        ("pytorch", PipelineSetting(schedule="zb-v", num_devices=2, num_microbatches=4), "neighbours on device 1"),
        ("torchgpipe", PipelineSetting(schedule="gpipe", num_devices=2, num_microbatches=4, num_replicas=2), "runs one pipeline"),
        (
            "megatron",
            PipelineSetting(schedule="1f1b", num_devices=2, num_microbatches=4, num_replicas=2, sharding="optimizer"),
            "plan again with --shard none",
        ),
        ("automodel", PipelineSetting(schedule="1f1b", num_devices=2, num_microbatches=4, recompute="always"), "recompute always"),
    ],
)  # fmt: skip
def test_settings_that_a_receiver_has_not_are_named(receiver: str, settings: PipelineSetting, told: str) -> None:
    assert told in settings_problem(receiver, settings)


@pytest.mark.parametrize(
    ("receiver", "profile", "told"),
    [
        ("megatron", profiled(["stem", "fc"]), "no blocks such as layers.0"),
        ("automodel", profiled(["wte", "h.0", "h.1", "head"]), "in a list named layers"),
        ("torchtitan", profiled(["a.b.c", "d"]), "a.b.c is too deep"),
        ("torchgpipe", profiled("abc", shared_weights=(shared(0, 2),)), "untie it"),
        ("megatron", replace(profiled(transformer(2)), granularity="op"), "--granularity layer"),
        ("pytorch", divided(["stem", "h.0.a.linear"], "h.0.a.*"), "operations of h.0.a; .* --granularity layer"),
    ],
)
def test_models_that_a_receiver_cannot_take_are_refused(receiver: str, profile: Profile, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        constraints_for(receiver, profile)


def test_more_stages_than_a_receiver_can_divide_are_refused_with_the_reason() -> None:
    tied = replace(language_model(4), shared_weights=(shared(0, 6),))
    rules = ForReceiver.of("torchtitan", tied)
    with pytest.raises(UsageError, match=r"2 stages, of this model at most 1: .* does not sum its gradients: untie it"):
        rules.check(PipelineSetting(schedule="1f1b", num_devices=2, num_microbatches=4))


PARTS = ["stem", *(f"layers.{i}.{part}" for i in range(4) for part in ("attention", "mlp")), "norm", "head"]
DIVIDED = tuple(f"layers.{i}" for i in range(4))


def test_parts_of_a_divided_layer_stay_together() -> None:
    profile = divided(PARTS, *DIVIDED)
    rules = ForReceiver.of("megatron", profile)
    found = gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="1f1b", constraints=rules.constraints)
    assert all(cut % 2 for cut in found.cuts)  # between two blocks
    text = export(found, to="megatron", profile=profile).text
    assert "'Ett|ttL'" in text and "--num-layers 4" in text
    back = import_plan(text, profile, receiver="megatron", num_microbatches=4)
    assert back.cuts == found.cuts


@pytest.mark.parametrize("receiver", ["torchtitan", "pytorch", "megatron"])
def test_a_cut_inside_a_module_is_refused_with_the_remedy(receiver: str) -> None:
    profile = divided(PARTS, *DIVIDED)
    constraints = Constraints(cut_after=("layers.1.attention",))
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="1f1b", constraints=constraints)
    with pytest.raises(UsageError, match=rf"cuts layers.1 apart, before layers.1.mlp; .* again with --for {receiver}"):
        export(plan, to=receiver, profile=profile)


# Layouts read back


def test_letters_are_written_out() -> None:
    assert stage_letters("Et*3|(tt|)*29,m|L") == ("Ettt", *["tt"] * 29, "m", "L")
    assert stage_letters("Et*2|(tt|)*2t|mL") == ("Ett", "tt", "tt", "t", "mL")


READ = [
    ("megatron", "Ett|t|tL"),
    ("megatron", "--num-layers 4 --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout 'Ett|t|tL' \\\n--bf16"),
    ("torchtitan", '[["tok_embeddings", "layers.0", "layers.1"], ["layers.2"], ["layers.3", "norm", "output"]]'),
    ("torchtitan", 'p = P(module_fqns_per_model_part=[["tok_embeddings", "layers.0", "layers.1"], ["layers.2"], ["layers.3", "norm", "output"]])'),
    ("deepspeed", "[0, 3, 4, 7]"),
    ("deepspeed", "PARTS = [0, 3, 4, 7]\n"),
    ("torchgpipe", "3,1,3"),
    ("vllm", "2,1,1"),
    ("sglang", "export SGLANG_PP_LAYER_PARTITION=2,1,1\n"),
    ("vllm", "export VLLM_PP_LAYER_PARTITION='2,1,1'\nvllm serve m --tensor-parallel-size=2 --port 8000\n"),
    ("vllm", 'os.environ["VLLM_PP_LAYER_PARTITION"] = "2,1,1"\n'),
    ("vllm", "VLLM_PP_LAYER_PARTITION=2,1,1 2>log vllm serve m"),
    ("megatron", "pretrain_gpt.py --num-layers 4 --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2"),
    ("megatron", "--pipeline-model-parallel-size=3 --decoder-first-pipeline-num-layers=2 --decoder-last-pipeline-num-layers=1"),
    ("megatron", "# layout tuned by hand\ntorchrun pretrain.py --pipeline-model-parallel-layout 'Ett|t|tL'"),
]  # fmt: skip


@pytest.mark.parametrize(("receiver", "text"), READ)
def test_layouts_are_read_from_texts_and_files(receiver: str, text: str) -> None:
    assert read_layout(text, language_model(4), receiver=receiver).cuts == (3, 4)


def test_embedding_and_loss_may_count_as_blocks() -> None:
    text = "--pipeline-model-parallel-size 3 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert read_layout(text, language_model(4), receiver="megatron").cuts == (2, 4)  # 1, 2 and 1 blocks


OLDER = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers"
WRONG = [
    ("megatron", f"{OLDER} $FIRST", "--decoder-first-pipeline-num-layers is $FIRST; expected a whole number"),
    ("megatron", f"{OLDER} --bf16", "--decoder-first-pipeline-num-layers is without a value; expected a whole number"),
    ("megatron", f"{OLDER} 2 \\\n --num-virtual-stages-per-pipeline-rank 2", "gives every rank several stages"),
    ("megatron", "Ett|t|L", "the layout has 3 t (transformer layer); the profile has 4; add t"),
    ("megatron", "Ett|x|ttL", "'x' at place 4 of the layout written out"),
    ("megatron", "Et*999999999|tL", "repetitions in the layout write 999,999,999 letters"),
    ("megatron", "E((tt|)*2)*2L", "without parentheses in parentheses"),
    ("megatron", "ttE|t|tL", "layer 0 of the layout is 't'; expected 'E'"),
    ("megatron", "Ett||ttL", "stage 1 of the layout is empty"),
    ("megatron", "Ett|tm|tL", "1 m (multi-token prediction); the profile has 0"),
    ("torchtitan", '[["tok_embeddings", "layers.0"]]', "layers.1 is on no stage"),
    ("torchtitan", "[[1], [2]]", "expected a list of lists of modules"),
    ("megatron", "M" * 50_000 + "x", "'M' at place 0"),
    ("pytorch", "hello", "'hello' has no split points"),
    ("torchgpipe", "-" * 100_000 + "1", "the layout is no Python"),
    ("deepspeed", "[{[]: 1}]", "holds no layout"),
    ("deepspeed", "0,\0", "null bytes"),
    ("torchgpipe", " ", "the layout is empty; expected the text that torchgpipe reads"),
    ("torchtitan", '[["tok_embeddings", "layers.0"], ["layers.0"]]', "layers.0 is on stages 0 and 1"),
    ("torchtitan", "[[", "is no Python"),
    ("torchtitan", "modules = 3\nx = 4", "holds no layout"),
    ("deepspeed", "[0, 3, 8]", "expected rising numbers from 0 to 7"),
    ("deepspeed", "[0, 4, 3, 7]", "stage 1 of the layout is empty"),
    ("torchgpipe", "3,3", "the counts add up to 6; the model has 7 layers as its author wrote them"),
    ("torchgpipe", "two", "'two' holds no layout; expected a literal, alone or named balance"),
    ("vllm", "2,1", "the counts add up to 3; the profile has 4 blocks"),
    ("deepspeed", "['a']", "expected whole numbers"),
    ("pytorch", '{"nothing": SplitPoint.BEGINNING}', "split point nothing is no layer"),
]


@pytest.mark.parametrize(("receiver", "text", "told"), WRONG)
def test_a_layout_that_is_wrong_is_named_with_the_place(receiver: str, text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_layout(text, language_model(4), receiver=receiver)
    assert told in str(caught.value)


def test_a_layout_is_priced_beside_the_best_one() -> None:
    profile = language_model(8)
    plan = import_plan("Ett|tt|tt|ttL", profile, receiver="megatron", num_microbatches=8)
    assert [x.num_layers for x in plan.stages] == [3, 2, 2, 4]
    best = plan.rivals[0]
    assert best.label == "best for Megatron-LM"
    assert best.step_s < plan.prediction.step_s
    assert any("longer than the best one" in x for x in plan.notes)
    again = import_plan(export(gplan.balance(
        profile, num_devices=4, num_microbatches=8, schedule="1f1b", constraints=constraints_for("megatron", profile)
    ), to="megatron").text, profile, receiver="megatron", num_microbatches=8)  # fmt: skip
    assert "the layout is as good as the best one" in again.notes


def test_a_layout_of_several_stages_a_device_is_interleaved() -> None:
    profile = language_model(8)
    plan = import_plan("Ett|tt|tt|ttL", profile, receiver="megatron", num_devices=2, num_microbatches=8)
    assert (plan.num_devices, plan.schedule) == (2, "interleaved-1f1b:2")
    with pytest.raises(UsageError, match="4 stages, which 3 devices cannot share equally"):
        import_plan("Ett|tt|tt|ttL", profile, receiver="megatron", num_devices=3)


def test_a_layout_that_does_not_fit_the_memory_is_refused() -> None:
    profile = decoder_profile("llama3-8b")
    layout = "E" + "t" * 20 + "|" + "t" * 4 + "|" + "t" * 4 + "|" + "t" * 4 + "L"
    with pytest.raises(NoPlanError):
        import_plan(layout, profile, receiver="megatron", num_microbatches=8)


# The verbs


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a profile."""
    monkeypatch.chdir(tmp_path)
    gplan.save(language_model(8), "gplan.profile.json")
    return tmp_path


def test_balance_for_a_receiver(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("balance", "--k", "3", "--for", "megatron") == 0
    assert "1f1b" in capsys.readouterr().out
    assert gplan_exits("export", "--to", "megatron") == 0
    assert "--pipeline-model-parallel-layout" in capsys.readouterr().out
    assert gplan_exits("balance", "--k", "3", "--for", "megatron", "--schedule", "gpipe") == 2
    assert "Megatron-LM can express 1f1b or interleaved-1f1b" in capsys.readouterr().err
    assert gplan_exits("balance", "--k", "2", "--for", "torchgpipe", "--microbatches", "auto", "--time-limit", "1") == 0
    assert "gpipe" in capsys.readouterr().out


def test_import_plan_prices_a_layout_or_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("import-plan", "Et*3|t*3|ttL", "--from", "megatron", "--microbatches", "6") == 0
    shown = capsys.readouterr().out
    assert "best for Megatron-LM" in shown
    Path("counts.txt").write_text("4,4,3\n")
    assert gplan_exits("import-plan", "counts.txt", "--from", "torchgpipe") == 0
    assert gplan_exits("import-plan", "3,3", "--from", "torchgpipe") == 2
    assert "the counts add up to 6; the model has" in capsys.readouterr().err


def test_a_file_says_how_its_layout_is_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The micro-batches, batch and recompute of an export come back without options; so do variables of a shell script."""
    arguments = ["--pp", "4", "--data", "2", "--microbatches", "12", "--recompute", "always", "--hardware", "h200"]
    for receiver in ("megatron", "torchtitan", "deepspeed"):
        capsys.readouterr()
        assert gplan_exits("layout", "llama3-8b", *arguments, "--to", receiver) == 0
        exported, made = capsys.readouterr().out, gplan.load("gplan.plan.json")
        Path("launch.txt").write_text(exported)
        assert gplan_exits("import-plan", "launch.txt", "--from", receiver, "--output", "back.plan.json") == 0
        back = gplan.load("back.plan.json")
        assert isinstance(made, Plan) and isinstance(back, Plan) and back.recompute == "always"
        assert (back.num_microbatches, back.batch_size) == (made.num_microbatches, made.batch_size)
    for receiver in (
        "torchtitan",
        "automodel",
    ):  # with one stage the local batch is a micro-batch, and the global one counts
        capsys.readouterr()
        assert gplan_exits("layout", "qwen3-0.6b", "--pp", "1", "--data", "2", "--gbs", "32", "--to", receiver) == 0
        text, profile = capsys.readouterr().out, gplan.load("gplan.profile.json")
        assert isinstance(profile, Profile)
        if receiver == "automodel":
            assert 'STEP_SCHEDULER = {"global_batch_size": 32, "local_batch_size": 1}' in text
        assert import_plan(text, profile, receiver=receiver).num_microbatches == 16
    assert gplan_exits("layout", "llama3-8b", *arguments) == 0
    profile = gplan.load("gplan.profile.json")
    assert isinstance(profile, Profile)
    script = """
MBS=1  # samples
GBS="64"
# --micro-batch-size 7
torchrun pretrain_gpt.py --pipeline-model-parallel-size 4 --num-layers 32 --micro-batch-size $MBS \\
    --global-batch-size ${GBS} --recompute-granularity %s --tensor-model-parallel-size %d
"""
    for granularity, mode in (("selective", "never"), ("full --recompute-method uniform", "always")):
        plan = import_plan(script % (granularity, 1), profile, receiver="megatron")
        assert (plan.num_microbatches, plan.batch_size, plan.recompute) == (32, 64, mode)
        assert any(f"--recompute-granularity {granularity.split()[0]}" in x for x in plan.notes)
    asked = import_plan(script.replace("64", "63", 1) % ("full", 1), profile, receiver="megatron", num_microbatches=8)
    assert asked.num_microbatches == 8, "what is asked for replaces a batch that the replicas do not divide"
    with pytest.raises(UsageError, match="the file has --tensor 8, the profile 1; make .* gplan layout --tensor 8"):
        import_plan(script % ("full", 8), profile, receiver="megatron")


def test_every_trainer_that_import_plan_lists_has_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("import-plan", "--help") == 0
    listed = capsys.readouterr().out.partition("--from")[2].partition("]")[0]
    for receiver in RECEIVERS:
        try:
            read_layout("", language_model(4), receiver=receiver)
        except UsageError as error:
            assert ("cannot be read" in str(error)) is (receiver not in listed)


def test_layout_of_a_known_model_in_one_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--pp", "4", "--tensor", "8", "--data", "8", "--microbatches", "8"]
    assert gplan_exits("layout", "llama3-70b", *arguments) == 0
    captured = capsys.readouterr()
    assert "--num-layers 80" in captured.out
    assert "wrote gplan.profile.json and gplan.plan.json" in captured.err
    layout = own_code.arguments(captured.out)["--pipeline-model-parallel-layout"]
    assert gplan_exits("import-plan", layout, "--from", "megatron", "--microbatches", "8") == 0
    told = capsys.readouterr().out
    assert "as good as the best one" in told and "= 256 devices" in told.replace("\n", " ")  # 8 x 4 x 8
    assert gplan_exits("layout", "gpt-9", *arguments) == 2
    assert "no model is named gpt-9; expected llama3-8b" in capsys.readouterr().err
    assert gplan_exits("layout", "llama3-8b", "--pp", "2", "--set", "layers=3") == 2
    assert "a decoder has no layers" in capsys.readouterr().err
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    Path("config.json").write_text(json.dumps({**sizes, "attn_logit_softcapping": 2}))
    assert gplan_exits("layout", "config.json", "--pp", "2") == 0
    assert "note: attn_logit_softcapping of the configuration is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("receiver", "first", "last"),
    [
        ("torchtitan", '["tok_embeddings", "layers.0"', '"norm", "lm_head", "rotary_emb"]'),
        ("automodel", '["model.embed_tokens", "model.layers.0"', '"model.norm", "lm_head", "model.rotary_emb"]'),
        ("pytorch", '"model.layers.', "SplitPoint.BEGINNING"),
        ("deepspeed", "PARTS = [0, ", ", 34]"),
    ],
)
def test_layouts_of_configurations_name_real_modules(receiver: str, first: str, last: str) -> None:
    profile = decoder_profile("llama3-8b", hardware="h200")
    rules = ForReceiver.of(receiver, profile)
    plan = gplan.balance(
        profile, num_devices=4, num_microbatches=8, schedule=rules.default_schedule(), constraints=rules.constraints,
        memory_bytes=10**12,
    )  # fmt: skip
    text = export(plan, to=receiver, profile=profile).text
    assert first in text and last in text
    assert read_layout(text, profile, receiver=receiver).cuts == plan.cuts


def test_a_module_that_is_called_twice_on_a_stage_is_read_back() -> None:
    plan = planned(["stem..relu", "mix", "relu#2"], ["head"])
    text = export(plan, to="torchtitan").text
    assert read_layout(text, named_profile(plan), receiver="torchtitan").cuts == plan.cuts


@pytest.mark.parametrize("count", ["num_devices", "num_microbatches"])
def test_no_devices_and_no_micro_batches_are_refused(count: str) -> None:
    with pytest.raises(UsageError, match="asked for 0 .*; expected at least 1"):
        import_plan("Ett|tt|tt|ttL", language_model(8), receiver="megatron", **{count: 0})


@pytest.mark.parametrize(
    ("name", "own"),
    [("nemo-automodel", "automodel"), ("MCore", "megatron"), ("titan", "torchtitan"), ("nemo", "automodel")],
)
def test_other_names_of_trainers(name: str, own: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("layout", "llama3-8b", "--to", name), ("import-plan", "Et|tL", "--from", name)):
        assert gplan_exits(*arguments) == 2
        assert f"{name} is called {own}" in capsys.readouterr().err


def test_every_degree_of_torchtitan_is_written() -> None:
    profile = decoder_profile("llama3-8b", hardware="h200")
    rules = ForReceiver.of("torchtitan", profile)
    plan = gplan.balance(profile, num_devices=4, num_microbatches=8, schedule="1f1b", constraints=rules.constraints)
    text = export(plan, to="torchtitan", profile=profile).text
    for name in (
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
        "data_parallel_shard",
        "data_parallel_replicate",
    ):
        assert f"{name}_degree=1," in text
    assert "seq_len=4096," in text


def test_a_layout_for_scripts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "num_hidden_layers=6", "--gbs", "8", "--hardware", "h200", "--time-limit", "5"]
    assert gplan_exits("layout", "llama3-8b", "--gpus", "4", "--to", "automodel", *small, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    widths, predicted = found["choice"]["widths"], found["prediction"]
    assert widths["tensor"] * widths["context"] * widths["pipeline"] * widths["data"] == 4
    assert predicted["tokens_per_s_per_device"] == pytest.approx(8 * 4096 / predicted["step_s"] / 4)
    assert predicted["lower_bound_s"] <= predicted["step_s"] and predicted["peak_bytes"] <= predicted["needed_bytes"]
    assert all(x["choice"]["recompute"] == "never" for x in found["alternatives"])  # all that Automodel has
    assert not [x for x in found["ruled_out"] if x.endswith("with")]
    assert any("NeMo Automodel" in x for x in found["notes"])
    assert widths["expert_tensor"] == widths["tensor"] and found["machine"]["hardware"] == "h200"
    assert (
        predicted["flops_per_s_per_device"] > 1e13 and 2e9 < found["num_parameters"] == found["active_parameters"] < 3e9
    )
    assert gplan_exits("show", "gplan.plan.json") == 0
    assert "widths beside the pipeline: tensor" in " ".join(capsys.readouterr().out.split())


def test_no_training_is_predicted_of_what_serves(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("layout", "llama3-8b", "--pp", "2", "--tp", "2", "--to", "vllm") == 0
    told = capsys.readouterr()
    assert "VLLM_PP_LAYER_PARTITION=" in told.out and "predicted: a step" not in told.err
    assert "--pipeline-parallel-size 2 --tensor-parallel-size 2" in told.err
    assert gplan_exits("layout", "llama3-8b", "--gpus", "4", "--to", "sglang") == 2
    assert "--gpus chooses widths by the step of a training, and SGLang serves" in capsys.readouterr().err


@pytest.mark.parametrize("receiver", ["deepspeed", "torchgpipe", "pytorch"])
def test_widths_that_a_trainer_leaves_to_the_model_are_named(receiver: str) -> None:
    profile = decoder_profile("llama3-8b", hardware="h200", tensor=2)
    rules = ForReceiver.of(receiver, profile)
    plan = gplan.balance(
        profile, num_devices=4, num_microbatches=8, schedule=rules.default_schedule(), constraints=rules.constraints
    )
    notes = export(plan, to=receiver, profile=profile).notes
    assert f"the plan counts with tensor 2, which {RECEIVERS[receiver].title} leaves to the model itself" in notes


def test_a_served_layout_has_the_step_of_a_training() -> None:
    plan = import_plan("4,6", language_model(10), receiver="vllm")
    assert "vLLM serves: the step and memory are those of a training with this cut" in plan.notes
