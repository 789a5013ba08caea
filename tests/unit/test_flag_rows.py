"""Every row of flags.yaml refuses what it says: in check, launch and plan as in a run."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.flag_samples import words_of
from tests.unit.cli_samples import FLAGS, lab_plan, runner_in
from zorse_megatron.errors import ModelError
from zorse_megatron.flags import conditions, table
from zorse_megatron.flags.check import check_command, is_refused
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import batch_size_from_flags
from zorse_megatron.flags.table import (
    defaults,
    expanded,
    flags,
    further_rows,
    names_of,
    rows,
    spelling_of,
)
from zorse_megatron.plan.plan_file import parse_plan

REFUSING = [row for row in rows() if row.refuses]


@pytest.fixture
def run(tmp_path, monkeypatch):
    return runner_in(tmp_path, monkeypatch)


def with_flags(words):
    """The plan is for V100s too, so the job's type is fp16, but where a test says another."""
    return [*(word for word in FLAGS if not ("--bf16" in words and word == "--fp16")), *words]


def changed(changes):
    """The lab's plan, with other values of groups, of replicas or of the plan itself."""
    plan = lab_plan()
    for key, value in changes.items():
        where = plan["groups"][1] if key in plan["groups"][1] or key in OF_GROUPS else plan
        where[key] = value
    return plan


def loaded(plan):
    return parse_plan(json.dumps(plan).encode(), source="plan.json")


def of_a_run(words, plan):
    """What a run says before it imports torch."""
    return check_command(read_command(words), plan, world_size=plan.world_size)


def said(output):
    return [tuple(each.values()) for each in json.loads(output)["problems"]]


def test_every_flag_has_one_row_and_every_row_flags_of_megatron():
    counts = Counter(name for row in rows() if row.under_plan for name in names_of(row))
    assert counts == dict.fromkeys(defaults(), 1)
    entries = {entry for row in rows() for entry in row.flags.split()}
    assert {each for each in entries if not set(expanded(each)) & defaults().keys()} == set()


def test_every_condition_of_a_row_is_there_and_every_condition_has_a_row():
    assert not any(row.when or row.beside for row in rows() if row.under_plan)
    there = {
        name
        for name, each in vars(conditions).items()
        if getattr(each, "__annotations__", {}).get("return") is conditions.Filled
    }
    assert {row.when for row in further_rows()} - {""} == there


def test_a_flag_of_each_row_is_refused_by_check_launch_and_the_run(run):
    """All in one command, as all problems are told at once."""
    words, expected = FLAGS, []
    for row in REFUSING:
        samples = (
            (name, sample)
            for name in names_of(row)
            for flag in flags()
            if flag.name == name and (flag.type != "name" or flag.choices)
            for sample in words_of(flag)
        )
        name, sample = next(
            (n, s) for n, s in samples if is_refused(n, getattr(read_command(s).args, n))
        )
        words = [*words, *sample]
        expected.append((spelling_of(name), row.remedy))
    checked = run("check", "--json", "plan.json", "--", *words)
    found = [(where, remedy) for where, _, _, remedy in said(checked.stdout)]
    assert checked.exit_code == 1 and set(expected) <= set(found)
    assert len(expected) == len(REFUSING) > 50
    of_the_run = [(each.where, each.remedy) for each in of_a_run(words, loaded(lab_plan()))]
    assert of_the_run == found
    launch = ("launch", "plan.json", "--cluster", "cluster.yaml", "--torchrun", "--", *words)
    for other in (run(*launch), run("plan", "--cluster", "cluster.yaml", "--", *words)):
        assert other.exit_code != 0 and "torchrun --" not in other.output
        assert [flag for flag, _ in expected if f"{flag}: found" not in other.output] == []


def test_defaults_and_flags_that_are_off_are_not_refused():
    for name, default in defaults().items():
        assert not any(is_refused(name, value) for value in (default, None))
        assert default or not is_refused(name, False)
    assert not is_refused("softmax_type", "off-by-one") and is_refused("softmax_type", "learnable")
    # `--inprocess-active-world-size` defaults to WORLD_SIZE, which torchrun and srun set.
    assert not is_refused("inprocess_active_world_size", 8) and is_refused("inprocess_restart", 1)


