"""What a user of each peer writes to train the same model: these files are run and timed, and their lines counted.

`plan` is what is done once, `train` what every process does. A model is an nn.Sequential, `loss(output, targets)` a
mean over the samples, `batches` gives (inputs, targets); `yield` stands for whatever the user does with the loss.
"""
