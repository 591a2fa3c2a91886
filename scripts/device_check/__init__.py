"""Checks jserve on the accelerator at hand, in one go and under a time limit; see __main__.py."""
