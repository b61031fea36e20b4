"""Exports run: torch.distributed.pipelining, torchtitan's trainer and Megatron-core's schedules train on two gloo processes,
torchgpipe in one, each with the losses of the plain model; the runs of the trainers can be recorded by torch.profiler."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.extend(str(Path(__file__).parents[i]) for i in (1, 2))

import torch
from torch import Tensor, nn

from gplan.core import Plan
from gplan.interop.export.exporters import export
from gplan.schedules.request import PipelineSetting
from receivers import own_code
from receivers.random_plans import plan_of
from tests.interop.traces.make import strip
from tests.runtime.ranks import on_ranks

NUM_STEPS, NUM_MICROBATCHES, BATCH, TOKENS, VOCABULARY, WIDTH = 4, 4, 8, 16, 64, 192


class Decoder(nn.Module):
    """A small model with torchtitan's names whose forward passes over children that are None."""

    def __init__(self, num_blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(width, width), nn.Tanh()) for i in range(num_blocks)}
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """int64 tokens (batch, tokens) -> logits, or the hidden states of a part."""
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.lm_head(x) if self.lm_head is not None else x


NAMES = ("tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", "lm_head")


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, a mean over all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def made_model() -> Decoder:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Decoder()


def batches() -> list[tuple[Tensor, Tensor]]:
    """The same batches in every process."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator) for _ in range(NUM_STEPS)]
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in tokens]


def losses_of(model: nn.Module) -> list[float]:
    """The losses of some steps of a model in this process."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = loss_of(model(tokens), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def small_plan(schedule: str = "1f1b") -> Plan:
    """Two stages, or four on two devices."""
    settings = PipelineSetting(schedule=schedule, num_devices=2, num_microbatches=NUM_MICROBATCHES)
    return plan_of(NAMES, [3] if settings.num_stages == 2 else [2, 3, 4], settings)


