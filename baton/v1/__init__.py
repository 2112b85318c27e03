"""Generated from `protos/baton/v1` by `make proto`; do not edit."""
