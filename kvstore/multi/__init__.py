"""Several connectors as one: load from the first that has a block, save to all.

`scheduler.py` decides who is asked for what, with the states of `jobs.py`;
`worker.py` hands each member its share. Both are made by `factory.py`.
"""
