"""A cluster in virtual time: replicas with real block pools, and the router's own decisions.

Nothing here waits, opens a connection or computes a token. Replicas admit, evict and report as
engines do, by `KvCacheManager`; routers see them through events and load reports that arrive late,
and choose by the policies, the cache index and the loads that a real router has. Before a
`QueueingRouter` requests also wait, take turns and are refused as they are before a real one.
"""