def pytorch_losses(rank: int) -> list[float]:
    """`pipeline()` with the exported split_spec, and the exported make_schedule."""
    from torch.distributed.pipelining import pipeline

    found = own_code.executed(export(small_plan(), to="pytorch").text)
    tokens, _ = batches()[0]
    pipe = pipeline(made_model(), mb_args=(tokens[: BATCH // NUM_MICROBATCHES],), split_spec=found["split_spec"])
    assert pipe.num_stages == 2, "pipeline() makes other stages"
    schedule = found["make_schedule"](pipe, rank, torch.device("cpu"), loss_of)
    return _trained(rank, schedule, schedule._stage.submod)


def torchtitan_losses(rank: int, *, schedule: str = "1f1b", traces: Path | None = None) -> list[float]:
    """torchtitan's splitter and schedules with the exported configuration, in its `Trainer.train_step`, by its `Profiler`.

    The trainer gets the parts that its steps use; its own set-up wants a GPU.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule, _pipeline_module_split
    from torchtitan.tools.profiler import Profiler
    from torchtitan.trainer import Trainer

    plan = small_plan(schedule)
    config = own_code.executed(export(plan, to="torchtitan").text)["planned"](own_code._debug_config())
    config.parallelism.pipeline_parallel_microbatch_size = BATCH // NUM_MICROBATCHES
    config.parallelism.spmd_backend = "default"  # others want a mesh of all widths
    config.training.max_norm = 1e9  # clips nothing
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stages, parts = _pipeline_module_split(
        made_model(), mesh["pp"], config.parallelism.pipeline_parallel_schedule, torch.device("cpu"),
        config.parallelism.module_fqns_per_model_part,
    )  # fmt: skip
    losses = list[float]()

    def loss_fn(output: Tensor, target: Tensor, global_valid_tokens: Tensor) -> tuple[Tensor, None]:
        return loss_of(output, target) * target.numel() / global_valid_tokens, None

    def log(_step: int, loss: float, *_others: object, **_options: object) -> None:
        losses.append(loss)

    schedule_made = _build_pipeline_schedule(
        parallelism=config.parallelism, local_batch_size=BATCH, stages=stages, loss_fn=loss_fn
    )

    def step_of_lists(**options: Any) -> object:
        """What later torch does with the lists of micro-batches that the trainer passes; 2.13 takes whole batches."""
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        return schedule_made._step_microbatches(**options)

    schedule_made.step = step_of_lists
    is_last = any(stage.is_last for stage in stages)
    trainer = object.__new__(Trainer)
    trainer.__dict__.update(
        config=config,
        device=torch.device("cpu"),
        parallel_dims=SimpleNamespace(
            pp_enabled=True, dp_enabled=False, cp_enabled=False, dp_cp_enabled=False, ep_enabled=False,
            get_optional_mesh=lambda _: mesh["pp"],
        ),
        model_config=None,
        model_parts=parts,
        pp_schedule=schedule_made,
        pp_has_first_stage=any(stage.is_first for stage in stages),
        pp_has_last_stage=is_last,
        optimizers=torch.optim.SGD(nn.ModuleList(parts).parameters(), lr=0.1),
        lr_schedulers=SimpleNamespace(get_metrics=dict, step=lambda: None),
        metrics_processor=SimpleNamespace(should_log=lambda _: True, log=log),
        checkpointer=SimpleNamespace(maybe_wait_for_staging=lambda: None),
        train_context=nullcontext,
        gradient_accumulation_steps=1,
        num_pipeline_parallel_microbatches=NUM_MICROBATCHES,
        step=0,
        ntokens_seen=0,
    )  # fmt: skip
    data = (({"input": tokens}, target) for step in batches() for tokens, target in _microbatches(*step))
    own = Profiler.Config(
        enable_profiling=traces is not None, profile_freq=NUM_STEPS, profiler_warmup=0, profiler_active=NUM_STEPS,
        profiler_repeat=1,
    )  # fmt: skip
    with own.build(base_folder=str(traces)) as profiler:
        for trainer.step in range(1, NUM_STEPS + 1):
            trainer.train_step(data)
            profiler.step()
    return losses if is_last else []


def megatron_losses(rank: int, *, schedule: str = "1f1b", traces: Path | None = None) -> list[float]:
    """Megatron-core's schedules with the stages of the exported layout, by its own parser; its code asks for CUDA in three
    calls, which answer with the CPU here. Recorded as Megatron-LM records: with stacks."""
    from megatron.core import parallel_state, pipeline_parallel
    from megatron.core.transformer import TransformerConfig
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    zeros = torch.zeros
    torch.zeros = lambda *sizes, device=None, **options: zeros(*sizes, **options)  # type: ignore[assignment]
    plan = small_plan(schedule)
    chunks = plan.num_stages // 2
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    layout = own_code.arguments(export(plan, to="megatron").text)["--pipeline-model-parallel-layout"]
    config = TransformerConfig(
        num_layers=4, hidden_size=WIDTH, num_attention_heads=1, pipeline_dtype=torch.float32, pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, pipeline_model_parallel_layout=layout,
        overlap_p2p_comm=chunks > 1, batch_p2p_comm=chunks == 1,  # as Megatron-LM's arguments set them
    )  # fmt: skip
    names = own_code.megatron(plan)  # the stages as Megatron's parser has them
    parts = [_MegatronPart(names[chunk * 2 + rank], config) for chunk in range(chunks)]
    for chunk, part in enumerate(parts):
        part.vp_stage = chunk if chunks > 1 else None

    def forward_step(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        tokens, target = next(data)

        def with_loss(output: Tensor) -> tuple[Tensor, Tensor]:
            loss = loss_of(output, target)
            return loss, loss.detach().clone()

        return model(tokens), with_loss

    optimizer, losses = torch.optim.SGD(nn.ModuleList(parts).parameters(), lr=0.1), []
    run = pipeline_parallel.get_forward_backward_func(2, chunks if chunks > 1 else None)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) if traces else nullcontext() as profiler:
        for step in batches():
            optimizer.zero_grad()
            found = run(
                forward_step_func=forward_step, data_iterator=[iter(_microbatches(*step)) for _ in parts],
                model=parts if chunks > 1 else parts[0], num_microbatches=NUM_MICROBATCHES,
                seq_length=BATCH // NUM_MICROBATCHES, micro_batch_size=TOKENS,  # the tensors are (samples, tokens, width)
            )  # fmt: skip
            optimizer.step()
            losses += [torch.stack(found).mean().item()] if found else []
            if profiler is not None:
                profiler.step()
    if profiler is not None:
        profiler.export_chrome_trace(str(traces / f"rank{rank}.json"))
    return losses


def deepspeed_losses(rank: int) -> list[float]:
    """The exported PipelineModule in DeepSpeed's engine. Its extension for shared memory is left out: it would be compiled."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    found, model = own_code.executed(export(small_plan(), to="deepspeed").text), made_model()
    layers = [model.tok_embeddings, *model.layers.values(), model.norm, model.lm_head]
    module = found["PlannedPipelineModule"](layers, loss_fn=loss_of, **found["ARGUMENTS"])
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // NUM_MICROBATCHES,
        "gradient_accumulation_steps": NUM_MICROBATCHES,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    data = (x for step in batches() for x in _microbatches(*step))
    return [engine.train_batch(data_iter=data).item() for _ in range(NUM_STEPS)]


def _microbatches(tokens: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tokens.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True))


class _MegatronPart(nn.Module):
    """The layers of a stage, as Megatron-core calls them."""

    def __init__(self, names: list[str], config: Any) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.model_type, self.given = config, ModelType.encoder_or_decoder, None
        self.part = made_model()
        for name in NAMES:
            parent, _, child = name.rpartition(".")
            if name not in names and parent:
                del self.part.layers[child]
            elif name not in names:
                setattr(self.part, child, None)

    def set_input_tensor(self, given: list[Tensor | None]) -> None:
        """What the stage before it sent; nothing for the first one."""
        self.given = given[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """The tokens or what was sent -> the part's output."""
        return self.part(tokens if self.given is None else self.given)


def _trained(rank: int, schedule: Any, module: nn.Module) -> list[float]:
    """The losses of some steps; none on the rank without a loss."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for tokens, target in batches():
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            parts: list[Tensor] = []
            schedule.step(target=target, losses=parts)
            losses.append(torch.stack(parts).mean().item())
        optimizer.step()
    return losses


RUNS: dict[str, Callable[..., list[float]]] = {
    "pytorch": pytorch_losses,
    "torchtitan": torchtitan_losses,
    "megatron": megatron_losses,
    "deepspeed": deepspeed_losses,
}


def run_on_two_processes(receiver: str, **options: Any) -> tuple[list[float], list[float]]:
    """The losses of the pipeline and of the plain model; an AssertionError has the trace of a rank that failed."""

    def job(rank: int) -> list[float]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        return RUNS[receiver](rank, **options)

    return on_ranks(2, job, timeout_s=300.0)[-1], losses_of(made_model())


RECORDED = {
    "torchtitan": ("torchtitan", "1f1b"),
    "torchtitan-interleaved": ("torchtitan", "interleaved-1f1b:2"),
    "megatron": ("megatron", "1f1b"),
    "megatron-interleaved": ("megatron", "interleaved-1f1b:2"),
}
"""The sample traces of trainers: which one, and the schedule."""


def record(folder: Path) -> None:
    """The sample traces, reduced as `tests/interop/traces` has them."""
    for name, (receiver, schedule) in RECORDED.items():
        with tempfile.TemporaryDirectory() as made:
            run_on_two_processes(receiver, schedule=schedule, traces=Path(made))
            for rank in range(2):
                strip(next(Path(made).rglob(f"rank{rank}*")), folder / f"{name}.rank{rank}.json.gz")


def run_torchgpipe() -> tuple[list[float], list[float]]:
    """GPipe on two partitions of the CPU, and the plain model."""
    import torchgpipe as package

    model, real = made_model(), package.GPipe
    chain = nn.Sequential(model.tok_embeddings, *model.layers.values(), model.norm, model.lm_head)

    def on_cpu(module: nn.Sequential, **options: Any) -> Any:
        return real(module, devices=["cpu", "cpu"], **options)

    package.GPipe = on_cpu
    try:
        made = own_code.executed(export(small_plan("gpipe"), to="torchgpipe").text, model=chain)["model"]
    finally:
        package.GPipe = real
    return losses_of(made), losses_of(made_model())


if __name__ == "__main__":
    record(Path(sys.argv[1]))