def replica(*ranks, **more):
    sizes = {"micro_batch_size": 2, "num_microbatches": 2, "shard_weight": 1.0}
    return {"ranks": list(ranks), **sizes, **more}


OF_GROUPS = ("grad_reduce_dtype", "compute_dtype", "offload", "recompute", "split_backward")
TP_GROUPS = {"replicas": [replica(4, 5, num_microbatches=4), replica(6), replica(7)]}
TP_SHARDS = {"vocabulary_rows": [20000, 12000]}
BREADTH_FIRST = {"schedule": {"name": "breadth_first"}}
BETWEEN = {
    "schedule": {"name": "breadth_first"},
    "chunks": [
        {"group": g, "layers": list(at)} for g, at in ((0, (0, 3)), (1, (3, 5)), (0, (5, 8)))
    ],
    "replicas": [replica(4, 5, num_microbatches=4), replica(6, 7, num_microbatches=4)],
}
FREQ = "--moe-layer-freq"
LATENT = "--multi-latent-attention"
MODEL = {"num_layers": 8, "hidden_size": 1024, "seq_length": 512}
EXPERTS = "--num-experts 4 --disable-bias-linear"
BALANCED = f"{EXPERTS} --moe-aux-loss-coeff 0.1"
GROUPS = "--moe-router-num-groups"
LOSSES = "--moe-router-load-balancing-type aux_loss global_aux_loss"
WHOLE_LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DOCUMENTS = "--dataloader-inter-document-masking --reset-position-ids --reset-attention-mask"
IN_ORDER = f"{BALANCED} --moe-router-load-balancing-type global_aux_loss"
IN_REGIONS = {
    "replicas": [
        *(
            replica(rank, num_microbatches=4, region=region)
            for rank, region in ((4, "a"), (5, "b"))
        ),
        *(replica(rank, num_microbatches=0) for rank in (6, 7)),
    ]
}
LORA = "rank=8,alpha=16,targets=q,v"
QUIET = "--attention-dropout 0 --hidden-dropout 0"
HASHES = "--check-weight-hash-across-dp-replicas-interval"
REDUCE_DTYPE = "groups[1].grad_reduce_dtype"


def sharing_experts(*samples, overlap=False):
    """Replicas of which the first one's ranks share experts alone."""
    shared = {"experts": [1, 3], "samples": samples, "overlap": overlap}
    pair = replica(4, 5, micro_batch_size=sum(samples), expert_parallel=shared)
    return {"replicas": [pair, replica(6), replica(7)]}


