"""Workloads: the requests that are sent. A new kind is a file here and a line in `registry`.

A workload is a function of its arguments and a seed, so that every engine and every run gets the
same token ids.
"""
