"""The prompt-template doctor: what the prefix cache could have saved in a log of requests, and
which part of a template stands in its way."""

from jserve.doctor.hits import possible_hit_tokens

__all__ = ["possible_hit_tokens"]