# Condition -> what is different in the plan, flags beside the usual ones, where it is found.
EXAMPLES = {
    "": [
        ({}, f"{LATENT} --transformer-impl local", "--transformer-impl"),
        (
            {},
            f"{LATENT} --group-query-attention --num-query-groups 8",
            "--group-query-attention",
        ),
        ({}, "--rope-type yarn", "--rope-type"),
        ({}, f"{LATENT} --zorse-lora rank=4,alpha=8,targets=q", "--zorse-lora"),
        ({}, "--position-embedding-type relative", "--position-embedding-type"),
        ({}, "--squared-relu --swiglu --no-bias-gelu-fusion", "--squared-relu"),
        ({}, "--squared-relu", "--squared-relu"),
        ({}, "--transformer-impl inference_optimized", "--transformer-impl"),
        ({}, "--attention-backend local", "--attention-backend"),
        ({}, "--transformer-impl local --attention-backend fused", "--attention-backend"),
        ({}, "--optimizer muon", "--fp16"),
        ({}, "--optimizer muon --use-distributed-optimizer", "--use-distributed-optimizer"),
        ({}, f"--zorse-lora {LORA} --optimizer muon", "--optimizer"),
        ({}, "--num-experts 4", "--num-experts"),
    ],
    "full_recomputation_lacks_settings": [
        ({}, "--recompute-granularity full", "--recompute-method, --recompute-num-layers")
    ],
    "only_full_recomputation_has_settings": [
        ({}, "--recompute-num-layers 2", "--recompute-method, --recompute-num-layers")
    ],
    "modules_are_of_other_layers": [
        ({}, "--recompute-modules mlp moe --recompute-activations", "--recompute-modules")
    ],
    "own_entry_trains": [({}, "--fim-data", "--fim-data")],
    "state_waits": [
        *(
            ({"offload": {what: True}, **more}, "--optimizer muon", "--optimizer")
            for what, more in (
                ("optimizer_state", {}),
                ("gradients", BREADTH_FIRST),
                ("parameters", BREADTH_FIRST),
            )
        ),
        (
            {"replicas": [*map(replica, (4, 5, 6)), replica(7, offload={"optimizer_state": True})]},
            "--optimizer muon",
            "--optimizer",
        ),
    ],
    "interval_is_missing": [
        ({}, "--eval-interval 0", "--eval-interval"),
        ({}, "--save x", "--save-interval"),
    ],
    "plan_is_to_be_made": [
        ({}, "--recompute-activations", "--recompute-activations"),
        ({}, "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size"),
    ],
    "job_has_other_ranks": [({}, "", "the number of ranks (WORLD_SIZE)")],
    "stages_are_not_chunks": [
        ({}, "--pipeline-model-parallel-size 3", "--pipeline-model-parallel-size")
    ],
    "parameters_are_sharded": [(BREADTH_FIRST, f"{HASHES} 5", HASHES)],
    "plan_recomputes": [
        ({"recompute": {"mode": "full"}}, f"--recompute-{how}", f"--recompute-{how.split()[0]}")
        for how in ("activations", "granularity selective")
    ],
    "sums_are_as_narrow_as_messages": [
        ({"grad_reduce_dtype": dtype}, "", REDUCE_DTYPE) for dtype in ("bf16", "fp16")
    ],
    "messages_lack_a_loss_scale": [({"grad_reduce_dtype": "fp16"}, "--bf16", REDUCE_DTYPE)],
    "groups_have_several_dtypes": [
        ({"compute_dtype": "fp16"}, flag, flag)
        for flag in (
            "--fp16-lm-cross-entropy",
            "--fp32-residual-connection",
            "--grad-reduce-in-bf16",
        )
    ],
    "gpus_lack_bf16": [
        ({}, "--bf16", "--bf16"),
    ],
    "gpus_lack_flash_attention": [({}, "--attention-backend flash", "--attention-backend")],
    "layout_is_not_of_the_chunks": [
        ({}, "--pipeline-model-parallel-layout Et*4|t*4L", "--pipeline-model-parallel-layout")
    ],
    "batch_is_another": [({}, "--global-batch-size 8", "--global-batch-size")],
    "batches_do_not_fit": [
        ({}, f"--step-batch-size-schedule {text} --train-samples 64", "--step-batch-size-schedule")
        for text in ("4,8", "1K:16", "0:8", "0:1,1K:16", "0:16,1K:8", "0:16,inf:32")
    ],
    "batches_are_counted_otherwise": [
        ({}, "--step-batch-size-schedule 0:16", "--step-batch-size-schedule")
    ],
    "batch_is_no_multiple": [
        ({}, f"--micro-batch-size {given}", "--micro-batch-size")
        for given in (
            "3",
            "0",
            "4 --step-batch-size-schedule 0:6,1K:16 --train-samples 64",
        )
    ],
    "model_is_another": [
        ({}, "--num-layers 9", "--num-layers"),
        ({"model": MODEL | {"vocab_size": 64}}, "--padded-vocab-size 128", "--padded-vocab-size"),
        ({"model": MODEL | {"num_query_groups": 4}}, "", "--num-query-groups"),
    ],
    "embeddings_are_tied_otherwise": [
        (
            {"model": MODEL | {"tied_embeddings": True}},
            "",
            "--untie-embeddings-and-output-weights",
        )
    ],
    "plan_has_tp_groups": [
        (TP_GROUPS, "", "--attention-dropout"),
        (TP_GROUPS, f"{QUIET} --optimizer muon", "--optimizer"),
        (
            TP_GROUPS,
            f"{QUIET} {EXPERTS} --moe-shared-expert-intermediate-size 8",
            "--moe-shared-expert-intermediate-size",
        ),
        (TP_GROUPS, f"{QUIET} {LATENT}", LATENT),
    ],
    "vocabulary_is_uneven": [
        (
            {
                "replicas": [
                    replica(4, 5, tp_shards=TP_SHARDS, num_microbatches=4),
                    *TP_GROUPS["replicas"][1:],
                ]
            },
            f"{QUIET} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
            "--cross-entropy-fusion-impl",
        )
    ],
    "tp_groups_between_lack_masks": [
        (BETWEEN, f"{QUIET} --reset-attention-mask", "--reset-attention-mask")
    ],
    "replicas_differ_in_tp_shards": [(TP_GROUPS, f"{QUIET} {HASHES} 5", HASHES)],
    "tp_groups_cannot_divide": [
        (TP_GROUPS, f"{QUIET} --padded-vocab-size 32001", "groups[1].replicas[0].ranks")
    ],
    "adapters_are_others": [
        ({"model": MODEL | {"lora": LORA}}, "", "--zorse-lora"),
        ({"model": MODEL | {"lora": LORA}}, f"--zorse-lora {LORA},o", "--zorse-lora"),
    ],
    "backwards_are_split": [
        ({"split_backward": True}, f"--zorse-lora {LORA}", "--zorse-lora"),
        ({"split_backward": True}, "--transformer-impl local", "gradient_accumulation_fusion"),
    ],
    "adapters_are_saved_into_their_base": [
        ({}, f"--zorse-lora {LORA} --save a/ --save-interval 1 --pretrained-checkpoint a", "--save")
    ],
    "adapters_lack_matrices": [({}, f"--zorse-lora {LORA},gate", "--zorse-lora")],
    "experts_lack_adapters": [({}, f"{EXPERTS} --zorse-lora {LORA},up", "--zorse-lora")],
    "batches_cut_blocks": [
        (
            {},
            f"{EXPERTS} --moe-aux-loss-coeff 0.1 --micro-batch-size 2 "
            "--step-batch-size-schedule 0:16",
            "--step-batch-size-schedule",
        )
    ],
    "options_of_experts_conflict": [
        ({}, f"{EXPERTS} --moe-apply-probs-on-input", "--moe-apply-probs-on-input"),
        ({}, f"{EXPERTS} --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias"),
        ({}, f"{EXPERTS} --moe-router-num-groups 3", "--moe-router-num-groups"),
        ({}, f"{EXPERTS} --moe-router-group-topk 1", "--moe-router-group-topk"),
        ({}, f"{EXPERTS} {GROUPS} 2 --moe-router-group-topk 3", "--moe-router-group-topk"),
        ({}, f"{EXPERTS} {GROUPS} 4 --moe-router-group-topk 1", "--moe-router-group-topk"),
        ({}, f"{EXPERTS} {LOSSES}", "--moe-router-load-balancing-type"),
        ({}, f"{BALANCED} {LOSSES}", "--moe-router-load-balancing-type"),
        ({}, f"{BALANCED} 0.2", "--moe-router-load-balancing-type"),
        ({}, f"{EXPERTS} --expert-model-parallel-size 3", "--expert-model-parallel-size"),
        ({}, "--expert-model-parallel-size 2", "--expert-model-parallel-size"),
    ],
    "other_layers_have_experts": [
        ({"model": MODEL | {"num_experts": 4}}, f"{EXPERTS} --moe-layer-freq {freq}", FREQ)
        for freq in ("[0]*8", "2")
    ]
    + [({"model": MODEL | {"num_experts": 4, "moe_layer_freq": [0] + [1] * 7}}, EXPERTS, FREQ)],
    "micro_batches_are_no_blocks": [
        ({}, f"{BALANCED} --micro-batch-size 4", "--moe-aux-loss-coeff"),
        (sharing_experts(3, 1), f"{BALANCED} --micro-batch-size 2", "--moe-aux-loss-coeff"),
        (
            sharing_experts(2, 2, overlap=True),
            f"{BALANCED} --micro-batch-size 2",
            "--moe-aux-loss-coeff",
        ),
        ({}, f"{IN_ORDER} --micro-batch-size 4", "--moe-aux-loss-coeff"),
    ],
    "tokens_overlap": [
        (sharing_experts(2, 2, overlap=True), flags, where)
        for flags, where in (
            (IN_ORDER, "--moe-router-load-balancing-type"),
            (f"{EXPERTS} {DOCUMENTS}", "--dataloader-inter-document-masking"),
            (f"{EXPERTS} {WHOLE_LAYERS}", "--recompute-granularity"),
        )
    ],
    "loads_come_too_late": [(IN_REGIONS, IN_ORDER, "--moe-router-load-balancing-type")],
}
CASES = [(when, *example) for when, listed in EXAMPLES.items() for example in listed]


