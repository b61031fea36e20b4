"""gplan: measured, balanced, and trained under torchrun."""

from itertools import repeat

import torch

import gplan


def plan(model, inputs, targets, loss, *, num_devices, num_microbatches, path):
    profile = gplan.profile(
        model,
        microbatch_sizes=[len(inputs) // num_microbatches],
        inputs=inputs,
        loss=loss,
        batches=lambda size: repeat((inputs[:size], targets[:size])),
    )
    gplan.save(gplan.balance(profile, num_devices=num_devices, num_microbatches=num_microbatches), path)
    return profile


def train(model, batches, loss, *, path):
    pipe = gplan.pipeline(model, gplan.load(path), loss=loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.001)
    for inputs, targets in batches:
        value = pipe.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        yield value
