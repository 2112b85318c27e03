"""The addresses of other processes: targets of flags, and what follows them while they change.

Each kind of target has a file here and a line in `discovery.py`.
"""