def test_every_condition_has_an_example():
    assert EXAMPLES.keys() == {row.when for row in further_rows()}
    assert len(EXAMPLES[""]) >= sum(not row.when for row in further_rows())


def parts(row):
    """What a row says between its braces."""
    return [
        re.compile(".+".join(map(re.escape, re.split(r"\{.*?\}", text))))
        for text in (row.found, row.expected, row.remedy)
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}")
def test_a_further_reason(run, tmp_path, case):
    """The row speaks; without what the example has nothing is wrong."""
    when, changes, flags_given, where = case
    plan = changed(changes)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    words = with_flags(flags_given.split())
    if when == "plan_is_to_be_made":
        found = [
            (each.where, each.found, each.expected, each.remedy)
            for each in check_command(read_command(words), None)
        ]
        planned = run("plan", "--cluster", "cluster.yaml", "--", *words)
        assert planned.exit_code != 0 and f"{where}: found" in planned.output
    elif when in {"job_has_other_ranks", "interval_is_missing"}:
        world_size = 7 if when == "job_has_other_ranks" else 8
        problems = check_command(read_command(words), loaded(plan), world_size=world_size)
        found = [(each.where, each.found, each.expected, each.remedy) for each in problems]
    else:
        files = ("plan.json", "cluster.yaml") if "flash" in when else ("plan.json",)
        checked = run("check", "--json", *files, "--", *words)
        assert checked.exit_code == 1, checked.output
        found = said(checked.stdout)
    matching = [row for row in further_rows() if row.when == when]
    assert any(
        at == where
        and all(part.fullmatch(text) for part, text in zip(parts(row), texts, strict=True))
        for row in matching
        for at, *texts in found
    ), found
    unchanged = check_command(read_command(with_flags([])), loaded(lab_plan()), world_size=8)
    assert unchanged == []


