"""The worker process: one engine, the services of both tiers, and a role that says which of them
takes new requests.
"""
