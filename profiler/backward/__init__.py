"""Backward passes that run otherwise than autograd alone would: in two halves, or with the forward run again."""