FINE = [
    ({"grad_reduce_dtype": "bf16"}, "--bf16"),
    ({"grad_reduce_dtype": "fp16"}, "--accumulate-allreduce-grads-in-fp32"),
    ({"grad_reduce_dtype": "fp16", "compute_dtype": "fp16"}, ""),
    ({}, "--fp32-residual-connection"),
    ({"recompute": {"mode": "full"}}, ""),
    ({}, "--recompute-granularity full --recompute-method block --recompute-num-layers 1"),
    ({}, f"{HASHES} 5"),
    ({}, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*5|t*3L"),
    ({}, "--micro-batch-size 4 --eval-global-batch-size 16"),
    ({"model": MODEL | {"num_query_groups": 16}}, "--num-query-groups 2"),
    ({"model": MODEL | {"num_query_groups": 2}}, "--group-query-attention --num-query-groups 2"),
    ({"model": MODEL | {"tied_embeddings": False}}, ""),
    ({"model": MODEL | {"lora": LORA}}, "--zorse-lora targets=v,q,rank=8,alpha=16.0"),
    ({}, f"--zorse-lora {LORA},up"),
    (TP_GROUPS, QUIET),
    ({"replicas": BETWEEN["replicas"]}, f"{QUIET} --reset-attention-mask {HASHES} 5"),
    (TP_GROUPS, f"{QUIET} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te"),
    (sharing_experts(4, 0), f"{BALANCED} --micro-batch-size 2"),
    (sharing_experts(3, 1), f"{BALANCED} --micro-batch-size 1"),
    (sharing_experts(3, 1), IN_ORDER),
    (IN_REGIONS, BALANCED),
    (sharing_experts(3, 1), f"{EXPERTS} --micro-batch-size 2"),
    (sharing_experts(3, 1), f"{EXPERTS} --expert-model-parallel-size 4"),
    ({"split_backward": True}, "--transformer-impl local --no-gradient-accumulation-fusion"),
    ({}, "--save x --save-interval 1 --use-distributed-optimizer --log-params-norm"),
    *((BETWEEN, f"{QUIET} --pipeline-model-parallel-size {size}") for size in (1, 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "flags_given"), FINE)
def test_what_is_no_reason(changes, flags_given):
    plan = changed(changes)
    if "--bf16" in flags_given:
        del plan["cluster"]
    assert of_a_run(with_flags(flags_given.split()), loaded(plan)) == []


def test_batches_that_change_are_counted_in_samples():
    at = FLAGS.index("--global-batch-size")
    schedule = ["--step-batch-size-schedule", "0:4 4K:16"]
    words = [*FLAGS[:at], *FLAGS[at + 2 :], *schedule]
    (problem,) = of_a_run(words, loaded(lab_plan()))
    assert problem.found == "the flag without --train-samples"
    assert of_a_run([*words, "--train-samples", "64"], loaded(lab_plan())) == []
    assert check_command(read_command(words), None) == []
    assert batch_size_from_flags(words) == 16
    with pytest.raises(ModelError, match='found "4K:16"'):
        batch_size_from_flags([*words[:-1], "4K:16"])


def test_a_run_that_starts_leaves_flags_to_the_script_and_to_its_machine():
    plan = loaded(changed({"split_backward": True}))
    words = [*FLAGS, "--my-own-idea", "3", "--transformer-impl", "local", "--fim-data"]
    assert of_a_run(["mine.py", *words], plan) == []
    assert [each.where for each in of_a_run(words, plan)] == ["--my-own-idea", "--fim-data"]


def test_a_script_may_have_flags_of_its_own(run, tmp_path):
    (tmp_path / "mine.py").write_text('parser.add_argument("--seq-lenghts")\n')
    plan = ("check", "plan.json", "--")
    own = run(*plan, "mine.py", *FLAGS, "--seq-lenghts", "3")
    assert own.exit_code == 0, own.output
    unheard = run(*plan, "mine.py", *FLAGS, "--my-own-idea", "3")
    assert unheard.exit_code == 0
    assert "--my-own-idea is no flag of Megatron's; mine.py must add it" in unheard.stdout
    slip = run(*plan, "mine.py", *FLAGS, "--seq-lenght", "3")
    assert slip.exit_code == 1 and "Did you mean --seq-length?" in slip.stdout
    for script in ([], ["pretrain_gpt.py"]):
        refused = run(*plan, *script, *FLAGS, "--my-own-idea", "3")
        assert refused.exit_code == 1 and "--my-own-idea" in refused.stdout


@pytest.mark.parametrize("folder", ["scripts", "tests/megatron", "tests/slurm", "zorse_megatron"])
def test_what_runs_of_ours_turn_off_stands_in_one_place(folder):
    """With its reason; the demo says its own."""
    off = re.compile(r'"--(num-workers|eval-iters|hidden-dropout|attention-dropout)"[,:] "?0[",)]')
    root = Path(table.__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for path in (root / folder).rglob("*.py")
        if path.stem != "demo" and off.search(path.read_text(encoding="utf-8"))
    }
    assert found == ({"zorse_megatron/flags/table.py"} & {f"{folder}/flags/table.py"})
