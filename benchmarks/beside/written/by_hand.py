"""torch.distributed.pipelining by hand, as in its tutorial: equal layer counts, under torchrun."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


def train(model, batches, inputs, loss, *, schedule_class, num_microbatches):
    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    begin, end = (len(model) * k // num_stages for k in (rank, rank + 1))
    module = model[begin:end]
    with torch.no_grad():
        received = model[:begin](inputs.chunk(num_microbatches)[0])
        sent = module(received)
    stage = PipelineStage(
        module,
        rank,
        num_stages,
        torch.device("cpu"),
        input_args=received.detach().to("meta").requires_grad_(rank > 0),
        output_args=sent.to("meta").requires_grad_(),
    )
    schedule = schedule_class(stage, num_microbatches, loss_fn=loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001)
    for inputs, targets in batches:
        losses = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == num_stages - 1:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack(losses).mean() if losses else None
