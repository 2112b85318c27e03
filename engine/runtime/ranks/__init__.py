"""The ranks of an engine: processes that compute one model together (docs/adr/0048-ranks.md)."""
