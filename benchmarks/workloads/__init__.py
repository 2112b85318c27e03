"""Workloads: which requests are sent. Each kind is a file here and a line in `registry`.

All of them are functions of their arguments and a seed, so that every engine
and every run meets the same token ids.
"""
