"""torchgpipe: balanced by its own measurement, trained in one process."""

import torch
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time


def plan(model, inputs, *, num_devices, num_microbatches):
    return balance_by_time(num_devices, model, inputs.chunk(num_microbatches)[0], device="cpu")


def train(model, batches, loss, *, balance, num_microbatches, checkpoint):
    pipe = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=num_microbatches, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.001)
    for inputs, targets in batches:
        value = loss(pipe(inputs), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield value
