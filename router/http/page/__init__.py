"""A page for browsers: talk to the models, see the state of the cluster (docs/page.md)."""
