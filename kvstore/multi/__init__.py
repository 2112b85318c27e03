"""Several connectors as one: loads from the first that has a block, saves to all.

`scheduler.py` decides which member gets which job, with the job states of `jobs.py`. `worker.py`
passes each member its work, and opens `multi://` URLs.
"""
