"""A model file to a model: with its weights, or without them where they do not fit."""
